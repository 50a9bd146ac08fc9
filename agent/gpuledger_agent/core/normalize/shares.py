"""Each process's share of a GPU in an interval, computed from the driver's process samples.

The driver reports whole percents of its own sampling windows. It reports nothing for a window in
which a process did not run, nor for the window in which it ended. Some drivers return one sample
per window, others one for the whole time since the last query. `gpuledger_agent.core.gpu_sampler`
learns which, and so the time that a sample covers. Until then, the distance between a process's
samples shows it.

Two kinds of samples do not describe a process's own use and are corrected here: samples that add up
to more than the device (`take_turns`), and those of an MPS server (`share_server`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Final

import msgspec
from msgspec.structs import replace

from gpuledger.records import ProcessKind
from gpuledger_agent.core.normalize.driver_clock import Cover
from gpuledger_agent.core.normalize.windows import MAX_GAP_US, SampledWindow, window_at
from gpuledger_agent.core.raw import ListedProcess, ProcessUtilizationSample
from gpuledger_agent.core.readings import (
    MEMORY_LIMITS,
    PERCENT,
    PID,
    TIMESTAMP_US,
    Validator,
    ratio_of,
)

_MIN_WINDOW_US: Final = 10_000
# Drop stamps further ahead of the GPU's newest one, because they would hide all later samples.
_AHEAD_US: Final = 60_000_000
# Two periods that differ by less than this ratio are the same one, measured twice.
_SAME_PERIOD_RATIO: Final = 0.2
# Rounding errs by up to half a percent, truncation by up to one.
_ROUNDING_PERCENT: Final = 1
# Points and weights of Gauss-Legendre quadrature on 0 to 1: exact for 15 other processes, and close
# for more.
_GAUSS: Final = (
    (0.019855071751, 0.050614268145),
    (0.101666761293, 0.111190517227),
    (0.237233795042, 0.156853322939),
    (0.408282678752, 0.181341891689),
    (0.591717321248, 0.181341891689),
    (0.762766204958, 0.156853322939),
    (0.898333238707, 0.111190517227),
    (0.980144928249, 0.050614268145),
)


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One process's use of one GPU over the covered time."""

    process: ListedProcess
    """The process as listed now, or else at the previous tick."""
    sm_ratio: float | None
    """Share of the covered time in which its kernels ran; `None` if the driver does not report
    it."""
    ended: bool
    """Whether it has ended but may have run in the covered time."""
    encoder_ratio: float | None = None
    """Share of the covered time in which the video encoders worked for it; `None` if that is zero
    or unknown."""
    decoder_ratio: float | None = None
    """Share of the covered time in which the video decoders worked for it, in the same way."""


class GoneProcess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process that ended and may have run in time that no tick has covered yet."""

    process: ListedProcess
    """The process as it was listed."""
    until_us: float
    """Latest possible time of its end, by the driver's clock."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one GPU in one tick."""

    usages: list[ProcessUsage]
    """Running processes, then ended ones."""
    newest_us: int
    """The newest plausible time stamp; 0 if there is none."""
    window_us: int | None
    """The driver's window length, as far as it is known."""
    dropped: Counter[str]
    """Samples left out, by reason."""
    overlaps: bool = False
    """Whether the samples added up to more than the device, so that they were taken for the time
    from each kernel's submission to its end."""


def merge_processes(
    listed: Iterable[ListedProcess] | None,
    before: Mapping[int, ListedProcess],
    *,
    memory_bytes: int | None,
    validator: Validator,
) -> Mapping[int, ListedProcess]:
    """Merge the driver's lists by pid: a process in two lists holds its memory once.

    If a list failed (`None`), the processes of the previous tick are assumed to be still running;
    callers pass none of them if lists have failed for too long.
    """
    if listed is None:
        return before
    limits = (0, memory_bytes or MEMORY_LIMITS[1])
    merged: dict[int, ListedProcess] = {}
    for process in listed:
        if validator.keep(process.pid, PID, reading="process_pid") is None:
            continue
        kept_bytes = validator.keep(process.memory_bytes, limits, reading="process_memory_bytes")
        kept = (
            process
            if kept_bytes == process.memory_bytes
            else replace(process, memory_bytes=kept_bytes)
        )
        other = merged.get(process.pid)
        if other:
            sizes = [size for size in (other.memory_bytes, kept_bytes) if size is not None]
            kept = ListedProcess(
                pid=process.pid,
                # A process that both renders and computes counts as a compute process.
                kind=other.kind if other.kind == process.kind else ProcessKind.COMPUTE,
                memory_bytes=max(sizes, default=None),
                is_mps_client=_is_mps_client(other) or _is_mps_client(process),
            )
        merged[process.pid] = kept
    return merged


def apportion(
    samples: Sequence[ProcessUtilizationSample] | None,
    *,
    running: Mapping[int, ListedProcess],
    before: Mapping[int, ListedProcess],
    cover: Cover,
    interval_us: float,
    window_us: int | None,
    gpu_ratio: float | None,
    validator: Validator,
    learns: bool = True,
) -> Shares:
    """Return each process's share of the covered time.

    If samples are given, a process without any had no share. With `learns` false, the samples say
    nothing about the driver's window, so its known length stays.
    """
    processes = {**before, **running}
    newest_us = cover.gpu[-1].end_us if cover.gpu else 0
    kept, dropped = _sort(samples or (), processes, newest_us)
    percents = take_turns(kept, cover.gpu)
    if learns:
        periods = (window_us, _shortest_gap_us(kept))
        window_us = min((period for period in periods if period is not None), default=None)
    covers_any = cover.interval is not None and cover.interval.end_us != cover.interval.start_us
    # Without new windows and samples the shares are unknown; with them, no sample means no kernel.
    is_known = samples is not None and (covers_any or bool(kept)) and not cover.has_gap
    # A single sample of a window of unknown length may belong to a short window.
    max_ratio = 1.0 if window_us is not None or gpu_ratio is None else gpu_ratio
    by_end = {window.end_us: window for window in cover.gpu}
    usages = []
    for pid, process in processes.items():
        sm_ratio, encoder_ratio, decoder_ratio = 0.0, None, None
        if own := kept.get(pid):
            parts = [(one, _share(one, cover, by_end, window_us, interval_us)) for one in own]
            percent = sum(
                percents.get((pid, one.timestamp_us), one.sm_percent) * part for one, part in parts
            )
            sm_ratio = min(ratio_of(percent), max_ratio)
            # For most processes both are 0.
            if is_known and any(one.encoder_percent or one.decoder_percent for one in own):
                encoder_ratio = _video_ratio(parts, "encoder", validator)
                decoder_ratio = _video_ratio(parts, "decoder", validator)
        usages.append(
            ProcessUsage(
                process=process,
                sm_ratio=sm_ratio if is_known else None,
                ended=pid not in running,
                encoder_ratio=encoder_ratio,
                decoder_ratio=decoder_ratio,
            )
        )
    return Shares(
        usages=sorted(usages, key=lambda usage: usage.ended),
        newest_us=max((sample.timestamp_us for own in kept.values() for sample in own), default=0),
        window_us=window_us,
        dropped=dropped,
        overlaps=bool(percents),
    )


def _share(
    sample: ProcessUtilizationSample,
    cover: Cover,
    by_end: Mapping[int, SampledWindow],
    window_us: int | None,
    interval_us: float,
) -> float:
    """Return the part of the covered time that a sample represents."""
    interval, end_us = cover.interval, sample.timestamp_us
    if interval is None:
        return 1.0 if window_us is None else min(1.0, window_us / interval_us)
    if sample.since_us:
        start_us: float = sample.since_us
    elif window_us is None:
        # The sample covers all the time since the last query.
        return 1.0 if end_us > interval.start_us else 0.0
    else:
        # The true width is that of the GPU's window, if both use the same grid.
        own = by_end.get(end_us)
        window = own or window_at(cover.gpu, end_us)
        width_us = window.end_us - window.start_us if window else window_us
        differs = abs(width_us - window_us) >= _SAME_PERIOD_RATIO * window_us
        # A process that rarely ran has long gaps, which show nothing about the window.
        if differs and (own is None or width_us > window_us):
            width_us = window_us
        start_us = end_us - width_us
    length_us = cover.known_us or interval.end_us - interval.start_us or 1.0
    return interval.overlap_us(start_us, end_us) / length_us


def _video_ratio(
    parts: Sequence[tuple[ProcessUtilizationSample, float]], engine: str, validator: Validator
) -> float | None:
    """Return the share of the covered time in which a video engine worked for a process."""
    percent = 0.0
    for sample, part in parts:
        own = getattr(sample, f"{engine}_percent")
        known = validator.keep(own, PERCENT, reading=f"process_{engine}_utilization")
        percent += (known or 0) * part
    # A share that rounds to zero is left out, like zero.
    return min(ratio_of(percent), 1.0) or None


def _is_mps_client(process: ListedProcess) -> bool:
    return process.kind is ProcessKind.MPS or process.is_mps_client


def share_server(
    usages: Sequence[ProcessUsage], servers: Collection[int]
) -> Sequence[ProcessUsage] | None:
    """Return usages in which MPS clients share the usage sampled for their server.

    They share it equally, because the driver does not report their own. `servers` are the servers'
    pids. Returns `None` if the driver did not attribute the clients' use to a server.
    """
    clients = [one for one in usages if _is_mps_client(one.process) and not one.ended]
    served = sum(one.sm_ratio or 0.0 for one in usages if one.process.pid in servers)
    if not served or not clients or any(one.sm_ratio for one in clients):
        return None
    part, shared = served / len(clients), []
    for one in usages:
        if one in clients:
            shared.append(replace(one, sm_ratio=part))
        elif one.process.pid in servers:
            shared.append(replace(one, sm_ratio=0.0))
        else:
            shared.append(one)
    return shared


def take_turns(
    samples: Mapping[int, Sequence[ProcessUtilizationSample]], windows: Sequence[SampledWindow]
) -> Mapping[tuple[int, int], float]:
    """Return corrected percents for windows in which the processes add up to more than the device.

    Some drivers count a kernel from its submission to its end, whether it runs or waits. A process
    then has work for a part of a window, and takes equal turns with other processes that have work
    at the same time. If they work independently, a process ran for its part times the mean of one
    over the number of processes with work. The result is scaled to the device's use. Keys are pid
    and stamp.
    """
    by_stamp: dict[int, list[ProcessUtilizationSample]] = {}
    for own in samples.values():
        for sample in own:
            by_stamp.setdefault(sample.timestamp_us, []).append(sample)
    found: dict[tuple[int, int], float] = {}
    for stamp, together in by_stamp.items():
        window = window_at(windows, stamp) if len(together) > 1 else None
        if window is None or window.end_us != stamp:
            continue
        claimed = sum(sample.sm_percent for sample in together)
        # Each process's value is rounded, and so is the device's.
        if claimed <= window.percent + _ROUNDING_PERCENT * (len(together) + 1):
            continue
        ran = _turns([sample.sm_percent / PERCENT[1] for sample in together])
        scale = window.percent / sum(ran)
        found.update(
            ((sample.pid, stamp), part * scale) for sample, part in zip(together, ran, strict=True)
        )
    return found


def _turns(parts: Sequence[float]) -> list[float]:
    """Return the part of the time that each process ran, given the parts in which it had work.

    The mean of 1 / (1 + k), where k is the number of other processes with work, is the integral
    from 0 to 1 of the product of 1 - p + p x over the others. It is a polynomial, which Gaussian
    quadrature sums.
    """
    ran = [0.0] * len(parts)
    for x, weight in _GAUSS:
        factors = [1 - part + part * x for part in parts]
        product = prod(factors)
        for place, (part, factor) in enumerate(zip(parts, factors, strict=True)):
            ran[place] += weight * part * product / factor
    return ran


def _sort(
    samples: Iterable[ProcessUtilizationSample],
    processes: Mapping[int, ListedProcess],
    newest_us: int,
) -> tuple[dict[int, list[ProcessUtilizationSample]], Counter[str]]:
    """Return the samples of listed processes, by pid; drivers also return invented ones."""
    kept: dict[int, list[ProcessUtilizationSample]] = {}
    dropped: Counter[str] = Counter()
    latest_us = newest_us + _AHEAD_US if newest_us else TIMESTAMP_US[1]
    lowest, highest = PERCENT
    for sample in samples:
        if sample.pid == 0:
            # Drivers pad their answers with empty samples.
            dropped["pid_zero"] += 1
        elif sample.pid not in processes:
            dropped["not_listed"] += 1
        elif not (
            lowest <= sample.sm_percent <= highest
            and lowest <= sample.memory_percent <= highest
            and 0 < sample.timestamp_us <= latest_us
        ):
            dropped["implausible"] += 1
        else:
            kept.setdefault(sample.pid, []).append(sample)
    return kept, dropped


def _shortest_gap_us(kept: Mapping[int, Sequence[ProcessUtilizationSample]]) -> int | None:
    """Return the shortest time between two samples of one process in one answer."""
    gaps = [
        later - earlier
        for own in kept.values()
        for earlier, later in pairwise(sorted(sample.timestamp_us for sample in own))
        if _MIN_WINDOW_US <= later - earlier <= MAX_GAP_US
    ]
    return min(gaps, default=None)
