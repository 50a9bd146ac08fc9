"""From one GPU's answers to its reading and its processes' shares of the covered interval.

Answers and the state of the tick before in, reading and next state out. Which interval of the
driver's time a tick covers is decided in `driver_clock`; a share is the mean over exactly that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuledger.clock import NS_PER_MS, NS_PER_US
from gpuledger.records import GpuDetails, GpuReading, GpuTotals, bounds
from gpuledger_agent.core.looks import Looked
from gpuledger_agent.core.normalize.driver_clock import Coverage, DriverClock
from gpuledger_agent.core.normalize.energy import (
    FREE_BYTES,
    DrawnEnergy,
    EnergyMeter,
    IdleDraw,
    TickEnergy,
)
from gpuledger_agent.core.normalize.fields import (
    CounterTotals,
    CounterTracker,
    ReadFields,
    read_fields,
)
from gpuledger_agent.core.normalize.set_back import without_former
from gpuledger_agent.core.normalize.shares import (
    GoneProcess,
    ProcessUsage,
    SampleCoverage,
    Shares,
    apportion,
    merge_processes,
    with_video,
)
from gpuledger_agent.core.normalize.windows import SampledWindow, WindowLength
from gpuledger_agent.core.raw import (
    EnergyReading,
    ListedProcess,
    ProcessAccounting,
    RawGpuSample,
    SampleCursor,
)
from gpuledger_agent.core.readings import (
    MEMORY_LIMITS,
    PERCENT,
    TIMESTAMP_US,
    Validator,
)

_SILENCE_NS: Final = 5_000_000_000
# A driver samples at least once a second; where the machine's clock was set back, this is enough.
_SILENCE_BEHIND_NS: Final = 2_000_000_000
_COUNTER_MILLIJOULES: Final = (0, bounds.MAX_MILLIJOULES)
_DRAW_MILLIWATTS: Final = (0, bounds.MAX_MILLIWATTS)
_READINGS_OF_SAMPLES: Final = {
    "samples": "utilization_ratio",
    "memory_samples": "memory_utilization_ratio",
}
# A list that only fails now and then leaves who is there as it was.
_BELIEVED_TICKS: Final = 5
# Longer, and it was no length of time.
_LIFETIME_MS: Final = (0, bounds.MAX_DURATION_NS // NS_PER_MS)
# Percents have four digits behind the point: those of the sums of an account.
_PARTS_PER_PERCENT: Final = 10_000


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """What the next tick must know of this one."""

    read_ns: int = 0
    """When the GPU answered, by the monotonic clock."""
    last_seen: SampleCursor = SampleCursor()
    """The newest samples of which nothing is needed any more."""
    clock: DriverClock | None = None
    """The driver's clock; `None` while no sample has shown it, or after it has been set back."""
    gpu_window: WindowLength = WindowLength()
    """The driver's sampling window of the GPU, as far as it has shown."""
    silent_ns: int = 0
    """For how long the driver has shown no sample of the GPU."""
    energy: DrawnEnergy | None = None
    """Its energy; `None` where it gives neither energy nor draw, as an instance."""
    idle: IdleDraw = IdleDraw()
    """What it draws without a process."""
    window_us: int | None = None
    """The driver's sampling window of processes, once it has shown."""
    processes: Mapping[int, ListedProcess] = {}
    """The processes that were there, by pid."""
    unlisted_ticks: int | None = None
    """How many ticks ago the driver listed them last; `None` where it has not yet."""
    gone: Mapping[int, GoneProcess] = {}
    """The processes that ended and may have run in time that is not covered yet, by pid."""
    totals: CounterTotals = {}
    """The counters, by field name."""
    newest_us: int = 0
    """The newest stamp of the GPU's samples."""
    was_set_back: bool = False
    """Whether the driver's clock was set back of late, as its silence showed."""

    @property
    def are_processes_unknown(self) -> bool:
        """Whether the driver has refused its lists for so long that nobody knows who is there."""
        return self.unlisted_ticks is not None and self.unlisted_ticks > _BELIEVED_TICKS

    def follow_list(self, listed: Sequence[ListedProcess] | None) -> "GpuState":
        """Return what is left of it before a tick that the driver gave this list for.

        Where it has refused too many lists, who was there then is no longer taken to be there.
        """
        if listed is not None:
            return replace(self, unlisted_ticks=0) if self.unlisted_ticks != 0 else self
        if self.unlisted_ticks is None:
            return self
        after = replace(self, unlisted_ticks=self.unlisted_ticks + 1)
        return replace(after, processes={}, gone={}) if after.are_processes_unknown else after

    def forget(self) -> "GpuState":
        """Return what is left of it after a tick in which the GPU did not answer.

        That is its counters, and how long its windows are.
        """
        return GpuState(
            totals=self.totals,
            energy=self.energy,
            idle=self.idle.interrupt(),
            gpu_window=self.gpu_window.interrupt(),
        )


class GpuTick(msgspec.Struct, frozen=True, kw_only=True):
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
    has_gap: bool = False
    """Whether nobody knows what was used in a part of the covered time."""
    takes_turns: bool = False
    """Whether the samples of its processes came to more than the device, and were made shares."""
    accounts: Sequence[tuple[int, GpuTotals]] | None = None
    """What processes that are done with it used, by pid; `None` where the driver has no accounts.
    One may come again in the next ticks."""


def read_gpu(
    raw: RawGpuSample,
    before: GpuState | None,
    *,
    looked: Looked | None = None,
    interval_ns: int,
    now_ns: int,
    set_back_now_us: int | None = None,
) -> GpuTick:
    """Return one GPU's reading over the interval that ends at `now_ns` of the monotonic clock.

    `before` is its state at the interval's start, `None` where it did not answer then: the reading
    has its values of this instant, samples as far as they lie within the interval, and nothing that
    needs a difference.

    `looked` is what looks between the ticks told, put together with the answers; `None` where there
    were none. `set_back_now_us` is what the machine's wall clock shows, while samples may be among
    the others that are stamped by that clock as it was before it was set back; else `None`. Most
    drivers stamp samples by it.
    """
    interval = _GpuInterval.begin(
        raw,
        before,
        looked=looked or Looked.at(raw),
        interval_ns=interval_ns,
        now_ns=now_ns,
        set_back_now_us=set_back_now_us,
    )
    looked, was, validator = interval.looked, interval.was, interval.validator
    counters = CounterTracker(before=was.totals, now_ns=now_ns)
    coverage = interval.find_coverage()
    fields = read_fields(raw, interval_ns=interval_ns, counters=counters, validator=validator)
    running = merge_processes(
        raw.processes,
        was.processes,
        memory_bytes=fields.reading.get("memory_total_bytes"),
        validator=validator,
    )
    # Those between the two ticks included, whoever came and went in one look.
    listed = {**was.processes, **looked.processes}
    gone = _gone(interval, listed, running, coverage.clock)
    utilization_ratio = _utilization_ratio(interval, coverage, fields)
    board = _BoardEnergy.measure(
        interval,
        fields,
        lag_ns=coverage.lag_ns,
        is_free=not running and not gone and _is_free(raw, fields),
        utilization_ratio=utilization_ratio,
    )
    reading = _make_reading(interval, coverage, fields, board, utilization_ratio)
    shares = _apportion(interval, coverage, listed, running, utilization_ratio)
    state = GpuState(
        read_ns=now_ns,
        last_seen=_next_cursor(was, coverage, shares),
        clock=coverage.clock,
        gpu_window=coverage.window,
        energy=board.drawn,
        idle=board.idle,
        window_us=shares.window_us,
        processes=running,
        unlisted_ticks=was.unlisted_ticks,
        gone=gone,
        totals=counters.after,
        was_set_back=was.was_set_back,
    )
    return GpuTick(
        reading=reading,
        details=GpuDetails(uuid=raw.uuid, **fields.details, resets=counters.fell or None),
        usages=shares.usages,
        state=_watch_silence(state, interval, coverage),
        dropped_readings=validator.dropped,
        dropped_samples=shares.dropped
        + Counter({"implausible": looked.dropped["process_samples"]}),
        accounts=_process_totals(raw, validator),
        has_gap=coverage.has_gap,
        takes_turns=shares.overlaps,
    )


class _GpuInterval(NamedTuple):
    """What one GPU answered by the end of an interval, and its state at the start."""

    raw: RawGpuSample
    looked: Looked
    was: GpuState
    interval_ns: int
    now_ns: int
    """Its end, by the monotonic clock."""
    set_back_now_us: int | None
    """The wall clock's time while it was set back of late, else `None`."""
    validator: Validator
    """Drops the values of this interval that cannot be true, and counts them."""

    @classmethod
    def begin(
        cls,
        raw: RawGpuSample,
        before: GpuState | None,
        *,
        looked: Looked,
        interval_ns: int,
        now_ns: int,
        set_back_now_us: int | None,
    ) -> "_GpuInterval":
        """Return it, without samples of the time before the driver's clock was set back."""
        was = (before or GpuState()).follow_list(raw.processes)
        if was.are_processes_unknown:
            # Nor can what looks listed between be told from who has gone since.
            looked = replace(looked, processes={}, left_ns={})
        if set_back_now_us is None:
            was = replace(was, was_set_back=False) if was.was_set_back else was
        elif was.was_set_back:
            looked = without_former(looked, now_us=set_back_now_us)
        validator = Validator()
        for name, reading in _READINGS_OF_SAMPLES.items():
            validator.drop(reading, "out_of_range", count=looked.dropped[name])
        return cls(raw, looked, was, interval_ns, now_ns, set_back_now_us, validator)

    def find_coverage(self) -> Coverage:
        """Return the part of the driver's time that the tick covers."""
        return Coverage.find(
            self.looked.samples,
            self.looked.memory_samples,
            signs=self.looked.signs,
            clock=self.was.clock,
            cursor=self.was.last_seen,
            known=self.was.gpu_window,
            interval_ns=self.interval_ns,
            now_ns=self.now_ns,
            validator=self.validator,
            is_one_timeline=self.set_back_now_us is None,
        )


def _make_reading(
    interval: _GpuInterval,
    coverage: Coverage,
    fields: ReadFields,
    board: "_BoardEnergy",
    utilization_ratio: float | None,
) -> GpuReading:
    raw = interval.raw
    return GpuReading(
        uuid=raw.uuid,
        index=raw.index,
        model=raw.model,
        **_identity(raw),
        utilization_ratio=utilization_ratio,
        memory_utilization_ratio=coverage.mean(
            coverage.memory, raw.memory_percent, "memory_utilization_ratio", interval.validator
        ),
        **fields.reading,
        energy_millijoules=board.tick.millijoules,
        energy_method=board.tick.method,
        idle_draw_milliwatts=board.idle.lowest_milliwatts,
        compute_slices=raw.compute_slices,
        memory_slices=raw.memory_slices,
        memory_unified=True
        if raw.memory_unified and "memory_total_bytes" in fields.reading
        else None,
    )


def _apportion(
    interval: _GpuInterval,
    coverage: Coverage,
    listed: Mapping[int, ListedProcess],
    running: Mapping[int, ListedProcess],
    utilization_ratio: float | None,
) -> Shares:
    """Return the processes' shares, of those included that ended and may still be sampled."""
    was = interval.was
    sampled = SampleCoverage(
        interval=coverage.interval,
        windows=coverage.gpu,
        interval_us=interval.interval_ns / NS_PER_US,
        has_gap=coverage.has_gap,
    )
    shares = apportion(
        interval.looked.process_samples,
        running=running,
        before={pid: gone.process for pid, gone in was.gone.items()} | dict(listed),
        coverage=sampled,
        window_us=was.window_us,
        gpu_ratio=utilization_ratio,
        # The gap between two samples is no window where their stamps are of two timelines.
        learns=interval.set_back_now_us is None,
    )
    samples = interval.looked.process_samples
    return with_video(shares, samples, coverage=sampled, validator=interval.validator)


def _identity(raw: RawGpuSample) -> dict[str, Any]:
    """Return the fields of `GpuReading` that say which instance a row is of, or if it is cut."""
    instance = raw.instance
    if instance is None:
        return {"mig_enabled": raw.mig_enabled}
    return {
        "parent_uuid": instance.parent_uuid,
        "gpu_instance": instance.gpu_instance,
        "compute_instance": instance.compute_instance,
        "mig_profile": instance.profile,
    }


def _utilization_ratio(
    interval: _GpuInterval, coverage: Coverage, fields: ReadFields
) -> float | None:
    """Return the share of the interval in which the device was busy."""
    percent = interval.raw.percent
    ratio = coverage.mean(coverage.gpu, percent, "utilization_ratio", interval.validator)
    if not interval.raw.instance:
        return ratio
    # The driver's own utilization is of whole GPUs only; the chip's counters are of instances too.
    profiling = fields.details.get("profiling")
    return profiling.graphics_engine_active_ratio if profiling else None


class _BoardEnergy(NamedTuple):
    """What a board drew; an instance gives neither energy nor draw."""

    tick: TickEnergy
    drawn: DrawnEnergy | None
    idle: IdleDraw

    @classmethod
    def measure(
        cls,
        interval: _GpuInterval,
        fields: ReadFields,
        *,
        lag_ns: int,
        is_free: bool,
        utilization_ratio: float | None,
    ) -> "_BoardEnergy":
        """Return it of the time that the tick covers, which ends `lag_ns` ago.

        `is_free` says that no process is on the board now.
        """
        was = interval.was
        counter = fields.reading.get("energy_total_millijoules")
        power = fields.reading.get("power_milliwatts")
        if interval.raw.instance or (was.energy is None and counter is None and power is None):
            return cls(TickEnergy(), was.energy, was.idle)
        before = was.energy or DrawnEnergy(meter=EnergyMeter(covered_ns=interval.now_ns))
        own = EnergyReading(interval.now_ns, counter, power)
        keep = interval.validator.keep
        between = [
            EnergyReading(
                one.at_ns,
                keep(one.counter, _COUNTER_MILLIJOULES, reading="energy_total_millijoules"),
                keep(one.power_milliwatts, _DRAW_MILLIWATTS, reading="power_milliwatts"),
            )
            for one in interval.looked.energy
        ]
        drawn, tick = before.measure(
            [*between, own],
            interval_ns=interval.interval_ns,
            cover_end_ns=interval.now_ns - lag_ns,
            validator=interval.validator,
        )
        if utilization_ratio is None and "profiling" in fields.details:
            # The driver has none of a GPU that is cut, where its chip may have counters.
            utilization_ratio = fields.details["profiling"].graphics_engine_active_ratio
        idle = was.idle.watch(
            tick,
            is_free=is_free,
            is_unused=utilization_ratio == 0.0,
            is_settled=before.meter.is_settled,
            interval_ns=interval.interval_ns,
        )
        return cls(tick, drawn, idle)


def _is_free(raw: RawGpuSample, fields: ReadFields) -> bool:
    """Return whether no process is on a board: none is listed, and no memory is held unlisted."""
    rows = raw.instances if raw.mig_enabled else [raw]
    lists = [row.processes for row in rows]
    used = fields.reading.get("memory_used_bytes", 0)
    # Before 510 the driver's reserve is part of what is used.
    is_told_apart = "memory_reserved_bytes" in fields.reading
    is_hidden = is_told_apart and used > FREE_BYTES * max(1, len(raw.instances))
    return not is_hidden and all(listed == () for listed in lists)


def _process_totals(raw: RawGpuSample, validator: Validator) -> list[tuple[int, GpuTotals]] | None:
    """Return what processes that are done with the GPU used, by pid, as far as it can be true."""
    if raw.process_stats is None:
        return None
    return [(account.pid, _totals(raw.uuid, account, validator)) for account in raw.process_stats]


def _totals(gpu_uuid: str, account: ProcessAccounting, validator: Validator) -> GpuTotals:
    lifetime_ms = validator.keep(account.lived_ms, _LIFETIME_MS, reading="accounted_time")
    lifetime_ns = None if lifetime_ms is None else lifetime_ms * NS_PER_MS

    def part(percent: float | None) -> int | None:
        if lifetime_ns is None or percent is None:
            return None
        lowest, highest = PERCENT
        if not lowest <= percent <= highest:
            validator.drop("accounted_utilization", "out_of_range")
            return None
        return lifetime_ns * round(percent * _PARTS_PER_PERCENT) // (highest * _PARTS_PER_PERCENT)

    return GpuTotals(
        gpu_uuid=gpu_uuid,
        busy_ns=part(account.gpu_percent),
        memory_busy_ns=part(account.memory_percent),
        max_memory_bytes=validator.keep(
            account.max_memory_bytes, MEMORY_LIMITS, reading="accounted_memory"
        ),
        started_time_ns=account.started_us * NS_PER_US
        if 0 < account.started_us < TIMESTAMP_US[1] // NS_PER_US
        else None,
        lifetime_ns=lifetime_ns,
    )


def _watch_silence(state: GpuState, interval: _GpuInterval, coverage: Coverage) -> GpuState:
    """Return the state with how long the driver has shown no sample.

    A driver samples at least once a second. One that shows nothing newer for long has had its clock
    set back: the stamps that were seen last lie in its future, so it is followed anew.
    """
    samples, was, set_back_now_us = interval.looked.samples, interval.was, interval.set_back_now_us
    newest_us = max((sample.timestamp_us for sample in samples or ()), default=0)
    has_new_samples = samples is None or bool(coverage.gpu)
    max_silence_ns = _SILENCE_NS
    if set_back_now_us is not None:
        # What is not covered yet is answered again and again: only what is newer is a sign.
        has_new_samples = samples is None or newest_us > was.newest_us
        max_silence_ns = _SILENCE_BEHIND_NS
    silent_ns = 0 if has_new_samples else was.silent_ns + interval.interval_ns
    if silent_ns <= max_silence_ns:
        return replace(state, silent_ns=silent_ns, newest_us=max(newest_us, was.newest_us))
    cursor = SampleCursor()
    if set_back_now_us is not None:
        # All that is stamped earlier may be of either timeline.
        cursor = SampleCursor(
            gpu_us=set_back_now_us, memory_us=set_back_now_us, process_us=set_back_now_us
        )
    return replace(
        state,
        last_seen=cursor,
        clock=None,
        silent_ns=0,
        gone={},
        gpu_window=state.gpu_window.interrupt(),
        newest_us=0,
        was_set_back=True,
    )


def _next_cursor(was: GpuState, coverage: Coverage, shares: Shares) -> SampleCursor:
    """Return after which samples to query: windows of which the next tick covers a part again."""
    newest_us = max(was.last_seen.process_us, shares.newest_us)
    if coverage.clock is None:
        return replace(was.last_seen, process_us=newest_us)
    covered_us = int(coverage.clock.covered_us)

    def last_end_us(windows: Sequence[SampledWindow], before_us: int) -> int:
        ends = (window.end_us for window in windows if window.end_us <= covered_us)
        return max(ends, default=before_us)

    return SampleCursor(
        gpu_us=last_end_us(coverage.gpu, was.last_seen.gpu_us),
        memory_us=last_end_us(coverage.memory, was.last_seen.memory_us),
        # Without windows, a sample is of all the time since the query before.
        process_us=newest_us if shares.window_us is None else min(newest_us, covered_us),
    )


def _gone(
    interval: _GpuInterval,
    listed: Mapping[int, ListedProcess],
    running: Mapping[int, ListedProcess],
    clock: DriverClock | None,
) -> Mapping[int, GoneProcess]:
    """Return the ended processes that may have run in time that is not covered yet."""
    if clock is None:
        return {}
    now_ns, left_ns = interval.now_ns, interval.looked.left_ns
    gone = dict(interval.was.gone)
    for pid in listed.keys() - running.keys():
        since_us = (now_ns - left_ns.get(pid, now_ns)) / NS_PER_US
        until_us = clock.latest_before_us(since_us)
        gone[pid] = GoneProcess(process=listed[pid], until_us=until_us)
    return {
        pid: process
        for pid, process in gone.items()
        if pid not in running and process.until_us > clock.covered_us
    }
