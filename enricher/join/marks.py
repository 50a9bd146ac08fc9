"""How far each node is booked, so that a tick that comes twice is booked once, by whomever.

Here lives the state of a worker's partitions; it is written beside the events (`NodeMark`), read
back by who takes a partition over, and forgotten with the partition. It knows no bus.
"""

from typing import Final, NamedTuple

from gpuledger.records import NodeMark, NodeSample
from gpuledger.twins import twin_of

_NodeMark: Final = twin_of(NodeMark)


class Mark(NamedTuple):
    """The last tick of a node that was booked."""

    boot_id: str
    """The kernel's id of the boot."""
    seq: int
    """The tick's number within the boot: milliseconds since it."""
    time_ns: int
    """End of what the tick covers, since the epoch."""
    offset: int
    """Where the tick lies in its partition."""


class NodeMarks:
    """The marks of one partition's nodes, and which of them nobody has written down yet."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark] = {}
        self._advanced: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def of(self, node: str) -> Mark | None:
        """Give the mark of a node, `None` where none of its ticks was booked."""
        return self._marks.get(node)

    def advance(self, sample: NodeSample, *, offset: int) -> None:
        """Remember that this tick is booked."""
        node = sample.node
        self._marks[node] = Mark(sample.boot_id, sample.seq, sample.time_ns, offset)
        self._advanced[node] = None

    def take(self, written: NodeMark) -> None:
        """Take in what was written down before; what is known to be further stays."""
        mark = Mark(written.boot_id, written.seq, written.time_ns, written.offset)
        known = self._marks.get(written.node)
        if known is None or not _is_behind(mark, known):
            self._marks[written.node] = mark

    def remove(self, node: str) -> None:
        """Forget a node; one that is not known is no error."""
        self._marks.pop(node, None)
        self._advanced.pop(node, None)

    def drain(self) -> list[NodeMark]:
        """Give the marks that advanced since the last call, to be written down."""
        advanced, self._advanced = self._advanced, {}
        return [_NodeMark(node=node, **self._marks[node]._asdict()) for node in advanced]


def is_booked(sample: NodeSample, mark: Mark | None, *, offset: int) -> bool:
    """Say whether this tick was booked before.

    `seq` rises within a boot, restarts of the agent included. A tick of another boot is an old one
    where both its place and its time are before the mark's: either alone could be a topic made
    anew or a clock set back.
    """
    if mark is None:
        return False
    if mark.boot_id == sample.boot_id:
        return sample.seq <= mark.seq
    return offset <= mark.offset and sample.time_ns <= mark.time_ns


def _is_behind(mark: Mark, known: Mark) -> bool:
    if mark.boot_id == known.boot_id:
        return mark.seq < known.seq
    return mark.time_ns < known.time_ns
