"""Plays NVML for one node: the functions of `pynvml` that the agent calls, with NVML's limits.

Here live NVML's forms: its names, structs, units and errors, a module a subject. What is true of
the devices comes from `simulator.device`, how the driver samples it from
`simulator.sampling_windows`.
Parameters are named as in nvidia-ml-py.
"""

from simulator.nvml.library import SimulatedNvml
from simulator.nvml.session import Handle

__all__ = ["Handle", "SimulatedNvml"]
