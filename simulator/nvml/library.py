"""The library put together from its subjects."""

from simulator.nvml.events import Events, SystemEventCalls
from simulator.nvml.fields import Fields
from simulator.nvml.gpm import Profiling
from simulator.nvml.health import Board, Health
from simulator.nvml.mig import Processes
from simulator.nvml.readings import Identity, Readings
from simulator.nvml.utilization import AccountingCalls, Utilization


# Processes come first: theirs is MIG, which narrows what the others answer.
class SimulatedNvml(
    Processes,
    Profiling,
    Identity,
    Board,
    Readings,
    Fields,
    Health,
    Utilization,
    AccountingCalls,
    Events,
    SystemEventCalls,
):
    """The NVML library of one node. A function raises the `pynvml.NVMLError` that NVML would."""
