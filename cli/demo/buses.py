"""The bus of a run; on a Kafka its topics are made first, and nobody's records are mixed with."""

import sys
from collections.abc import Iterable, Mapping

from cli.demo.machine import DemoBus
from cli.demo.plan import DemoPlan
from gpuledger.bus.administration import check_topics, create_topics, refuse_other_partitions
from gpuledger.bus.history import History, Span
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import TopicPartition
from gpuledger.errors import TopicsError, UnavailableError, UserError
from gpuledger.settings import KafkaSettings


async def open_bus(plan: DemoPlan) -> DemoBus:
    """Return the bus of a run; raises `UserError`, with nothing written, where it cannot be had."""
    if plan.kafka is None:
        return MemoryBus()
    try:
        return await _open_kafka(plan.kafka, reuse_topics=plan.reuse_topics)
    except (UnavailableError, TopicsError) as error:
        raise UserError(f"--bus kafka://{plan.kafka.bootstrap_servers}: {error}") from error


async def _open_kafka(settings: KafkaSettings, *, reuse_topics: bool) -> KafkaBus:
    bus = KafkaBus(settings)
    found = await check_topics(settings)
    refuse_other_partitions(found)
    missing = [line.topic for line in found if line.status == "missing"]
    if not reuse_topics:
        await refuse_used_topics(bus, (one.topic for one in found if one.topic not in missing))
    if missing:
        _show(f"making {len(missing)} topics on {settings.bootstrap_servers} … ")
        done = "failed"
        try:
            await create_topics(settings)
            done = "done"
        finally:
            _show(f"{done}\n")
    return bus


async def refuse_used_topics(bus: History, topics: Iterable[str]) -> None:
    """Raise `TopicsError` where a topic holds records, for the demo's would mix with them."""
    async with bus.reader() as reader:
        for topic in topics:
            if holds_records(await reader.spans(topic)):
                raise TopicsError(
                    f"{topic} holds records already, and the demo's would mix with them; name "
                    "a broker without them, or, where they are an earlier demo's, add "
                    "--reuse-topics"
                )


def holds_records(spans: Mapping[TopicPartition, Span]) -> bool:
    """Return whether any partition keeps anything."""
    return any(span.end > span.first for span in spans.values())


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
