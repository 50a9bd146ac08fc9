"""A `libnvidia-ml.so.1` that plays a scenario, so that the agent's real NVML code is measured.

The C library answers from shared memory, which a separate process updates from the simulator. If
the agent queries something for the first time, the library requests it from that process.
"""
