"""The pods that are known from the topic, whatever it contains."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import HistoryReader, Message, Record, Unreadable, UnreadableReason
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import key_in
from gpuledger.records import PodRecord
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.publish import KnownRecords, read_known
from tests.default_topics import PODS, TOPICS
from tests.unit.enricher.podwatch.builders import PatientClock, pod_record, soon


def value(uid: str, *, phase: str = "Running", deleted_time_ns: int | None = None) -> bytes:
    made: PodRecord = pod_record(uid, phase=phase, deleted_time_ns=deleted_time_ns)
    return encode(made)


def records(*pairs: tuple[str, bytes | None]) -> list[Record]:
    return [
        Record(PODS.name, 0, offset, 0, key_in("default", uid).encode(), value)
        for offset, (uid, value) in enumerate(pairs)
    ]


def phases(known: KnownRecords) -> dict[str, str]:
    return {uid: pod.phase for uid, pod in known.by_identity.items()}


@pytest.mark.parametrize(
    ("pairs", "expected", "undecodable"),
    [
        ([("a", value("a", phase="Pending")), ("a", value("a"))], {"a": "Running"}, 0),
        ([("a", value("a")), ("a", None)], {}, 0),
        ([("a", None), ("a", value("a"))], {"a": "Running"}, 0),
        ([("a", b"{"), ("b", value("b"))], {"b": "Running"}, 1),
        ([("a", value("a")), ("a", b"\xff")], {}, 1),
        ([("a", value("b"))], {}, 1),
    ],
    ids=["newest", "tombstone", "reborn", "undecodable", "undecodable-newest", "other-key"],
)
def test_the_newest_record_of_each_pod_counts(
    pairs: Sequence[tuple[str, bytes | None]], expected: dict[str, str], undecodable: int
) -> None:
    known = KnownRecords(cluster="default", kind=POD, topics=TOPICS)
    known.ingest(records(*pairs))
    assert (phases(known), known.undecodable) == (expected, undecodable)


def test_a_record_without_a_key_is_not_a_pod() -> None:
    known = KnownRecords(cluster="default", kind=POD, topics=TOPICS)
    known.ingest([Record(PODS.name, 0, 0, 0, None, value("a"))])
    assert (known.by_identity, known.undecodable) == ({}, 1)


def test_records_share_equal_values() -> None:
    known = KnownRecords(cluster="default", kind=POD, topics=TOPICS)
    known.ingest(records(("a", value("a")), ("b", value("b"))))
    one, other = known.by_identity["a"], known.by_identity["b"]
    assert one == pod_record("a")
    for part in ("namespace", "node", "labels", "phase", "created_time_ns"):
        assert getattr(one, part) is getattr(other, part)


class FlakyBus(MemoryBus):
    """A bus whose reader breaks off after its first records, a given number of times."""

    def __init__(self, *, failures: int) -> None:
        super().__init__()
        self.failures = failures

    @override
    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        async with super().reader() as reader:
            yield reader
            if self.failures:
                self.failures -= 1
                raise BusUnavailableError("no broker answers")


async def publish(bus: MemoryBus, *messages: tuple[int, str, bytes | None]) -> None:
    async with bus.producer() as producer:
        for partition, uid, content in messages:
            await producer.publish(
                PODS.name, partition, [Message(key_in("default", uid).encode(), content, 0)]
            )


async def test_all_partitions_are_read_to_their_end() -> None:
    bus, readiness = MemoryBus(), Readiness()
    await publish(bus, *((number % 12, f"u{number}", value(f"u{number}")) for number in range(30)))
    await publish(bus, (3, "u3", None), (4, "u4", value("u4", deleted_time_ns=1)))
    known = await read_known(
        cluster="default",
        kind=POD,
        bus=bus,
        check=readiness.check("pods.known"),
        clock=PatientClock(),
    )
    assert known.by_identity.keys() == {f"u{number}" for number in range(30)} - {"u3"}
    check = readiness.check("pods.known")
    assert (check.is_ok, check.detail) == (True, "29 known pods, 1 of them deleted")


async def test_an_unavailable_bus_is_tried_again_after_a_pause() -> None:
    bus, readiness, clock = FlakyBus(failures=3), Readiness(), PatientClock()
    await publish(bus, (0, "a", value("a")))
    known = await read_known(
        cluster="default", kind=POD, bus=bus, check=readiness.check("pods.known"), clock=clock
    )
    assert phases(known) == {"a": "Running"}
    assert len(clock.slept) == 3
    assert clock.slept[2] > clock.slept[0]


async def test_a_missing_topic_is_named_and_waited_for() -> None:
    bus, check, clock = MemoryBus(topics=[]), Readiness().check("pods.known"), PatientClock()
    reading = asyncio.create_task(
        read_known(cluster="default", kind=POD, bus=bus, check=check, clock=clock)
    )
    await soon(lambda: len(clock.slept) >= 2)
    assert "there is no topic 'gpuledger.pods.v1'" in check.detail
    bus.create([PODS])
    assert (await reading).by_identity == {}


def test_an_unreadable_batch_removes_no_pod_and_is_counted() -> None:
    known = KnownRecords(cluster="default", kind=POD, topics=TOPICS)
    why = Unreadable(1, UnreadableReason.DAMAGED, "no zstd")
    known.ingest([*records(("a", value("a"))), Record(PODS.name, 0, 3, 0, None, None, why)])
    assert (phases(known), known.undecodable) == ({"a": "Running"}, 1)
