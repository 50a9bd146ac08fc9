"""The driver's sampling: whole percentages over windows on a fixed grid.

This module reduces the accuracy of the ground truth in the same way as the driver that the node's
`DriverModel` describes. The ring buffer is not stored, because each of its samples can be computed
again from the ground truth.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from threading import Lock
from typing import Final

import pynvml

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.drivers import DriverModel
from gpuledger_simulator.plan import PlannedProcess

_PERCENT: Final = 100
_MPS_SERVER: Final = "nvidia-cuda-mps"
_NOT_SUPPORTED: Final = pynvml.NVML_ERROR_NOT_SUPPORTED


@dataclass(frozen=True, slots=True)
class DriverWindow:
    """One completed window, in nanoseconds since the scenario's start."""

    start_ns: int
    end_ns: int
    timestamp_us: int
    """End of the window by the driver's clock, in microseconds."""


@dataclass(frozen=True, slots=True)
class SimulatedProcessSample:
    """The driver's sample of one process in one or more windows."""

    pid: int
    timestamp_us: int
    sm_percent: int
    memory_percent: int


class SamplingWindows:
    """The sampling windows of one GPU that its ring buffer still contains."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        *,
        period_ns: int,
        stamp_us: Callable[[int], int],
        driver: DriverModel = DriverModel(),  # noqa: B008  # frozen, so sharing it is safe
    ) -> None:
        self._gpu = gpu
        self._period_ns = period_ns
        self._stamp_us = stamp_us
        self._driver = driver
        self._used: dict[int, bool] = {}
        """Whether a kernel ran in each completed window, by window number. This is a cache, because
        callers read the same ring many times."""
        self._ring: deque[int] = deque(maxlen=driver.ring_samples)
        """For `skipped`: the numbers of the latest used windows, up to window `_filled_until`."""
        self._filled_until = 0
        self._shown_ns: int | None = None
        """Until when windows have appeared, if the driver is late."""
        self._lock = Lock()

    def newer_than(self, last_seen_us: int, *, now_ns: int) -> list[DriverWindow]:
        """Return the ring buffer's windows with a timestamp after `last_seen_us`, oldest first.

        The driver's sampling started before the scenario; windows before the scenario are idle.
        """
        driver, newest = self._driver, self._newest(now_ns)
        # Older windows have been overwritten, as in the driver's ring buffer.
        oldest = newest - driver.ring_samples + 1
        if driver.ring_idle == "skipped":
            numbers = self._fill_ring(newest)
        elif driver.ring_idle == "dry":
            numbers = range(newest, max(oldest, self._refilled_at(newest, oldest)) - 1, -1)
        else:
            numbers = range(newest, oldest - 1, -1)
        found: list[DriverWindow] = []
        for number in numbers:
            if self._stamp_us(number * self._period_ns) > last_seen_us:
                if not self._is_lost(driver.lost_ratio, number):
                    found.append(self._window(number))
            elif driver.ring_idle == "skipped":
                break  # older windows may cover hours
        return found[::-1]

    def latest(self, now_ns: int) -> DriverWindow:
        """Return the newest completed window that has appeared."""
        return self._window(self._newest(now_ns))

    def gpu_percent(self, window: DriverWindow) -> int:
        """Return the share of the window in which a kernel ran, in percent."""
        busy_ns = self._gpu.device_busy_ns(window.start_ns, window.end_ns)
        return self._percent(busy_ns, window)

    def memory_percent(self, window: DriverWindow) -> int:
        """Return the share of the window in which the memory controller was busy, in percent."""
        busy_ns = sum(
            self._gpu.memory_busy_ns(process, window.start_ns, window.end_ns)
            for process in self._gpu.processes
        )
        return self._percent(busy_ns, window)

    def milliwatts(self, window: DriverWindow) -> int:
        """Return the mean power draw over the window, in milliwatts."""
        joules = self._gpu.joules(window.start_ns, window.end_ns)
        return round(joules * NS_PER_SECOND * 1000 / (window.end_ns - window.start_ns))

    def process_samples(self, window: DriverWindow) -> Iterator[SimulatedProcessSample]:
        """Yield a sample for each process that ran in the window and is on the GPU at its end.

        Some drivers have only one, of the process that ran at some instant.
        """
        if self._driver.processes == "active":
            yield from self._active_sample(window)
            return
        for pid, processes in self._sampled_by_pid().items():
            # The driver has no samples of processes that end within a window; only its accounts
            # include them.
            there = [process for process in processes if process.is_on_gpu(window.end_ns)]
            used_ns = [self._counted_ns(process, window) for process in there]
            # The driver omits processes whose percentage rounds to 0.
            if sm_percent := self._percent(sum(used_ns), window):
                memory_ns = sum(
                    own * process.spec.load.memory_ratio
                    for own, process in zip(used_ns, there, strict=True)
                )
                yield SimulatedProcessSample(
                    pid=pid,
                    timestamp_us=window.timestamp_us,
                    sm_percent=sm_percent,
                    memory_percent=self._percent(memory_ns, window),
                )

    def list_process_samples(
        self, last_seen_us: int, *, now_ns: int
    ) -> list[SimulatedProcessSample]:
        """Return the process samples with a timestamp after `last_seen_us`, in the driver's form.

        Raise `pynvml.NVMLError` (NotSupported) if the driver does not support process samples.
        """
        form = self._driver.processes
        if form == "absent":
            raise pynvml.NVMLError(_NOT_SUPPORTED)
        if form == "zero":
            newest = self.latest(now_ns)
            return [
                SimulatedProcessSample(process.pid, newest.timestamp_us, 0, 0)
                for process in self._gpu.users(newest.end_ns)
                if newest.timestamp_us > last_seen_us
            ]
        windows = self.newer_than(last_seen_us, now_ns=now_ns)
        samples = [
            one
            for window in windows
            for one in self.process_samples(window)
            if not self._is_lost(self._driver.process_lost_ratio, window.end_ns, one.pid)
        ]
        if form in ("windows", "active"):
            return samples
        own: dict[int, list[SimulatedProcessSample]] = {}
        for sample in samples:
            own.setdefault(sample.pid, []).append(sample)
        return [self._join(of_one, windows) for of_one in own.values()]

    def _newest(self, now_ns: int) -> int:
        """Return the number of the newest completed window that has appeared."""
        driver = self._driver
        if driver.late_seconds or driver.busy_late_seconds:
            busy_ns = self._gpu.device_busy_ns(now_ns - NS_PER_SECOND, now_ns)
            late_ns = driver.late_seconds * NS_PER_SECOND + driver.busy_late_seconds * busy_ns
            now_ns -= round(late_ns)
            # A window that has appeared remains.
            now_ns = now_ns if self._shown_ns is None else max(self._shown_ns, now_ns)
            self._shown_ns = now_ns
        return now_ns // self._period_ns

    def _is_lost(self, ratio: float, *key: int) -> bool:
        return ratio > 0 and Random(hash(key)).random() < ratio  # noqa: S311  # a scenario, no secret

    def _join(
        self, samples: Sequence[SimulatedProcessSample], windows: Sequence[DriverWindow]
    ) -> SimulatedProcessSample:
        """Return one sample for all of a process's samples, in the driver's form."""
        newest, form = samples[-1], self._driver.processes
        if form == "newest":
            return newest
        # The mean over all windows ends with the last window, even if the process was idle then.
        is_of_all = form == "mean"
        count = len(windows) if is_of_all else len(samples)
        return SimulatedProcessSample(
            pid=newest.pid,
            timestamp_us=windows[-1].timestamp_us if is_of_all else newest.timestamp_us,
            sm_percent=self._whole(sum(one.sm_percent for one in samples) / count),
            memory_percent=self._whole(sum(one.memory_percent for one in samples) / count),
        )

    def _sampled_by_pid(self) -> dict[int, list[PlannedProcess]]:
        """Return the GPU's processes, grouped by the pid that the driver's samples contain.

        This is the process's own pid, or the MPS server's pid for some drivers.
        """
        server = None
        if self._driver.mps_samples == "server":
            servers = (one for one in self._gpu.processes if one.comm.startswith(_MPS_SERVER))
            server = next(servers, None)
        found: dict[int, list[PlannedProcess]] = {}
        for process in self._gpu.processes:
            is_client = server is not None and process.spec.kind == "mps"
            pid = server.pid if server is not None and is_client else process.pid
            found.setdefault(pid, []).append(process)
        return found

    def _counted_ns(self, process: PlannedProcess, window: DriverWindow) -> int:
        """Return the part of the window that counts as the process's time, in nanoseconds."""
        if self._driver.process_time == "submitted":
            return self._gpu.pending_ns(process, window.start_ns, window.end_ns)
        busy_ns = self._gpu.busy_ns(process, window.start_ns, window.end_ns)
        if self._driver.process_time == "filled":
            return round(busy_ns * process.spec.load.draw_ratio)
        return busy_ns

    def _active_sample(self, window: DriverWindow) -> Iterator[SimulatedProcessSample]:
        ran_ns = {
            process.pid: self._gpu.busy_ns(process, window.start_ns, window.end_ns)
            for process in self._gpu.processes
        }
        if percent := self.gpu_percent(window):
            random = Random(window.end_ns)  # noqa: S311  # a scenario, no secret
            (pid,) = random.choices(list(ran_ns), list(ran_ns.values()))
            yield SimulatedProcessSample(
                pid, window.timestamp_us, percent, self.memory_percent(window)
            )

    def _refilled_at(self, newest: int, oldest: int) -> int:
        """Return the number of the first window that a ring stored after it was last dry.

        If the ring is dry now, return the number after the newest window. If the ring was never
        dry, return `oldest`.
        """
        idle, windows = 0, self._driver.dry_after_seconds * NS_PER_SECOND / self._period_ns
        if len(self._used) > 2 * self._driver.ring_samples:
            self._used = {number: used for number, used in self._used.items() if number >= oldest}
        for number in range(newest, oldest - 1, -1):
            idle = 0 if self._is_used(number) else idle + 1
            if idle > windows:
                return number + idle if number + idle <= newest else newest + 1
        return oldest

    def _fill_ring(self, newest: int) -> Sequence[int]:
        """Return the numbers of the windows in a ring that skips idle windows, newest first.

        The ring is empty before the scenario's start.
        """
        with self._lock:
            for number in range(self._filled_until + 1, newest + 1):
                if self._has_kernel(number):
                    self._ring.append(number)
            self._filled_until = max(newest, self._filled_until)
            return [number for number in reversed(self._ring) if number <= newest]

    def _is_used(self, number: int) -> bool:
        """Return whether a kernel ran in a completed window."""
        if number not in self._used:
            self._used[number] = self._has_kernel(number)
        return self._used[number]

    def _has_kernel(self, number: int) -> bool:
        window = self._window(number)
        return self._gpu.device_busy_ns(window.start_ns, window.end_ns) > 0

    def _window(self, number: int) -> DriverWindow:
        end_ns = number * self._period_ns
        return DriverWindow(
            start_ns=end_ns - self._period_ns,
            end_ns=end_ns,
            timestamp_us=self._stamp_us(end_ns),
        )

    def _percent(self, busy_ns: float, window: DriverWindow) -> int:
        percent = self._whole(_PERCENT * busy_ns / (window.end_ns - window.start_ns))
        return min(_PERCENT, percent)

    def _whole(self, percent: float) -> int:
        return int(percent) if self._driver.rounding == "down" else round(percent)
