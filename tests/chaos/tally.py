"""Compares published ticks with events: lost and repeated ones. Pure, with bounded memory.

A tick takes one byte: whether its event was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from benchmarks.ticks import SEQ_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_AHEAD: Final = 1_000
"""How far an event may be ahead of the last tick whose acknowledgement its agent has seen."""
_EXAMPLES: Final = 5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a run."""

    lost: int
    """Ticks that were published and acknowledged but have no event."""
    duplicated: int
    """Events whose id an earlier event had."""
    strange: int
    """Events of ticks that were never published."""
    examples: list[str] = field(default_factory=list)
    """The first few lost, unexpected or repeated events, by id."""
    alerts: Sequence[str] = ()
    """The alerts that fire. None should, because every component is back within seconds."""

    @property
    def is_kept(self) -> bool:
        """Return whether each published tick has its event, no other exists, and no alert fires."""
        return not (self.lost or self.duplicated or self.strange or self.alerts)

    def as_line(self) -> str:
        """Return the last line of a run."""
        return f"lost {self.lost}, duplicated {self.duplicated}"


class Tally:
    """Counts acknowledged ticks against events; a node's ticks are numbered from 0."""

    def __init__(self, boots: Mapping[str, str]) -> None:
        self._boots = dict(boots)
        self._acknowledged = dict.fromkeys(boots, 0)
        self._seen = {node: bytearray() for node in boots}
        self._examples: list[str] = []
        self.published = 0
        self.seen = 0
        """Number of events with a new id."""
        self.duplicated = 0
        self._strange = 0

    def acknowledge(self, node: str, number: int) -> None:
        """Record the acknowledgement of a tick; a node's ticks are acknowledged in order."""
        if number != self._acknowledged[node]:
            raise ValueError(f"{node}: tick {number} after {self._acknowledged[node]} ticks")
        self._acknowledged[node] += 1
        self.published += 1

    def observe(self, node: str, boot_id: str, seq: int) -> None:
        """Record an event."""
        if not self._is_possible(node, boot_id, seq):
            self._strange += 1
            self._show(f"strange: {node} {boot_id} {seq}")
            return
        seen, number = self._seen[node], seq // SEQ_PER_TICK
        seen.extend(bytes(max(0, number + 1 - len(seen))))
        if not seen[number]:
            seen[number] = True
            self.seen += 1
            return
        self.duplicated += 1
        self._show(f"again: {node} {boot_id} {seq}")

    def judge(self) -> Verdict:
        """Return the verdict, once nothing is in flight any more."""
        lost = list(self._lost())
        named = [f"lost: {node} {self._boots[node]} {seq}" for node, seq in lost[:_EXAMPLES]]
        # A cancelled attempt that the broker has stored was never acknowledged.
        ahead = sum(sum(seen[self._acknowledged[node] :]) for node, seen in self._seen.items())
        return Verdict(
            lost=len(lost),
            duplicated=self.duplicated,
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
            seen = self._seen[node]
            for number in range(count):
                if number >= len(seen) or not seen[number]:
                    yield node, number * SEQ_PER_TICK

    def _show(self, text: str) -> None:
        if len(self._examples) < _EXAMPLES:
            self._examples.append(text)
