"""How far each node is booked, so that a tick that comes twice is booked once, by whomever.

Here lives the state of a worker's partitions; it is written beside the events (`NodeMark`), read
back by who takes a partition over, and forgotten with the partition. It knows no bus.
"""

from typing import Final

from enricher.join.timing.passage import Mark, time_reached
from gpuledger.records import NodeMark, NodeSample
from gpuledger.twins import twin_of

_NodeMark: Final = twin_of(NodeMark)
# Longer than samples are kept: what was booked before can come again no more.
FORGOTTEN_AFTER_NS: Final = 24 * 3_600 * 10**9


class NodeMarks:
    """The marks of one partition's nodes, and which of them nobody has written down yet.

    Memory is bounded by the nodes that were heard of within a day.
    """

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._advanced: dict[str, None] = {}
        self._reached_ns: int | None = None
        self._left_of_round = 0

    def __len__(self) -> int:
        return len(self._marks)

    def of(self, node: str) -> Mark | None:
        """Give the mark of a node, `None` where none of its ticks was booked."""
        return self._marks.get(node)

    def advance(self, sample: NodeSample, *, offset: int, now_ns: int) -> None:
        """Remember that this tick is booked."""
        node = sample.node
        self._marks[node] = Mark(sample.boot_id, sample.seq, sample.time_ns, offset, now_ns)
        self._advanced[node] = None
        self._left_of_round -= 1

    def reached_ns(self, now_ns: int) -> int | None:
        """Give the time that the partition has reached; `None` before its first tick.

        It is found anew once in as many ticks as there are nodes: a round costs as much as they.
        """
        if self._left_of_round <= 0 and self._marks:
            self._begin_round(now_ns)
        return self._reached_ns

    def _begin_round(self, now_ns: int) -> None:
        self._reached_ns = time_reached(
            (mark.time_ns for mark in self._marks.values()), now_ns=now_ns
        )
        eldest_ns = now_ns - FORGOTTEN_AFTER_NS
        for node in [one for one, mark in self._marks.items() if mark.heard_ns < eldest_ns]:
            del self._marks[node]
            self._advanced[node] = None
        self._left_of_round = len(self._marks)

    def take(self, written: NodeMark, *, heard_ns: int) -> None:
        """Take in what was written down before; what is known to be further stays."""
        mark = Mark(written.boot_id, written.seq, written.time_ns, written.offset, heard_ns)
        known = self._marks.get(written.node)
        if known is None or not _is_behind(mark, known):
            self._marks[written.node] = mark
            self._left_of_round = 0

    def remove(self, node: str) -> None:
        """Forget a node; one that is not known is no error."""
        self._marks.pop(node, None)
        self._advanced.pop(node, None)

    def drain(self) -> list[tuple[str, NodeMark | None]]:
        """Give what changed since the last call: a node's mark, `None` where it was forgotten."""
        advanced, self._advanced = self._advanced, {}
        return [(node, self._written(node)) for node in advanced]

    def _written(self, node: str) -> NodeMark | None:
        mark = self._marks.get(node)
        if mark is None:
            return None
        return _NodeMark(
            node=node,
            boot_id=mark.boot_id,
            seq=mark.seq,
            time_ns=mark.time_ns,
            offset=mark.offset,
        )


def _is_behind(mark: Mark, known: Mark) -> bool:
    if mark.boot_id == known.boot_id:
        return mark.seq < known.seq
    return mark.time_ns < known.time_ns
