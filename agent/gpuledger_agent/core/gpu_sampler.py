"""The state machine of one GPU or MIG instance, which turns the GPU's answers into rows of ticks.

              first answer          a stamp shows the driver's clock
    (none) ────────────▶ UNTIMED ─────────────────────────────────▶ TIMED
                          ▲   ▲                                      │  │
        the next answer   │   └── no newer sample for 5 s: the ──────┘  │
                          │       driver's clock was set back; or the   │
                          │       wall clock was, and all samples from  │
                          │       before have been used or dropped      │
                          └─ UNRESPONSIVE ◀── no answer, a failed tick ─┘
                                           (from UNTIMED as well)

| state        | known                            | in the tick                              |
|--------------|----------------------------------|------------------------------------------|
| UNTIMED      | counters, energy, processes      | values of the driver's latest window     |
| TIMED        | the same, and the driver's clock | means since the end of the previous tick |
| UNRESPONSIVE | counters, energy, window length  | a row without measurements               |

In TIMED `last.clock` is set; in UNTIMED it is not. `forget` starts UNRESPONSIVE. Between two ticks,
fast polls read samples that the driver would discard before the next tick. `take` stores these
samples in `_polled` until a tick covers their time.

In every state, the sampler learns the properties of the driver (`traits`), the length of its
sampling windows (`window`), and how long after its window a sample may come (`lateness`). Ticks end
earlier by that time.

A GPU is watched closely by frequent fast polls in four cases:

- for 10 s after a process started or ended;
- for 10 s after a tick with a gap in its samples;
- while several containers share it, if the driver has `one_sample_each`;
- if the driver returns utilization rates but no samples. Each rate describes only the latest
  window, so the rates of all polls are averaged.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, NS_PER_US
from gpuledger.records import BusyMethod, GpuDetails, GpuReading, GpuTotals, bounds
from gpuledger_agent.core.driver_traits import DriverTraits
from gpuledger_agent.core.normalize.accounts import read_accounts
from gpuledger_agent.core.normalize.driver_clock import (
    BEHIND_WINDOWS,
    OF_LATEST,
    ClockSync,
    Cover,
    DriverClock,
    Freshness,
    find_cover,
    freshness,
    sync,
)
from gpuledger_agent.core.normalize.energy import (
    FREE_BYTES,
    DrawnEnergy,
    EnergyMeter,
    IdleDraw,
    TickEnergy,
)
from gpuledger_agent.core.normalize.fields import (
    CounterTotal,
    CounterTracker,
    ReadFields,
    read_fields,
)
from gpuledger_agent.core.normalize.lateness import Lateness
from gpuledger_agent.core.normalize.shares import (
    GoneProcess,
    ProcessUsage,
    Shares,
    apportion,
    merge_processes,
)
from gpuledger_agent.core.normalize.windows import USUAL_WINDOW_US, WindowLength
from gpuledger_agent.core.raw import (
    AnswerTime,
    ClockReading,
    EnergyReading,
    FastPoll,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.core.readings import PERCENT, Validator, ratio_of
from gpuledger_agent.core.stamps import drop_impossible

_Answer = TypeVar("_Answer", FastPoll, RawGpuSample)
_K = TypeVar("_K")
_V = TypeVar("_V")

_SILENCE_NS: Final = 5_000_000_000
# The maximum silence while the wall clock is known to have been set back; drivers sample at least
# once per second.
_SILENCE_BEHIND_NS: Final = 2_000_000_000
# The maximum time between the reading of the wall clock and the end of the query.
_AHEAD_US: Final = 1_000_000
_WATCH_NS: Final = 10 * NS_PER_SECOND
"""How long a GPU is watched closely after a process started or ended, or samples were missing."""
_MAX_KEPT: Final = 65_536
"""Maximum number of samples kept for one GPU: 16 processes in 4,096 windows."""
_BELIEVED_TICKS: Final = 5
"""Maximum number of ticks without a process list during which the last list still counts."""
_COUNTER_MILLIJOULES: Final = (0, bounds.MAX_MILLIJOULES)
_DRAW_MILLIWATTS: Final = (0, bounds.MAX_MILLIWATTS)
_RARE: Final = ("readings", "health")
"""Fields of `RawGpuSample` that most ticks do not query. The chip's counters are not listed here,
although they are queried as rarely: each answer contains the time that it covers, and the first
answer contains no values."""


class LastTick(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's state after a tick, for the next tick; reset when the GPU becomes unresponsive."""

    read_ns: int = 0
    """When the GPU answered the tick's query, by the monotonic clock."""
    last_seen: SampleCursor = SampleCursor()
    """Position in the driver's samples: all samples up to it have been used in ticks."""
    clock: DriverClock | None = None
    """The estimate of the driver's clock; `None` until a time stamp shows the clock, and after the
    clock was set back."""
    unresponsive_ns: int = 0
    """Time since the driver last returned a new sample."""
    window_us: int | None = None
    """Length of the driver's sampling windows of processes; `None` until it is known."""
    processes: Mapping[int, ListedProcess] = {}
    """The processes in this tick, by pid."""
    unlisted_ticks: int | None = None
    """Ticks since the driver last returned a process list; `None` before the first list."""
    gone: Mapping[int, GoneProcess] = {}
    """Ended processes that may have run after the end of the time covered so far, by pid."""
    returned: Mapping[int, float] = {}
    """Processes that left and came back, by pid, each with the latest time at which it left if that
    may be after the time covered so far."""
    newest_us: int = 0
    """The newest time stamp of the GPU's samples."""
    was_set_back: bool = False
    """Whether the driver's clock was set back recently. A lack of new samples reveals this."""

    @property
    def is_list_refused(self) -> bool:
        """Whether process lists have failed for too many ticks for the last list to count."""
        return self.unlisted_ticks is not None and self.unlisted_ticks > _BELIEVED_TICKS


class _Polled(msgspec.Struct):
    """A GPU's answers since the last tick, stored until a tick covers the time they describe."""

    gpu: dict[int, UtilizationSample] = {}
    memory: dict[int, UtilizationSample] = {}
    uses: dict[tuple[int, int], ProcessUtilizationSample] = {}
    """Samples of processes, by pid and time stamp."""
    energy: list[EnergyReading] = []
    rates: dict[int, int] = {}
    """Utilization rates of answers without samples, by the monotonic clock."""
    processes: dict[int, ListedProcess] = {}
    """Processes that any fast poll since the last tick has listed, by pid."""
    left_ns: dict[int, int] = {}
    """Processes that left since the last tick, by pid, each with the time of the first list that
    does not contain it."""
    returned_ns: dict[int, int] = {}
    """Processes that left and came back since the last tick, in the same way."""
    cursor: SampleCursor | None = None
    """Position from which the next fast poll queries samples; `None` means that it uses the last
    tick's position."""
    freshness: Freshness = Freshness.LATEST
    """Whether the newest sample belongs to the latest window that has closed."""
    synced: ClockSync | None = None
    """The clock's bounds from the answers whose newest sample was of the latest closed window."""
    idle_after: set[int] = set()
    """Time stamps of samples above 0 % after which the driver returned no sample although its
    utilization rate had already fallen to 0 %."""
    ahead_us: int | None = None
    """The largest difference so far between a sample's time stamp and the monotonic clock."""
    misses_windows: bool = False
    """Whether there are used windows without a process's sample, because the form of the driver's
    process samples was not known yet."""
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of samples dropped because their time stamps were impossible, by field."""


class GpuTick(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one tick for one GPU."""

    reading: GpuReading
    """The measurements from which the join computes usage."""
    details: GpuDetails
    """All other readings."""
    usages: list[ProcessUsage]
    """Each process's use of the GPU, including ended processes that may have run in the time that
    the tick covers."""
    last: LastTick
    """State for the next tick."""
    dropped_readings: Counter[tuple[str, str]]
    """Number of implausible values, by reading and reason."""
    dropped_samples: Counter[str]
    """Number of dropped process samples, by reason."""
    accounts: Sequence[tuple[int, GpuTotals]] | None = None
    """The driver's accounting entries of processes that no longer use the GPU, by pid; `None` if
    the driver keeps none. Later ticks may repeat an entry."""


class GpuSampler:
    """The state of one GPU; see the module's docstring."""

    def __init__(self) -> None:
        self.last = LastTick()
        """The state after the last tick."""
        self.totals: dict[str, CounterTotal] = {}
        """Histories of the GPU's counters, by field name."""
        self.energy: DrawnEnergy | None = None
        """The board's energy; `None` if neither energy nor power is reported, as for MIG
        instances."""
        self.idle = IdleDraw()
        """The lowest power that the board has drawn without a process."""
        self.window = WindowLength()
        """The estimate of the length of the driver's sampling windows."""
        self.traits = DriverTraits()
        """The properties of the driver."""
        self.lateness = Lateness()
        """How late the driver's samples come."""
        self.is_shared = False
        """Whether several containers, or a container and the host, use the GPU."""
        self.reading: GpuReading | None = None
        """The GPU's row in the last tick for which it answered."""
        self.instances: tuple[str, ...] | None = None
        """UUIDs of the GPU's MIG instances in the GPU's last answer; `None` if this sampler is for
        an instance."""
        self._polled = _Polled()
        self._requested = SampleCursor()
        self._has_rates_only = False
        self._is_set_back = False
        self._watched_since_ns: int | None = None
        self._listed: frozenset[int] | None = None
        self._answered_ns = 0
        self._unreported: dict[str, Any] = {}
        """Rarely queried readings (`_RARE`) of answers that were not published as a tick, such as a
        GPU's first answers. The next tick reports them, because the next health query comes much
        later."""

    # Queries.

    def request_tick(self, *, is_set_back: bool) -> SampleCursor:
        """Return the position from which the tick's query must read samples, and remember it."""
        self._requested = self.cursor(is_set_back=is_set_back)
        return self._requested

    def cursor(self, *, is_set_back: bool) -> SampleCursor:
        """Return the position from which the next query must read samples."""
        of_tick, cursor = self.last.last_seen, self._polled.cursor
        # After a clock was set back, ignore the position of fast polls: its stamps may be from
        # before. `_begin` drops the samples from before.
        if is_set_back or cursor is None:
            return of_tick
        return SampleCursor(
            gpu_us=max(of_tick.gpu_us, cursor.gpu_us),
            memory_us=max(of_tick.memory_us, cursor.memory_us),
            process_us=max(of_tick.process_us, cursor.process_us),
        )

    def is_watched_closely(self, now_ns: int) -> bool:
        """Return whether the GPU needs frequent fast polls now; see the module's docstring."""
        if self._watched_since_ns is not None and now_ns - self._watched_since_ns < _WATCH_NS:
            return True
        return self._has_rates_only or (self.is_shared and bool(self.traits.one_sample_each))

    # Answers.

    def take(self, poll: FastPoll, *, is_querying: bool) -> bool:
        """Store the answers to a fast poll; return whether the poll came in time.

        A poll is late if a tick's query is in progress, or if a later answer was stored before.
        Only the energy of a late poll is used: its process list is outdated, and its samples would
        count twice.
        """
        polled, at_ns = self._polled, poll.at.monotonic_ns
        polled.energy.append(EnergyReading(at_ns, poll.energy_millijoules, poll.power_milliwatts))
        polled_until_us = polled.cursor.process_us if polled.cursor else 0
        if is_querying or at_ns <= self._answered_ns or poll.since_us < polled_until_us:
            return False
        poll = self._take_samples(poll, poll.at, since_us=poll.since_us)
        self._take_listed(poll.processes, poll.listed.answered_ns if poll.listed else at_ns)
        if poll.processes is not None:
            # A process in two lists counts once. Only ticks count implausible values.
            listed = merge_processes(poll.processes, {}, memory_bytes=None, validator=Validator())
            polled.processes.update(listed)
        return True

    def tick(
        self,
        raw: RawGpuSample,
        *,
        at: ClockReading,
        interval_ns: int,
        set_back_now_us: int | None = None,
        is_reported: bool = True,
    ) -> GpuTick:
        """Return the GPU's part of the tick that ends at the clock reading `at`.

        The first tick, and the first after the GPU did not answer, has the values of this instant
        and the samples within the interval, but no differences of counters. Usually
        `set_back_now_us` is `None`. If the machine's wall clock was set back and the driver may
        still return samples from before, `set_back_now_us` is the present wall-clock time. If
        `is_reported` is false, the caller does not publish this tick, so its rarely queried
        readings are kept for the next tick.
        """
        now_ns, validator = at.monotonic_ns, Validator()
        raw = self._with_unreported(raw, is_reported=is_reported)
        if set_back_now_us is not None:
            self.lateness = self.lateness.interrupt()
        raw = self._take_samples(raw, at, since_us=self._requested.process_us)
        # A partitioned GPU lists the processes of its instances.
        is_physical_gpu = not (raw.mig_enabled or raw.instance)
        self._take_listed(
            raw.processes if is_physical_gpu else None,
            raw.listed.answered_ns if raw.listed else now_ns,
        )
        self._answered_ns = now_ns
        polled, was = self._polled, self._begin(raw, set_back_now_us)
        resumes = self._is_set_back and set_back_now_us is None
        self._is_set_back = set_back_now_us is not None
        if resumes:
            was = self._resume(was, since_us=(at.time_ns - interval_ns) // NS_PER_US - _AHEAD_US)
        validator.drop("utilization_ratio", "out_of_range", count=polled.dropped["samples"])
        validator.drop(
            "memory_utilization_ratio", "out_of_range", count=polled.dropped["memory_samples"]
        )
        clock, cover = self._find_cover(
            raw,
            was,
            interval_ns=interval_ns,
            now_ns=now_ns,
            validator=validator,
            is_one_timeline=set_back_now_us is None,
        )
        counters = CounterTracker(totals=self.totals, now_ns=now_ns)
        fields = read_fields(raw, interval_ns=interval_ns, counters=counters, validator=validator)
        running = merge_processes(
            raw.processes,
            was.processes,
            memory_bytes=fields.reading.get("memory_total_bytes"),
            validator=validator,
        )
        # Includes processes that only a fast poll between the two ticks has seen.
        listed = {**was.processes, **polled.processes}
        # Energy and lists are not late, so they are compared with the time that samples lag behind.
        by_wall = clock and self.lateness.correct(clock, wall_us=at.time_ns / NS_PER_US)
        gone = self._find_gone(was, listed, running, by_wall, now_ns)
        returned = self._find_returned(was, running, by_wall, now_ns)
        self._has_rates_only = raw.samples is None and raw.percent is not None
        if self._has_rates_only:
            rate = _mean_rate(polled.rates, since_ns=was.read_ns or now_ns - interval_ns)
            cover = replace(cover, gpu_percent=rate)
        ratio = _utilization_ratio(raw, cover, fields, validator)
        energy = self._measure_energy(
            raw,
            fields,
            cover_end_ns=now_ns - _lag_ns(by_wall, cover),
            interval_ns=interval_ns,
            is_free=not running and not gone and _is_free(raw, fields),
            utilization_ratio=ratio,
            now_ns=now_ns,
            validator=validator,
        )
        shares = apportion(
            None if raw.process_samples is None else tuple(polled.uses.values()),
            running=running,
            before={pid: one.process for pid, one in was.gone.items()} | listed,
            returned=returned,
            cover=cover,
            interval_us=interval_ns / NS_PER_US,
            window_us=was.window_us,
            gpu_ratio=ratio,
            # Stamps from two timelines do not show the length of a window.
            learns=set_back_now_us is None,
            adds_lost_samples=self.traits.loses_uses and self.traits.has_right_uses,
            validator=validator,
        )
        if set_back_now_us is None:
            self.traits.learn(shares, is_shared=self.is_shared)
        self.last = LastTick(
            read_ns=now_ns,
            last_seen=_next_cursor(was.last_seen, clock, polled, shares),
            clock=clock,
            window_us=shares.window_us,
            processes=running,
            unlisted_ticks=was.unlisted_ticks,
            gone=gone,
            returned={pid: us for pid, us in returned.items() if clock and us > clock.covered_us},
            newest_us=was.newest_us,
            was_set_back=was.was_set_back,
        )
        if raw.samples is not None:
            self.last = self._watch_silence(was, cover, interval_ns, set_back_now_us)
        dropped_samples = shares.dropped + Counter(implausible=polled.dropped["process_samples"])
        busy_method = self._find_method(
            shares, is_estimate=raw.samples is not None and (cover.is_estimate or resumes)
        )
        self._drop_covered()
        if cover.has_gap:
            # Frequent polls reveal whether the driver skips idle windows.
            self._watched_since_ns = now_ns
        self.reading = self._make_reading(
            raw,
            cover,
            fields,
            energy,
            ratio,
            busy_method=busy_method,
            validator=validator,
        )
        return GpuTick(
            reading=self.reading,
            details=GpuDetails(uuid=raw.uuid, **fields.details, resets=counters.fell or None),
            usages=shares.usages,
            last=self.last,
            dropped_readings=validator.dropped,
            dropped_samples=dropped_samples,
            accounts=read_accounts(raw, validator),
        )

    # Ends of states.

    def forget(self) -> None:
        """Enter the state UNRESPONSIVE after the GPU did not answer.

        All state is dropped except the counters and the properties learned about the driver. The
        counters are kept so that a reset is still detected.
        """
        self.last, self.is_shared = LastTick(), False
        self.drop_polled()
        self.idle, self.window = self.idle.interrupt(), self.window.interrupt()
        self.lateness = self.lateness.interrupt()

    def drop_polled(self) -> None:
        """Drop the answers of all fast polls since the last tick, because one of them was unusable.

        The next tick queries their samples again.
        """
        self._polled = _Polled(dropped=self._polled.dropped)

    def _watch_silence(
        self, was: LastTick, cover: Cover, interval_ns: int, set_back_now_us: int | None
    ) -> LastTick:
        """Return the state after the tick, with the time since the driver's last new sample.

        Drivers sample at least once per second. If no newer sample comes for several seconds, the
        driver's clock was set back, and the last stamps lie in that clock's future. The returned
        state is then UNTIMED.
        """
        last, stamps = self.last, self._polled.gpu
        newest_us = max(stamps, default=0)
        has_new_samples, max_silence_ns = bool(cover.gpu), _SILENCE_NS
        if set_back_now_us is not None:
            # Samples that are not covered yet are returned again, so only newer ones count.
            has_new_samples, max_silence_ns = newest_us > was.newest_us, _SILENCE_BEHIND_NS
        unresponsive_ns = 0 if has_new_samples else was.unresponsive_ns + interval_ns
        if unresponsive_ns <= max_silence_ns:
            newest_us = max(newest_us, was.newest_us)
            return replace(last, unresponsive_ns=unresponsive_ns, newest_us=newest_us)
        self.window, self.lateness = self.window.interrupt(), self.lateness.interrupt()
        # Earlier stamps may be from either timeline.
        since_us = set_back_now_us or 0
        cursor = SampleCursor(gpu_us=since_us, memory_us=since_us, process_us=since_us)
        return replace(
            last, last_seen=cursor, clock=None, gone={}, returned={}, newest_us=0, was_set_back=True
        )

    # Parts of taking answers in.

    def _with_unreported(self, raw: RawGpuSample, *, is_reported: bool) -> RawGpuSample:
        """Return the answer with the rarely queried readings of earlier unpublished answers.

        If `is_reported` is false, this answer is not published either: keep its rarely queried
        readings for the next tick.
        """
        kept = {name: value for name, value in self._unreported.items() if not getattr(raw, name)}
        raw = replace(raw, **kept) if kept else raw
        self._unreported = {}
        if not is_reported:
            self._unreported = {name: value for name in _RARE if (value := getattr(raw, name))}
        return raw

    def _take_samples(self, answer: _Answer, at: ClockReading, *, since_us: int) -> _Answer:
        """Store an answer's samples; return the answer without samples with impossible time stamps.

        `since_us` is the time stamp after which process samples were requested.
        """
        polled, last, window_us = self._polled, self.last, self.window.length_us
        answer, polled.ahead_us = drop_impossible(
            answer, at, ahead_us=polled.ahead_us, dropped=polled.dropped
        )
        samples, uses, closed_us = answer.samples, answer.process_samples, None
        if last.clock:
            # The driver's windows up to here are closed: it returns no further samples of them.
            closed_us = last.clock.closed_us((at.monotonic_ns - last.read_ns) / NS_PER_US)
        given = answer.sampled or AnswerTime(at.monotonic_ns, at.monotonic_ns)
        if samples is not None:
            self._learn_lateness(samples, given, at)
        if uses is not None:
            newest_us = _newest(uses if samples is None else samples, since_us)
            for use in self._with_spans(uses, samples or (), since_us, newest_us, window_us):
                polled.uses.setdefault((use.pid, use.timestamp_us), use)
            before = polled.cursor or SampleCursor()
            polled.cursor = SampleCursor(
                gpu_us=_newest(samples, before.gpu_us),
                memory_us=_newest(answer.memory_samples, before.memory_us),
                # Otherwise the next mean would include idle time that is already accounted for.
                process_us=max(
                    newest_us, before.process_us, int((closed_us or 0) - self.lateness.late_us)
                ),
            )
        polled.memory.update((one.timestamp_us, one) for one in answer.memory_samples or ())
        if samples is not None:
            polled.gpu.update((one.timestamp_us, one) for one in samples)
            self._follow_rates(answer.percent, given, closed_us)
        elif answer.percent is not None:
            polled.rates[at.monotonic_ns] = answer.percent
        return answer

    def _learn_lateness(
        self, samples: Sequence[UtilizationSample], given: AnswerTime, at: ClockReading
    ) -> None:
        """Learn how late samples come from an answer that was given at `given`."""
        before = self.lateness.late_us
        self.lateness = self.lateness.learn(
            (sample.timestamp_us for sample in samples),
            given=given,
            wall_us=(at.time_ns + given.requested_ns - at.monotonic_ns) / NS_PER_US,
            window_us=self.window.usual_us,
        )
        if self.lateness.late_us > before:
            # The windows that were missing had not come yet.
            self.traits.skips_idle = False

    def _follow_rates(
        self, rate_percent: int | None, given: AnswerTime, closed_us: float | None
    ) -> None:
        """Determine whether the newest sample is of the latest window, and learn `skips_idle`.

        `rate_percent` is the driver's utilization rate, which always describes the latest window.
        `given` is when the driver answered. All windows up to `closed_us` have closed.
        """
        polled = self._polled
        if polled.synced:
            # Before the first tick, only these bounds are known.
            closed_us = max(closed_us or 0.0, polled.synced.at(given.requested_ns).closed_us)
        newest_us = max(polled.gpu, default=polled.cursor.gpu_us if polled.cursor else 0)
        newest = polled.gpu.get(newest_us)
        polled.freshness = freshness(
            newest_us,
            newest.percent if newest else None,
            rate_percent=rate_percent,
            closed_us=closed_us,
            window_us=self.window.length_us,
            skips_idle=self.traits.skips_idle,
            late_us=self.lateness.late_us,
            loses_windows=self.traits.loses_windows,
        )
        if newest and newest.percent and rate_percent == 0:
            polled.idle_after.add(newest_us)
        if polled.freshness is Freshness.BEHIND and not self.traits.skips_idle:
            self.traits.skips_idle = True
            # The last answers without use may have been taken for answers of the latest window.
            polled.synced = None
            if self.last.clock:
                clock = self.last.clock.widen(BEHIND_WINDOWS * self.window.usual_us)
                self.last = replace(self.last, clock=clock)
        elif polled.freshness is Freshness.LEAPT:
            self.traits.skips_idle = False
        if newest and polled.freshness in OF_LATEST:
            polled.synced = sync(
                polled.synced, newest_us, given=given, window_us=self.window.usual_us
            )

    def _with_spans(
        self,
        uses: Sequence[ProcessUtilizationSample],
        samples: Sequence[UtilizationSample],
        since_us: int,
        newest_us: int,
        window_us: float | None,
    ) -> Sequence[ProcessUtilizationSample]:
        """Return the process samples of an answer, each with the start of its time span if known.

        Also learn `one_sample_each` from the samples.
        """
        since_us = since_us or min((sample.timestamp_us for sample in samples), default=0)
        if not since_us or not (window_us or self._polled.cursor):
            return uses
        width_us = round(window_us or USUAL_WINDOW_US)
        self._polled.misses_windows |= self.traits.learn_form(uses, samples, width_us=width_us)
        if not self.traits.one_sample_each:
            return uses
        if round((newest_us - since_us) / (window_us or USUAL_WINDOW_US)) > 1:
            return [replace(use, since_us=since_us) for use in uses]
        return [replace(use, since_us=use.timestamp_us - width_us) for use in uses]

    def _take_listed(self, listed: Sequence[ListedProcess] | None, now_ns: int) -> None:
        """Record which processes use the GPU now, and which have left since the last list.

        `listed` is `None` if the driver returned no list.
        """
        if listed is None:
            return
        pids, before = frozenset(process.pid for process in listed), self._listed
        self._listed = pids
        if before is None or pids == before:
            return
        self._watched_since_ns = now_ns
        left_ns = self._polled.left_ns
        left_ns |= dict.fromkeys(before - pids, now_ns)
        for pid in pids - before:
            if pid in left_ns:
                self._polled.returned_ns[pid] = left_ns.pop(pid)

    # Parts of a tick.

    def _begin(self, raw: RawGpuSample, set_back_now_us: int | None) -> LastTick:
        """Return the previous tick's state, updated for the start of this tick.

        If the driver has returned no process list for too many ticks, the last known processes no
        longer count as running. If the wall clock was set back, samples from before are dropped.
        """
        polled, was = self._polled, self.last
        if raw.processes is not None:
            was = replace(was, unlisted_ticks=0) if was.unlisted_ticks != 0 else was
        elif was.unlisted_ticks is not None:
            was = replace(was, unlisted_ticks=was.unlisted_ticks + 1)
        if was.is_list_refused:
            # The lists of fast polls may contain processes that have ended since.
            was = replace(was, processes={}, gone={})
            polled.processes, polled.left_ns = {}, {}
        if was.was_set_back and set_back_now_us is None:
            was = replace(was, was_set_back=False)
        elif was.was_set_back and set_back_now_us is not None:
            # Stamps ahead of the wall clock are from before it was set back.
            latest_us = set_back_now_us + _AHEAD_US
            polled.gpu = {us: one for us, one in polled.gpu.items() if us <= latest_us}
            polled.memory = {us: one for us, one in polled.memory.items() if us <= latest_us}
            polled.uses = {key: one for key, one in polled.uses.items() if key[1] <= latest_us}
        return was

    def _resume(self, was: LastTick, *, since_us: int) -> LastTick:
        """Return the previous tick's state for the first tick whose samples are of one timeline.

        After the wall clock was set back, samples from before and after the change are mixed. All
        stamps after `since_us` are from after it. The others are dropped, and so are the bounds of
        the driver's clock, unless the driver stamps by another clock than the wall clock.
        """
        polled = self._polled
        if max(polled.gpu, default=0) <= since_us:
            return was
        polled.gpu = {us: one for us, one in polled.gpu.items() if us > since_us}
        polled.memory = {us: one for us, one in polled.memory.items() if us > since_us}
        polled.uses = {key: one for key, one in polled.uses.items() if key[1] > since_us}
        polled.cursor = polled.synced = None
        self.window = self.window.interrupt()
        cursor = SampleCursor(gpu_us=since_us, memory_us=since_us, process_us=since_us)
        return replace(was, last_seen=cursor, clock=None, gone={}, returned={}, newest_us=0)

    def _find_cover(
        self,
        raw: RawGpuSample,
        was: LastTick,
        *,
        interval_ns: int,
        now_ns: int,
        validator: Validator,
        is_one_timeline: bool,
    ) -> tuple[DriverClock | None, Cover]:
        """Return the estimate of the driver's clock, and the time that the tick covers.

        `is_one_timeline` is false if stored samples may be from before and after a change of the
        clock, so that their stamps cannot be compared.
        """
        polled, known_window_us = self._polled, self.window.usual_us
        gpu: list[UtilizationSample] = []
        memory: list[UtilizationSample] = []
        if raw.samples is not None:
            gpu = _plausible(polled.gpu, "utilization_ratio", validator)
        if raw.memory_samples is not None:
            memory = _plausible(polled.memory, "memory_utilization_ratio", validator)
        # Stamps from two timelines do not show the length of a window.
        if is_one_timeline:
            self.window = self.window.learn(
                gpu,
                before_us=was.last_seen.gpu_us,
                idle_after=polled.idle_after,
                skips_idle=self.traits.skips_idle,
            )
        return find_cover(
            gpu,
            memory,
            before=was.clock,
            since=was.last_seen,
            window=self.window,
            known_window_us=known_window_us,
            newest=polled.freshness,
            skips_idle=self.traits.skips_idle,
            synced=polled.synced,
            interval_ns=interval_ns,
            now_ns=now_ns,
            is_one_timeline=is_one_timeline,
            late_us=self.lateness.late_us,
            loses_windows=self.traits.loses_windows,
        )

    def _find_method(self, shares: Shares, *, is_estimate: bool) -> BusyMethod | None:
        """Return how shares were derived, if the samples do not simply contain them.

        `is_estimate` tells whether the samples of this tick describe only a part of its time.
        """
        is_estimate |= self._has_rates_only or self.lateness.shifts_usage
        if is_estimate or self.traits.loses_windows:
            return BusyMethod.SAMPLED
        if shares.overlaps:
            return BusyMethod.EQUAL_TURNS
        is_partial = (
            shares.falls_short
            or shares.are_coarse
            or self.traits.loses_uses
            or self.traits.one_process_each
            or self._polled.misses_windows
        )
        return BusyMethod.PARTIAL_SAMPLES if is_partial else None

    def _find_gone(
        self,
        was: LastTick,
        listed: Mapping[int, ListedProcess],
        running: Mapping[int, ListedProcess],
        clock: DriverClock | None,
        now_ns: int,
    ) -> Mapping[int, GoneProcess]:
        """Return the ended processes that may have run after the time covered so far, by pid.

        `listed` are the processes listed since the previous tick began, and `running` those that
        are listed now.
        """
        if clock is None:
            return {}
        gone, left_ns = dict(was.gone), self._polled.left_ns
        for pid in listed.keys() - running.keys():
            until_us = clock.latest_before_us((now_ns - left_ns.get(pid, now_ns)) / NS_PER_US)
            gone[pid] = GoneProcess(process=listed[pid], until_us=until_us)
        return {
            pid: process
            for pid, process in gone.items()
            if pid not in running and process.until_us > clock.covered_us
        }

    def _find_returned(
        self,
        was: LastTick,
        running: Mapping[int, ListedProcess],
        clock: DriverClock | None,
        now_ns: int,
    ) -> Mapping[int, float]:
        """Return the running processes that left in the covered time and came back, by pid."""
        if clock is None or not (was.gone or was.returned or self._polled.returned_ns):
            return {}
        left = {pid: one.until_us for pid, one in was.gone.items()} | dict(was.returned)
        for pid, at_ns in self._polled.returned_ns.items():
            left[pid] = clock.latest_before_us((now_ns - at_ns) / NS_PER_US)
        return {pid: us for pid, us in left.items() if pid in running}

    def _measure_energy(
        self,
        raw: RawGpuSample,
        fields: ReadFields,
        *,
        cover_end_ns: int,
        interval_ns: int,
        now_ns: int,
        is_free: bool,
        utilization_ratio: float | None,
        validator: Validator,
    ) -> TickEnergy:
        """Return the energy that the board used in the covered time; empty for MIG instances.

        `is_free` is whether no process uses the board now. Also update `energy` and `idle`.
        """
        counter = fields.reading.get("energy_total_millijoules")
        power = fields.reading.get("power_milliwatts")
        if raw.instance or (self.energy is None and counter is None and power is None):
            return TickEnergy()
        before = self.energy or DrawnEnergy(meter=EnergyMeter(covered_ns=now_ns))
        readings = [
            EnergyReading(
                one.at_ns,
                validator.keep(
                    one.counter, _COUNTER_MILLIJOULES, reading="energy_total_millijoules"
                ),
                validator.keep(one.power_milliwatts, _DRAW_MILLIWATTS, reading="power_milliwatts"),
            )
            for one in sorted(self._polled.energy, key=attrgetter("at_ns"))
            if one.at_ns < now_ns
        ]
        readings.append(EnergyReading(now_ns, counter, power))
        self.energy, energy = before.measure(
            readings, interval_ns=interval_ns, cover_end_ns=cover_end_ns, validator=validator
        )
        if utilization_ratio is None and "profiling" in fields.details:
            # The driver reports no utilization of a partitioned GPU, but the chip may count it.
            utilization_ratio = fields.details["profiling"].graphics_engine_active_ratio
        self.idle = self.idle.watch(
            energy,
            is_free=is_free,
            is_unused=utilization_ratio == 0.0,
            is_settled=before.meter.is_settled,
            interval_ns=interval_ns,
        )
        return energy

    def _drop_covered(self) -> None:
        """Drop stored answers whose time the tick has covered.

        If the driver's clock is unknown, drop all stored answers.
        """
        polled, clock, since = self._polled, self.last.clock, self.last.last_seen
        if clock is None:
            self._polled = _Polled()
            return
        polled.gpu = _latest((us, one) for us, one in polled.gpu.items() if us > since.gpu_us)
        polled.memory = _latest(
            (us, one) for us, one in polled.memory.items() if us > since.memory_us
        )
        polled.uses = _latest(
            (key, one) for key, one in polled.uses.items() if key[1] > clock.covered_us
        )
        polled.idle_after = {us for us in polled.idle_after if us >= since.gpu_us}
        # Readings from after the tick's query belong to the next tick.
        polled.energy = [one for one in polled.energy if one.at_ns > self._answered_ns]
        polled.rates, polled.processes, polled.dropped = {}, {}, Counter()
        polled.left_ns, polled.returned_ns, polled.misses_windows = {}, {}, False

    def _make_reading(
        self,
        raw: RawGpuSample,
        cover: Cover,
        fields: ReadFields,
        energy: TickEnergy,
        utilization_ratio: float | None,
        *,
        busy_method: BusyMethod | None,
        validator: Validator,
    ) -> GpuReading:
        instance = raw.instance
        has_unified_memory = raw.memory_unified and "memory_total_bytes" in fields.reading
        return GpuReading(
            uuid=raw.uuid,
            index=raw.index,
            model=raw.model,
            # An instance reports its identity, a GPU whether it is partitioned.
            mig_enabled=None if instance else raw.mig_enabled,
            parent_uuid=instance.parent_uuid if instance else None,
            gpu_instance=instance.gpu_instance if instance else None,
            compute_instance=instance.compute_instance if instance else None,
            mig_profile=instance.profile if instance else None,
            utilization_ratio=utilization_ratio,
            memory_utilization_ratio=_mean_ratio(
                cover,
                cover.memory_percent,
                raw.memory_percent,
                "memory_utilization_ratio",
                validator,
            ),
            **fields.reading,
            busy_method=busy_method,
            energy_millijoules=energy.millijoules,
            energy_method=energy.method,
            idle_draw_milliwatts=self.idle.lowest_milliwatts,
            compute_slices=raw.compute_slices,
            memory_slices=raw.memory_slices,
            memory_unified=has_unified_memory or None,
        )


def _newest(
    samples: Sequence[UtilizationSample] | Sequence[ProcessUtilizationSample] | None, since_us: int
) -> int:
    return max((sample.timestamp_us for sample in samples or ()), default=since_us)


def _latest(kept: Iterable[tuple[_K, _V]]) -> dict[_K, _V]:
    """Return the last `_MAX_KEPT` items."""
    return dict(deque(kept, maxlen=_MAX_KEPT))


def _plausible(
    polled: Mapping[int, UtilizationSample], reading: str, validator: Validator
) -> list[UtilizationSample]:
    lowest, highest = PERCENT
    kept = [polled[us] for us in sorted(polled) if lowest <= polled[us].percent <= highest]
    validator.drop(reading, "out_of_range", count=len(polled) - len(kept))
    return kept


def _mean_ratio(
    cover: Cover,
    percent: float | None,
    latest_percent: int | None,
    reading: str,
    validator: Validator,
) -> float | None:
    """Return a utilization's mean over the covered time as a ratio.

    Return `None` if the utilization is unknown for a part of that time. `percent` is the mean of
    the driver's samples. If it is `None`, the result is `latest_percent`, the utilization in the
    driver's latest window.
    """
    if cover.has_gap:
        return None
    if percent is None:
        # A driver without samples reports its latest window only.
        percent = validator.keep(latest_percent, PERCENT, reading=reading)
    # Rounding may push a mean of 100 % slightly above 1.
    return None if percent is None else min(1.0, ratio_of(percent))


def _mean_rate(rates: Mapping[int, int], *, since_ns: int) -> float | None:
    """Return the mean of plausible rates; each counts for the time since the previous one."""
    total = known_ns = 0
    for at_ns in sorted(rates):
        if PERCENT[0] <= rates[at_ns] <= PERCENT[1]:
            total += rates[at_ns] * (at_ns - since_ns)
            known_ns += at_ns - since_ns
        since_ns = at_ns
    return total / known_ns if known_ns else None


def _utilization_ratio(
    raw: RawGpuSample, cover: Cover, fields: ReadFields, validator: Validator
) -> float | None:
    """Return the share of the covered time in which the GPU or instance was busy."""
    if not raw.instance:
        reading = "utilization_ratio"
        return _mean_ratio(cover, cover.gpu_percent, raw.percent, reading, validator)
    # The driver reports utilization of whole GPUs only; the chip's counters cover instances too.
    profiling = fields.details.get("profiling")
    return profiling.graphics_engine_active_ratio if profiling else None


def _is_free(raw: RawGpuSample, fields: ReadFields) -> bool:
    """Return whether no process uses a board.

    The result is true if the driver lists no process, and the memory in use is too small for a
    process that the driver does not list.
    """
    rows = raw.instances if raw.mig_enabled else [raw]
    used = fields.reading.get("memory_used_bytes", 0)
    # Drivers before 510 count their reserve as used memory.
    is_reserved_separate = "memory_reserved_bytes" in fields.reading
    is_hidden = is_reserved_separate and used > FREE_BYTES * max(1, len(raw.instances))
    return not is_hidden and all(row.processes == () for row in rows)


def _next_cursor(
    since: SampleCursor, clock: DriverClock | None, polled: _Polled, shares: Shares
) -> SampleCursor:
    """Return the position from which the next tick must query samples.

    The next tick thus reads windows again that this tick covers only in part, and samples that come
    late. `since` is the position of this tick.
    """
    newest_us = max(since.process_us, shares.newest_us)
    if clock is None:
        return replace(since, process_us=newest_us)
    covered_us = int(clock.covered_us)
    gpu_ends = (end_us for end_us in polled.gpu if end_us <= covered_us)
    memory_ends = (end_us for end_us in polled.memory if end_us <= covered_us)
    return SampleCursor(
        gpu_us=max(gpu_ends, default=since.gpu_us),
        memory_us=max(memory_ends, default=since.memory_us),
        # Without windows, a sample covers the whole time since the previous query.
        process_us=newest_us if shares.window_us is None else min(newest_us, covered_us),
    )


def _lag_ns(clock: DriverClock | None, cover: Cover) -> int:
    """Return the time since the end of the covered time, in nanoseconds; 0 if it is unknown."""
    if clock is None or cover.interval is None:
        return 0
    return round(((clock.earliest_us + clock.latest_us) / 2 - clock.covered_us) * 1000)
