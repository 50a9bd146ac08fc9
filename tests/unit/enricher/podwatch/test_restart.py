"""Podwatch restarted, or run twice, does not publish again what the topic already has."""

from collections.abc import Callable

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from tests.default_topics import PODS, WATERMARKS
from tests.unit.enricher.podwatch.builders import PatientClock, pod, pod_record, soon
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    event,
    events,
    page,
)
from tests.unit.enricher.podwatch.running import StillClock, decoded, running, states, topic


@pytest.fixture
def settings(server: MisbehavingServer) -> PodwatchSettings:
    return PodwatchSettings(
        kubernetes=KubernetesSettings(url=server.url), tombstone_after_seconds=60
    )


def completion(bus: MemoryBus) -> Callable[[], bool]:
    """Return a condition that holds once a list begun after this call is completely published.

    A watermark shows it: everything in the list was published before the watermark, so nothing
    more can come.
    """
    before = len(bus.kept(WATERMARKS.name))
    return lambda: len(bus.kept(WATERMARKS.name)) >= before + PODS.partitions


async def run_until(
    bus: MemoryBus, settings: PodwatchSettings, expected: dict[str, list[str]], clock: PatientClock
) -> Readiness:
    """Run podwatch until the topic has exactly these states and is complete by its watermarks."""
    readiness, is_complete = Readiness(), completion(bus)
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        try:
            await soon(
                lambda: (
                    is_complete()
                    and readiness.is_ready()
                    and states(bus.kept(PODS.name)) == expected
                )
            )
        except TimeoutError:
            assert states(bus.kept(PODS.name)) == expected  # shows the difference
            raise
    assert states(await topic(bus)) == expected
    return readiness


async def test_a_restart_repeats_nothing_and_misses_nothing(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus = MemoryBus()
    server.lists += [page(pod("same"), pod("changed"), pod("gone"))]
    before = {"same": ["Running"], "changed": ["Running"], "gone": ["Running"]}
    await run_until(bus, settings, before, StillClock())
    server.lists += [
        page(pod("same", version="99"), pod("changed", status={"phase": "Failed"}), pod("new"))
    ]
    after = {
        "same": ["Running"],
        "changed": ["Running", "Failed"],
        "gone": ["Running", "deleted"],
        "new": ["Running"],
    }
    readiness = await run_until(bus, settings, after, StillClock())
    assert readiness.check("pods.known").detail == "3 known pods, 0 of them deleted"


async def test_a_deleted_pod_gets_its_tombstone_even_from_the_next_podwatch(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus = MemoryBus()
    server.lists += [page(pod("a"))]
    server.watches += [events(event("DELETED", pod("a", version="11")), keep=True)]
    await run_until(bus, settings, {"a": ["Running", "deleted"]}, StillClock())
    deletion = decoded((await topic(bus))[-1]).deleted_time_ns or 0
    server.watches.clear()
    clock = PatientClock()
    await run_until(bus, settings, {"a": ["Running", "deleted", "tombstone"]}, clock)
    last = (await topic(bus))[-1]
    assert last.timestamp_ms >= deletion // 10**6 + 60_000


async def test_a_record_that_cannot_be_read_is_published_again(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus = MemoryBus()
    server.lists += [page(pod("a"))] * 2
    await run_until(bus, settings, {"a": ["Running"]}, StillClock())
    (record,) = await topic(bus)
    async with bus.producer() as producer:
        spoiled = Message(key=b"default/a", value=b"{", timestamp_ms=0)
        await producer.publish(PODS.name, record.partition, [spoiled])
    readiness, is_complete = Readiness(), completion(bus)
    async with running(bus=bus, settings=settings, readiness=readiness, clock=StillClock()):
        await soon(lambda: readiness.is_ready() and is_complete())
    assert [one.value for one in await topic(bus)] == [record.value, b"{", record.value]


async def test_a_record_that_is_followed_by_an_older_one_is_published_again(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    """For example if a leader stopped in the middle of a batch: compaction keeps the last."""
    bus = MemoryBus()
    listed = page(pod("a", version="9"), version="20")
    server.lists += [page(pod("a", version="9"), pod("b", version="5")), listed, listed]
    await run_until(bus, settings, {"a": ["Running"], "b": ["Running"]}, StillClock())
    deleted = {"a": ["Running"], "b": ["Running", "deleted"]}
    await run_until(bus, settings, deleted, StillClock())
    late = {uid: pod_record(uid, resource_version="7", phase="Pending") for uid in ("a", "b")}
    partition = (await topic(bus))[0].partition
    async with bus.producer() as producer:
        for uid, record in late.items():
            message = Message(
                key=key_in("default", uid).encode(), value=encode(record), timestamp_ms=0
            )
            await producer.publish(PODS.name, partition, [message])
    healed = {
        "a": ["Running", "Pending", "Running"],
        "b": ["Running", "deleted", "Pending", "deleted"],
    }
    await run_until(bus, settings, healed, StillClock())


async def test_two_podwatches_publish_the_same_and_a_reader_of_the_newest_sees_no_difference(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    """Two are harmless because a record depends only on its pod and has the pod's key.

    Only the time of a deletion differs between them, and the last of two such records counts.
    """
    bus = MemoryBus()
    server.lists += [page(pod("a"), pod("b"))] * 2
    gone = events(event("DELETED", pod("b", version="11")), keep=True)
    server.watches += [gone, gone]
    both = (Readiness(), Readiness())
    async with (
        running(bus=bus, settings=settings, readiness=both[0], clock=StillClock()),
        running(bus=bus, settings=settings, readiness=both[1], clock=StillClock()),
    ):
        await soon(lambda: all(one.is_ready() for one in both) and not server.watches)
        await soon(lambda: states(bus.kept(PODS.name)).get("b", []).count("deleted") >= 2)
    records = await topic(bus)
    of_a = {record.value for record in records if record.key == b"default/a"}
    assert len(of_a) == 1
    assert {key: found[-1] for key, found in states(records).items()} == {
        "a": "Running",
        "b": "deleted",
    }
