"""How far each node is booked, so that a tick that comes twice is booked once, by whomever.

Here lives the state of a worker's partitions; it is written beside the events (`NodeMark`), read
back by who takes a partition over, and forgotten with the partition. It knows no bus.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Final

from enricher.join.timing.passage import Booked, Mark, begin_of, time_reached
from gpuledger.records import BootMark, NodeMark, NodeSample
from gpuledger.twins import twin_of

_NodeMark: Final = twin_of(NodeMark)
_BootMark: Final = twin_of(BootMark)
_NS_PER_MS: Final = 1_000_000
# Longer than samples are kept: what was booked before can come again no more.
FORGOTTEN_AFTER_NS: Final = 24 * 3_600 * 10**9
MOST_BOOTS_BEFORE: Final = 4
"""A batch that is sent twice may hold ticks of several boots, where a node rebooted unsent."""


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

    def advance(self, sample: NodeSample, *, offset: int, written_ms: int, now_ns: int) -> None:
        """Remember that this tick is booked, whose record bears the time `written_ms`."""
        node = sample.node
        begun_ns = begin_of(sample.seq, time_ns=min(written_ms * _NS_PER_MS, now_ns))
        mark = Mark(sample.boot_id, sample.seq, sample.time_ns, offset, now_ns, begun_ns)
        if known := self._marks.get(node):
            mark = _after(known, mark)
        self._marks[node] = mark
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
        before = tuple(
            Booked(one.boot_id, one.seq, one.begun_time_ns or 0)
            for one in written.boots_before or ()
        )
        mark = Mark(
            written.boot_id,
            written.seq,
            written.time_ns,
            written.offset,
            heard_ns,
            written.begun_time_ns or 0,
        )
        known = self._marks.get(written.node)
        if known is None or mark.seq >= (known.seq_of(mark.boot_id) or 0):
            told = _boots_of(known) if known else ()
            mark.begun_ns = max(_begins_of(mark.boot_id, (_booked(mark), *told)))
            mark.before = _furthest(mark, before, told)
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
            begun_time_ns=mark.begun_ns,
            boots_before=[
                _BootMark(boot_id=one.boot_id, seq=one.seq, begun_time_ns=one.begun_ns)
                for one in mark.before
            ]
            or None,
        )


def _after(known: Mark, tick: Mark) -> Mark:
    """Give a node's mark after a tick was booked; what came late moves its own boot alone."""
    if tick.boot_id == known.boot_id:
        tick.before = known.before
        if known.begun_ns > tick.begun_ns:  # noqa: PLR1730 - max() costs three times as much, for each tick
            tick.begun_ns = known.begun_ns
        return tick
    if known.seq_of(tick.boot_id) is None:
        tick.before = _furthest(tick, _boots_of(known))
        return tick
    known.before = _furthest(known, known.before, [_booked(tick)])
    known.heard_ns = tick.heard_ns
    return known


def _boots_of(mark: Mark) -> Sequence[Booked]:
    return (_booked(mark), *mark.before)


def _booked(mark: Mark) -> Booked:
    return Booked(mark.boot_id, mark.seq, mark.begun_ns)


def _begins_of(boot_id: str, told: Iterable[Booked]) -> list[int]:
    return [one.begun_ns for one in told if one.boot_id == boot_id]


def _furthest(newest: Mark, *told: Iterable[Booked]) -> tuple[Booked, ...]:
    """Give how far the few boots before the newest are booked, by all that is told of them."""
    boots: dict[str, Booked] = {}
    for one in chain(*told):
        other = boots.get(one.boot_id, one)
        furthest = max(one.seq, other.seq), max(one.begun_ns, other.begun_ns)
        boots[one.boot_id] = Booked(one.boot_id, *furthest)
    boots.pop(newest.boot_id, None)
    return tuple(islice(boots.values(), MOST_BOOTS_BEFORE))
