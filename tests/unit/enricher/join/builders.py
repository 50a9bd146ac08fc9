"""A stage whose clock the test sets, and records as they are read from the topics."""

from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY

from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.keys import key_in
from gpuledger.records import DeadLetter, GpuEvent, PodRecord
from gpuledger_enricher.join.stage import NOWHERE, JoinStage
from tests.default_topics import DEAD_LETTERS, EVENTS, PODS, PROGRESS, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.ticks import SECOND_NS, record, sample

T_NS = 1_790_000_000 * SECOND_NS
_EVENT = Decoder(topic=EVENTS.name, record=GpuEvent)
_DEAD_LETTER = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter)


class Given:
    """A stage, the watermarks of its topic, and the dead letters that it wrote."""

    def __init__(
        self,
        *,
        pending_pod_timeout_seconds: float = 120.0,
        watermarks_from: Mapping[int, int] = NOWHERE,
    ) -> None:
        self.now_ns = T_NS
        self.homes: dict[str, int] = {}
        """Nodes whose records are valid in one partition only."""
        self._producer = KeepingProducer()
        self.dead_letters = DeadLetterQueue(
            consumer="test", producer=self._producer, partitions=1, topic=DEAD_LETTERS
        )
        self.stage = JoinStage(
            dead_letters=self.dead_letters,
            is_placed=lambda node, partition: self.homes.get(node, partition) == partition,
            time_ns=lambda: self.now_ns,
            pending_pod_timeout_seconds=pending_pod_timeout_seconds,
            topics=TOPICS,
            watermarks_from=watermarks_from,
        )
        self._offset = 0

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_ns += round(seconds * SECOND_NS)

    def offer(self, **changes: object) -> list[GpuEvent]:
        """Offer a tick to the stage, and return its event if there is one."""
        self._offset += 1
        values = {"seq": 1000 * self._offset} | changes
        messages = self.stage.take_samples([record(sample(**values), offset=self._offset)])
        return [_EVENT.decode(message.value) for message in messages]

    def take(self, **changes: object) -> GpuEvent:
        """Offer a tick to the stage, and return its event."""
        (event,) = self.offer(**changes)
        return event

    def read_pod(
        self, pod: PodRecord, *, seen_time_ns: int | None = None, partition: int = 3
    ) -> None:
        """Let the stage read a pod's record that podwatch saw at that time, or now."""
        seen_ms = (self.now_ns if seen_time_ns is None else seen_time_ns) // 10**6
        read = record(pod, topic=PODS.name)
        self.stage.take_pods([read._replace(timestamp_ms=seen_ms, partition=partition)])

    def read_tombstone(self, uid: str, *, partition: int = 3) -> None:
        """Let the stage read a pod's tombstone."""
        read = record(None, topic=PODS.name, key=key_in("default", uid))
        self.stage.take_pods([read._replace(partition=partition)])

    def read_watermarks(self, watermarks: Sequence[Message]) -> None:
        """Let the stage read watermarks as the next worker does."""
        self.stage.restore_progress(
            [
                Record(PROGRESS.name, 3, partition, one.timestamp_ms, one.key, one.value)
                for partition, one in enumerate(watermarks)
            ]
        )

    async def rejected_records(self) -> list[DeadLetter]:
        """Return the dead letters."""
        await self.dead_letters.flush()
        return [_DEAD_LETTER.decode(message.value) for message in self._producer.messages()]


def value_of(name: str, **labels: str) -> float:
    """Return the current value of a metric."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
