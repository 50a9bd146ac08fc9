"""What looks between two ticks told of one GPU, put together with a tick's answers.

`GpuLooks` keeps one GPU's answers until a tick has covered them. Which form the driver's process
samples have it learns from the answers: two samples of one process in one answer are windows. Where
windows in which the device was used have no sample of any process, there is one for all of them.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace as replace_struct

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.core.normalize.driver_clock import (
    OF_LATEST,
    ClockSync,
    Freshness,
    SamplingSigns,
    freshness,
)
from gpuledger_agent.core.normalize.shares import merge_processes
from gpuledger_agent.core.normalize.windows import USUAL_WINDOW_US
from gpuledger_agent.core.raw import (
    AnswerTime,
    ClockReading,
    EnergyReading,
    GpuLook,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.core.readings import Validator
from gpuledger_agent.core.stamps import StampFilter

K = TypeVar("K")
V = TypeVar("V")

_WINDOWS_TO_LEARN: Final = 6
"""So many windows in which the device was used, and of which no answer had a sample of any process,
show the form of the driver's samples: a driver leaves out the window in which a process ends."""
_USED_PERCENT: Final = 5
"""Less may be several processes' that each round to nothing."""
_WATCHED_NS: Final = 10 * NS_PER_SECOND
"""For so long after a process has come or gone the next one is expected."""
_MAX_KEPT: Final = 65_536
"""Samples of one GPU: of 4,096 windows those of 16 processes."""


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU has told by a tick's end, in the tick's own answers and at looks before it.

    Samples are those of which ticks have not covered all; `None` where the driver gives none.
    """

    samples: Sequence[UtilizationSample] | None
    """Of the GPU's utilization, oldest first."""
    memory_samples: Sequence[UtilizationSample] | None
    """Of the memory controller's utilization, oldest first."""
    process_samples: Sequence[ProcessUtilizationSample] | None
    """Of the processes."""
    signs: SamplingSigns = SamplingSigns()
    """How the driver samples, as far as it has shown."""
    processes: Mapping[int, ListedProcess] = {}
    """The processes that were listed at any look since the tick before, by pid."""
    left_ns: Mapping[int, int] = {}
    """When it was first seen of those that left since the tick before, by pid and the monotonic
    clock."""
    energy: Sequence[EnergyReading] = ()
    """What looks since the tick before showed of its energy."""
    dropped: Counter[str] = Counter()
    """Samples that are left out as their stamps cannot be true, by the fields above."""

    @classmethod
    def at(cls, raw: RawGpuSample) -> "Looked":
        """Return what a GPU tells that nobody has looked at before."""
        return cls(
            samples=raw.samples,
            memory_samples=raw.memory_samples,
            process_samples=raw.process_samples,
        )


@dataclass(kw_only=True)
class GpuLooks:
    """One GPU's answers since the time that ticks have covered."""

    one_sample_each: bool | None = None
    """Whether the driver gives one sample a process, however many windows were asked for; `None`
    until it has shown."""
    skips_idle: bool = False
    """Whether the driver gives no sample of windows in which nothing was used, as the rates show,
    which are always of the latest one."""
    _watched_ns: int | None = None
    _processes: dict[int, ListedProcess] = field(default_factory=dict)
    _listed: frozenset[int] | None = None
    _left_ns: dict[int, int] = field(default_factory=dict)
    _gpu: dict[int, UtilizationSample] = field(default_factory=dict)
    _memory: dict[int, UtilizationSample] = field(default_factory=dict)
    _uses: dict[tuple[int, int], ProcessUtilizationSample] = field(default_factory=dict)
    _energy: list[EnergyReading] = field(default_factory=list)
    _missing_windows: int = 0
    _joined_ns: int = 0
    _cursor: SampleCursor | None = None
    _freshness: Freshness = Freshness.LATEST
    _synced: ClockSync | None = None
    _stamps: StampFilter = field(default_factory=StampFilter)
    _idle_after: set[int] = field(default_factory=set)
    """The stamps of samples of use beside which the latest window's rate was nothing."""

    def cursor(self, of_tick: SampleCursor) -> SampleCursor:
        """Return after which samples to ask next, where a tick would ask after `of_tick`."""
        cursor = self._cursor
        if cursor is None:
            return of_tick
        return SampleCursor(
            gpu_us=max(of_tick.gpu_us, cursor.gpu_us),
            memory_us=max(of_tick.memory_us, cursor.memory_us),
            process_us=max(of_tick.process_us, cursor.process_us),
        )

    def watch_for_a_while(self, now_ns: int) -> None:
        """Have it watched closely from now on, as when a process has come or gone."""
        self._watched_ns = now_ns

    def has_recent_changes(self, now_ns: int) -> bool:
        """Return whether a process came or went of late, or it was to be watched for a while."""
        return self._watched_ns is not None and now_ns - self._watched_ns < _WATCHED_NS

    def add(
        self, look: GpuLook, *, window_us: float | None, closed_us: float | None = None
    ) -> None:
        """Take over the answers of a look between two ticks.

        The driver's windows up to `closed_us` had closed, so that none of them is told of later;
        `None` where that is not known.
        """
        at_ns = look.at.monotonic_ns
        self.add_energy(look)
        look = self._stamps.filter(look, look.at)
        self._add_samples(
            look, at_ns=at_ns, since_us=look.since_us, window_us=window_us, closed_us=closed_us
        )
        self._record_listed(look.processes, at_ns)
        if look.processes is not None:
            # One that stands in two lists is one; what cannot be true is counted of ticks alone.
            listed = merge_processes(look.processes, {}, memory_bytes=None, validator=Validator())
            self._processes.update(listed)

    def add_energy(self, look: GpuLook) -> None:
        """Take over what a look showed of the board's energy, and nothing else."""
        at_ns = look.at.monotonic_ns
        self._energy.append(EnergyReading(at_ns, look.energy_millijoules, look.power_milliwatts))

    def is_late(self, look: GpuLook) -> bool:
        """Return whether something was answered since a look that is newer, or of the same time.

        Its lists name who has gone since, and its samples would be there twice: in forms in which
        one sample is of all the time since the question under two stamps.
        """
        asked_us = self._cursor.process_us if self._cursor else 0
        return look.at.monotonic_ns <= self._joined_ns or look.since_us < asked_us

    def join(
        self,
        raw: RawGpuSample,
        *,
        at: ClockReading,
        since_us: int,
        window_us: float | None,
        closed_us: float | None = None,
    ) -> Looked:
        """Return what was told before put together with a tick's answers.

        `since_us` is the stamp after which these were asked for process samples.
        """
        raw, at_ns = self._stamps.filter(raw, at), at.monotonic_ns
        self._add_samples(
            raw, at_ns=at_ns, since_us=since_us, window_us=window_us, closed_us=closed_us
        )
        # Of a GPU that is cut they are those of its instances.
        self._record_listed(None if raw.mig_enabled else raw.processes, at_ns)
        self._joined_ns = at_ns
        processes, self._processes = self._processes, {}
        left_ns, self._left_ns = self._left_ns, {}
        energy = sorted(self._energy, key=attrgetter("at_ns"))
        # What was read while the tick asked is the next one's.
        self._energy = [reading for reading in energy if reading.at_ns > at_ns]
        return Looked(
            samples=_in_order(self._gpu, raw.samples),
            memory_samples=_in_order(self._memory, raw.memory_samples),
            process_samples=None if raw.process_samples is None else tuple(self._uses.values()),
            signs=SamplingSigns(
                freshness=self._freshness,
                skips_idle=self.skips_idle,
                idle_after=frozenset(self._idle_after),
                synced=self._synced,
            ),
            processes=processes,
            left_ns=left_ns,
            energy=[reading for reading in energy if reading.at_ns < at_ns],
            dropped=self._stamps.drain_dropped(),
        )

    def drop_covered(self, cursor: SampleCursor, *, covered_us: float) -> None:
        """Forget what no tick needs any more: of the next one's cursor, and what it covers."""
        self._gpu = _latest(
            (stamp, one) for stamp, one in self._gpu.items() if stamp > cursor.gpu_us
        )
        self._memory = _latest(
            (stamp, one) for stamp, one in self._memory.items() if stamp > cursor.memory_us
        )
        self._uses = _latest((key, one) for key, one in self._uses.items() if key[1] > covered_us)
        self._idle_after = {stamp for stamp in self._idle_after if stamp >= cursor.gpu_us}

    def forget(self) -> None:
        """Forget all samples: the driver's clock has jumped, or the GPU did not answer."""
        self._gpu, self._memory, self._uses = {}, {}, {}
        self._energy, self._cursor, self._synced = [], None, None
        self._processes, self._left_ns = {}, {}
        self._freshness, self._idle_after = Freshness.LATEST, set()
        self._stamps.forget()

    def _add_samples(
        self,
        answer: GpuLook | RawGpuSample,
        *,
        at_ns: int,
        since_us: int,
        window_us: float | None,
        closed_us: float | None,
    ) -> None:
        """Take over what an answer has of the driver's buffers."""
        samples, uses = answer.samples, answer.process_samples
        if uses is not None:
            newest_us = max(
                _newest(samples, since_us), _newest(uses, since_us) if samples is None else 0
            )
            for use in self._with_spans(uses, samples or (), since_us, newest_us, window_us):
                self._uses.setdefault((use.pid, use.timestamp_us), use)
            before = self._cursor or SampleCursor()
            self._cursor = SampleCursor(
                gpu_us=_newest(samples, before.gpu_us),
                memory_us=_newest(answer.memory_samples, before.memory_us),
                # Asked on from where nothing was used, a mean would be of the time before, too.
                process_us=max(newest_us, before.process_us, int(closed_us or 0)),
            )
        self._memory.update((one.timestamp_us, one) for one in answer.memory_samples or ())
        if samples is not None:
            self._gpu.update((sample.timestamp_us, sample) for sample in samples)
            given = answer.sampled or AnswerTime(at_ns, at_ns)
            self._follow_clock(answer.percent, given, window_us, closed_us)

    def _follow_clock(
        self,
        rate_percent: int | None,
        given: AnswerTime,
        window_us: float | None,
        closed_us: float | None,
    ) -> None:
        """Learn from the latest window's rates what the newest sample shows of the clock."""
        newest_us = max(self._gpu, default=self._cursor.gpu_us if self._cursor else 0)
        newest = self._gpu.get(newest_us)
        self._freshness = freshness(
            newest_us,
            newest.percent if newest else None,
            rate_percent=rate_percent,
            closed_us=closed_us,
            window_us=window_us,
            skips_idle=self.skips_idle,
        )
        if newest and newest.percent and rate_percent == 0:
            self._idle_after.add(newest_us)
        if self._freshness is Freshness.BEHIND:
            self.skips_idle = True
        elif self._freshness is Freshness.LEAPT:
            self.skips_idle = False
        if newest and self._freshness in OF_LATEST:
            self._synced = ClockSync(given, newest_us)

    def _record_listed(self, listed: Sequence[ListedProcess] | None, now_ns: int) -> None:
        """Record who is on the GPU now; `None` is not known."""
        if listed is None:
            return
        pids, before = frozenset(process.pid for process in listed), self._listed
        self._listed = pids
        if before is None or pids == before:
            return
        self.watch_for_a_while(now_ns)
        self._left_ns |= dict.fromkeys(before - pids, now_ns)
        for pid in pids - before:
            self._left_ns.pop(pid, None)

    def _with_spans(
        self,
        uses: Sequence[ProcessUtilizationSample],
        samples: Sequence[UtilizationSample],
        since_us: int,
        newest_us: int,
        window_us: float | None,
    ) -> Sequence[ProcessUtilizationSample]:
        """Return an answer's samples, each with the time that it is of where that is known."""
        since_us = since_us or min((sample.timestamp_us for sample in samples), default=0)
        if not since_us or not (window_us or self._cursor):
            return uses
        window_us = window_us or USUAL_WINDOW_US
        windows = round((newest_us - since_us) / window_us)
        self._learn(uses, samples, round(window_us))
        if not self.one_sample_each:
            return uses
        if windows > 1:
            return [replace_struct(sample, since_us=since_us) for sample in uses]
        width_us = round(window_us)
        return [replace_struct(sample, since_us=sample.timestamp_us - width_us) for sample in uses]

    def _learn(
        self,
        uses: Sequence[ProcessUtilizationSample],
        samples: Sequence[UtilizationSample],
        window_us: int,
    ) -> None:
        """Learn the form of the driver's samples from those of one answer."""
        pids = {use.pid for use in uses}
        if len(pids) < len(uses):
            self.one_sample_each = False
        elif pids and self.one_sample_each is None:
            stamps = {use.timestamp_us for use in uses}
            self._missing_windows += sum(
                sample.percent > _USED_PERCENT
                and not any(abs(sample.timestamp_us - stamp) < window_us / 2 for stamp in stamps)
                for sample in samples
            )
            if self._missing_windows >= _WINDOWS_TO_LEARN:
                self.one_sample_each = True


def _newest(
    samples: Sequence[UtilizationSample] | Sequence[ProcessUtilizationSample] | None, since_us: int
) -> int:
    return max((sample.timestamp_us for sample in samples or ()), default=since_us)


def _latest(kept: Iterable[tuple[K, V]]) -> dict[K, V]:
    """Return those that came last, as many as are kept at most."""
    return dict(deque(kept, maxlen=_MAX_KEPT))


def _in_order(
    kept: Mapping[int, UtilizationSample], answered: Sequence[UtilizationSample] | None
) -> tuple[UtilizationSample, ...] | None:
    """Return the samples by their stamps; `None` where the driver gives none at all."""
    return None if answered is None else tuple(kept[stamp] for stamp in sorted(kept))
