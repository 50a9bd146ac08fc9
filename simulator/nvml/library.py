"""The library put together from its subjects."""

from simulator.nvml.accounting import AccountingCalls
from simulator.nvml.board import Board
from simulator.nvml.events import Events
from simulator.nvml.fields import Fields
from simulator.nvml.gpm import Profiling
from simulator.nvml.health import Health
from simulator.nvml.identity import Identity
from simulator.nvml.processes import Processes
from simulator.nvml.readings import Readings
from simulator.nvml.system_events import SystemEventCalls
from simulator.nvml.utilization import Utilization


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
