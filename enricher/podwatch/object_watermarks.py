"""When podwatch says that the topic of a kind is complete. Pure but for the clock that it is given.

Said is: whatever podwatch had seen by a time is in the topic, before an offset. That holds once a
whole list was acknowledged, and from then on while the kind is watched, so it is renewed every few
seconds. While the API server is away it is not: a watermark that stands still tells of it.
"""

from collections.abc import Sequence
from typing import Final, Generic

from enricher.podwatch.events import Interrupted, Phase, Step
from enricher.podwatch.table import ObjectTable, PendingMessage
from enricher.watched_records import RecordT
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.completeness import RENEWED_AFTER_SECONDS

_RENEWED_AFTER_NS: Final = round(RENEWED_AFTER_SECONDS * NS_PER_SECOND)


class ObjectWatermarks(Generic[RecordT]):
    """Up to which time all that was seen is acknowledged, found without looking at each object.

    The table sends what became due first, and keeps the place of what changes while it waits. So
    all that is due at a time was sent, in that state or a newer one, once the last of it was.
    """

    def __init__(self, *, table: ObjectTable[RecordT], clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._follows = False
        self._due_ns = 0
        self._seen_time_ns: int | None = None
        self._last_due: str | None = None

    def follow(self, step: Step[RecordT]) -> None:
        """Follow the reflector: what it does not say, nobody has seen."""
        match step:
            case Phase.LISTED:
                self._follows, self._due_ns = True, self._clock.monotonic_ns()
            case Phase.WATCHING if not self._follows:
                # The watch goes on where it broke off: what changed meanwhile is on its way.
                self._follows = True
                self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS
            case Phase.LISTING | Interrupted():
                self._follows = False
            case _:
                pass

    def begin(self) -> None:
        """Take note of what is due now, where the watermark is to be renewed."""
        if (
            self._follows
            and self._seen_time_ns is None
            and self._clock.monotonic_ns() >= self._due_ns
        ):
            self._seen_time_ns = self._clock.time_ns()
            self._last_due = self._table.newest_unpublished

    def acknowledge(self, batch: Sequence[PendingMessage[RecordT]]) -> None:
        """Record that a whole batch was acknowledged."""
        if self._last_due is not None and any(each.identity == self._last_due for each in batch):
            self._last_due = None

    def complete_until_ns(self) -> int | None:
        """Return the time up to which all that was seen is acknowledged, where that is to be said.

        It is to be said until `told`, or until `reset`.
        """
        return self._seen_time_ns if self._last_due is None else None

    def told(self) -> None:
        """Record that it was said."""
        self.reset()
        self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS

    def reset(self) -> None:
        """Begin anew: of a batch that failed it is not known which parts were acknowledged."""
        self._seen_time_ns = self._last_due = None
