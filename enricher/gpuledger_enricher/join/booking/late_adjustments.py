"""Settles processes that ended: moves their unattributed time to their own accounts.

Pure arithmetic on one tick. For each process that ended, the agent sends the driver's account, the
time that ticks already showed for it, and the unattributed time that it has reserved for it. Other
ticks are not needed.
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
"""Maximum time from an end to its sample. An agent reports an end in the first sample that covers
it, and no sample covers more than a day."""
LIFETIME_PARTS: Final = 200
"""Accounting rounds to whole percents, so it cannot resolve less than half a percent: a lifetime
divided by this number."""


def adjust_ends(sample: NodeSample) -> list[LateAdjustment] | None:
    """Return the late adjustments of the processes that ended; `None` if there are none.

    The entries of each sum to zero. Raises `IndexError` if an end points to a GPU or a container
    that the tick does not have.
    """
    # Amounts that an account cannot resolve are dropped: they would be noise in every tick.
    adjusted = [
        _adjust(end, unbooked, sample)
        for end in sample.ended_processes or ()
        if (unbooked := unbooked_ns(end))
    ]
    return adjusted or None


def unbooked_ns(end: ProcessExit) -> int:
    """Return the busy time of a process that no entry has, in nanoseconds; 0 if it is rounding.

    It never exceeds the time reserved for the process, so nothing is taken from other accounts.
    """
    unbooked = min(end.busy_ns - end.sampled_busy_ns, end.reserved_busy_ns)
    return unbooked if unbooked * LIFETIME_PARTS > end.lifetime_ns else 0


def adjusted_ns(adjustments: Iterable[LateAdjustment]) -> int:
    """Return how much busy time these adjustments book on processes, in nanoseconds."""
    # Only positive entries: the counterpart on `unattributed` is negative.
    return sum(
        max(0, entry.busy_ns or 0) for adjustment in adjustments for entry in adjustment.entries
    )


def _adjust(end: ProcessExit, unbooked: int, sample: NodeSample) -> LateAdjustment:
    """Return the entries that move a process's time from `unattributed` to its account."""
    # The GPU itself is not needed here, but readers rely on its row being there.
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
    """Return the begin and the end of the ticks with the process, by the node's clock.

    An end that is not within 25 hours before its tick was stamped by a clock that has been set
    since, or is made up. The range then ends with the tick and keeps its length. Otherwise one tick
    could name a different day for each end, and the store creates a directory for each day.
    """
    if 0 <= sample.time_ns - end.until_time_ns <= MAX_BEHIND_NS:
        return end.from_time_ns, end.until_time_ns
    length_ns = max(0, end.until_time_ns - end.from_time_ns)
    return max(0, sample.time_ns - length_ns), sample.time_ns
