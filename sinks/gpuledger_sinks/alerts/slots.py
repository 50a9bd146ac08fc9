"""Limits the number of active alerts, and selects the alert to drop for a new one.

The names of nodes and GPUs come from untrusted writers, and the sink examines every active alert at
each poll. The total number of alerts of all partitions of the sink is therefore limited, and the
node with the most alerts loses alerts first. Pure.
"""

from typing import Final, NamedTuple, Protocol

MAX_HELD: Final = 10_000
"""Maximum number of active alerts; each of them is examined at each poll."""
MAX_HELD_OF_NODE: Final = 500
"""Maximum number of active alerts per node: more than its GPUs have incidents of different
kinds."""


Labels = tuple[tuple[str, str], ...]


class SlotOwner(Protocol):
    """The collection that holds an alert."""

    def drop(self, key: Labels) -> object:
        """Forget an alert and free its slot."""


class Held(NamedTuple):
    """An alert that has a slot."""

    key: Labels
    owner: SlotOwner


class LeftOut(NamedTuple):
    """The alerts that were dropped or not activated, because there were too many."""

    number: int
    node: str
    """The node of the last of these alerts."""


class AlertSlots:
    """The slots of all partitions of a sink, by node and in the order in which they were taken."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[Labels, SlotOwner]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        """The nodes by their number of slots."""
        self._count = 0
        self._left_out = LeftOut(0, "")

    def take(self, key: Labels, node: str, owner: SlotOwner) -> None:
        """Assign a slot to an alert, unless it already has one."""
        held = self._by_node.setdefault(node, {})
        if key not in held:
            held[key] = owner
            self._move(node, by=1)

    def free(self, key: Labels, node: str) -> None:
        """Free the slot of an alert, if it has one."""
        held = self._by_node.get(node, {})
        if key in held:
            del held[key]
            self._move(node, by=-1)

    def oldest_to_go(self, node: str) -> Held | None:
        """Return the alert to drop before `node` gets another one, or `None` if there is room.

        If the node has too many alerts, or if no other node has more, it is the node's own oldest
        alert. Otherwise it is the oldest alert of the node with the most alerts.
        """
        own = self._count_of(node)
        if own < MAX_HELD_OF_NODE and self._count < MAX_HELD:
            return None
        largest = max(self._by_count)
        loser = node if own in (MAX_HELD_OF_NODE, largest) else next(iter(self._by_count[largest]))
        return Held(*next(iter(self._by_node[loser].items())))

    def _count_of(self, node: str) -> int:
        return len(self._by_node.get(node, ()))

    def _move(self, node: str, *, by: int) -> None:
        """Record that a node's number of slots changed by `by`, which is 1 or -1."""
        self._count += by
        now = self._count_of(node)
        if before := self._by_count.get(now - by):
            before.pop(node, None)
            if not before:
                del self._by_count[now - by]
        if now:
            self._by_count.setdefault(now, {})[node] = None
        else:
            del self._by_node[node]

    def leave_out(self, node: str) -> None:
        """Count an alert of a node that was dropped or not activated for lack of room."""
        self._left_out = LeftOut(self._left_out.number + 1, node)

    def take_left_out(self) -> LeftOut:
        """Return how many alerts were left out since the last call, and the last one's node."""
        left_out, self._left_out = self._left_out, LeftOut(0, "")
        return left_out
