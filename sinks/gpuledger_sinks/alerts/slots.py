"""How many alerts may stand, and whose goes where there would be more.

Names of nodes and of GPUs are anybody's, and each alert that stands is looked at in each turn. So
their number is bounded, over all partitions of the sink, and a node that has many gives way first.
Pure.
"""

from typing import Final, NamedTuple, Protocol

MAX_HELD: Final = 10_000
"""How many alerts of a kind stand at most, incidents or rules: in each turn each is looked at."""
MAX_HELD_OF_NODE: Final = 500
"""How many of one node: more than its GPUs have incidents of different kinds."""


Labels = tuple[tuple[str, str], ...]


class SlotOwner(Protocol):
    """Where an alert stands."""

    def drop(self, key: Labels) -> object:
        """Forget an alert that stands, and give back its slot."""


class Held(NamedTuple):
    """An alert that has a slot."""

    key: Labels
    owner: SlotOwner


class Slots:
    """Who has the slots of one kind of alert, by node and in the order in which they were taken."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[Labels, SlotOwner]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        """The nodes, by how many slots they have."""
        self._count = 0

    def take(self, key: Labels, node: str, owner: SlotOwner) -> None:
        """Record that an alert has a slot; one that has it keeps it."""
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
        """Return what goes for a newer alert of a node: nothing while there is room.

        It is the oldest of the node itself where that has too many, or as many as any; else of
        the node that has the largest number.
        """
        own = self._count_of(node)
        if own < MAX_HELD_OF_NODE and self._count < MAX_HELD:
            return None
        largest = max(self._by_count)
        loser = node if own in (MAX_HELD_OF_NODE, largest) else next(iter(self._by_count[largest]))
        return Held(*next(iter(self._by_node[loser].items())))

    def has_room(self, node: str) -> bool:
        """Return whether an alert of a node may stand, others giving way where it has fewer."""
        own = self._count_of(node)
        if self._count < MAX_HELD:
            return own < MAX_HELD_OF_NODE
        return own + 1 < max(self._by_count)

    def newest_to_go(self) -> Held | None:
        """Return what goes for an alert for which there is room: nothing while slots are free."""
        if self._count < MAX_HELD:
            return None
        loser = next(iter(self._by_count[max(self._by_count)]))
        return Held(*next(reversed(self._by_node[loser].items())))

    def _count_of(self, node: str) -> int:
        return len(self._by_node.get(node, ()))

    def _move(self, node: str, *, by: int) -> None:
        """Note that a node has more slots now, or fewer."""
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


class LeftOut(NamedTuple):
    """Alerts that do not stand, as too many do."""

    number: int
    node: str
    """The node of the last of them."""


class AlertSlots:
    """The slots of all partitions of a sink: too many alerts of one kind take none of the other."""

    def __init__(self) -> None:
        self.incidents = Slots()
        self.rules = Slots()
        self._left_out = LeftOut(0, "")

    def leave_out(self, node: str) -> None:
        """Note that an alert of a node does not stand, as too many do."""
        self._left_out = LeftOut(self._left_out.number + 1, node)

    def take_left_out(self) -> LeftOut:
        """Return what was left out since the last call."""
        left_out, self._left_out = self._left_out, LeftOut(0, "")
        return left_out
