"""The agent's pure core: turns raw answers into readings, processes and incidents.

Nothing here waits, reads a clock, opens a file, knows a vendor or counts a metric; values to count
are returned. import-linter enforces that.
"""
