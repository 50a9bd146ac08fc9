"""The library put together from its subjects."""

from simulator.nvml.accounting import Accounting
from simulator.nvml.events import Events
from simulator.nvml.identity import Identity
from simulator.nvml.processes import Processes
from simulator.nvml.readings import Readings
from simulator.nvml.utilization import Utilization


# Processes come first: theirs is MIG, which narrows what the others answer.
class SimulatedNvml(Processes, Identity, Readings, Utilization, Accounting, Events):
    """The NVML library of one node. A function raises the `pynvml.NVMLError` that NVML would."""
