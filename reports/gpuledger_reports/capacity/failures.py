"""Failures of GPUs, derived from incidents, and the minutes that a GPU is idle after one. Pure.

One failure can cause several incidents, such as XID 79 and a lost GPU, or XIDs 48, 95 and 154.
Incidents of one GPU are therefore one failure until an hour passes without another incident.
Incidents that existed when the agent started do not count, because they repeat at each start.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_PAUSE_US: Final = 3_600_000_000
_MINUTE_US: Final = 60_000_000
_MINUTES: Final = 60
CONTAINED_ECC: Final = 94
"""The XID of a memory error that ends only one program. Its severity is not critical, but it counts
as a failure."""
_ECC_XIDS: Final = frozenset({48, 64, CONTAINED_ECC, 95, 140, 156, 171, 172})
_ECC_KINDS: Final = frozenset(
    {
        *("ecc_uncorrected", "page_retirement_failed", "row_remap_failed"),
        *("poison_fatal", "sram_threshold_exceeded"),
    }
)
_LOST_KINDS: Final = frozenset({"gpu_lost", "gpu_unavailable", "agent_ended"})
_LOST_XIDS: Final = frozenset({79})
_XID_KINDS: Final = frozenset({"xid"})
ECC: Final = "ecc"
LOST: Final = "lost"
XID: Final = "xid"
OTHER: Final = "other"
CAUSES: Final = (ECC, LOST, XID, OTHER)
"""The causes of failures. If incidents of a failure have several causes, the first one counts."""

Gpu = tuple[str, str, str]
"""Cluster, node and UUID."""


class SeenIncident(NamedTuple):
    """An incident that is critical, or an ECC error that ended a program."""

    gpu: Gpu
    time_us: int
    kind: str
    xid: int | None
    pods: tuple[str, ...]
    """UIDs of the pods on the GPU."""


@dataclass(kw_only=True)
class Failure:
    """A failure of a GPU."""

    gpu: Gpu
    time_us: int
    """Time of its first incident."""
    last_us: int
    """Time of its last incident."""
    cause: str
    pods: set[str] = field(default_factory=set)
    """UIDs of the pods on the GPU."""


def find_failures(incidents: Iterable[SeenIncident]) -> list[Failure]:
    """Group incidents into failures. `incidents` and the result are in order of time."""
    failures: list[Failure] = []
    latest: dict[Gpu, Failure] = {}
    for each in incidents:
        cause = _cause(each)
        failure = latest.get(each.gpu)
        if failure is None or each.time_us > failure.last_us + _PAUSE_US:
            failure = Failure(gpu=each.gpu, time_us=each.time_us, last_us=each.time_us, cause=cause)
            latest[each.gpu] = failure
            failures.append(failure)
        failure.last_us = each.time_us
        failure.cause = min(failure.cause, cause, key=CAUSES.index)
        failure.pods |= set(each.pods)
    return failures


def _cause(each: SeenIncident) -> str:
    if each.kind in _ECC_KINDS or each.xid in _ECC_XIDS:
        return ECC
    if each.kind in _LOST_KINDS or each.xid in _LOST_XIDS:
        return LOST
    return XID if each.kind in _XID_KINDS else OTHER


class DeviceHour(NamedTuple):
    """Bitmaps of the minutes of an hour in which a device was allocated, used, and free."""

    allocated: int
    used: int
    free: int = 0


def stalled_minutes(begin_us: int, end_us: int, hours: Mapping[int, DeviceHour]) -> int:
    """Return how long a device stayed allocated and unused after a failure, in minutes.

    Counting begins with the minute after the failure, and ends when the device is used or released,
    or at `end_us`. Minutes without a response or without samples do not count, but do not end it
    either. The keys of `hours` are hours since 1970.
    """
    stalled = 0
    for at in range(begin_us // _MINUTE_US + 1, end_us // _MINUTE_US):
        hour, minute = divmod(at, _MINUTES)
        if found := hours.get(hour):
            if (found.used | found.free & ~found.allocated) >> minute & 1:
                break
            stalled += found.allocated >> minute & 1
    return stalled
