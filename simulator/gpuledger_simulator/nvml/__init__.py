"""Simulates NVML on one node: the `pynvml` functions that the agent calls, with NVML's limits.

This module assembles the library from one module per subject. Each of these modules contains NVML's
names, structs, units and errors. The state of the devices comes from `gpuledger_simulator.device`,
the driver's sampling from `gpuledger_simulator.sampling_windows`. Parameters have the names of
nvidia-ml-py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from typing_extensions import override

from gpuledger.clock import Clock
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.drivers import DriverModel
from gpuledger_simulator.nvml.events import Events, SystemEventCalls
from gpuledger_simulator.nvml.gpm import Profiling
from gpuledger_simulator.nvml.health import FieldValues, Health
from gpuledger_simulator.nvml.mig import Mig, Processes
from gpuledger_simulator.nvml.readings import AccountingCalls, Readings, Utilization
from gpuledger_simulator.nvml.session import Board, Identity, Session
from gpuledger_simulator.plan import PlannedIncident
from gpuledger_simulator.schema import EventSupport

NvmlFunction = Callable[..., Any]


class SimulatedNvml:
    """The NVML library of one node. Its functions raise the same `pynvml.NVMLError` as NVML."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int, incidents: Sequence[PlannedIncident] = (),
        event_support: EventSupport = EventSupport(),  # noqa: B008  # frozen, so sharing it is safe
        shown_ns: Callable[[int], int] = lambda time_ns: time_ns,
        system_events: Sequence[tuple[int, int]] = (),
        driver: DriverModel = DriverModel(),  # noqa: B008  # as above
    ) -> None:  # fmt: skip
        self.session = session = Session(
            gpus, clock=clock, epoch_ns=epoch_ns, uptime_ns=uptime_ns,
            sample_period_ns=sample_period_ns, incidents=incidents, event_support=event_support,
            shown_ns=shown_ns, driver=driver,
        )  # fmt: skip
        identity, readings, utilization = Identity(session), Readings(session), Utilization(session)
        mig = Mig(session, identity=identity, readings=readings, utilization=utilization)
        self.events = Events(session)
        processes = Processes(session, mig)
        if not driver.has_plain_lists:
            # nvidia-ml-py misreads such a driver. Callers then call the driver directly, so its
            # functions below nvidia-ml-py exist too.
            self._nvmlGetFunctionPointer = processes.find_function
        self._functions = _functions_of(
            [
                session, identity, readings, utilization, Board(session), Health(session),
                FieldValues(session), processes, Profiling(session, mig),
                AccountingCalls(session), self.events, SystemEventCalls(session, system_events),
            ],
            narrowed_by=mig,
        )  # fmt: skip

    def __getattr__(self, name: str) -> NvmlFunction:
        # `self._functions` would recurse endlessly if it is not set yet, as in an unpickled object,
        # so the dictionary is used.
        function = self.__dict__.get("_functions", {}).get(name)
        if function is None:
            raise AttributeError(f"the simulated library has no {name}")
        return cast("NvmlFunction", function)

    @override
    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]


def _functions_of(subjects: Iterable[object], *, narrowed_by: Mig) -> Mapping[str, NvmlFunction]:
    """Return all functions by name; raise `ValueError` if two subjects have the same function.

    Only `narrowed_by` may replace functions of other subjects, because instances support fewer
    functions.
    """
    found: dict[str, NvmlFunction] = {}
    for subject in (*subjects, narrowed_by):
        functions = {name: getattr(subject, name) for name in dir(subject) if name[:4] == "nvml"}
        twice = functions.keys() & found.keys()
        if twice and subject is not narrowed_by:
            raise ValueError(f"two subjects have {', '.join(sorted(twice))}")
        found |= functions
    return found
