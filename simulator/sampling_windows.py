"""The driver's sampling: utilization in whole percents over windows on a fixed grid.

Here the truth is blurred as a driver blurs it. The ring buffer is not stored: any of its samples
can be worked out again from the truth.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from simulator.device import SimulatedGpu

RING_SAMPLES: Final = 100
_PERCENT: Final = 100


@dataclass(frozen=True, slots=True)
class DriverWindow:
    """One completed window, in nanoseconds since the scenario's start."""

    start_ns: int
    end_ns: int
    timestamp_us: int
    """Its end in microseconds of the machine's clock, as the driver stamps it."""


@dataclass(frozen=True, slots=True)
class SimulatedProcessSample:
    """What the driver says of one process in one window."""

    pid: int
    timestamp_us: int
    sm_percent: int
    memory_percent: int


class SamplingWindows:
    """The windows of one GPU that its ring buffer still holds."""

    def __init__(
        self, gpu: SimulatedGpu, *, period_ns: int, stamp_us: Callable[[int], int]
    ) -> None:
        self._gpu = gpu
        self._period_ns = period_ns
        self._stamp_us = stamp_us

    def newer_than(self, last_seen_us: int, *, now_ns: int) -> list[DriverWindow]:
        """Return the completed windows with a newer stamp, oldest first.

        The driver has sampled since before the scenario's start: those windows are idle.
        """
        # Older windows are lost to who asks late, as in the driver's ring buffer.
        newest = now_ns // self._period_ns
        return [
            self._window(number)
            for number in range(newest - RING_SAMPLES + 1, newest + 1)
            if self._stamp_us(number * self._period_ns) > last_seen_us
        ]

    def latest(self, now_ns: int) -> DriverWindow:
        """Return the newest completed window."""
        return self._window(now_ns // self._period_ns)

    def gpu_percent(self, window: DriverWindow) -> int:
        """Share of the window in which a kernel ran."""
        busy_ns = self._gpu.device_busy_ns(window.start_ns, window.end_ns)
        return _percent(busy_ns, window)

    def memory_percent(self, window: DriverWindow) -> int:
        """Share of the window in which the memory controller was busy."""
        busy_ns = sum(
            self._gpu.memory_busy_ns(process, window.start_ns, window.end_ns)
            for process in self._gpu.processes
        )
        return _percent(busy_ns, window)

    def milliwatts(self, window: DriverWindow) -> int:
        """Mean draw over the window."""
        joules = self._gpu.joules(window.start_ns, window.end_ns)
        return round(joules * NS_PER_SECOND * 1000 / (window.end_ns - window.start_ns))

    def process_samples(self, window: DriverWindow) -> Iterator[SimulatedProcessSample]:
        """Yield a sample of each process that used the GPU and outlived the window."""
        for process in self._gpu.processes:
            # What ends within a window is in none of the driver's samples: only its accounts know.
            if not process.alive(window.end_ns):
                continue
            busy_ns = self._gpu.busy_ns(process, window.start_ns, window.end_ns)
            # The driver leaves out who rounds to nothing.
            if sm_percent := _percent(busy_ns, window):
                memory_ns = busy_ns * process.spec.load.memory_ratio
                yield SimulatedProcessSample(
                    pid=process.pid,
                    timestamp_us=window.timestamp_us,
                    sm_percent=sm_percent,
                    memory_percent=_percent(memory_ns, window),
                )

    def _window(self, number: int) -> DriverWindow:
        end_ns = number * self._period_ns
        return DriverWindow(
            start_ns=end_ns - self._period_ns,
            end_ns=end_ns,
            timestamp_us=self._stamp_us(end_ns),
        )


def _percent(busy_ns: float, window: DriverWindow) -> int:
    return round(_PERCENT * busy_ns / (window.end_ns - window.start_ns))
