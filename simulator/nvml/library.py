"""The library put together from its subjects: each function from the one that has it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from typing_extensions import override

from gpuledger.clock import Clock
from simulator.device import SimulatedGpu
from simulator.faults import PlannedIncident
from simulator.nvml.events import Events, SystemEventCalls
from simulator.nvml.fields import Fields
from simulator.nvml.gpm import Profiling
from simulator.nvml.health import Board, Health
from simulator.nvml.mig import Mig, Processes
from simulator.nvml.readings import Identity, Readings
from simulator.nvml.session import Session
from simulator.nvml.utilization import AccountingCalls, Utilization
from simulator.scenario.fault_schema import EventSupport

NvmlFunction = Callable[..., Any]


class SimulatedNvml:
    """The NVML library of one node. A function raises the `pynvml.NVMLError` that NVML would."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int, incidents: Sequence[PlannedIncident] = (),
        event_support: EventSupport = EventSupport(),  # noqa: B008  # frozen, so one for all does no harm
        shown_ns: Callable[[int], int] = lambda time_ns: time_ns,
        system_events: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self.session = session = Session(
            gpus, clock=clock, epoch_ns=epoch_ns, uptime_ns=uptime_ns,
            sample_period_ns=sample_period_ns, incidents=incidents, event_support=event_support,
            shown_ns=shown_ns,
        )  # fmt: skip
        identity, readings, utilization = Identity(session), Readings(session), Utilization(session)
        mig = Mig(session, identity=identity, readings=readings, utilization=utilization)
        self.events = Events(session)
        self._functions = _functions_of(
            [
                session, identity, readings, utilization, Board(session), Health(session),
                Fields(session), Processes(session, mig), Profiling(session, mig),
                AccountingCalls(session), self.events, SystemEventCalls(session, system_events),
            ],
            narrowed_by=mig,
        )  # fmt: skip

    def __getattr__(self, name: str) -> NvmlFunction:
        function = self.__dict__.get("_functions", {}).get(name)
        if function is None:
            raise AttributeError(f"the simulated library has no {name}")
        return cast("NvmlFunction", function)

    @override
    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]


def _functions_of(subjects: Iterable[object], *, narrowed_by: Mig) -> Mapping[str, NvmlFunction]:
    """Return every function by its name; raises ValueError where two subjects have one.

    `narrowed_by` alone may have those of others: of an instance much is not answered.
    """
    found: dict[str, NvmlFunction] = {}
    for subject in subjects:
        functions = _own(subject)
        if twice := functions.keys() & found.keys():
            raise ValueError(f"two subjects have {', '.join(sorted(twice))}")
        found |= functions
    return found | _own(narrowed_by)


def _own(subject: object) -> dict[str, NvmlFunction]:
    return {name: getattr(subject, name) for name in dir(subject) if name.startswith("nvml")}
