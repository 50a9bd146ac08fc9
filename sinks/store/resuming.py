"""Going on where the table ends, of the topic of which the table is.

Here live the partitions that were not set there yet, and the refusal to go on with another topic.
Offsets and identities are compared in `sinks.store.stored`.
"""

from collections.abc import Collection, Sequence
from functools import partial

from gpuledger.bus.protocol import Consumer, Gap, GapReason, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import RetryingCaller
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.topics import EVENTS
from sinks.errors import ReceiverUnavailableError
from sinks.protocol import Partitions
from sinks.store.gaps import GapRecorder
from sinks.store.stored import Stored, other_topic, refuse_shorter_topic
from sinks.store.table import EntriesTable, GapsTable, StaleTableError


class Resuming:
    """The partitions that have yet to be set to where the table ends."""

    def __init__(
        self,
        *,
        table: EntriesTable,
        gaps: GapsTable,
        recorder: GapRecorder,
        stored: Stored,
        retrying: RetryingCaller[ReceiverUnavailableError],
        asking_brokers: RetryingCaller[ReceiverUnavailableError],
    ) -> None:
        self._table, self._gaps_table = table, gaps
        self._recorder, self._stored, self._retrying = recorder, stored, retrying
        self._asking_brokers = asking_brokers
        self._unsought: set[TopicPartition] = set()

    @property
    def topic_id(self) -> str | None:
        """The identity of the topic in which partitions were sought."""
        return self._stored.topic_id

    def require(self, partitions: Collection[TopicPartition]) -> None:
        """Have these set to where the table ends before any more is taken of them."""
        self._unsought.update(partitions)

    def cancel(self, partitions: Collection[TopicPartition]) -> None:
        """Leave these to whoever gets them."""
        self._unsought.difference_update(partitions)

    def is_due(self, consumer: Consumer) -> bool:
        """Return whether there are any among what is held."""
        return bool(consumer.assignment() & self._unsought)

    def is_needed(self, partition: TopicPartition) -> bool:
        """Return whether this has yet to be set to where the table ends."""
        return partition in self._unsought

    def settled(self, consumer: Consumer) -> Partitions:
        """Return what is held and of which it is known what is stored."""
        return consumer.assignment() - self._unsought

    async def seek(self, consumer: Consumer) -> Partitions:
        """Set what is needed to where the table ends, and return it.

        Raises UserError where the table is of another topic than the one that is read.
        """
        topic_id = await consumer.topic_id(EVENTS.name)
        if topic_id != self._stored.topic_id:
            # Whatever is held was sought in another topic.
            self.require(consumer.assignment())
        self._stored.topic_id = topic_id
        wanted = consumer.assignment() & self._unsought
        await self._must_be_of_topic(wanted)
        ends = await consumer.end_offsets(wanted)
        for partition in wanted:
            last_offset = self._stored.last_offsets.get(partition, -1)
            refuse_shorter_topic(partition, last_offset=last_offset, end=ends[partition])
            await consumer.seek(partition, last_offset + 1)
        self.cancel(wanted)
        return wanted

    async def topic_id_now(self, consumer: Consumer) -> str | None:
        """Return the identity of the topic as of now, once the brokers have answered.

        Where they give topics none, it is not asked for.
        """
        if self._stored.topic_id is None:
            return None
        # Brokers that do not answer are no failure of the table. Polls go on meanwhile, and say so.
        return await self._asking_brokers(lambda: _ask_topic_id(consumer))

    async def record(self, gaps: Sequence[Gap]) -> None:
        """Write each gap its row, once the table answers."""

        async def record_once() -> None:
            with self._retrying.awaiting():
                await self._recorder.record_once(gaps)

        await self._retrying(record_once)

    async def refuse_rows(
        self, partitions: Collection[TopicPartition], *, topic_id: str | None
    ) -> None:
        """Raise what says that rows of these partitions may be of another topic than was sought.

        StaleTableError where the table has nothing of them, so that they can be read again.
        """
        stored = sorted(self._stored.last_offsets.keys() & partitions)
        if not stored:
            raise StaleTableError(f"the topic {EVENTS.name} was made anew before a row was stored")
        await self._refuse_other_topic(stored, topic_id=topic_id)

    async def _must_be_of_topic(self, wanted: Partitions) -> None:
        """Load what the table has of partitions; see that it is of the topic that there is now."""
        streams = self._stored.names_of(wanted)
        numbers = await self._retrying(lambda: self._ask(streams))
        others = [at for at in sorted(wanted) if not self._stored.learn(at, numbers)]
        if others:
            await self._refuse_other_topic(others, topic_id=self._stored.topic_id)

    async def _ask(self, streams: Sequence[str]) -> dict[str, int]:
        with self._retrying.awaiting():
            return await in_daemon_thread(partial(self._load, streams))

    def _load(self, streams: Sequence[str]) -> dict[str, int]:
        # A reader of `gaps` shall find it empty, not absent.
        self._gaps_table.load([])
        return self._table.load(streams)

    async def _refuse_other_topic(
        self, partitions: Sequence[TopicPartition], *, topic_id: str | None
    ) -> None:
        """Raise UserError, once it is recorded that the rest of the old topic is not known."""
        last_offsets = {at: self._stored.last_offsets.get(at, -1) for at in partitions}
        gaps = [
            Gap(
                partition=partition,
                first_offset=last_offset + 1,
                next_offset=0,
                reason=GapReason.TOPIC_RECREATED,
            )
            for partition, last_offset in last_offsets.items()
        ]
        await self.record(gaps)
        first = partitions[0]
        raise other_topic(first, last_offset=last_offsets[first], topic_id=topic_id)


async def _ask_topic_id(consumer: Consumer) -> str | None:
    """Return the topic's identity of now; raise ReceiverUnavailableError where nobody answers."""
    try:
        return await consumer.topic_id(EVENTS.name)
    except BusUnavailableError as error:
        raise ReceiverUnavailableError(str(error)) from error
