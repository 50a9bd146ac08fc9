"""The nodes of whose new ticks none is booked: each counts as booked before, or runs ahead.

A node's `seq` never falls within a boot, so what is sent twice is old. New ticks below the highest
`seq` say that this one was never the node's: a tick has run ahead, and by how much is known. Where
all new ticks run ahead themselves, so far that they are refused, what was booked of the boot was
never the node's. It is told by when a record was written and read, whatever the node says of its
own time.
"""

from dataclasses import dataclass
from typing import Final

from enricher.join import metrics

AFTER_NS: Final = 60 * 10**9
"""For how long new ticks must have come of which none was booked; who reads again what others have
booked is through by then."""
NEW_NS: Final = 60 * 10**9
"""A tick that was written longer ago may be one that is sent, or read, again."""


@dataclass(kw_only=True)
class _NodeHistory:
    partition: int
    first_ns: int
    """When the first tick was read that was not booked, since the last one that was."""
    last_ns: int
    """When the last one was."""
    is_told: bool = False

    @property
    def is_unbooked(self) -> bool:
        return self.last_ns - self.first_ns >= AFTER_NS


class UnbookedNodes:
    """Follows them; memory is bounded by the nodes that have a watermark."""

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeHistory] = {}

    def __bool__(self) -> bool:
        """Return whether there may be one."""
        return bool(self._nodes)

    def see_duplicate(self, node: str, *, partition: int, written_ns: int, now_ns: int) -> bool:
        """Record that a tick counts as booked before; return whether the node is to be told of.

        It is told once, until a tick is booked again.
        """
        found = self._see(node, partition=partition, written_ns=written_ns, now_ns=now_ns)
        if found is None:
            return False
        is_new, found.is_told = not found.is_told, found.is_unbooked
        return is_new and found.is_told

    def see_refused(self, node: str, *, partition: int, written_ns: int, now_ns: int) -> None:
        """Record that a tick was put aside, as it runs ahead: that is told of each."""
        self._see(node, partition=partition, written_ns=written_ns, now_ns=now_ns)

    def _see(
        self, node: str, *, partition: int, written_ns: int, now_ns: int
    ) -> _NodeHistory | None:
        """Record that a tick was not booked; `None` where it may be one that comes again."""
        if abs(now_ns - written_ns) > NEW_NS:
            return None
        found = self._nodes.get(node)
        if found is None or now_ns - found.last_ns > NEW_NS:
            found = _NodeHistory(partition=partition, first_ns=now_ns, last_ns=now_ns)
            self._nodes[node] = found
        found.last_ns = now_ns
        return found

    def see_booked(self, node: str) -> None:
        """Record that a tick of the node was booked."""
        self._nodes.pop(node, None)

    def show(self, now_ns: int) -> None:
        """Count those that there are; one that has gone silent is none."""
        gone = [name for name, one in self._nodes.items() if now_ns - one.last_ns > NEW_NS]
        for name in gone:
            del self._nodes[name]
        metrics.NODES_UNBOOKED.set(sum(one.is_unbooked for one in self._nodes.values()))

    def forget(self, partition: int) -> None:
        """Forget the nodes of a partition that is no longer held."""
        self._nodes = {name: one for name, one in self._nodes.items() if one.partition != partition}
        metrics.NODES_UNBOOKED.set(sum(one.is_unbooked for one in self._nodes.values()))
