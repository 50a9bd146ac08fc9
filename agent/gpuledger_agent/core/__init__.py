"""The agent's pure core: turns raw answers into readings, processes and incidents.

Modules of this package do not wait, read clocks, open files, depend on a vendor or count metrics;
they return the values to count. import-linter enforces this.
"""
