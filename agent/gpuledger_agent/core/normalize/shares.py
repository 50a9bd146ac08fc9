"""What each process had of a GPU in an interval, from the driver's process samples.

The driver gives whole percents of its own sampling windows, nothing for a window in which a process
did not run, and nothing for the window in which it ended. On some drivers there is one sample for
each window, on others one for the whole time since the last query.
`gpuledger_agent.core.gpu_sampler` learns which, and so the time that a sample covers; until then,
the distance between the samples of one process shows it.

Two kinds of samples are not each process's own use, and made into it here: those that come to more
than the device (`take_turns`), and those of a server of MPS (`share_server`).
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
# A stamp further ahead of the GPU's newest would hide every later sample, were it believed.
_AHEAD_US: Final = 60_000_000
# Two periods that differ by less than this are the same one, measured twice.
_SAME_PERIOD_RATIO: Final = 0.2
# Half a percent by rounding to the nearest; one where what is behind the point is cut off.
_ROUNDING_PERCENT: Final = 1
# Gauss and Legendre's points and weights on 0 to 1: exact for 15 others, and close for more.
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
    """One process on one GPU over the covered time."""

    process: ListedProcess
    """The process as it is listed, or was at the tick before."""
    sm_ratio: float | None
    """Share of the covered time in which its kernels ran; `None` where the driver does not say."""
    ended: bool
    """Whether it is gone, and may have run in the covered time."""
    encoder_ratio: float | None = None
    """Share of the covered time in which the video encoders worked for it; `None` where none is
    known of."""
    decoder_ratio: float | None = None
    """The same of the video decoders."""


class GoneProcess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process that ended and may have run in time that no tick has covered yet."""

    process: ListedProcess
    """The process as it was listed."""
    until_us: float
    """It ended no later than this, by the driver's clock."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one GPU in one tick."""

    usages: list[ProcessUsage]
    """Those that run, then those that ended."""
    newest_us: int
    """The newest time stamp that can be true, 0 where there was none."""
    window_us: int | None
    """The driver's window, as far as it has shown."""
    dropped: Counter[str]
    """Samples left out, by reason."""
    overlaps: bool = False
    """Whether the processes' samples came to more than the device, and were taken for the time from
    submission to end."""


def merge_processes(
    listed: Iterable[ListedProcess] | None,
    before: Mapping[int, ListedProcess],
    *,
    memory_bytes: int | None,
    validator: Validator,
) -> Mapping[int, ListedProcess]:
    """Merge the driver's lists by pid: a process in two of them holds its memory once.

    Where a list failed, the processes of the tick before are taken to be there still; who calls it
    leaves them out where lists have failed for too long.
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
                # Whoever draws and computes is there to compute.
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

    A process without samples had nothing of it, if samples are given. With `learns` off the samples
    do not show the driver's window: it stays as it is known.
    """
    processes = {**before, **running}
    newest_us = cover.gpu[-1].end_us if cover.gpu else 0
    kept, dropped = _sort(samples or (), processes, newest_us)
    percents = take_turns(kept, cover.gpu)
    if learns:
        periods = (window_us, _shortest_gap_us(kept))
        window_us = min((period for period in periods if period is not None), default=None)
    covers_any = cover.interval is not None and cover.interval.end_us != cover.interval.start_us
    # Without new windows and samples nobody knows; with them, no sample means no kernel.
    is_known = samples is not None and (covers_any or bool(kept)) and not cover.has_gap
    # One sample, of a window whose length has not shown yet, may be of a short one.
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
            # Of most processes both are 0.
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
    """Return which part of the covered time a sample represents."""
    interval, end_us = cover.interval, sample.timestamp_us
    if interval is None:
        return 1.0 if window_us is None else min(1.0, window_us / interval_us)
    if sample.since_us:
        start_us: float = sample.since_us
    elif window_us is None:
        # One sample for all the time since the last query.
        return 1.0 if end_us > interval.start_us else 0.0
    else:
        # The true width is that of the GPU's window, if both are of one grid.
        own = by_end.get(end_us)
        window = own or window_at(cover.gpu, end_us)
        width_us = window.end_us - window.start_us if window else window_us
        differs = abs(width_us - window_us) >= _SAME_PERIOD_RATIO * window_us
        # The gaps of a process that seldom ran show no more than how seldom.
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
    # What rounds to nothing is as absent as nothing.
    return min(ratio_of(percent), 1.0) or None


def _is_mps_client(process: ListedProcess) -> bool:
    return process.kind is ProcessKind.MPS or process.is_mps_client


def share_server(
    usages: Sequence[ProcessUsage], servers: Collection[int]
) -> Sequence[ProcessUsage] | None:
    """Return usages in which the clients of MPS have what was sampled of their server.

    In equal parts: the driver says nothing of any of them. `servers` are the pids of the servers;
    `None` where they were not sampled in the place of their clients.
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
    """Return the percents of processes in windows in which they come to more than the device.

    Some drivers count a kernel from its submission to its end, be it run or not. So a process has
    work for a part of a window, and while others have some, too, they take turns, equal ones. With
    work that comes independently of one another's, a process ran for its part times the mean of
    one over those who have work; that is fitted to the device. By pid and stamp.
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
        # Each is rounded, and so is the device.
        if claimed <= window.percent + _ROUNDING_PERCENT * (len(together) + 1):
            continue
        ran = _turns([sample.sm_percent / PERCENT[1] for sample in together])
        scale = window.percent / sum(ran)
        found.update(
            ((sample.pid, stamp), part * scale) for sample, part in zip(together, ran, strict=True)
        )
    return found


def _turns(parts: Sequence[float]) -> list[float]:
    """Return for which part each runs that has work for a part of the time.

    The mean of 1 / (1 + k), k being how many others have work, is the integral from 0 to 1 of the
    product of 1 - p + p x over the others: a polynomial, which Gauss's rule sums.
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
    """Return the samples of processes that are or were there, by pid; drivers do invent others."""
    kept: dict[int, list[ProcessUtilizationSample]] = {}
    dropped: Counter[str] = Counter()
    latest_us = newest_us + _AHEAD_US if newest_us else TIMESTAMP_US[1]
    lowest, highest = PERCENT
    for sample in samples:
        if sample.pid == 0:
            # Drivers fill up their answers with empty samples.
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
