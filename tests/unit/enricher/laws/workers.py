"""A join of several workers without a bus, run step by step by a test.

Does by hand what a group of workers does over Kafka, so that a test can stop a worker anywhere:
between events and watermarks, or between watermarks and commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gpuledger.bus.protocol import Message, Record
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import DEAD_LETTERS, PROGRESS, TOPICS
from tests.unit.enricher.join.ticks import anywhere
from tests.unit.enricher.laws.topics import BEGIN_NS, PARTITIONS, Topics

WORKERS: Final = 2


class Death(Enum):
    """When a worker dies within a batch."""

    NEVER = "never"
    BEFORE_EVENTS = "before its events are there"
    BEFORE_WATERMARKS = "before its watermarks are there"
    BEFORE_COMMIT = "before its offsets are there"


@dataclass(frozen=True)
class Work:
    """The owner of a partition processes a batch of ticks, and may die meanwhile."""

    partition: int
    ticks: int
    death: Death = Death.NEVER


@dataclass(frozen=True)
class PublishPods:
    """More pods of a partition are published; its owner reads them too."""

    partition: int
    pods: int


@dataclass(frozen=True)
class Move:
    """A partition moves to another worker."""

    partition: int
    worker: int


Step = Work | PublishPods | Move


class Workers:
    """Some workers, and what they have published and committed."""

    def __init__(self, topics: Topics) -> None:
        self.events: list[Message] = []
        self._topics = topics
        self._stages = [_new_stage() for _ in range(WORKERS)]
        self._holder = dict.fromkeys(PARTITIONS, 0)
        self._published_pods = dict.fromkeys(PARTITIONS, 0)
        self._committed = dict.fromkeys(PARTITIONS, 0)
        self._watermarks: dict[int, list[Record]] = {partition: [] for partition in PARTITIONS}

    def follow(self, steps: Sequence[Step]) -> None:
        """Follow the steps, then process the remaining ticks; some pods may stay unpublished."""
        for step in steps:
            self._take(step)
        for partition in PARTITIONS:
            self._take(Work(partition, ticks=len(self._topics.samples[partition])))

    def _take(self, step: Step) -> None:
        match step:
            case Work(partition, ticks, death):
                self._work(partition, ticks, death)
            case PublishPods(partition, pods):
                begin = self._published_pods[partition]
                records = self._topics.pods[partition][begin : begin + pods]
                self._published_pods[partition] += len(records)
                self._stages[self._holder[partition]].take_pods(records)
            case Move(partition, worker):
                self._stages[self._holder[partition]].forget(partition)
                self._assign(partition, worker)

    def _assign(self, partition: int, worker: int) -> None:
        """Read the pods and the watermarks to their end, before any tick."""
        self._holder[partition] = worker
        self._stages[worker].take_pods(
            self._topics.pods[partition][: self._published_pods[partition]]
        )
        self._stages[worker].restore_progress(self._watermarks[partition])

    def _work(self, partition: int, ticks: int, death: Death) -> None:
        stage, begin = self._stages[self._holder[partition]], self._committed[partition]
        records = self._topics.samples[partition][begin : begin + ticks]
        events = stage.take_samples(records)
        watermarks = stage.drain_progress(partition)
        if death is Death.BEFORE_EVENTS:
            return self._die(partition)
        self.events += events
        if death is Death.BEFORE_WATERMARKS:
            return self._die(partition)
        kept = self._watermarks[partition]
        kept += [
            Record(PROGRESS.name, partition, len(kept), each.timestamp_ms, each.key, each.value)
            for each in watermarks
        ]
        if death is Death.BEFORE_COMMIT:
            return self._die(partition)
        self._committed[partition] += len(records)
        return None

    def _die(self, partition: int) -> None:
        """Let a new process take the partitions of the dead one."""
        dead = self._holder[partition]
        self._stages[dead] = _new_stage()
        for each, holder in self._holder.items():
            if holder == dead:
                self._assign(each, dead)


def _new_stage() -> JoinStage:
    dead_letters = DeadLetterQueue(
        consumer="test", producer=_Nowhere(), partitions=1, topic=DEAD_LETTERS
    )
    return JoinStage(
        dead_letters=dead_letters,
        is_placed=anywhere,
        time_ns=lambda: BEGIN_NS + 10**12,
        topics=TOPICS,
    )


class _Nowhere:
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Publish nothing."""
