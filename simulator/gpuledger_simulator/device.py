"""The physical state of one GPU: kernels that run, memory in use, energy drawn.

This module returns the state of a device at any instant, in nanoseconds since the scenario's start.
It models a time-slicing device. Each process submits work, and after the work has run, it waits for
some time before it submits more. One kernel runs at a time, and processes with work take turns in
time slices. On a MIG-partitioned GPU, each instance is such a device. Time is simulated only as far
as callers ask, and the results are kept as intervals, so queries about the same time always return
the same state.

`gpuledger_simulator.nvml` reports this state in NVML's formats.
"""

import heapq
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from threading import Lock
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger.mig_profiles import MigGpu, mig_gpu_of
from gpuledger_simulator.gpu_models import (
    ARCHITECTURES,
    MODELS,
    UNLISTED,
    Architecture,
    Cut,
    GpuModel,
    SimulatedInstance,
    cut_at,
    plan_cuts,
)
from gpuledger_simulator.plan import NEVER_NS, HealthFaults, PlannedProcess
from gpuledger_simulator.schema import GpuGroup, RackPosition

MAX_INTERVALS: Final = 1 << 17
"""Maximum number of busy intervals per process and GPU. They take 2 MiB, and suffice for hours of
kernels of 10 ms. Beyond the maximum, older intervals are merged."""


class Stream:
    """The kernels of one process on one GPU while the process has it open."""

    def __init__(
        self,
        *,
        visits: Sequence[tuple[int, int]],
        kernel_ns: int,
        busy_ratio: float,
        seed: str,
    ) -> None:
        self._visits = deque(visits or [(NEVER_NS, NEVER_NS)])
        self.start_ns, self.end_ns = self._visits.popleft()
        """Start and end of the current or next visit: the process has the GPU open from start to
        end."""
        self.busy = BusyTime()
        self.pending = BusyTime()
        """Times from each submission of work to the end of the work."""
        self.waits_since_ns: int | None = self.start_ns
        """Time up to which `pending` covers the current work; `None` if there is no work."""
        self.remaining_ns = 0
        self._kernel_ns = kernel_ns
        self._gap_ns = kernel_ns * (1 - busy_ratio) / busy_ratio
        self._random = Random(seed)  # noqa: S311  # jitter, no secret
        self.submit()

    def submit(self) -> None:
        """Submit the next work, with a random duration around the mean duration."""
        self.remaining_ns = max(1, int(self._kernel_ns * (0.5 + self._random.random())))

    def gap_ns(self) -> int:
        """Return the time until the next submission in nanoseconds, random around the mean."""
        return int(self._gap_ns * (0.5 + self._random.random()))

    def ran(self, start_ns: int, end_ns: int) -> None:
        """Record that the stream's kernels ran in an interval."""
        self.busy.add(start_ns, end_ns)
        waited_ns = start_ns if self.waits_since_ns is None else self.waits_since_ns
        self.pending.add(waited_ns, end_ns)
        self.waits_since_ns = end_ns

    def comes_again(self) -> bool:
        """Begin the next visit without the unfinished work; return false if no visit is left."""
        if not self._visits:
            return False
        if self.waits_since_ns is not None and self.waits_since_ns < self.end_ns:
            self.pending.add(self.waits_since_ns, self.end_ns)
        self.waits_since_ns = None
        self.start_ns, self.end_ns = self._visits.popleft()
        self.submit()
        return True

    def pending_until(self, time_ns: int) -> int:
        """Return for how long before `time_ns` the stream had work, running or waiting, in ns."""
        found = self.pending.until(time_ns)
        if self.waits_since_ns is None:
            return found
        return found + max(0, min(time_ns, self.end_ns) - self.waits_since_ns)


class Kernels:
    """The device: runs its streams' kernels one at a time, up to the time that callers need."""

    def __init__(self, streams: Sequence[Stream], *, time_slice_ns: int) -> None:
        self._time_slice_ns = time_slice_ns
        self._now_ns = 0
        self._ready: deque[Stream] = deque()
        # The order breaks ties, because streams cannot be compared and runs must be reproducible.
        self._waiting = [(stream.start_ns, order, stream) for order, stream in enumerate(streams)]
        self._order = {id(stream): order for order, stream in enumerate(streams)}
        heapq.heapify(self._waiting)

    def run_until(self, until_ns: int) -> None:
        """Run every kernel that starts before `until_ns` and has not run yet."""
        while True:
            self._wake()
            if not self._ready:
                if not self._waiting or self._waiting[0][0] >= until_ns:
                    return
                self._now_ns = self._waiting[0][0]
            elif self._now_ns >= until_ns:
                return
            else:
                self._run(self._ready.popleft())

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._now_ns:
            woke_ns, _, stream = heapq.heappop(self._waiting)
            stream.waits_since_ns = woke_ns
            self._ready.append(stream)

    def _run(self, stream: Stream) -> None:
        start_ns = self._now_ns
        end_ns = min(start_ns + self._turn_ns(stream), stream.end_ns)
        if end_ns <= start_ns:
            self._leave(stream)
            return
        stream.ran(start_ns, end_ns)
        stream.remaining_ns -= end_ns - start_ns
        self._now_ns = end_ns
        if end_ns >= stream.end_ns:
            stream.waits_since_ns = None
            self._leave(stream)
            return
        if stream.remaining_ns > 0:
            # Streams that became ready in the meantime come first. Otherwise a stream with much
            # work would run twice in a row.
            self._wake()
            self._ready.append(stream)
            return
        stream.submit()
        stream.waits_since_ns = None
        wake_ns = end_ns + stream.gap_ns()
        if wake_ns < stream.end_ns:
            heapq.heappush(self._waiting, (wake_ns, self._order[id(stream)], stream))
        else:
            self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Take a process off the GPU until its next visit."""
        if stream.comes_again():
            heapq.heappush(self._waiting, (stream.start_ns, self._order[id(stream)], stream))

    def _turn_ns(self, stream: Stream) -> int:
        """Return the duration of the stream's turn: all of its work if no other stream has work."""
        if self._ready:
            return min(stream.remaining_ns, self._time_slice_ns)
        if not self._waiting:
            return stream.remaining_ns
        alone_ns = self._waiting[0][0] - self._now_ns
        return min(stream.remaining_ns, max(alone_ns, self._time_slice_ns))


class BusyTime:
    """Busy intervals in order of time, with bounded memory.

    If there are too many intervals, neighbours in the older half are merged in pairs. The busy time
    before the start of a pair stays exact. Within a pair, all busy time counts as if it were at the
    pair's beginning.
    """

    def __init__(self, *, max_intervals: int = MAX_INTERVALS) -> None:
        self._max_intervals = max_intervals
        self._starts = array("q")
        self._sums = array("q")
        self._total_ns = 0
        self._end_ns = -1

    def add(self, start_ns: int, end_ns: int) -> None:
        """Append an interval that starts at or after the end of the last one."""
        if start_ns != self._end_ns:
            self._starts.append(start_ns)
            self._sums.append(self._total_ns)
            if len(self._starts) > self._max_intervals:
                half = len(self._starts) // 2
                self._starts[:half] = self._starts[:half:2]
                self._sums[:half] = self._sums[:half:2]
        self._total_ns += end_ns - start_ns
        self._end_ns = end_ns

    def until(self, time_ns: int) -> int:
        """Return the busy time before `time_ns`, in nanoseconds."""
        at = bisect_right(self._starts, time_ns) - 1
        if at < 0:
            return 0
        maximum = self._sums[at + 1] if at + 1 < len(self._sums) else self._total_ns
        return min(self._sums[at] + time_ns - self._starts[at], maximum)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the stored intervals as (start, end) in nanoseconds."""
        ends = [*self._sums[1:], self._total_ns]
        for start_ns, before_ns, after_ns in zip(self._starts, self._sums, ends, strict=False):
            yield start_ns, start_ns + after_ns - before_ns


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The constant properties of a GPU."""

    uuid: str
    """UUID in NVML's format."""
    index: int
    """Index in the driver's order."""
    name: str
    """Product name."""
    memory_bytes: int
    """Size of the device memory, in bytes."""
    unified_memory: bool
    """Whether the GPU shares the node's memory."""
    idle_watts: float
    """Power draw while no kernel runs."""
    max_watts: float
    """Power draw while kernels with the highest draw run."""
    context_watts: float
    """Power draw beyond idle while at least one process has the GPU open."""
    model: GpuModel
    """Other properties of the product."""
    ailments: HealthFaults = field(default_factory=HealthFaults)
    """Health problems."""

    @property
    def architecture(self) -> Architecture:
        """Properties of the product's generation."""
        return ARCHITECTURES[self.model.architecture]

    @property
    def room_bytes(self) -> int:
        """Size of the memory that processes can use."""
        return self.memory_bytes - self.model.reserved_bytes

    mig_gpu: MigGpu | None
    """MIG profiles of the product; `None` if it does not support MIG."""
    cuts: list[Cut]
    """MIG layouts in order of time."""
    energy_step_ns: int
    """Interval between steps of the energy counter; 0 if it is continuous."""
    energy_counter: str
    """`counting`, `frozen` or `absent`."""
    power_mean: str
    """Window of the power reading: `second` or `quarter`."""
    accounting: str
    """`off`, or the version of the driver's accounting calls."""
    rack: RackPosition | None = None
    """Position in a rack."""
    confidential: str = "off"
    """Mode of confidential computing."""


def describe_gpu(group: GpuGroup, *, uuid: str, index: int) -> DeviceFacts:
    """Return a GPU's properties.

    Properties that the scenario does not set come from the product data. Raise `UserError` if the
    product does not support a MIG layout of the scenario, or if idle and context power together
    exceed the maximum power.
    """
    model = MODELS.get(group.model, UNLISTED)
    memory_bytes = group.memory_bytes or model.memory_bytes
    room_bytes = memory_bytes - model.reserved_bytes
    mig_gpu = mig_gpu_of(group.model, memory_bytes=memory_bytes)
    idle_watts = group.idle_watts or model.idle_watts
    max_watts = group.max_watts or model.max_watts
    if idle_watts + group.context_watts > max_watts:
        raise UserError(
            f"gpus.context_watts: {group.context_watts} plus idle_watts {idle_watts} exceeds"
            f" max_watts {max_watts}; lower one of them"
        )
    return DeviceFacts(
        uuid=uuid,
        index=index,
        name=group.model,
        memory_bytes=memory_bytes,
        unified_memory=group.unified_memory,
        idle_watts=idle_watts,
        max_watts=max_watts,
        context_watts=group.context_watts,
        model=model,
        ailments=HealthFaults(group.ailments),
        mig_gpu=mig_gpu,
        cuts=plan_cuts(group.mig, gpu_uuid=uuid, mig_gpu=mig_gpu, room_bytes=room_bytes),
        energy_step_ns=round(group.energy_step_seconds * NS_PER_SECOND),
        energy_counter=group.energy_counter,
        power_mean=group.power_mean,
        accounting=group.accounting,
        rack=group.rack,
        confidential=group.confidential,
    )


class SimulatedGpu:
    """One GPU and all processes that use it during the scenario; thread-safe."""

    def __init__(
        self,
        facts: DeviceFacts,
        processes: list[PlannedProcess],
        *,
        seed: int,
        time_slice_ns: int,
    ) -> None:
        self.facts = facts
        self.processes = processes
        # Skipped if contexts draw no power, because scenarios of several days have many processes.
        self._contexts = plan_contexts(processes) if facts.context_watts else []
        self._lock = Lock()
        self._streams = {
            process: Stream(
                visits=process.visits,
                kernel_ns=round(process.spec.load.kernel_seconds * NS_PER_SECOND),
                busy_ratio=process.spec.load.busy_ratio,
                seed=f"{seed}/{facts.uuid}/{process.pid}",
            )
            for process in processes
        }
        # An unpartitioned GPU (`None`) runs one kernel at a time; so does each instance.
        self._kernels = {
            instance: Kernels(
                [
                    stream
                    for process, stream in self._streams.items()
                    if process.spec.instance == instance
                ],
                time_slice_ns=time_slice_ns,
            )
            for instance in {process.spec.instance for process in processes}
        }

    def busy_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> int:
        """Return for how long within [start, end) the process's kernels ran, in nanoseconds."""
        with self._lock:
            self._kernels[process.spec.instance].run_until(end_ns)
            busy = self._streams[process].busy
            return busy.until(end_ns) - busy.until(start_ns)

    def pending_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> int:
        """Return for how long within [start, end) a process had work, running or waiting, in ns."""
        with self._lock:
            self._kernels[process.spec.instance].run_until(end_ns)
            stream = self._streams[process]
            return stream.pending_until(end_ns) - stream.pending_until(start_ns)

    def device_busy_ns(self, start_ns: int, end_ns: int) -> int:
        """Return for how long within [start, end) kernels ran, in nanoseconds.

        The time of kernels on a MIG instance is multiplied by the instance's share of the GPU.
        """
        return sum(
            round(self.busy_ns(process, start_ns, end_ns) * self.share(process))
            for process in self.processes
        )

    def memory_busy_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Return for how long within [start, end) the process used the memory controller, in ns."""
        return self.busy_ns(process, start_ns, end_ns) * process.spec.load.memory_ratio

    def mixed_ns(self, what: str, start_ns: int, end_ns: int) -> float:
        """Return the time within [start, end), weighted by one field of the processes' kernel mix.

        If the field is a ratio, the result is the time during which this part of the chip worked,
        in nanoseconds. If it is a rate in bytes per second, the result is the number of bytes times
        1e9.
        """
        worked_ns = 0.0
        for process in self.processes:
            busy_ns = self.busy_ns(process, start_ns, end_ns)
            worked_ns += busy_ns * getattr(process.spec.load.mix, what)
        return worked_ns

    def intervals(self, process: PlannedProcess, until_ns: int) -> list[tuple[int, int]]:
        """Return the busy intervals that started before `until_ns`, as (start, end)."""
        with self._lock:
            self._kernels[process.spec.instance].run_until(until_ns)
            return [span for span in self._streams[process].busy.intervals() if span[0] < until_ns]

    def cut(self, time_ns: int) -> Cut | None:
        """Return the MIG layout at `time_ns`; `None` while the GPU is unpartitioned."""
        return cut_at(self.facts.cuts, time_ns)

    def cuts_within(self, start_ns: int, end_ns: int) -> list[Cut]:
        """Return the layouts that the GPU had at some time within [start, end)."""
        first = self.cut(start_ns)
        return [cut for cut in self.facts.cuts if cut is first or start_ns < cut.start_ns < end_ns]

    def instance_of(self, process: PlannedProcess) -> SimulatedInstance | None:
        """Return the instance in which a process runs; `None` on an unpartitioned GPU."""
        # The start of the process determines the layout, because the scenario's checks ensure that
        # the layout does not change while the process runs.
        cut, index = self.cut(process.start_ns), process.spec.instance
        return None if cut is None or index is None else cut.instances[index]

    def share(self, process: PlannedProcess) -> float:
        """Return the share of the GPU's multiprocessors that a process can use, from 0 to 1."""
        instance = self.instance_of(process)
        return instance.share if instance else 1.0

    def users(self, time_ns: int) -> list[PlannedProcess]:
        """Return the processes that have the GPU open at `time_ns` and therefore use its memory."""
        return [process for process in self.processes if process.is_on_gpu(time_ns)]

    def used_bytes(self, time_ns: int) -> int:
        """Return the memory that processes use at `time_ns`, in bytes."""
        return sum(process.spec.memory_bytes for process in self.users(time_ns))

    def kernel_joules(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Return the energy of a process's kernels in [start, end).

        It contains neither the GPU's idle draw nor the draw of CUDA contexts.
        """
        return self._kernel_joules(self._drawing_ns(process, start_ns, end_ns))

    def context_joules(self, start_ns: int, end_ns: int) -> float:
        """Return the energy drawn within [start, end) because processes had the GPU open."""
        spans = (span.overlap_ns(start_ns, end_ns) for span in self._contexts)
        return sum(spans) / NS_PER_SECOND * self.facts.context_watts

    def context_joules_of(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Return a process's part of `context_joules`; concurrent processes share it equally."""
        spans = (
            span.overlap_ns(start_ns, end_ns) / len(span.processes)
            for span in self._contexts
            if process in span.processes
        )
        return sum(spans) / NS_PER_SECOND * self.facts.context_watts

    def joules(self, start_ns: int, end_ns: int) -> float:
        """Return the energy drawn within [start, end).

        Before the scenario's start, the GPU is idle.
        """
        idle = (end_ns - start_ns) / NS_PER_SECOND * self.facts.idle_watts
        drawing_ns = sum(self._drawing_ns(one, start_ns, end_ns) for one in self.processes)
        return idle + self.context_joules(start_ns, end_ns) + self._kernel_joules(drawing_ns)

    def _drawing_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Return the busy time of a process within [start, end), weighted by its power draw, in ns.

        In the returned time, kernels with the maximum draw would use the same energy.
        """
        # A busy instance draws only its share of the GPU's power.
        busy_ns = round(self.busy_ns(process, start_ns, end_ns) * self.share(process))
        return busy_ns * process.spec.load.draw_ratio

    def _kernel_joules(self, drawing_ns: float) -> float:
        facts = self.facts
        watts = facts.max_watts - facts.idle_watts - facts.context_watts
        return drawing_ns / NS_PER_SECOND * watts


@dataclass(frozen=True, kw_only=True)
class ContextSpan:
    """A time during which the same processes have a GPU open."""

    start_ns: int
    """Start time."""
    end_ns: int
    """End time."""
    processes: frozenset[PlannedProcess]
    """The processes; at least one."""

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """Return for how long the span overlaps [start, end), in nanoseconds."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns))


def plan_contexts(processes: Sequence[PlannedProcess]) -> list[ContextSpan]:
    """Return the spans during which processes have a GPU open, in order of time."""
    changes = sorted({time for one in processes for visit in one.visits for time in visit})
    spans = (
        ContextSpan(
            start_ns=start_ns,
            end_ns=end_ns,
            processes=frozenset(one for one in processes if one.is_on_gpu(start_ns)),
        )
        for start_ns, end_ns in pairwise(changes)
    )
    return [span for span in spans if span.processes]
