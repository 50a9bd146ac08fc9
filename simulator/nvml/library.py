"""The library put together from its subjects."""

from simulator.nvml.identity import Identity
from simulator.nvml.processes import Processes
from simulator.nvml.readings import Readings
from simulator.nvml.utilization import Utilization


class SimulatedNvml(Identity, Readings, Utilization, Processes):
    """The NVML library of one node. A function raises the `pynvml.NVMLError` that NVML would."""
