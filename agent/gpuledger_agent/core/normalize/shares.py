"""Each process's share of a GPU in an interval, computed from the driver's process samples.

The driver reports whole percents of its own sampling windows. It does not report windows in which a
process did not run, nor the window in which the process ended. Some drivers return one sample per
window, others one sample for the whole time since the last query.
`gpuledger_agent.core.driver_traits` learns which kind a driver is, and thus the time that a sample
covers. Until then, that time is derived from the distance between a process's samples.

Two kinds of samples do not describe a process's own use and are corrected here: samples that add up
to more than the GPU's use (`take_turns`), and samples of an MPS server (`share_server`).
"""

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from math import prod
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuledger.records import ProcessKind
from gpuledger_agent.core.normalize.driver_clock import Cover
from gpuledger_agent.core.normalize.windows import (
    MAX_GAP_US,
    USUAL_WINDOW_US,
    SampledWindow,
    window_at,
)
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
# Stamps that are ahead of the GPU's newest stamp by more than this are dropped, because they would
# hide all later samples.
_AHEAD_US: Final = 60_000_000
# Two lengths that differ by less than this ratio are the same length, measured twice.
_SAME_PERIOD_RATIO: Final = 0.2
# A sample that covers a longer time than this, in windows, covers several.
_MAX_SPAN: Final = 1.5
# Rounding errs by up to half a percent, truncation by up to one.
_ROUNDING_PERCENT: Final = 1
# Maximum part of the covered time in which samples of several windows do not affect the result by
# more than rounding.
_MAX_COARSE: Final = 0.25
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
    """One process's use of one GPU over the time that a tick covers."""

    process: ListedProcess
    """The process, from the driver's latest list that contains it."""
    sm_ratio: float | None
    """Share of the covered time in which the process's kernels ran; `None` if unknown."""
    ended: bool
    """Whether the process has ended but may have run in the covered time."""
    encoder_ratio: float | None = None
    """Share of the covered time in which the video encoders worked for the process; `None` if that
    is zero or unknown."""
    decoder_ratio: float | None = None
    """Share of the covered time in which the video decoders worked for the process; `None` if that
    is zero or unknown."""


class GoneProcess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An ended process that may have run after the end of the last tick's covered time."""

    process: ListedProcess
    """The process, from the driver's last list that contains it."""
    until_us: float
    """Latest possible time of the process's end, by the driver's clock."""


class UsedWindows(NamedTuple):
    """Numbers of windows in which the GPU was used by more than rounding hides."""

    used: int = 0
    """All these windows."""
    short: int = 0
    """Those in which the processes' samples add up to less than the GPU's use, by more than
    rounding explains."""
    full: int = 0
    """Those in which each process has a sample."""
    short_full: int = 0
    """Those that count as both short and full."""

    def plus(self, other: "UsedWindows") -> "UsedWindows":
        """Return the sums of both."""
        return UsedWindows(*map(operator.add, self, other))

    def halved(self) -> "UsedWindows":
        """Return half of each number, rounded down."""
        return UsedWindows(*(number // 2 for number in self))


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Each process's share of one GPU in one tick."""

    usages: list[ProcessUsage]
    """The use of the running processes, then of ended ones."""
    newest_us: int
    """The newest plausible time stamp of a process's sample; 0 if there is none."""
    window_us: int | None
    """The driver's window length; `None` if it is unknown."""
    dropped: Counter[str]
    """Samples left out, by reason."""
    overlaps: bool = False
    """Whether the processes' samples added up to more than the GPU's use, so that `take_turns`
    corrected them."""
    sampled_windows: int = 0
    """Number of windows in the covered time with samples of processes."""
    lost_windows: int = 0
    """Number of these windows without a sample of the GPU."""
    used_windows: UsedWindows = UsedWindows()
    """Numbers of windows in the covered time in which the GPU was used."""
    mixed_windows: int = 0
    """Number of windows in the covered time with samples of several processes."""
    switches: int = 0
    """Number of windows with one process's sample after a window with one of another process, which
    has not ended."""
    falls_short: bool = False
    """Whether the processes' samples add up to less than the GPU's use, by more than rounding and
    ended processes explain."""
    are_coarse: bool = False
    """Whether a process has one sample for several windows in a large part of the covered time. It
    is unknown which of these windows the sample describes."""


def merge_processes(
    listed: Iterable[ListedProcess] | None,
    before: Mapping[int, ListedProcess],
    *,
    memory_bytes: int | None,
    validator: Validator,
) -> Mapping[int, ListedProcess]:
    """Return the processes in the driver's lists by pid.

    A process that is in two lists counts once, with its memory. If a list failed (`listed` is
    `None`), the result is `before`, because the processes listed before are assumed to be still
    running. Callers pass an empty `before` if lists have failed for too long. `memory_bytes` is the
    GPU's memory, the maximum plausible memory of a process.
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
    returned: Collection[int] = (),
    learns: bool = True,
    adds_lost_samples: bool = False,
) -> Shares:
    """Return each process's share of the time that the tick covers (`cover`).

    `running` are the processes listed now, and `before` those listed earlier that may have run in
    the covered time. If `samples` is `None`, the shares are unknown; otherwise a process without
    samples has a share of 0. `window_us` is the known length of the driver's window for process
    samples. If `learns` is false, the samples do not change it. If `adds_lost_samples` is true, the
    only process without a sample in a window gets the use that the other samples lack.
    """
    processes = {**before, **running}
    newest_us = cover.gpu[-1].end_us if cover.gpu else 0
    kept, dropped = _sort(samples or (), processes, newest_us)
    by_stamp = _by_stamp(kept)
    by_end = {window.end_us: window for window in cover.gpu}
    percents = take_turns(by_stamp, by_end)
    if learns:
        periods = (window_us, _shortest_gap_us(kept))
        window_us = min((period for period in periods if period is not None), default=None)
    covers_any = cover.interval is not None and cover.interval.end_us != cover.interval.start_us
    # Without new windows or samples, the shares are unknown. Otherwise, a process without samples
    # ran no kernel.
    is_known = samples is not None and (covers_any or bool(kept)) and not cover.has_gap
    # A single sample of a window of unknown length may belong to a short window.
    max_ratio = 1.0 if window_us is not None or gpu_ratio is None else gpu_ratio
    by_window = _by_window(by_stamp, by_end, cover.gpu, window_us)
    shown: Mapping[int, Sequence[ProcessUtilizationSample]] = kept
    # An ended process has no samples of its last window, so a process that came or went may be the
    # one that used it.
    if adds_lost_samples and window_us is not None and before.keys() == running.keys():
        shown = _with_lost(kept, processes, cover, by_window, window_us)
    # The processes' samples have the same time spans.
    spans = {(one.timestamp_us, one.since_us): one for own in shown.values() for one in own}
    part_of = {
        span: _share(one, cover, by_end, window_us, interval_us) for span, one in spans.items()
    }
    usages, are_coarse = [], False
    for pid, process in processes.items():
        sm_ratio, encoder_ratio, decoder_ratio = 0.0, None, None
        if own := shown.get(pid):
            parts = [(one, part_of[one.timestamp_us, one.since_us]) for one in own]
            percent = sum(
                percents.get((pid, one.timestamp_us), one.sm_percent) * part for one, part in parts
            )
            sm_ratio = min(ratio_of(percent), max_ratio)
            are_coarse |= _coarse_part(parts, window_us) > _MAX_COARSE
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
    sampled_windows, lost_windows = _count_lost(by_stamp, by_end, cover, window_us)
    windows = _covered_windows(by_window, cover)
    mixed_windows, switches = _count_switches(windows, running)
    if returned and gpu_ratio is not None and is_known:
        usages = _with_last_windows(usages, returned, gpu_ratio)
    return Shares(
        usages=sorted(usages, key=lambda usage: usage.ended),
        newest_us=max(by_stamp, default=0),
        window_us=window_us,
        dropped=dropped,
        overlaps=bool(percents),
        sampled_windows=sampled_windows,
        lost_windows=lost_windows,
        used_windows=_count_used(windows, len(processes)),
        mixed_windows=mixed_windows,
        switches=switches,
        falls_short=gpu_ratio is not None and _falls_short(usages, gpu_ratio),
        are_coarse=are_coarse,
    )


def _with_last_windows(
    usages: Sequence[ProcessUsage], returned: Collection[int], gpu_ratio: float
) -> list[ProcessUsage]:
    """Return usages in which processes that left get the GPU's use that no sample shows.

    The driver has no sample of the window in which a process leaves. The missing use is divided
    equally among the processes that left. `returned` are those that came back; the join books the
    part of those that ended.
    """
    missing = gpu_ratio - sum(usage.sm_ratio or 0.0 for usage in usages)
    left = len(returned) + sum(usage.ended for usage in usages)
    part = max(0.0, missing) / left
    return [
        replace(usage, sm_ratio=min(1.0, (usage.sm_ratio or 0.0) + part))
        if usage.process.pid in returned
        else usage
        for usage in usages
    ]


def _count_lost(
    by_stamp: Mapping[int, Sequence[ProcessUtilizationSample]],
    by_end: Mapping[int, SampledWindow],
    cover: Cover,
    window_us: int | None,
) -> tuple[int, int]:
    """Return the numbers of windows with process samples and of those without a GPU's sample."""
    if cover.interval is None or window_us is None or not cover.gpu:
        return 0, 0
    sampled = lost = 0
    margin_us = window_us / 10
    for end_us, together in by_stamp.items():
        start_us = end_us - window_us
        if (
            cover.interval.start_us <= start_us
            and end_us <= cover.interval.end_us
            and any(one.sm_percent > _ROUNDING_PERCENT and not one.since_us for one in together)
        ):
            sampled += 1
            # Usually the GPU has a sample of the same window, which need not be searched for.
            own = by_end.get(end_us)
            if own is None or not own.percent:
                lost += not _is_used(cover.gpu, start_us + margin_us, end_us - margin_us)
    return sampled, lost


def _by_window(
    by_stamp: Mapping[int, Sequence[ProcessUtilizationSample]],
    by_end: Mapping[int, SampledWindow],
    windows: Sequence[SampledWindow],
    window_us: int | None,
) -> Mapping[int, Mapping[int, int]]:
    """Return the processes' percents in each of the GPU's windows, by the window's end and pid.

    The result is empty if a sample covers several windows, which shows nothing about a single one.
    """
    found: dict[int, dict[int, int]] = {window.end_us: {} for window in windows}
    width_us = window_us or USUAL_WINDOW_US
    for stamp, together in by_stamp.items():
        if any(one.since_us and stamp - one.since_us > _MAX_SPAN * width_us for one in together):
            return {}
        window, middle_us = by_end.get(stamp), stamp - width_us // 2
        if window is None or window.start_us >= middle_us:
            window = window_at(windows, middle_us)
        if window:
            percents = found[window.end_us]
            for one in together:
                percents[one.pid] = percents.get(one.pid, 0) + one.sm_percent
    return found


def _covered_windows(
    by_window: Mapping[int, Mapping[int, int]], cover: Cover
) -> list[tuple[SampledWindow, Mapping[int, int]]]:
    """Return the windows that count in this tick, each with the processes' percents by pid.

    A window on the border of two ticks counts in the later one. The border may be in each window.
    """
    interval = cover.interval
    if interval is None or not by_window:
        return []
    return [
        (window, by_window[window.end_us])
        for window in cover.gpu
        if interval.start_us < window.end_us <= interval.end_us
    ]


def _hidden_percent(processes: int) -> int:
    """Return how much of the GPU's use in a window the samples of processes lack by rounding."""
    return _ROUNDING_PERCENT * (processes + 1)


def _count_used(
    windows: Sequence[tuple[SampledWindow, Mapping[int, int]]], processes: int
) -> UsedWindows:
    """Count windows, each with the processes' percents by pid."""
    hidden = _hidden_percent(processes)
    used = [
        (window.percent - sum(percents.values()) > hidden, len(percents))
        for window, percents in windows
        if window.percent > hidden
    ]
    full = [is_short for is_short, sampled in used if sampled == processes]
    short = sum(is_short for is_short, _ in used)
    return UsedWindows(used=len(used), short=short, full=len(full), short_full=sum(full))


def _count_switches(
    windows: Sequence[tuple[SampledWindow, Mapping[int, int]]], running: Collection[int]
) -> tuple[int, int]:
    """Return the numbers of windows of several processes, and of switches between processes."""
    pids = [tuple(percents) for _, percents in windows]
    switches = sum(
        len(before) == len(after) == 1 and before != after and before[0] in running
        for before, after in pairwise(pids)
    )
    return sum(len(own) > 1 for own in pids), switches


def _with_lost(
    kept: Mapping[int, Sequence[ProcessUtilizationSample]],
    processes: Collection[int],
    cover: Cover,
    by_window: Mapping[int, Mapping[int, int]],
    window_us: int,
) -> Mapping[int, Sequence[ProcessUtilizationSample]]:
    """Return the samples, and one for each window in which only one process has none.

    The GPU's use that the samples of the other processes lack in that window is its use.
    """
    found = {pid: list(own) for pid, own in kept.items()}
    for window in cover.gpu:
        percents = by_window.get(window.end_us)
        differs = abs(window.end_us - window.start_us - window_us) >= _SAME_PERIOD_RATIO * window_us
        if not percents or differs or len(processes) - len(percents) != 1:
            continue
        missing = window.percent - sum(percents.values())
        if missing > _hidden_percent(len(processes)):
            pid = next(pid for pid in processes if pid not in percents)
            sample = ProcessUtilizationSample(
                pid=pid,
                timestamp_us=window.end_us,
                sm_percent=missing,
                memory_percent=0,
                since_us=window.start_us,
            )
            found.setdefault(pid, []).append(sample)
    return found


def _is_used(windows: Sequence[SampledWindow], start_us: float, end_us: float) -> bool:
    """Return whether the GPU has a sample above 0 % of a window that overlaps this time."""
    first = bisect_left(windows, start_us, key=attrgetter("end_us"))
    found = takewhile(lambda window: window.start_us < end_us, islice(windows, first, None))
    return any(window.percent for window in found)


def _falls_short(usages: Sequence[ProcessUsage], gpu_ratio: float) -> bool:
    """Return whether the processes' shares lack more of the GPU's use than rounding explains."""
    lacking = gpu_ratio - ratio_of(_hidden_percent(len(usages)))
    for usage in usages:
        if usage.ended or usage.sm_ratio is None:
            return False
        lacking -= usage.sm_ratio
    return lacking > 0


def _share(
    sample: ProcessUtilizationSample,
    cover: Cover,
    by_end: Mapping[int, SampledWindow],
    window_us: int | None,
    interval_us: float,
) -> float:
    """Return the part of the covered time to which a process's sample applies."""
    interval, end_us = cover.interval, sample.timestamp_us
    if interval is None:
        return 1.0 if window_us is None else min(1.0, window_us / interval_us)
    if sample.since_us:
        start_us: float = sample.since_us
    elif window_us is None:
        # The sample covers all the time since the last query.
        return 1.0 if end_us > interval.start_us else 0.0
    else:
        # If processes and GPU are sampled on the same grid, use the width of the GPU's window.
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


def _coarse_part(
    parts: Sequence[tuple[ProcessUtilizationSample, float]], window_us: int | None
) -> float:
    """Return the part of the covered time in which a process has one sample for several windows.

    `parts` are the process's samples, each with the part of the covered time to which it applies.
    """
    long_us = _MAX_SPAN * (window_us or USUAL_WINDOW_US)
    return sum(
        part for one, part in parts if one.since_us and one.timestamp_us - one.since_us > long_us
    )


def _video_ratio(
    parts: Sequence[tuple[ProcessUtilizationSample, float]], engine: str, validator: Validator
) -> float | None:
    """Return the share of the covered time in which the `engine` worked for a process.

    `parts` are the process's samples, each with the part of the covered time to which it applies.
    Return `None` if the share is zero.
    """
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
    """Return usages in which the MPS servers' use is divided equally among the MPS clients.

    The driver reports clients' use under the server's pid, so each client's own use is unknown.
    `servers` are the servers' pids. If the driver lists no clients as such, they are the processes
    without use of their own. If there are none either, the servers keep the use. Return `None` if
    the servers have no use, or the driver reports use of the clients themselves.
    """
    served = sum(one.sm_ratio or 0.0 for one in usages if one.process.pid in servers)
    others = [one for one in usages if one.process.pid not in servers and not one.ended]
    listed = [one for one in others if _is_mps_client(one.process)]
    if not served or any(one.sm_ratio for one in listed):
        return None
    clients = listed or [one for one in others if not one.sm_ratio]
    if not clients:
        return usages
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
    by_stamp: Mapping[int, Sequence[ProcessUtilizationSample]],
    by_end: Mapping[int, SampledWindow],
) -> Mapping[tuple[int, int], float]:
    """Return corrected percents for windows in which the processes' samples exceed the GPU's.

    `by_stamp` contains the samples by time stamp, `by_end` the GPU's windows by end. The keys of
    the result are pid and time stamp of a sample.

    Some drivers count a kernel from its submission to its end, whether it runs or waits. A
    process's sample then shows the part of the window in which the process had work. Processes that
    have work at the same time are assumed to take equal turns. If they work independently of each
    other, a process ran for its part of the window times the mean of 1 / n, where n is the number
    of processes with work. The results are scaled so that they add up to the GPU's use.
    """
    found: dict[tuple[int, int], float] = {}
    for stamp, together in by_stamp.items():
        window = by_end.get(stamp) if len(together) > 1 else None
        if window is None:
            continue
        claimed = sum(sample.sm_percent for sample in together)
        # Allow for the rounding of each process's value and of the device's value.
        if claimed <= window.percent + _ROUNDING_PERCENT * (len(together) + 1):
            continue
        ran = _turns([sample.sm_percent / PERCENT[1] for sample in together])
        scale = window.percent / sum(ran)
        found.update(
            ((sample.pid, stamp), part * scale) for sample, part in zip(together, ran, strict=True)
        )
    return found


def _turns(parts: Sequence[float]) -> list[float]:
    """Return the part of a window in which each process ran, if they take equal turns.

    `parts` are the parts of the window in which each process had work. Let k be the number of other
    processes with work at an instant. The mean of 1 / (1 + k) is the integral from 0 to 1 of the
    product of 1 - p + p x over the other processes, where p is a process's part. The product is a
    polynomial in x, which Gaussian quadrature integrates.
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
    """Return the plausible samples of `processes` by pid, and the number of others by reason.

    `newest_us` is the GPU's newest time stamp; samples with much later stamps are not plausible.
    """
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


def _by_stamp(
    kept: Mapping[int, Sequence[ProcessUtilizationSample]],
) -> Mapping[int, Sequence[ProcessUtilizationSample]]:
    """Return the samples of all processes by time stamp."""
    found: dict[int, list[ProcessUtilizationSample]] = {}
    for own in kept.values():
        for sample in own:
            found.setdefault(sample.timestamp_us, []).append(sample)
    return found


def _shortest_gap_us(kept: Mapping[int, Sequence[ProcessUtilizationSample]]) -> int | None:
    """Return the shortest time between two consecutive samples of one process.

    Times that cannot be the length of a window are ignored. Return `None` if there are no others.
    """
    gaps = [
        later - earlier
        for own in kept.values()
        for earlier, later in pairwise(sorted(sample.timestamp_us for sample in own))
        if _MIN_WINDOW_US <= later - earlier <= MAX_GAP_US
    ]
    return min(gaps, default=None)
