"""Reconciles ended processes: moves their unattributed busy time to their pod, job or the host.

Pure arithmetic on one tick; other ticks are not needed. For each process that ended, the agent
sends the busy time from the driver's accounting, the busy time that earlier ticks contained, and
the unattributed busy time that the agent reserved for the process.
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
"""Maximum time from the end of a process to the sample that reports it. An agent reports an end in
the first sample that covers it, and no sample covers more than a day."""
LIFETIME_PARTS: Final = 200
"""Amounts up to half a percent of a process's lifetime, which is the lifetime divided by this
number, are not booked. The driver's accounting cannot resolve less, because it rounds to whole
percents."""


def adjust_ends(sample: NodeSample) -> list[LateAdjustment] | None:
    """Return the late adjustments of the processes that ended; `None` if there are none.

    The entries of each adjustment sum to zero. Raise `IndexError` if an ended process refers to a
    GPU or a container that the tick does not have.
    """
    # Amounts below the resolution of accounting are dropped: they would be noise in every tick.
    adjusted = [
        _adjust(end, unbooked, sample)
        for end in sample.ended_processes or ()
        if (unbooked := unbooked_ns(end))
    ]
    return adjusted or None


def unbooked_ns(end: ProcessExit) -> int:
    """Return the busy time of an ended process that no entry contains yet, in nanoseconds.

    The result is 0 if the difference may be due to rounding. It is at most the time that was
    reserved for the process, so that other users lose nothing.
    """
    unbooked = min(end.busy_ns - end.sampled_busy_ns, end.reserved_busy_ns)
    return unbooked if unbooked * LIFETIME_PARTS > end.lifetime_ns else 0


def adjusted_ns(adjustments: Iterable[LateAdjustment]) -> int:
    """Return the busy time that is moved from `unattributed` to users, in nanoseconds."""
    # Only positive entries: the counterpart on `unattributed` is negative.
    return sum(
        max(0, entry.busy_ns or 0) for adjustment in adjustments for entry in adjustment.entries
    )


def _adjust(end: ProcessExit, unbooked: int, sample: NodeSample) -> LateAdjustment:
    """Return the adjustment that moves a process's busy time from `unattributed` to its user."""
    # The GPU itself is not needed here, but consumers rely on the existence of its row.
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
    """Return the start and the end of the ticks that contain the process, by the node's clock.

    The agent reports both times. If the end is not within the 25 hours before the tick that reports
    it, the clock was set in the meantime, or the time is forged. The returned times then have the
    same distance, but end with the reporting tick. Without this limit, one tick could report times
    on many different days, and the store would create a directory for each day.
    """
    if 0 <= sample.time_ns - end.until_time_ns <= MAX_BEHIND_NS:
        return end.from_time_ns, end.until_time_ns
    length_ns = max(0, end.until_time_ns - end.from_time_ns)
    return max(0, sample.time_ns - length_ns), sample.time_ns
