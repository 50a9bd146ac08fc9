"""A bus in memory on which two nodes ticked and their pods arrived late, joined once."""

import asyncio
import gzip
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpuledger.bus.memory import MAX_PARTITION_RECORDS, MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import Decoder, encode
from gpuledger.keys import key_in, node_key
from gpuledger.records import ContainerRef, GpuEvent, NodeSample
from gpuledger.runtime import Readiness
from gpuledger.topics import Topic, partition_of_node
from gpuledger_cli.replay.range_plan import ReplayRequest, TimeRange
from gpuledger_cli.replay.replay_command import choose_output, replay_range
from gpuledger_cli.replay.run import ReplayOutcome
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_enricher.join.replay_diff import Comparison
from tests.default_topics import EVENTS, PODS, SAMPLES, TOPICS
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.ticks import CONTAINER_IDS, SECOND_NS, UIDS, pod, process, sample

NODES = ("node-a", "node-b")
BEGIN_MS = 1_795_000_000_000
AGAIN = Topic(name="again", record=GpuEvent, key="node")
SETTINGS = JoinSettings(join=JoinTuning(poll_timeout_seconds=0.02, podwatch_timeout_seconds=0))
_EVENTS = Decoder(topic=EVENTS.name, record=GpuEvent)


def new_bus(*, max_partition_records: int = MAX_PARTITION_RECORDS) -> MemoryBus:
    """Return an empty bus with one more topic than the project's."""
    return MemoryBus([*TOPICS, AGAIN], max_partition_records=max_partition_records)


def tick(second: int, node: str = "node-a") -> NodeSample:
    """Return a tick in which the node's first pod was busy, and at times its second one."""
    first = 2 * NODES.index(node)
    busy = [process(container=0, sm_utilization_ratio=0.25)]
    if second % 3:
        busy.append(process(pid=1001, container=1, sm_utilization_ratio=0.125))
    return sample(
        node=node,
        seq=1000 * second,
        time_ns=BEGIN_MS * 10**6 + second * SECOND_NS,
        containers=[
            ContainerRef(pod_uid=UIDS[number], container_id=CONTAINER_IDS[number])
            for number in (first, first + 1)[: len(busy)]
        ],
        processes=busy,
    )


def place_of(node: str, topic: Topic = SAMPLES) -> TopicPartition:
    """Return the partition of a node's records."""
    return TopicPartition(
        topic.name, partition_of_node(key_in("default", node), partitions=topic.partitions)
    )


async def publish_ticks(bus: MemoryBus, ticks: Iterable[NodeSample]) -> None:
    """Publish ticks as agents do."""
    async with bus.producer() as producer:
        for each in ticks:
            message = Message(node_key(each).encode(), encode(each), each.time_ns // 10**6)
            await producer.publish(*place_of(each.node), [message])


async def publish_pod(bus: MemoryBus, number: int, node: str = "node-a") -> None:
    """Publish a pod's record."""
    message = Message(
        key_in("default", UIDS[number]).encode(), encode(pod(number, node=node)), BEGIN_MS
    )
    async with bus.producer() as producer:
        await producer.publish(*place_of(node, PODS), [message])


async def join(bus: MemoryBus, *, events: int) -> None:
    """Run the join until there are this many events."""
    task = asyncio.create_task(run_join(bus=bus, settings=SETTINGS, readiness=Readiness()))
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while len(await read_topic(bus, EVENTS)) < events:  # noqa: ASYNC110  # the join has no event for this
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def read_topic(bus: MemoryBus, topic: Topic) -> list[bytes]:
    """Return the values of a topic, partition by partition."""
    async with bus.reader() as reader:
        return [
            record.value or b""
            for partition, span in (await reader.spans(topic.name)).items()
            async for some in reader.read(partition, span)
            for record in some
        ]


def decoded(values: Iterable[bytes]) -> list[GpuEvent]:
    """Return events."""
    return [_EVENTS.decode(value) for value in values]


def read_lines(path: Path) -> list[bytes]:
    """Return a file's lines, compressed or not."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def names_in(folder: Path) -> list[str]:
    """Return the names of a directory's files."""
    return sorted(each.name for each in folder.iterdir())


@dataclass(kw_only=True)
class Again:
    """A replay and its result."""

    bus: MemoryBus
    begin_second: float = 0
    end_second: float = 60
    output: Path | None = None
    topic: str | None = None
    compare: bool = False
    accept_gaps: bool = False
    lead_in_seconds: float = 300
    comparison: Comparison | None = field(init=False, default=None)

    async def run(self) -> ReplayOutcome:
        """Replay."""
        self.comparison = Comparison(shown=100) if self.compare else None
        request = ReplayRequest(
            wanted=TimeRange(self._ms(self.begin_second), self._ms(self.end_second)),
            lead_in_ms=round(self.lead_in_seconds * 1000),
            lateness_ms=600_000,
            accept_gaps=self.accept_gaps,
            compare=self.compare,
        )
        return await replay_range(
            self.bus,
            self.bus,
            request=request,
            open_output=choose_output(self.output, self.topic, compare=self.compare),
            comparison=self.comparison,
        )

    def _ms(self, second: float) -> int:
        return BEGIN_MS + round(second * 1000)
