"""Reading a topic again, outside any group: the seam of who looks back instead of following.

Here live the protocol and its value type. No group is joined and nothing is committed, so a reader
disturbs nobody. Errors: any method may raise `BusUnavailableError`.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from gpuledger.bus.protocol import Record, TopicPartition, TransactionalBus


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
