"""Podwatch as a whole, between an API server that misbehaves and a bus that may be unavailable."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import structlog
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Bus,
    Message,
    Producer,
    Record,
    Subscription,
)
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import key_in
from gpuledger.runtime import Readiness
from gpuledger.topics import partition_of_node
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from tests.default_topics import NAMESPACES, NODES, PENDING_PODS, PODS
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import (
    PatientClock,
    pod,
    soon,
    write_kubeconfig,
)
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    event,
    events,
    halves,
    page,
    status,
)
from tests.unit.enricher.podwatch.running import StillClock, decoded, running


class ShakyBus(MemoryBus):
    """An in-memory bus whose producers fail a given number of times."""

    def __init__(self, *, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield ShakyProducer(bus=self, inner=producer)


class ShakyProducer:
    def __init__(self, *, bus: ShakyBus, inner: Producer) -> None:
        self._bus = bus
        self._inner = inner

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if self._bus.refusals > 0:
            self._bus.refusals -= 1
            raise BusUnavailableError("no broker answers")
        await self._inner.publish(topic, partition, messages)


@pytest.fixture
def settings(server: MisbehavingServer, tmp_path: Path) -> PodwatchSettings:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="secret")
    return PodwatchSettings(
        kubernetes=KubernetesSettings(kubeconfig=str(kubeconfig)), tombstone_after_seconds=60
    )


async def published(bus: Bus, count: int) -> list[Record]:
    """Read the topic of pods from its beginning until it has returned `count` messages."""
    found: list[Record] = []
    subscription = Subscription(group="test", topics=[PODS.name])
    async with asyncio.timeout(HANG_SECONDS), bus.consumer(subscription) as consumer:
        while len(found) < count:
            polled = await consumer.poll(timeout_seconds=1, max_records=count)
            found += [record for records in polled.values() for record in records]
    return found


async def published_phase(bus: Bus, phase: str) -> None:
    """Read the topic until it has a pod in this phase."""
    async with (
        asyncio.timeout(HANG_SECONDS),
        bus.consumer(Subscription(group="phase", topics=[PODS.name])) as consumer,
    ):
        while True:
            polled = await consumer.poll(timeout_seconds=1, max_records=10)
            if any(decoded(one).phase == phase for records in polled.values() for one in records):
                return


async def test_pods_are_published_under_their_uid_on_the_partition_of_their_node(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, readiness, clock = MemoryBus(), Readiness(), PatientClock()
    server.lists += [page(pod("a", node="n1"), pod("b", node="n2"), pod("c", node=None))]
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        first, second = sorted(await published(bus, 2), key=lambda record: record.key or b"")
    for record, uid, node in ((first, "a", "n1"), (second, "b", "n2")):
        assert record.key == key_in("default", uid).encode()
        assert record.partition == partition_of_node(
            key_in("default", node), partitions=PODS.partitions
        )
        assert (decoded(record).uid, decoded(record).node) == (uid, node)


async def test_a_deletion_is_published_with_its_time_and_later_as_a_tombstone(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, clock = MemoryBus(), PatientClock()
    server.lists += [page(pod("a"))]
    server.watches += [events(event("DELETED", pod("a", version="11")), keep=True)]
    async with running(bus=bus, settings=settings, readiness=Readiness(), clock=clock):
        *_, deletion, tombstone = await published(bus, 3)
    assert decoded(deletion).deleted_time_ns is not None
    assert (tombstone.key, tombstone.value) == (b"default/a", None)


async def test_a_pod_missing_from_a_new_list_is_published_as_deleted(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, clock = MemoryBus(), PatientClock()
    server.lists += [page(pod("a"), pod("b")), page(pod("b"), version="50")]
    server.watches += [status(410, reason="Expired")]
    async with running(bus=bus, settings=settings, readiness=Readiness(), clock=clock):
        records = [decoded(record) for record in await published(bus, 3)]
    assert [(one.uid, one.deleted_time_ns is None) for one in records[:2]] == [
        ("a", True),
        ("b", True),
    ]
    assert (records[2].uid, records[2].deleted_time_ns is None) == ("a", False)


async def test_readiness_covers_both_the_api_server_and_kafka(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, readiness, clock = MemoryBus(), Readiness(), PatientClock()
    server.lists += [page(pod("a"))]
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        assert not readiness.is_ready()
        await published(bus, 1)
        await soon(readiness.is_ready)
        assert readiness.check("pods.api").detail == "1 pods"


async def test_podwatch_is_ready_and_silent_while_no_pod_changes(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    readiness = Readiness()
    impatient = msgspec.structs.replace(settings.kubernetes, idle_timeout_seconds=0.2)
    settings = msgspec.structs.replace(settings, kubernetes=impatient)
    server.lists += [page(pod("a"))]
    with structlog.testing.capture_logs() as lines:
        async with running(
            bus=MemoryBus(), settings=settings, readiness=readiness, clock=PatientClock()
        ):
            await soon(lambda: server.kinds().count("watch") > 4)
            assert readiness.is_ready()
    assert [line for line in lines if line["log_level"] != "info"] == []


async def test_a_missing_role_makes_podwatch_unready_and_is_named(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    readiness = Readiness()
    server.lists.extend([status(403, reason="Forbidden")] * 1000)
    async with running(
        bus=MemoryBus(), settings=settings, readiness=readiness, clock=PatientClock()
    ):
        await soon(lambda: "403" in readiness.check("pods.api").detail)
        assert not readiness.is_ready()


async def test_pods_wait_for_an_unavailable_bus(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, readiness, clock = ShakyBus(refusals=3), Readiness(), PatientClock()
    server.lists += [page(pod("a"))]
    server.watches += [events(event("MODIFIED", pod("a", status={"phase": "Failed"})), keep=True)]
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        await published_phase(bus, "Failed")
        await soon(lambda: readiness.check("pods.kafka").is_ok)
    assert bus.refusals == 0


async def test_an_unavailable_bus_makes_podwatch_unready_and_is_not_queried_all_the_time(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus, readiness, clock = ShakyBus(refusals=10**9), Readiness(), StillClock()
    server.lists += [page(pod("a"))]
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        await soon(lambda: "no broker answers" in readiness.check("pods.kafka").detail)
        assert bus.refusals == 10**9 - 1
        assert not readiness.is_ready()


async def test_a_missing_topic_is_named_and_waited_for(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    server.lists.append(page(pod("a")))
    bus, readiness = MemoryBus(topics=[]), Readiness()
    async with running(bus=bus, settings=settings, readiness=readiness, clock=PatientClock()):
        await soon(lambda: "there is no topic 'gpuledger.pods.v1'" in str(readiness.report()))
        assert not readiness.is_ready()
        bus.create([PODS])
        await soon(lambda: readiness.check("pods.known").is_ok)
        # Each kind is independent: pods are published while the others wait for their topics.
        await soon(lambda: len(bus.kept(PODS.name)) == 1)
        assert not readiness.is_ready()
        bus.create([PENDING_PODS, NODES, NAMESPACES])
        await soon(readiness.is_ready)


async def test_a_pod_that_cannot_be_read_is_named_until_it_can_be_or_is_deleted(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    odd = pod("a", metadata={"labels": 5})
    go_on = asyncio.Event()
    server.lists += [page(pod("a"), pod("b"))]
    server.watches += [halves(event("MODIFIED", odd), event("DELETED", odd), go_on=go_on)]
    readiness = Readiness()
    async with running(
        bus=MemoryBus(), settings=settings, readiness=readiness, clock=PatientClock()
    ):
        api, readable = readiness.check("pods.api"), readiness.check("pods.objects")
        await soon(lambda: readable.has_failed)
        assert "cannot read team-red/pod-a" in readable.detail
        assert api.detail == "2 pods"
        go_on.set()
        await soon(lambda: readable.is_ok)
        assert api.detail == "1 pods"
