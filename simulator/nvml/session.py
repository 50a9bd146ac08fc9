"""An open library: its users, its handles, its time. What a device answers lives beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pynvml

from gpuledger.clock import Clock
from simulator.device import SimulatedGpu
from simulator.faults import PlannedIncident
from simulator.sampling_windows import SamplingWindows
from simulator.scenario.fault_schema import EventSupport

# ruff: noqa: N802  # NVML's own names


@dataclass(frozen=True)
class Handle:
    """A device handle, good until the library is shut down."""

    index: int
    session: int


@dataclass(frozen=True)
class MigHandle(Handle):
    """The handle of an instance, good until the GPU is cut anew."""

    uuid: str


class Session:
    """What every function of the library needs; each raises the error that NVML would."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int, incidents: Sequence[PlannedIncident] = (),
        event_support: EventSupport = EventSupport(),  # noqa: B008  # frozen, so one for all does no harm
        shown_ns: Callable[[int], int] = lambda time_ns: time_ns,
    ) -> None:  # fmt: skip
        self.gpus = gpus
        self.clock = clock
        self.epoch_ns = epoch_ns
        self.driver_loaded_ns = -uptime_ns
        self.shown_ns = shown_ns
        self._windows = [
            SamplingWindows(gpu, period_ns=sample_period_ns, stamp_us=self.stamp_us) for gpu in gpus
        ]
        self.incidents = incidents
        self.event_support = event_support
        self.users = 0
        self.number = 0

    def nvmlInit(self) -> None:
        """Open the library; each call needs a shutdown of its own."""
        self.users += 1

    def nvmlShutdown(self) -> None:
        """Close the library; the last call makes all handles invalid."""
        self.check_open()
        self.users -= 1
        if not self.users:
            self.number += 1

    def gpu(self, handle: Handle) -> SimulatedGpu:
        """Return the GPU of a handle; NotSupported for an instance's, as of most functions."""
        if isinstance(handle, MigHandle):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.whole_gpu(handle)

    def whole_gpu(self, handle: Handle) -> SimulatedGpu:
        """Return the GPU of a handle, or the one on which an instance is."""
        self.check_open()
        if handle.session != self.number:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[handle.index]

    def windows_of(self, handle: Handle) -> SamplingWindows:
        """Return the driver's sampling windows of a GPU."""
        return self._windows[self.gpu(handle).facts.index]

    def check_open(self) -> None:
        """Raise the error that NVML raises before the library is open."""
        if not self.users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def stamp_us(self, since_epoch_ns: int) -> int:
        """Return an instant as the driver stamps it: by the node's wall clock as it was then."""
        return self.shown_ns(self.epoch_ns + since_epoch_ns) // 1000

    def since_epoch_ns(self) -> int:
        """Return the time since the scenario's start."""
        return self.clock.time_ns() - self.epoch_ns


class Subject:
    """Functions of one subject of the library, over what its session knows."""

    def __init__(self, session: Session) -> None:
        self._session = session
