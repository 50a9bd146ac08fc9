"""What is asked of GPUs between two ticks, when, and how it is put together with a tick's answers.

How it works. A tick asks every GPU once. That is enough where one container is on a GPU, and where
the driver gives a sample for each of its windows and processes. It is not enough

- where a driver gives one sample a process for all the time since the last question. Whether that
  is the mean, the newest window or the mean of the windows of use, no driver says. Asked in each of
  its windows, all of them say the same: so a GPU that several containers share is asked as often;
- for energy, which is a counter of this instant, while a tick covers the driver's time up to some
  windows ago: so it is read when that time comes;
- in ticks that are longer than the driver keeps samples of an idle GPU: so each second is asked;
- for processes that come and go within a tick: so where some did of late, or several containers
  are, the lists are read in between, too.

`GpuLooks` keeps one GPU's answers until a tick has covered them. Which form the driver's process
samples have it learns from the answers: two samples of one process in one answer are windows. One
sample in each of some answers that are of several windows is that driver's form.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace as replace_struct

from agent.core.raw import (
    ClockSync,
    EnergyReading,
    GpuLook,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)

K = TypeVar("K")
V = TypeVar("V")

_NS_PER_SECOND: Final = 1_000_000_000
MAX_PAUSE_NS: Final = _NS_PER_SECOND
"""A tick that is longer is asked for samples in between: no driver is known to lose those of the
last second."""
BEHIND_WINDOWS: Final = 1.1
"""A newest sample that is older has others behind it, which the driver did not give: one window may
be about to close, and stamps jitter by a hundredth."""
_APART_NS: Final = 20_000_000
"""A look that is nearer to a tick would show nothing else."""
_WINDOWS_TO_LEARN: Final = 6
"""So many windows of which answers might have had a further sample and had none show the form of
the driver's samples; a process may rest in some of them."""
_LIVELY_NS: Final = 10 * _NS_PER_SECOND
"""For so long after a process has come or gone the next one is expected."""
_MAX_KEPT: Final = 65_536
"""Samples of one GPU: of 4,096 windows those of 16 processes."""


class LookScope(Enum):
    """What a look asks of GPUs that are not watched closely; of those it asks for all."""

    NOTHING = "nothing"
    """It is for the others alone."""
    ENERGY = "energy"
    """What the board has drawn by now."""
    ALL = "all"
    """Samples, energy and who is there."""


class LookTime(NamedTuple):
    """When to look."""

    at_ns: int
    """By the monotonic clock."""
    scope: LookScope
    """What of those that are not watched closely."""


@dataclass(frozen=True, kw_only=True)
class LookPlan:
    """When to look between two ticks; times are of the monotonic clock."""

    begin_ns: int
    """When the first of the two was."""
    end_ns: int
    """When the other one will be."""
    lag_ns: int
    """How long before its end a tick's cover ends: energy is read then. Of a lag of several ticks
    it is the cover of a tick to come."""
    pause_ns: int
    """The time from one look to the next at what is watched closely."""

    def next(self, now_ns: int, *, is_close: bool) -> LookTime | None:
        """Return when to look next, `None` where not before the tick.

        `is_close` says whether anything is watched closely, as far as is known by now.
        """
        length_ns = self.end_ns - self.begin_ns
        cover_ns = self.end_ns - self.lag_ns % max(1, length_ns)
        times = {cover_ns: LookScope.ENERGY}
        seconds = range(self.begin_ns + MAX_PAUSE_NS, self.end_ns, MAX_PAUSE_NS)
        times |= dict.fromkeys(seconds, LookScope.ALL)
        if is_close:
            closely = range(self.begin_ns + self.pause_ns, self.end_ns, self.pause_ns)
            times = dict.fromkeys(closely, LookScope.NOTHING) | times
        first_ns, last_ns = max(now_ns, self.begin_ns) + _APART_NS, self.end_ns - _APART_NS
        to_come = (at for at in times if first_ns < at < last_ns)
        at_ns = min(to_come, default=None)
        return None if at_ns is None else LookTime(at_ns, times[at_ns])


@dataclass(kw_only=True)
class GpuLooks:
    """One GPU's answers since the time that ticks have covered."""

    one_sample_each: bool | None = None
    """Whether the driver gives one sample a process, however many windows were asked for; `None`
    until it has shown."""
    skips_idle: bool = False
    """Whether the driver gives no sample of windows in which nothing was used, as the rates show,
    which are always of the latest one."""
    changed_ns: int | None = None
    """When a process was last seen to have come or gone, by the monotonic clock."""
    _processes: dict[int, ListedProcess] = field(default_factory=dict)
    _listed: frozenset[int] | None = None
    _gpu: dict[int, UtilizationSample] = field(default_factory=dict)
    _memory: dict[int, UtilizationSample] = field(default_factory=dict)
    _uses: dict[tuple[int, int], ProcessUtilizationSample] = field(default_factory=dict)
    _energy: list[EnergyReading] = field(default_factory=list)
    _missing_windows: int = 0
    _cursor: SampleCursor | None = None
    _synced: ClockSync | None = None

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

    def is_lively(self, now_ns: int) -> bool:
        """Return whether a process came or went of late."""
        return self.changed_ns is not None and now_ns - self.changed_ns < _LIVELY_NS

    def add(
        self, look: GpuLook, *, window_us: float | None, closed_us: float | None = None
    ) -> frozenset[int]:
        """Take over the answers of a look; return the pids that are new since the last one.

        The driver's windows up to `closed_us` had closed, so that none of them is told of later;
        `None` where that is not known.
        """
        self._energy.append(
            EnergyReading(look.at.monotonic_ns, look.energy_millijoules, look.power_milliwatts)
        )
        if look.process_samples is not None:
            newest_us = self._newest_us(look.samples, look.process_samples, look.since_us)
            for sample in self._with_spans(look.process_samples, look, newest_us, window_us):
                self._uses.setdefault((sample.pid, sample.timestamp_us), sample)
            before = self._cursor or SampleCursor()
            self._cursor = SampleCursor(
                gpu_us=_newest(look.samples, before.gpu_us),
                memory_us=_newest(look.memory_samples, before.memory_us),
                # Asked on from where nothing was used, a mean would be of the time before, too.
                process_us=max(newest_us, before.process_us, int(closed_us or 0)),
            )
        if look.samples is not None:
            self._gpu.update((sample.timestamp_us, sample) for sample in look.samples)
        self._note_rates(look, window_us, closed_us)
        if look.samples and shows_latest(look.samples, look.percent):
            self._synced = ClockSync(look.at.monotonic_ns, _newest(look.samples, 0))
        self._memory.update((sample.timestamp_us, sample) for sample in look.memory_samples or ())
        return self._note(look.processes, look.at.monotonic_ns)

    def join(
        self,
        raw: RawGpuSample,
        look: GpuLook,
        *,
        window_us: float | None,
        closed_us: float | None = None,
    ) -> RawGpuSample:
        """Return a tick's answers with all that was told before; `look` is of the tick itself."""
        self.add(look, window_us=window_us, closed_us=closed_us)
        processes, self._processes = self._processes, {}
        energy, self._energy = self._energy, self._energy[-1:]
        return replace(
            raw,
            samples=_in_order(self._gpu, raw.samples),
            memory_samples=_in_order(self._memory, raw.memory_samples),
            process_samples=None if raw.process_samples is None else tuple(self._uses.values()),
            synced=self._synced,
            skips_idle=self.skips_idle,
            seen_processes=processes,
            energy_readings=tuple(energy),
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

    def forget(self) -> None:
        """Forget all samples: the driver's clock has jumped, or the GPU did not answer."""
        self._gpu, self._memory, self._uses = {}, {}, {}
        self._energy, self._cursor, self._processes, self._synced = [], None, {}, None

    def _note_rates(self, look: GpuLook, window_us: float | None, closed_us: float | None) -> None:
        """Learn from the latest window's rates where the samples have none of that window."""
        if look.percent is None or look.samples is None:
            return
        newest_us = max(self._gpu, default=self._cursor.gpu_us if self._cursor else 0)
        if window_us and closed_us and closed_us - newest_us > BEHIND_WINDOWS * window_us:
            self.skips_idle = look.percent == 0

    def _note(self, listed: Sequence[ListedProcess] | None, now_ns: int) -> frozenset[int]:
        """Record who is on the GPU now."""
        if listed is None:
            return frozenset()
        pids, before = frozenset(process.pid for process in listed), self._listed
        self._listed = pids
        self._processes.update((process.pid, process) for process in listed)
        if before is None:
            return frozenset()
        if pids != before:
            self.changed_ns = now_ns
        return pids - before

    @staticmethod
    def _newest_us(
        samples: Sequence[UtilizationSample] | None,
        uses: Sequence[ProcessUtilizationSample],
        since_us: int,
    ) -> int:
        """Return up to which stamp an answer is; one that lies far ahead is no stamp."""
        return max(_newest(samples, since_us), _newest(uses, since_us) if samples is None else 0)

    def _with_spans(
        self,
        uses: Sequence[ProcessUtilizationSample],
        look: GpuLook,
        newest_us: int,
        window_us: float | None,
    ) -> Sequence[ProcessUtilizationSample]:
        """Return an answer's samples, each with the time that it is of where that is known."""
        stamps = [sample.timestamp_us for sample in look.samples or ()]
        since_us = look.since_us or min(stamps, default=0)
        if not window_us or not since_us:
            return uses
        windows = round((newest_us - since_us) / window_us)
        self._learn(uses, windows)
        if not self.one_sample_each:
            return uses
        if windows > 1:
            return [replace_struct(sample, since_us=since_us) for sample in uses]
        width_us = round(window_us)
        return [replace_struct(sample, since_us=sample.timestamp_us - width_us) for sample in uses]

    def _learn(self, uses: Sequence[ProcessUtilizationSample], windows: int) -> None:
        """Learn the form of the driver's samples from an answer that is of so many windows."""
        pids = [sample.pid for sample in uses]
        if len(set(pids)) < len(pids):
            self.one_sample_each = False
        elif pids and windows > 1 and self.one_sample_each is None:
            self._missing_windows += windows - 1
            if self._missing_windows >= _WINDOWS_TO_LEARN:
                self.one_sample_each = True


def shows_latest(samples: Sequence[UtilizationSample], percent: int | None) -> bool:
    """Return whether the newest sample is of the driver's latest window, by that one's rates.

    A driver may leave out windows in which nothing was used; one that shows such a window does not.
    """
    newest = max(samples, key=attrgetter("timestamp_us"))
    return percent is None or percent > 0 or newest.percent == 0


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
