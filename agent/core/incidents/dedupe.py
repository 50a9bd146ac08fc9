"""Which detections are new: several sources see one thing, and readings show it once more.

One source never reports one thing twice. So a detection is a repetition where another source has
one within two seconds that is not paired yet; equal XIDs in a burst are paired one by one, the
oldest first, and each real occurrence leaves exactly one incident, whoever comes first. A reading
of a GPU's health reports only what got worse since the one before, and no event has said.
"""

from collections import OrderedDict, deque
from typing import Final, NamedTuple, TypeVar

from gpuledger.records import GpuHealth
from gpuledger.xids import RECOVERY_ACTION_CHANGED, recovery_action

T = TypeVar("T")
WINDOW_NS: Final = 2_000_000_000
_MAX_KEYS: Final = 256
_MAX_UNPAIRED: Final = 512
_NONE: Final = "none"
_SAME: Final = {
    "row_remap_pending": {"page_retirement_pending", 63},
    "row_remap_failed": {"page_retirement_failed", 64},
    "recovery_action": {"recovery_action", RECOVERY_ACTION_CHANGED},
}

Key = tuple[str, int | str]
"""GPU and XID, or GPU and kind."""


class Deduplicator:
    """The detections that no other source has had yet, a bounded number of them."""

    def __init__(self) -> None:
        self._unpaired: OrderedDict[Key, dict[str, deque[int]]] = OrderedDict()

    def is_new(self, key: Key, *, source: str, time_ns: int, window_ns: int = WINDOW_NS) -> bool:
        """Record a detection; return whether no other source has had it within the window."""
        by_source = self._unpaired.setdefault(key, {})
        self._unpaired.move_to_end(key)
        if len(self._unpaired) > _MAX_KEYS:
            self._unpaired.popitem(last=False)
        for other, times_ns in by_source.items():
            near = (ns for ns in times_ns if abs(ns - time_ns) <= window_ns)
            if other != source and (paired_ns := next(near, None)) is not None:
                # The oldest of equal ones: each is paired once.
                times_ns.remove(paired_ns)
                return False
        by_source.setdefault(source, deque(maxlen=_MAX_UNPAIRED)).append(time_ns)
        return True


class HealthChange(NamedTuple):
    """Something that is worse than it was."""

    kind: str
    action: str | None


def degradations(before: GpuHealth | None, now: GpuHealth) -> list[HealthChange]:
    """Return what has come up between two readings; the first reading says nothing of changes."""
    if before is None:
        return []
    found = []
    asked = now.recovery_action
    if asked and asked != _NONE and before.recovery_action not in (None, asked):
        found.append(HealthChange("recovery_action", recovery_action(asked)))
    if now.remapped_rows_pending and before.remapped_rows_pending is False:
        found.append(HealthChange("row_remap_pending", None))
    if now.remapped_rows_failed and before.remapped_rows_failed is False:
        found.append(HealthChange("row_remap_failed", None))
    return found


def merge(before: GpuHealth | None, now: GpuHealth) -> GpuHealth:
    """Keep what is compared, and the last known value where this reading has none."""
    before = before or GpuHealth()
    return GpuHealth(
        recovery_action=_either(now.recovery_action, before.recovery_action),
        remapped_rows_pending=_either(now.remapped_rows_pending, before.remapped_rows_pending),
        remapped_rows_failed=_either(now.remapped_rows_failed, before.remapped_rows_failed),
    )


def is_covered_by(change: HealthChange, *, kind: str, xid: int | None, action: str | None) -> bool:
    """Return whether an incident said the same; one of a new recovery action has to name it."""
    if kind not in _SAME[change.kind] and xid not in _SAME[change.kind]:
        return False
    return change.kind != "recovery_action" or action == change.action


def _either(now: T | None, before: T | None) -> T | None:
    return before if now is None else now
