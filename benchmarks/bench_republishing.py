"""Events per second and core that the sink rows writes back to Kafka, on a real broker."""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.events import ENTRIES, booked
from benchmarks.figure import Figure
from benchmarks.parts import run_kafka
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import encode
from gpuledger.errors import UnavailableError
from gpuledger.keys import key_in, node_key
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS, TOPICS
from tests.real.end_to_end.components import Component
from tests.real.services.kafka import Kafka

NAME = "republishing"
_NODES: Final = 50
_TICKS: Final = 200
_LONGEST_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.2
_KIND: Final = "rows"


class _Reading(NamedTuple):
    events: float
    cpu_seconds: float
    resident_bytes: float


def run() -> Iterator[Figure]:
    """Yield rate and memory, from events on the topic to committed rows."""
    with run_kafka() as kafka, tempfile.TemporaryDirectory(prefix="gpuledger-bench-") as folder:
        asyncio.run(_publish(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)))
        first, last = _measure(kafka, Path(folder))
        rate = (last.events - first.events) / (last.cpu_seconds - first.cpu_seconds)
        yield Figure(name=f"{NAME}.{_KIND}", value=rate, unit="events/s/core")
        yield Figure(name=f"{NAME}.{_KIND}_memory", value=last.resident_bytes, unit="bytes")


async def _publish(settings: KafkaSettings) -> None:
    await create_topics(settings, TOPICS)
    # Records older than the topic's retention may be deleted before they are read.
    start_ns = time.time_ns() - _TICKS * NS_PER_SECOND
    async with KafkaBus(settings).producer() as producer:
        for node in (f"gpu-node-{number}" for number in range(_NODES)):
            events = (booked(tick, node=node, start_ns=start_ns) for tick in range(_TICKS))
            messages = [
                Message(node_key(one).encode(), encode(one), one.time_ns // NS_PER_MS)
                for one in events
            ]
            at = partition_of_node(key_in(DEFAULT_CLUSTER, node), partitions=EVENTS.partitions)
            await producer.publish(EVENTS.name, at, messages)


def _measure(kafka: Kafka, folder: Path) -> tuple[_Reading, _Reading]:
    """Return a reading of the sink as soon as it writes, and one when it is done."""
    sink = Component(
        name=_KIND,
        command=["gpuledger", "sink", _KIND],
        folder=folder,
        environment={"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers},
    )
    deadline = time.monotonic() + _LONGEST_SECONDS
    sink.start()
    try:
        sink.wait_until_ready()
        first = last = _read(sink)
        while last.events < _NODES * _TICKS:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{_KIND} wrote {last.events:.0f} events: {sink.log_tail()}")
            time.sleep(_POLL_SECONDS)
            last = _read(sink)
    finally:
        sink.stop()
    return first, last


def _read(sink: Component) -> _Reading:
    sent = f'gpuledger_sink_sent_total{{sink="{_KIND}"}}'
    messages = sink.metric(sent) if sent in sink.metrics() else 0.0
    return _Reading(
        events=messages / ENTRIES,
        cpu_seconds=sink.metric("process_cpu_seconds_total"),
        resident_bytes=sink.metric("process_resident_memory_bytes"),
    )
