"""What was published and what came out of it: who is missing, who came twice. Pure, and bounded.

A tick costs eight bytes here: a digest of the books of its first event.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from benchmarks.ticks import SEQ_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Mode = Literal["at_least_once", "exactly_once"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
MAX_AHEAD: Final = 1_000
"""How far an event may be ahead of what its node's agent knows to be acknowledged."""
_EXAMPLES: Final = 5
_NOT_SEEN: Final = 0
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run comes to."""

    lost: int
    """Ticks that were published and acknowledged and have no event."""
    repeated: int
    """Events whose id another event had before."""
    differing: int
    """Those of them with other books than the first."""
    strange: int
    """Events of ticks that nobody published."""
    examples: list[str] = field(default_factory=list)
    """The first few of what is lost, strange or there again, by id."""

    def duplicated(self, mode: Mode) -> int:
        """Return the events that break the promise of the mode by being there twice."""
        return self.repeated if mode == "exactly_once" else self.differing

    def keeps_promise(self, mode: Mode) -> bool:
        """Return whether the run was as the mode promises."""
        return not (self.lost or self.strange or self.duplicated(mode))

    def as_line(self, mode: Mode) -> str:
        """Return the line that a run ends with."""
        duplicated = self.duplicated(mode)
        return f"{mode}: lost {self.lost}, duplicated {duplicated}, repeated {self.repeated}"


class Tally:
    """Counts acknowledged ticks against events; a node's ticks have the numbers 0, 1, 2 and on."""

    def __init__(self, boots: Mapping[str, str]) -> None:
        self._boots = dict(boots)
        self._acknowledged = dict.fromkeys(boots, 0)
        self._digests = {node: array("Q") for node in boots}
        self._examples: list[str] = []
        self.published = 0
        self.seen = 0
        """Events with a new id."""
        self.repeated = 0
        self._differing = 0
        self._strange = 0

    def acknowledge(self, node: str, number: int) -> None:
        """Note that a tick was acknowledged; each node's come in their order."""
        if number != self._acknowledged[node]:
            raise ValueError(f"{node}: tick {number} after {self._acknowledged[node]} ticks")
        self._acknowledged[node] += 1
        self.published += 1

    def see(self, node: str, boot_id: str, seq: int, books: bytes) -> None:
        """Note an event with these books."""
        if not self._is_possible(node, boot_id, seq):
            self._strange += 1
            self._show(f"strange: {node} {boot_id} {seq}")
            return
        digests, number = self._digests[node], seq // SEQ_PER_TICK
        digests.extend([_NOT_SEEN] * (number + 1 - len(digests)))
        digest = _digest(books)
        if digests[number] == _NOT_SEEN:
            digests[number] = digest
            self.seen += 1
            return
        self.repeated += 1
        is_same = digests[number] == digest
        self._differing += not is_same
        self._show(f"{'again' if is_same else 'other books'}: {node} {boot_id} {seq}")

    def judge(self) -> Verdict:
        """Return the verdict, once nothing is on its way any more."""
        lost = list(self._lost())
        named = [f"lost: {node} {self._boots[node]} {seq}" for node, seq in lost[:_EXAMPLES]]
        # A broken-off attempt that the broker has all the same was never acknowledged.
        ahead = sum(
            1
            for node, digests in self._digests.items()
            for digest in digests[self._acknowledged[node] :]
            if digest != _NOT_SEEN
        )
        return Verdict(
            lost=len(lost),
            repeated=self.repeated,
            differing=self._differing,
            strange=self._strange + ahead,
            examples=named + self._examples,
        )

    def _is_possible(self, node: str, boot_id: str, seq: int) -> bool:
        if self._boots.get(node) != boot_id:
            return False
        number, rest = divmod(seq, SEQ_PER_TICK)
        return not rest and number < self._acknowledged[node] + MAX_AHEAD

    def _lost(self) -> Iterator[tuple[str, int]]:
        for node, count in self._acknowledged.items():
            digests = self._digests[node]
            for number in range(count):
                if number >= len(digests) or digests[number] == _NOT_SEEN:
                    yield node, number * SEQ_PER_TICK

    def _show(self, text: str) -> None:
        if len(self._examples) < _EXAMPLES:
            self._examples.append(text)


def _digest(books: bytes) -> int:
    found = hashlib.blake2b(books, digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(found, "little") | 1  # never the mark of what was not seen
