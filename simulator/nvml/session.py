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


class Session:
    """What every function of the library needs; each raises the error that NVML would."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int, incidents: Sequence[PlannedIncident] = (),
        event_support: EventSupport = EventSupport(),  # noqa: B008  # frozen, so one for all does no harm
        shown_ns: Callable[[int], int] = lambda time_ns: time_ns,
    ) -> None:  # fmt: skip
        self._gpus = gpus
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._driver_loaded_ns = -uptime_ns
        self._shown_ns = shown_ns
        self._windows = [
            SamplingWindows(gpu, period_ns=sample_period_ns, stamp_us=self._stamp_us)
            for gpu in gpus
        ]
        self._incidents = incidents
        self._event_support = event_support
        self._users = 0
        self._session = 0

    def nvmlInit(self) -> None:
        """Open the library; each call needs a shutdown of its own."""
        self._users += 1

    def nvmlShutdown(self) -> None:
        """Close the library; the last call makes all handles invalid."""
        self._check_open()
        self._users -= 1
        if not self._users:
            self._session += 1

    def _gpu(self, handle: Handle) -> SimulatedGpu:
        self._check_open()
        if handle.session != self._session:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._gpus[handle.index]

    def _windows_of(self, handle: Handle) -> SamplingWindows:
        return self._windows[self._gpu(handle).facts.index]

    def _check_open(self) -> None:
        if not self._users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _stamp_us(self, since_epoch_ns: int) -> int:
        """Return an instant as the driver stamps it: by the node's wall clock as it was then."""
        return self._shown_ns(self._epoch_ns + since_epoch_ns) // 1000

    def _since_epoch_ns(self) -> int:
        return self._clock.time_ns() - self._epoch_ns
