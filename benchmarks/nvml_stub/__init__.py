"""A `libnvidia-ml.so.1` that plays a scenario, so that the agent's true NVML path is measured.

The C library answers out of shared memory; a process of its own keeps that up to date from the
simulator. What the agent asks for the first time, the library asks that process for.
"""
