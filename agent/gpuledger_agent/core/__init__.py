"""What the agent makes of raw answers: readings, processes, incidents.

Pure: nothing here waits, reads a clock, opens a file, knows a vendor or counts a metric. What has
to be counted is returned. import-linter holds that.
"""
