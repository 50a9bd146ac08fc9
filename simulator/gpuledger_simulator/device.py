"""One GPU as physics: kernels that run, memory that is held, energy that is drawn.

Here the truth of a device is asked at any instant since the scenario's start, in nanoseconds. The
model is a time-slicing device: each process alternates between work that it submits at once and a
gap; one kernel runs at a time, and processes with work take turns in slices. A GPU that is cut has
such a device in each of its instances. Nothing is simulated before somebody asks for it, and what
was simulated is kept as intervals, so that any question about the past has the same answer again.

In which form NVML tells of all this is `gpuledger_simulator.nvml`'s business.
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
from gpuledger_simulator.gpu_models import (
    ARCHITECTURES,
    MODELS,
    UNLISTED,
    Architecture,
    Cut,
    GpuModel,
    MigGpu,
    SimulatedInstance,
    cut_at,
    mig_gpu_of,
    plan_cuts,
)
from gpuledger_simulator.plan import NEVER_NS, HealthFaults, PlannedProcess
from gpuledger_simulator.schema import GpuGroup, RackPosition

MAX_INTERVALS: Final = 1 << 17
"""Two megabytes a process and GPU; hours of kernels of 10 ms, and what is older is joined."""


class Stream:
    """One process's stream of kernels on one GPU, while it is there."""

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
        """Of the visit to the GPU that is, or that comes next."""
        self.busy = BusyTime()
        self.pending = BusyTime()
        """From each submission to its end."""
        self.waits_since_ns: int | None = self.start_ns
        """While it has work: up to where that is in `pending`."""
        self.remaining_ns = 0
        self._kernel_ns = kernel_ns
        self._gap_ns = kernel_ns * (1 - busy_ratio) / busy_ratio
        self._random = Random(seed)  # noqa: S311  # jitter, no secret
        self.submit()

    def submit(self) -> None:
        """Submit the next work, of a length around the mean."""
        self.remaining_ns = max(1, int(self._kernel_ns * (0.5 + self._random.random())))

    def gap_ns(self) -> int:
        """Draw the time until the next submission, around the mean."""
        return int(self._gap_ns * (0.5 + self._random.random()))

    def ran(self, start_ns: int, end_ns: int) -> None:
        """Record that its kernels ran in an interval."""
        self.busy.add(start_ns, end_ns)
        waited_ns = start_ns if self.waits_since_ns is None else self.waits_since_ns
        self.pending.add(waited_ns, end_ns)
        self.waits_since_ns = end_ns

    def comes_again(self) -> bool:
        """End the visit, with the work that is not done; return whether there is another one."""
        if not self._visits:
            return False
        if self.waits_since_ns is not None and self.waits_since_ns < self.end_ns:
            self.pending.add(self.waits_since_ns, self.end_ns)
        self.waits_since_ns = None
        self.start_ns, self.end_ns = self._visits.popleft()
        self.submit()
        return True

    def pending_until(self, time_ns: int) -> int:
        """Return for how long before `time_ns` it had work, run or not."""
        found = self.pending.until(time_ns)
        if self.waits_since_ns is None:
            return found
        return found + max(0, min(time_ns, self.end_ns) - self.waits_since_ns)


class Kernels:
    """The device: runs its streams' kernels one at a time, as far as it was asked to."""

    def __init__(self, streams: Sequence[Stream], *, time_slice_ns: int) -> None:
        self._time_slice_ns = time_slice_ns
        self._now_ns = 0
        self._ready: deque[Stream] = deque()
        # The order breaks ties: streams themselves cannot be compared, and runs must be repeatable.
        self._waiting = [(stream.start_ns, order, stream) for order, stream in enumerate(streams)]
        self._order = {id(stream): order for order, stream in enumerate(streams)}
        heapq.heapify(self._waiting)

    def run_until(self, until_ns: int) -> None:
        """Run every kernel that starts before `until_ns`, whatever was asked for before."""
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
            # Whoever has become ready meanwhile comes first: else a stream with much work would
            # run twice in a row.
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
        """Let a process go from the GPU until its next visit."""
        if stream.comes_again():
            heapq.heappush(self._waiting, (stream.start_ns, self._order[id(stream)], stream))

    def _turn_ns(self, stream: Stream) -> int:
        """Length of its turn: all of its work while nobody else has any."""
        if self._ready:
            return min(stream.remaining_ns, self._time_slice_ns)
        if not self._waiting:
            return stream.remaining_ns
        alone_ns = self._waiting[0][0] - self._now_ns
        return min(stream.remaining_ns, max(alone_ns, self._time_slice_ns))


class BusyTime:
    """Busy intervals in order of time, bounded in memory.

    When there are too many, pairs of the older half are joined: sums up to the start of a pair
    stay exact, within it the busy time counts as spent at its beginning.
    """

    def __init__(self, *, max_intervals: int = MAX_INTERVALS) -> None:
        self._max_intervals = max_intervals
        self._starts = array("q")
        self._sums = array("q")
        self._total_ns = 0
        self._end_ns = -1

    def add(self, start_ns: int, end_ns: int) -> None:
        """Append an interval that starts no earlier than the last one ended."""
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
        """Busy nanoseconds before `time_ns`."""
        at = bisect_right(self._starts, time_ns) - 1
        if at < 0:
            return 0
        maximum = self._sums[at + 1] if at + 1 < len(self._sums) else self._total_ns
        return min(self._sums[at] + time_ns - self._starts[at], maximum)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the intervals that are kept, as (start, end) in nanoseconds."""
        ends = [*self._sums[1:], self._total_ns]
        for start_ns, before_ns, after_ns in zip(self._starts, self._sums, ends, strict=False):
            yield start_ns, start_ns + after_ns - before_ns


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What never changes of a GPU."""

    uuid: str
    """Its UUID as NVML writes it."""
    index: int
    """The driver's index."""
    name: str
    """Product name."""
    memory_bytes: int
    """Size of its memory."""
    unified_memory: bool
    """Whether that is the machine's."""
    idle_watts: float
    """Draw while no kernel runs."""
    max_watts: float
    """Draw while kernels run that draw the most."""
    context_watts: float
    """Draw beyond idle while a process is there."""
    model: GpuModel
    """The product's other facts."""
    ailments: HealthFaults = field(default_factory=HealthFaults)
    """What befalls it."""

    @property
    def architecture(self) -> Architecture:
        """What its generation can be asked for."""
        return ARCHITECTURES[self.model.architecture]

    mig_gpu: MigGpu | None
    """Into what it can be cut; `None` where it cannot be."""
    cuts: list[Cut]
    """How it is cut into instances, one cut after the other."""
    energy_step_ns: int
    """From one step of its energy counter to the next; 0 where it has none."""
    energy_counter: str
    """`counting`, `frozen` or `absent`."""
    power_mean: str
    """Of what its draw is told as the mean: `second` or `quarter`."""
    accounting: str
    """`off`, or the version of the driver's accounting."""
    rack: RackPosition | None = None
    """Where it is in a rack."""
    confidential: str = "off"
    """Its mode of confidential computing."""


def describe_gpu(group: GpuGroup, *, uuid: str, index: int) -> DeviceFacts:
    """Fill in from the product facts what the scenario leaves out.

    Raises UserError where the product cannot be cut as the scenario says, or would draw more than
    its maximum.
    """
    model = MODELS.get(group.model, UNLISTED)
    memory_bytes = group.memory_bytes or model.memory_bytes
    room_bytes = memory_bytes - model.reserved_bytes
    mig_gpu = mig_gpu_of(group.model, memory_bytes=memory_bytes)
    idle_watts = group.idle_watts or model.idle_watts
    max_watts = group.max_watts or model.max_watts
    if idle_watts + group.context_watts > max_watts:
        raise UserError(
            f"gpus.context_watts: {group.context_watts} and idle_watts {idle_watts} are more than"
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
    """One GPU and the processes that ever use it; safe to ask from several threads."""

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
        # Not looked for where it draws nothing: scenarios of days have many processes.
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
        # What runs one kernel at a time is the instance, or the whole GPU (None).
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
        """Time within [start, end) in which the process's kernels ran."""
        with self._lock:
            self._kernels[process.spec.instance].run_until(end_ns)
            busy = self._streams[process].busy
            return busy.until(end_ns) - busy.until(start_ns)

    def pending_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> int:
        """Time within [start, end) in which the process had work, whether it ran or waited."""
        with self._lock:
            self._kernels[process.spec.instance].run_until(end_ns)
            stream = self._streams[process]
            return stream.pending_until(end_ns) - stream.pending_until(start_ns)

    def device_busy_ns(self, start_ns: int, end_ns: int) -> int:
        """Time within [start, end) in which any kernel ran; that of an instance by its share."""
        return sum(
            round(self.busy_ns(process, start_ns, end_ns) * self.share(process))
            for process in self.processes
        )

    def memory_busy_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Time within [start, end) in which the process kept the memory controller busy."""
        return self.busy_ns(process, start_ns, end_ns) * process.spec.load.memory_ratio

    def mixed_ns(self, what: str, start_ns: int, end_ns: int) -> float:
        """Time within [start, end) weighed by a part of the processes' kernel mix.

        Of a ratio it is the time in which that part of the chip worked, of a rate in bytes per
        second the bytes times 1e9.
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
        """Return the GPU's instances at `time_ns`; `None` while it is whole."""
        return cut_at(self.facts.cuts, time_ns)

    def cuts_within(self, start_ns: int, end_ns: int) -> list[Cut]:
        """Return the cuts that the GPU had at any time within [start, end)."""
        first = self.cut(start_ns)
        return [cut for cut in self.facts.cuts if cut is first or start_ns < cut.start_ns < end_ns]

    def instance_of(self, process: PlannedProcess) -> SimulatedInstance | None:
        """Return the instance in which a process runs; `None` on a whole GPU."""
        # By its start: no process lives over a new cut, which the scenario's checks see to.
        cut, index = self.cut(process.start_ns), process.spec.instance
        return None if cut is None or index is None else cut.instances[index]

    def share(self, process: PlannedProcess) -> float:
        """Return the share of the GPU's multiprocessors that a process has at hand."""
        instance = self.instance_of(process)
        return instance.share if instance else 1.0

    def users(self, time_ns: int) -> list[PlannedProcess]:
        """Return the processes that are on it at `time_ns`, and hold memory."""
        return [process for process in self.processes if process.is_on_gpu(time_ns)]

    def used_bytes(self, time_ns: int) -> int:
        """Memory that processes hold at `time_ns`."""
        return sum(process.spec.memory_bytes for process in self.users(time_ns))

    def kernel_joules(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Energy within [start, end) of the process's kernels, beyond idle and contexts."""
        return self._kernel_joules(self._drawing_ns(process, start_ns, end_ns))

    def context_joules(self, start_ns: int, end_ns: int) -> float:
        """Energy within [start, end) that was drawn for processes' being there."""
        spans = (span.overlap_ns(start_ns, end_ns) for span in self._contexts)
        return sum(spans) / NS_PER_SECOND * self.facts.context_watts

    def context_joules_of(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Return a process's part of that: equal to that of each other one that was there."""
        spans = (
            span.overlap_ns(start_ns, end_ns) / len(span.processes)
            for span in self._contexts
            if process in span.processes
        )
        return sum(spans) / NS_PER_SECOND * self.facts.context_watts

    def joules(self, start_ns: int, end_ns: int) -> float:
        """Energy drawn within [start, end); times before the scenario's start count as idle."""
        idle = (end_ns - start_ns) / NS_PER_SECOND * self.facts.idle_watts
        drawing_ns = sum(self._drawing_ns(one, start_ns, end_ns) for one in self.processes)
        return idle + self.context_joules(start_ns, end_ns) + self._kernel_joules(drawing_ns)

    def _drawing_ns(self, process: PlannedProcess, start_ns: int, end_ns: int) -> float:
        """Time of kernels that would draw the maximum, by which what these drew is drawn too."""
        # An instance that is busy draws its share of what the board draws.
        busy_ns = round(self.busy_ns(process, start_ns, end_ns) * self.share(process))
        return busy_ns * process.spec.load.draw_ratio

    def _kernel_joules(self, drawing_ns: float) -> float:
        facts = self.facts
        watts = facts.max_watts - facts.idle_watts - facts.context_watts
        return drawing_ns / NS_PER_SECOND * watts


@dataclass(frozen=True, kw_only=True)
class ContextSpan:
    """A time in which the same processes are on a GPU."""

    start_ns: int
    """Where it begins."""
    end_ns: int
    """Where it ends."""
    processes: frozenset[PlannedProcess]
    """Who is there; at least one."""

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """Return how much of it lies within [start, end)."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns))


def plan_contexts(processes: Sequence[PlannedProcess]) -> list[ContextSpan]:
    """Return the times in which processes are on a GPU, in order."""
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
