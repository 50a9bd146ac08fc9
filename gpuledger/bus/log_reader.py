"""Reading a topic again, outside any group: the seam of who looks back instead of following.

Here live the protocol and its value type, and what an open transaction withholds from a reader. No
group is joined and nothing is committed, so a reader disturbs nobody. Errors: any method may raise
`BusUnavailableError`.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple, Protocol

from gpuledger.bus import metrics
from gpuledger.bus.protocol import Record, Subscription, TopicPartition, TransactionalBus


class Span(NamedTuple):
    """Offsets of one partition, from `first` up to and without `end`."""

    first: int
    end: int


class HistoryReader(Protocol):
    """Reads any partition of any topic, one at a time; of transactions what was committed."""

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return what is kept of each partition; `TopicsError` where the topic does not exist.

        `first` is above 0 where the bus has removed what was before it.
        """

    async def offsets_at(
        self, places: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset before which every record is older than that.

        Younger records may come before older ones; where none is as young, it is the end.
        """

    def read(self, place: TopicPartition, span: Span) -> AsyncGenerator[Sequence[Record], None]:
        """Return the records of a span in their order, some at a time; one call at a time."""


class History(Protocol):
    """Opens readers."""

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader; leaving the context closes it."""


class WholeBus(TransactionalBus, History, Protocol):
    """A bus that can be followed, written to at once, and looked back on."""


# For how long a consumer has been kept from records that are there: behind an open transaction.
#
# A transaction that nobody ends withholds all that is written to its partition after it, until the
# brokers abort it (`transaction.max.timeout.ms`, 15 minutes). Its consumer sees nothing of that:
# its poll finds no record, as on a partition without any. Brokers tell it beside each answer all
# the same, by two offsets. Pure but for the clock, and one gauge.


class Withheld:
    """Since when each partition has stood before an open transaction."""

    def __init__(
        self, *, subscription: Subscription, clock_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock_seconds = clock_seconds
        self._since: dict[TopicPartition, tuple[int, float]] = {}
        """The offset before which it stands, and when that was seen first."""
        for topic in subscription.topics:
            gauge = metrics.RECORDS_WITHHELD_SECONDS.labels(
                topic=topic, consumer=subscription.group
            )
            gauge.set_function(partial(self._seconds_of, topic))

    def observe(self, offsets: Mapping[TopicPartition, tuple[int, int, int]]) -> None:
        """Record how partitions stand: the position, the last stable and the end offset of each.

        Those that are not named are not read any more.
        """
        now = self._clock_seconds()
        since: dict[TopicPartition, tuple[int, float]] = {}
        for partition, (position, stable, end) in offsets.items():
            if position >= stable and stable < end:
                known = self._since.get(partition)
                # Each transaction withholds what is behind it for a moment: another offset, another
                # transaction.
                since[partition] = known if known and known[0] == stable else (stable, now)
        self._since = since

    def seconds(self) -> float:
        """Return the longest time of all partitions; 0 where nothing is withheld."""
        return self._longest(at for _, at in list(self._since.values()))

    def _seconds_of(self, topic: str) -> float:
        return self._longest(
            at for partition, (_, at) in list(self._since.items()) if partition[0] == topic
        )

    def _longest(self, since: Iterable[float]) -> float:
        begun_at = min(since, default=None)
        return 0.0 if begun_at is None else self._clock_seconds() - begun_at
