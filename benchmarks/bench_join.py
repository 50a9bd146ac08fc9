"""The join over a real Kafka: ticks per second and core, against the same join on Quix Streams.

8 GPUs and 20 processes per tick, one tick per batch, as thousands of agents write them; 100,000
pods cached. Also compared with the lower bounds without Kafka, and with the cost of each step.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from prometheus_client import REGISTRY
from typing_extensions import override

from benchmarks.figure import Figure
from benchmarks.join_load import cache_places, cache_pods, publish_one_by_one, publish_pods
from benchmarks.parts import run_kafka
from benchmarks.quix import find_quix, measure_quix
from benchmarks.ticks import Fleet
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus, Message, Record, Subscription
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import Decoder, encode
from gpuledger.records import GpuEvent, NodeSample
from gpuledger.runtime import Check, Readiness
from gpuledger.runtime.readiness import Detail
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings import KafkaSettings
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_enricher.join.pods.describe import DescriptionCache
from gpuledger_enricher.join.stage import make_event
from tests.default_topics import EVENTS, SAMPLES

NAME = "join"
_CACHED_NODES: Final = 10_000
_NODES: Final = 400
_TICKS: Final = 60_000  # 150 of each node: its pods are described once
_PARTITIONS: Final = SAMPLES.partitions
_PER_BATCH: Final = 40
_DEADLINE_SECONDS: Final = 180.0
_RATE: Final = "ticks/s/core"
_MICROSECONDS: Final = "microseconds/tick"

A = TypeVar("A")
B = TypeVar("B")


def run() -> Iterator[Figure]:
    """Measure the join, the other engine, the lower bounds without Kafka, and each step."""
    find_quix()
    fleet = Fleet(nodes=_CACHED_NODES)
    ticks = [encode(fleet.tick(number % _NODES, number // _NODES)) for number in range(_TICKS)]
    steps, event_bytes = _measure_steps(fleet, ticks)
    floors = {
        "codec_floor": 1e6 / (steps["decode"] + steps["encode"]),
        "floor": 1e6 / (steps["decode"] + steps["join"] + steps["encode"]),
    }
    with run_kafka() as kafka:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        joined = asyncio.run(_over_kafka(settings, fleet, ticks))
        steps["poll"], steps["send"] = asyncio.run(_measure_bus(settings))
        quix = measure_quix(settings, nodes=_CACHED_NODES, ticks=_TICKS)
    yield Figure(name="join_ticks_per_core_second", value=joined, unit=_RATE, reference=quix)
    for floor, rate in floors.items():
        yield Figure(name=f"join.of_{floor}", value=joined, unit=_RATE, reference=rate)
    for step in ("poll", "decode", "join", "encode", "send"):
        yield Figure(name=f"join.{step}", value=steps[step], unit=_MICROSECONDS)
    yield Figure(name="join.tick_bytes", value=sum(map(len, ticks)) / _TICKS, unit="bytes/tick")
    yield Figure(name="join.event_bytes", value=event_bytes, unit="bytes/event")


def _measure_steps(fleet: Fleet, ticks: Sequence[bytes]) -> tuple[dict[str, float], float]:
    """Return the microseconds per tick of decoding, joining and encoding, and an event's bytes."""
    descriptions = DescriptionCache(cache_pods(fleet), cache_places(fleet))
    gc.collect()
    gc.freeze()  # as the service does once it has the pods
    decode = Decoder(topic=SAMPLES.name, record=NodeSample).decode
    spent = {"decode": 0.0, "join": 0.0, "encode": 0.0}
    event_bytes = 0
    for tick in ticks:  # one after the other, as the join works: nothing is kept for long
        sample = _timed(spent, "decode", decode, tick)
        event = _timed(spent, "join", lambda it: _join(it, descriptions), sample)
        event_bytes += len(_timed(spent, "encode", encode, event))
    steps = {step: seconds * 1e6 / _TICKS for step, seconds in spent.items()}
    return steps, event_bytes / _TICKS


def _join(sample: NodeSample, descriptions: DescriptionCache) -> GpuEvent:
    books = book_tick(sample)
    return make_event(sample, books, descriptions.describe(sample))


def _timed(spent: dict[str, float], step: str, work: Callable[[A], B], thing: A) -> B:
    """Process one item, and add its CPU seconds to those of the step."""
    begun_ns = time.thread_time_ns()
    made = work(thing)
    spent[step] += (time.thread_time_ns() - begun_ns) / NS_PER_SECOND
    return made


async def _over_kafka(settings: KafkaSettings, fleet: Fleet, ticks: Sequence[bytes]) -> float:
    """Return the join's ticks per second and core."""
    await create_topics(settings)
    await publish_pods(settings, fleet)
    await publish_one_by_one(settings, ticks, nodes=_NODES)
    tuning = JoinTuning(podwatch_timeout_seconds=0)
    return _TICKS / await _join_all(KafkaBus(settings), JoinSettings(join=tuning))


async def _measure_bus(settings: KafkaSettings) -> tuple[float, float]:
    """Return the microseconds per tick of polling ticks and of sending their events."""
    bus = KafkaBus(settings)
    poll_us = await _cpu_seconds(lambda: _poll(bus, SAMPLES.name, _ignore)) * 1e6 / _TICKS
    events: dict[int, list[Message]] = {number: [] for number in range(_PARTITIONS)}
    await _poll(bus, EVENTS.name, lambda each: events[each.partition].append(_again(each)))
    send_us = await _cpu_seconds(lambda: _send(bus, events)) * 1e6 / _TICKS
    return poll_us, send_us


async def _cpu_seconds(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.process_time()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await work()
    return time.process_time() - begun


class _PodsRead(Check):
    """The check that a join sets when it has read its pods; it then starts to read ticks."""

    at_cpu_seconds: float = 0.0

    @override
    def ok(self, detail: Detail = "") -> None:
        super().ok(detail)
        self.at_cpu_seconds = time.process_time()


async def _join_all(bus: Bus, settings: JoinSettings) -> float:
    """Join until all events are committed.

    Returns the CPU seconds since the pods were read.
    """
    wanted, pods = _events_published() + _TICKS, _PodsRead()
    readiness = Readiness(pods=pods)
    join = asyncio.create_task(run_join(bus=bus, settings=settings, readiness=readiness))
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while _events_published() < wanted and not join.done():  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.3)
        return time.process_time() - pods.at_cpu_seconds
    finally:
        await end_tasks(join)


def _events_published() -> float:
    return REGISTRY.get_sample_value("gpuledger_join_events_total") or 0.0


def _ignore(record: Record) -> None:
    """Keep nothing: keeping the polled records would measure the growth of memory."""


def _again(record: Record) -> Message:
    return Message(record.key, record.value, record.timestamp_ms)


async def _poll(bus: Bus, topic: str, take: Callable[[Record], None]) -> None:
    """Read all ticks or events of a topic as the join polls them."""
    tuning, count = JoinTuning(), 0
    async with bus.consumer(Subscription(group=f"read-{topic}", topics=[topic])) as consumer:
        while count < _TICKS:
            batch = await consumer.poll(
                timeout_seconds=tuning.poll_timeout_seconds, max_records=tuning.max_poll_records
            )
            for records in batch.values():
                count += len(records)
                for record in records:
                    take(record)


async def _send(bus: Bus, events: Mapping[int, Sequence[Message]]) -> None:
    """Publish the events in batches as large as the join's."""
    async with bus.producer() as producer:
        for partition, messages in events.items():
            for start in range(0, len(messages), _PER_BATCH):
                batch = messages[start : start + _PER_BATCH]
                await producer.publish(EVENTS.name, partition, batch)
