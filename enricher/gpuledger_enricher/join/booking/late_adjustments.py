"""Settles processes that ended: what ticks left to nobody goes to those whose it was.

Pure arithmetic over one tick: its agent says beside the driver's account of a process what ticks
said of it, and what of their time it has set aside for it. Nothing here knows another tick.
"""

from collections.abc import Iterable
from typing import Final

from gpuledger.clock import NS_PER_HOUR
from gpuledger.records import (
    BusyMethod,
    Category,
    Entry,
    LateAdjustment,
    NodeSample,
    ProcessExit,
)

MAX_BEHIND_NS: Final = 25 * NS_PER_HOUR
"""How far before its tick an end may lie: an agent tells of it in the first tick that covers it,
and no tick covers more than a day."""
LIFETIME_PARTS: Final = 200
"""The rounding of a whole percent: what is no more than one of so many parts of a process's life,
its account cannot tell."""


def adjust_ends(sample: NodeSample) -> list[LateAdjustment] | None:
    """Return the late adjustments of the processes that ended; `None` if there are none.

    The entries of each sum to zero. Raises `IndexError` where an end points to a GPU or a container
    that the tick does not have.
    """
    # Without what an account cannot tell: an adjustment of nothing would be noise in every tick.
    adjusted = [
        _adjust(end, unbooked, sample)
        for end in sample.ended_processes or ()
        if (unbooked := unbooked_ns(end))
    ]
    return adjusted or None


def unbooked_ns(end: ProcessExit) -> int:
    """Return the busy time of a process that no entry has, in nanoseconds; 0 where nobody knows.

    It is never more than what was set aside for it, so that nothing is taken from anybody.
    """
    unbooked = min(end.busy_ns - end.sampled_busy_ns, end.reserved_busy_ns)
    return unbooked if unbooked * LIFETIME_PARTS > end.lifetime_ns else 0


def adjusted_ns(adjustments: Iterable[LateAdjustment]) -> int:
    """Return how much busy time these adjustments book on its users, in nanoseconds."""
    # What is owed alone: its counterpart on `unattributed` is below zero.
    return sum(
        max(0, entry.busy_ns or 0) for adjustment in adjustments for entry in adjustment.entries
    )


def _adjust(end: ProcessExit, unbooked: int, sample: NodeSample) -> LateAdjustment:
    """Return entries that book the process's time on its category, and off nobody's."""
    # Nothing of the GPU is needed here, but who counts rows counts on it that it is there.
    if end.gpu >= len(sample.gpus):
        raise IndexError(f"gpu {end.gpu} of {len(sample.gpus)}")
    category, container, job_id = Category.HOST, end.container, None
    if container is not None:
        ref = sample.containers[container]
        if ref.pod_uid is None and ref.job_id is not None:
            category, job_id = Category.JOB, ref.job_id
        elif ref.container_id is not None or ref.pod_uid is not None:
            category = Category.POD
    owed = Entry(
        category=category,
        container=container if category is Category.POD else None,
        busy_ns=unbooked,
        job_id=job_id,
    )
    written_off = Entry(category=Category.UNATTRIBUTED, busy_ns=-unbooked)
    from_time_ns, until_time_ns = _times(end, sample)
    return LateAdjustment(
        gpu=end.gpu,
        pid=end.pid,
        started_boottime_ns=end.started_boottime_ns,
        from_seq=end.from_seq,
        from_time_ns=from_time_ns,
        until_seq=end.until_seq,
        until_time_ns=until_time_ns,
        entries=[owed, written_off],
        busy_method=BusyMethod.ACCOUNTING,
    )


def _times(end: ProcessExit, sample: NodeSample) -> tuple[int, int]:
    """Return where the ticks begin and end in which it was used, by the clock of that tick.

    An end that is not within a day before its tick was stamped by a clock that has been set since,
    or by nobody's: it is told as of the tick, as long as it was. Otherwise one tick could name as
    many days as it has ends, of which the store makes a folder each.
    """
    if 0 <= sample.time_ns - end.until_time_ns <= MAX_BEHIND_NS:
        return end.from_time_ns, end.until_time_ns
    length_ns = max(0, end.until_time_ns - end.from_time_ns)
    return max(0, sample.time_ns - length_ns), sample.time_ns
