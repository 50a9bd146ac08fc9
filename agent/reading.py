"""From one GPU's answers to its reading and its processes' shares of the covered interval.

Pure: answers and the state of the tick before in, reading and next state out. The driver samples
on a grid of its own, so a share is a mean over the windows that closed within the interval.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agent import plausibility
from agent.answers import GpuAnswers, LastSeen, ListedProcess, Sample
from agent.plausibility import Sieve
from agent.shares import ProcessUsage, Windows, list_processes, share_out
from gpuledger.records import GpuReading

_HERTZ_PER_MEGAHERTZ: Final = 1_000_000
_MILLI: Final = 1000
_SILENCE_NS: Final = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """What the next tick must know of this one."""

    last_seen: LastSeen = field(default_factory=LastSeen)
    """The newest samples used."""
    knows_seen: bool = True
    """Whether `last_seen` can be relied on: not after it has been set back."""
    silent_ns: int = 0
    """For how long the driver has shown no sample of the GPU."""
    energy_millijoules: int | None = None
    """The energy counter."""
    window_us: int | None = None
    """The driver's sampling window of processes, once it has shown."""
    processes: Mapping[int, ListedProcess] = field(default_factory=dict)
    """The processes that were there, by pid."""


@dataclass(frozen=True, kw_only=True)
class GpuTick:
    """One GPU in one tick."""

    reading: GpuReading
    """Its readings."""
    usages: list[ProcessUsage]
    """Its processes, those that ended since the tick before included."""
    state: GpuState
    """For the next tick."""
    dropped_readings: Counter[str]
    """Values that could not be true, by reading."""
    dropped_samples: Counter[str]
    """Process samples left out, by reason."""


def read_gpu(answers: GpuAnswers, before: GpuState | None, *, interval_ns: int) -> GpuTick:
    """Read one GPU over an interval.

    `before` is its state at the interval's start, or `None` where it did not answer then: its
    readings of an instant are given, its samples as far as they lie within the interval, and
    nothing that needs a difference.
    """
    sieve = Sieve()
    was = before or GpuState(knows_seen=False)
    samples = _Samples.sift(answers, was, interval_ns=interval_ns, sieve=sieve)
    reading = GpuReading(
        uuid=answers.uuid,
        index=answers.index,
        model=answers.model,
        utilization_ratio=_mean(samples.inside, answers.percent, "utilization", sieve),
        memory_utilization_ratio=_mean(
            samples.inside_memory, answers.memory_percent, "memory_utilization", sieve
        ),
        **_instant(answers, sieve),
        energy_joules=_drawn_joules(was.energy_millijoules, answers, interval_ns, sieve),
    )
    running = list_processes(
        answers.processes, was.processes, memory_bytes=reading.memory_total_bytes, sieve=sieve
    )
    shares = share_out(
        answers.process_samples,
        since_us=0 if was.knows_seen else samples.since_us,
        running=running,
        before=was.processes,
        windows=Windows.measure(
            samples.inside,
            newest_before_us=was.last_seen.gpu_us if was.knows_seen else 0,
            interval_ns=interval_ns,
        ),
        window_us=was.window_us,
        gpu_ratio=reading.utilization_ratio,
    )
    state = replace(
        _move_on(
            answers, was, samples, newest_process_us=shares.newest_us, interval_ns=interval_ns
        ),
        window_us=shares.window_us,
        processes=running,
    )
    return GpuTick(
        reading=reading,
        usages=shares.usages,
        state=state,
        dropped_readings=sieve.dropped,
        dropped_samples=shares.dropped,
    )


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The GPU's samples that can be true, and those of them that lie within the interval."""

    gpu: list[Sample]
    memory: list[Sample]
    inside: list[Sample]
    inside_memory: list[Sample]
    since_us: int

    @classmethod
    def sift(
        cls, answers: GpuAnswers, was: GpuState, *, interval_ns: int, sieve: Sieve
    ) -> "_Samples":
        gpu = _plausible(answers.samples, "utilization", sieve)
        memory = _plausible(answers.memory_samples, "memory_utilization", sieve)
        start_us = _newest_us(gpu, 0) - interval_ns // 1000
        since_us = was.last_seen.gpu_us if was.knows_seen else start_us
        memory_since_us = was.last_seen.memory_us if was.knows_seen else start_us
        return cls(
            gpu=gpu,
            memory=memory,
            inside=[sample for sample in gpu if sample.timestamp_us > since_us],
            inside_memory=[sample for sample in memory if sample.timestamp_us > memory_since_us],
            since_us=since_us,
        )


def _move_on(
    answers: GpuAnswers,
    was: GpuState,
    samples: _Samples,
    *,
    newest_process_us: int,
    interval_ns: int,
) -> GpuState:
    """Give what is seen by now; a driver that is silent for too long has had its clock set back.

    Every driver samples at least once a second, so the last seen stamps must lie in its future.
    """
    silent_ns = 0 if samples.gpu or answers.samples is None else was.silent_ns + interval_ns
    if silent_ns > _SILENCE_NS:
        return GpuState(knows_seen=False, energy_millijoules=answers.energy_millijoules)
    seen = LastSeen(
        gpu_us=_newest_us(samples.gpu, was.last_seen.gpu_us),
        memory_us=_newest_us(samples.memory, was.last_seen.memory_us),
        process_us=max(was.last_seen.process_us, newest_process_us),
    )
    return GpuState(
        last_seen=seen, silent_ns=silent_ns, energy_millijoules=answers.energy_millijoules
    )


def _plausible(samples: Sequence[Sample] | None, reading: str, sieve: Sieve) -> list[Sample]:
    return [
        sample
        for sample in samples or ()
        if sieve.keep(sample.percent, plausibility.PERCENT, reading=reading) is not None
        and sieve.keep(sample.timestamp_us, plausibility.TIMESTAMP_US, reading=reading) is not None
    ]


def _newest_us(samples: Sequence[Sample], before_us: int) -> int:
    return max((sample.timestamp_us for sample in samples), default=before_us)


def _mean(
    samples: Sequence[Sample], latest_percent: int | None, reading: str, sieve: Sieve
) -> float | None:
    """Give the mean of all samples, or the driver's latest window where there is none."""
    if samples:
        return sum(sample.percent for sample in samples) / len(samples) / 100
    percent = sieve.keep(latest_percent, plausibility.PERCENT, reading=reading)
    return None if percent is None else percent / 100


def _instant(answers: GpuAnswers, sieve: Sieve) -> dict[str, Any]:
    """Give the readings of the instant, each where it can be true."""
    total_bytes = sieve.keep(
        answers.memory_total_bytes, plausibility.MEMORY_BYTES, reading="memory_total"
    )
    memory = (0, plausibility.MEMORY_BYTES[1] if total_bytes is None else total_bytes)
    power_mw = sieve.keep(answers.power_milliwatts, plausibility.POWER_MILLIWATTS, reading="power")
    energy_mj = sieve.keep(
        answers.energy_millijoules, plausibility.ENERGY_MILLIJOULES, reading="energy_total"
    )
    return {
        "memory_total_bytes": total_bytes,
        "memory_used_bytes": sieve.keep(answers.memory_used_bytes, memory, reading="memory_used"),
        "memory_reserved_bytes": sieve.keep(
            answers.memory_reserved_bytes, memory, reading="memory_reserved"
        ),
        "power_watts": _scaled(power_mw),
        "energy_total_joules": _scaled(energy_mj),
        "temperature_celsius": sieve.keep(
            answers.temperature_celsius, plausibility.TEMPERATURE_CELSIUS, reading="temperature"
        ),
        "sm_clock_hertz": _hertz(answers.sm_clock_megahertz, "sm_clock", sieve),
        "memory_clock_hertz": _hertz(answers.memory_clock_megahertz, "memory_clock", sieve),
    }


def _drawn_joules(
    before_mj: int | None, answers: GpuAnswers, interval_ns: int, sieve: Sieve
) -> float | None:
    """Give the counter's difference; a counter that fell has started again and says nothing."""
    now_mj = answers.energy_millijoules
    if before_mj is None or now_mj is None or now_mj < before_mj:
        return None
    most_mj = plausibility.POWER_MILLIWATTS[1] * interval_ns // 1_000_000_000
    return _scaled(sieve.keep(now_mj - before_mj, (0, most_mj), reading="energy"))


def _scaled(milli: int | None) -> float | None:
    return None if milli is None else milli / _MILLI


def _hertz(megahertz: int | None, reading: str, sieve: Sieve) -> int | None:
    kept = sieve.keep(megahertz, plausibility.CLOCK_MEGAHERTZ, reading=reading)
    return None if kept is None else kept * _HERTZ_PER_MEGAHERTZ
