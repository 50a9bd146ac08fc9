"""From one GPU's answers to its reading and its processes' shares of the covered interval.

Pure: answers and the state of the tick before in, reading and next state out. Which stretch of the
driver's time a tick covers is decided elsewhere; a share is the mean over exactly that stretch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent.core.raw import (
    ListedProcess,
    RawGpuSample,
    SampleCursor,
)
from agent.normalize.counters import CounterTracker, Totals
from agent.normalize.coverage import Coverage
from agent.normalize.driver_clock import DriverClock, SampledWindow
from agent.normalize.instant import energy_delta_joules
from agent.normalize.parts import Parts, read_parts
from agent.normalize.process_totals import read_accounts
from agent.normalize.rows import identify, measured_ratio
from agent.normalize.set_back import without_former
from agent.normalize.shares import (
    GoneProcess,
    ProcessUsage,
    SampleCoverage,
    Shares,
    list_processes,
    share_out,
)
from agent.normalize.validation import Validator
from gpuledger.records import GpuDetails, GpuReading, GpuTotals

_SILENCE_NS: Final = 5_000_000_000
# A driver samples at least once a second; where the machine's clock was set back, this is enough.
_SILENCE_BEHIND_NS: Final = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What the next tick must know of this one."""

    last_seen: SampleCursor = field(default_factory=SampleCursor)
    """The newest samples of which nothing is needed any more."""
    time: DriverClock | None = None
    """The driver's clock; `None` while no sample has shown it, or after it has been set back."""
    gpu_window_us: float | None = None
    """The driver's sampling window of the GPU, once it has shown."""
    silent_ns: int = 0
    """For how long the driver has shown no sample of the GPU."""
    energy_millijoules: int | None = None
    """The energy counter."""
    window_us: int | None = None
    """The driver's sampling window of processes, once it has shown."""
    processes: Mapping[int, ListedProcess] = field(default_factory=dict)
    """The processes that were there, by pid."""
    gone: Mapping[int, GoneProcess] = field(default_factory=dict)
    """The processes that ended and may have run in time that is not covered yet, by pid."""
    totals: Totals = field(default_factory=dict)
    """The counters, by field name."""
    newest_us: int = 0
    """The newest stamp of the GPU's samples."""
    was_set_back: bool = False
    """Whether the driver's clock was set back of late, as its silence showed."""

    def forget(self) -> "GpuState":
        """Return what is left of it after a tick in which the GPU did not answer: its counters."""
        return GpuState(totals=self.totals)


@dataclass(frozen=True, kw_only=True)
class GpuTick:
    """One GPU in one tick."""

    reading: GpuReading
    """Its readings from which ticks are booked."""
    details: GpuDetails
    """Its other readings."""
    usages: list[ProcessUsage]
    """Its processes, those that ended and may have run in the covered time included."""
    state: GpuState
    """For the next tick."""
    dropped_readings: Counter[tuple[str, str]]
    """Values that could not be true, by reading and reason."""
    dropped_samples: Counter[str]
    """Process samples left out, by reason."""
    accounts: Sequence[tuple[int, GpuTotals]] | None = None
    """What processes that are done with it used, by pid; `None` where the driver has no accounts.
    One may come again in the next ticks."""


def read_gpu(
    answers: RawGpuSample,
    before: GpuState | None,
    *,
    interval_ns: int,
    now_ns: int,
    behind_us: int | None = None,
) -> GpuTick:
    """Read one GPU over an interval that ends at `now_ns` of the monotonic clock.

    `behind_us` is given while samples from before the machine's wall clock was set back may be
    among the others: what that clock shows now. Most drivers stamp samples by it.

    `before` is its state at the interval's start, or `None` where it did not answer then: its
    readings of an instant are given, its samples as far as they lie within the interval, and
    nothing that needs a difference.
    """
    was = before or GpuState()
    if behind_us is None:
        was = replace(was, was_set_back=False) if was.was_set_back else was
    elif was.was_set_back:
        answers = without_former(answers, now_us=behind_us)
    ledger = CounterTracker(before=was.totals, now_ns=now_ns)
    look = _Look(
        answers=answers,
        was=was,
        interval_ns=interval_ns,
        ledger=ledger,
        sieve=Validator(),
        behind_us=behind_us,
    )
    cover = look.cover()
    parts = look.parts()
    reading = look.reading(cover, parts)
    running = look.running(reading)
    shares = look.shares(cover, running, reading)
    return GpuTick(
        reading=reading,
        details=look.details(parts),
        usages=shares.usages,
        state=look.state(cover, running, shares),
        dropped_readings=look.sieve.dropped,
        dropped_samples=shares.dropped,
        accounts=read_accounts(answers, look.sieve),
    )


@dataclass(frozen=True, kw_only=True)
class _Look:
    """One GPU's answers over one interval, and the steps of reading them."""

    answers: RawGpuSample
    was: GpuState
    interval_ns: int
    ledger: CounterTracker
    sieve: Validator
    behind_us: int | None

    def cover(self) -> Coverage:
        return Coverage.find(
            self.answers,
            time=self.was.time,
            seen=self.was.last_seen,
            known_us=self.was.gpu_window_us,
            interval_ns=self.interval_ns,
            sieve=self.sieve,
        )

    def parts(self) -> Parts:
        return read_parts(
            self.answers, interval_ns=self.interval_ns, ledger=self.ledger, sieve=self.sieve
        )

    def reading(self, cover: Coverage, parts: Parts) -> GpuReading:
        answers, sieve = self.answers, self.sieve
        ratio = cover.mean(cover.gpu, answers.percent, "utilization_ratio", sieve)
        return GpuReading(
            uuid=answers.uuid,
            index=answers.index,
            model=answers.model,
            **identify(answers),
            utilization_ratio=measured_ratio(parts.details) if answers.instance else ratio,
            memory_utilization_ratio=cover.mean(
                cover.memory, answers.memory_percent, "memory_utilization_ratio", sieve
            ),
            **parts.reading,
            energy_joules=energy_delta_joules(
                self.was.energy_millijoules, answers, self.interval_ns, sieve
            ),
        )

    def details(self, parts: Parts) -> GpuDetails:
        fell = self.ledger.fell or None
        return GpuDetails(uuid=self.answers.uuid, **parts.details, resets=fell)

    def running(self, reading: GpuReading) -> Mapping[int, ListedProcess]:
        return list_processes(
            self.answers.processes,
            self.was.processes,
            memory_bytes=reading.memory_total_bytes,
            sieve=self.sieve,
        )

    def shares(
        self, cover: Coverage, running: Mapping[int, ListedProcess], reading: GpuReading
    ) -> Shares:
        gone = {pid: one.process for pid, one in self.was.gone.items()}
        return share_out(
            self.answers.process_samples,
            running=running,
            before=gone | dict(self.was.processes),
            cover=SampleCoverage(
                stretch=cover.stretch, windows=cover.gpu, interval_us=self.interval_ns / 1000
            ),
            window_us=self.was.window_us,
            gpu_ratio=reading.utilization_ratio,
            # Two samples of two timelines are any time apart.
            learns=self.behind_us is None,
        )

    def state(
        self, cover: Coverage, running: Mapping[int, ListedProcess], shares: Shares
    ) -> GpuState:
        """Return what is seen by now; a driver that is silent for long has had its clock set back.

        Every driver samples at least once a second, so the last seen stamps must lie in its future.
        """
        newest_us = max((one.timestamp_us for one in self.answers.samples or ()), default=0)
        shows = self.answers.samples is None or bool(cover.gpu)
        patience_ns = _SILENCE_NS
        if self.behind_us is not None:
            # What is not covered yet is answered again and again: only what is newer tells.
            shows = self.answers.samples is None or newest_us > self.was.newest_us
            patience_ns = _SILENCE_BEHIND_NS
        state = GpuState(
            last_seen=_last_seen(self.was, cover, shares),
            time=cover.time,
            gpu_window_us=cover.window_us,
            silent_ns=0 if shows else self.was.silent_ns + self.interval_ns,
            energy_millijoules=self.answers.energy_millijoules,
            window_us=shares.window_us,
            processes=running,
            gone=_gone(self.was, running, cover.time),
            totals=self.ledger.after,
            newest_us=max(newest_us, self.was.newest_us),
            was_set_back=self.was.was_set_back,
        )
        if state.silent_ns <= patience_ns:
            return state
        asks_from = SampleCursor()
        if self.behind_us is not None:
            # All that is stamped earlier may be of either timeline.
            now_us = self.behind_us
            asks_from = SampleCursor(gpu_us=now_us, memory_us=now_us, process_us=now_us)
        return replace(
            state,
            last_seen=asks_from,
            time=None,
            silent_ns=0,
            gone={},
            newest_us=0,
            was_set_back=True,
        )


def _last_seen(was: GpuState, cover: Coverage, shares: Shares) -> SampleCursor:
    """Return from where to ask: a window that the next tick covers in part is asked for again."""
    newest_us = max(was.last_seen.process_us, shares.newest_us)
    if cover.time is None:
        return replace(was.last_seen, process_us=newest_us)
    covered_us = int(cover.time.covered_us)
    return SampleCursor(
        gpu_us=_last_end_us(cover.gpu, covered_us, was.last_seen.gpu_us),
        memory_us=_last_end_us(cover.memory, covered_us, was.last_seen.memory_us),
        # Without windows, a sample is of all the time since the question before.
        process_us=newest_us if shares.window_us is None else min(newest_us, covered_us),
    )


def _last_end_us(windows: Sequence[SampledWindow], covered_us: int, before_us: int) -> int:
    ends = (window.end_us for window in windows if window.end_us <= covered_us)
    return max(ends, default=before_us)


def _gone(
    was: GpuState, running: Mapping[int, ListedProcess], time: DriverClock | None
) -> Mapping[int, GoneProcess]:
    """Return the ended processes to list again: those that may have ended after the cover."""
    if time is None:
        return {}
    gone = {
        pid: GoneProcess(process=process, until_us=time.latest_us)
        for pid, process in was.processes.items()
    }
    return {
        pid: one
        for pid, one in {**was.gone, **gone}.items()
        if pid not in running and one.until_us > time.covered_us
    }
