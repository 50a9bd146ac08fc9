"""Podwatch as a whole with nodes and namespaces as well as pods, each kind independently."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import Clock
from gpuledger.codec import decoder_of
from gpuledger.keys import key_in, split_key
from gpuledger.records import NamespaceRecord, NodeRecord, Watermark
from gpuledger.records.bounds import MAX_LABEL_LENGTH
from gpuledger.runtime import Readiness
from gpuledger.topics import partition_of_node
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.kinds import KINDS, NAMESPACE, NODE, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_enricher.podwatch.publish import encode_bounded
from tests.default_topics import NAMESPACES, NODES, PODS, TOPICS, WATERMARKS
from tests.unit.enricher.podwatch.builders import CREATED, Object, PatientClock, pod, soon
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer, page, status
from tests.unit.enricher.podwatch.running import StillClock, running


@pytest.fixture
def settings(server: MisbehavingServer) -> PodwatchSettings:
    return PodwatchSettings(
        kubernetes=KubernetesSettings(url=server.url), tombstone_after_seconds=60
    )


def item(uid: str, *, version: str = "7", **metadata: object) -> Object:
    named = {"uid": uid, "name": f"name-{uid}", "resourceVersion": version}
    return {"metadata": named | {"creationTimestamp": CREATED} | metadata}


def reported(bus: MemoryBus, kind: ObjectKind[Any]) -> list[tuple[str, int, str]]:
    """Return a kind's topic as name, partition and state."""
    found = []
    for record in bus.kept(kind.topic(bus.topics).name):
        key = (record.key or b"").decode()
        if record.value is None:
            uid = split_key(key)[1].removeprefix("name-")
            found.append((uid, record.partition, "tombstone"))
            continue
        decoded = kind.decoder(bus.topics).decode(record.value)
        state = "there" if decoded.deleted_time_ns is None else "deleted"
        found.append((decoded.uid, record.partition, state))
    return found


async def run_until(
    bus: MemoryBus, settings: PodwatchSettings, clock: Clock, counts: dict[str, int]
) -> Readiness:
    """Run podwatch until its topics have this many messages, and a little longer."""
    readiness = Readiness()
    async with running(bus=bus, settings=settings, readiness=readiness, clock=clock):
        await soon(
            lambda: (
                {name: len(bus.kept(name)) for name in counts} == counts and readiness.is_ready()
            )
        )
        await asyncio.sleep(0.02)
    assert {name: len(bus.kept(name)) for name in counts} == counts
    return readiness


async def test_nodes_are_placed_with_their_samples_and_namespaces_in_one_partition(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    server.others = {"nodes": [item("n1"), item("n2")], "namespaces": [item("s1"), item("s2")]}
    bus = MemoryBus()
    readiness = await run_until(bus, settings, StillClock(), {NODES.name: 2, NAMESPACES.name: 2})
    places = [
        partition_of_node(key_in("default", f"name-{uid}"), partitions=NODES.partitions)
        for uid in ("n1", "n2")
    ]
    assert sorted(reported(bus, NODE)) == [("n1", places[0], "there"), ("n2", places[1], "there")]
    assert sorted(reported(bus, NAMESPACE)) == [("s1", 0, "there"), ("s2", 0, "there")]
    assert {kind.plural: readiness.check(f"{kind.plural}.api").detail for kind in KINDS} == {
        "pods": "0 pods",
        "pending_pods": "0 pending_pods",
        "nodes": "2 nodes",
        "namespaces": "2 namespaces",
    }


async def test_a_restart_repeats_nothing_finds_deletions_and_later_writes_tombstones(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    bus = MemoryBus()
    server.others = {"nodes": [item("n1"), item("n2")], "namespaces": [item("s1"), item("s2")]}
    await run_until(bus, settings, StillClock(), {NODES.name: 2, NAMESPACES.name: 2})
    # Only the version changes, and one of each kind is gone.
    server.others = {
        "nodes": [item("n1", version="8")],
        "namespaces": [item("s1", version="8")],
    }
    await run_until(bus, settings, StillClock(), {NODES.name: 3, NAMESPACES.name: 3})
    await run_until(
        bus, settings, PatientClock(start_ns=2**62), {NODES.name: 4, NAMESPACES.name: 4}
    )
    for kind, gone in ((NODE, "n2"), (NAMESPACE, "s2")):
        mine = [(place, state) for uid, place, state in reported(bus, kind) if uid == gone]
        assert [state for _, state in mine] == ["there", "deleted", "tombstone"]
        assert len({place for place, _ in mine}) == 1


async def test_without_permission_for_nodes_pods_are_published_and_the_check_names_the_permission(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    server.refused = {"nodes": status(403, reason="Forbidden")}
    server.lists += [page(pod("a"))]
    bus, readiness = MemoryBus(), Readiness()
    async with running(bus=bus, settings=settings, readiness=readiness, clock=PatientClock()):
        await soon(lambda: len(bus.kept(PODS.name)) == 1)
        await soon(lambda: readiness.check("nodes.api").has_failed)
        assert "list and watch on pods, nodes and namespaces" in readiness.check("nodes.api").detail
        assert readiness.check("namespaces.api").is_ok
        assert not readiness.is_ready()
        server.refused.clear()
        await soon(readiness.is_ready)


async def test_watermarks_are_published_only_for_pods_and_only_once_pods_were_listed(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    """Lists and acknowledged records of the other kinds do not move them."""
    listed = asyncio.Event()

    async def once_it_is_time(request: web.Request) -> web.StreamResponse:
        await listed.wait()
        return await page(pod("a"))(request)

    server.others = {"nodes": [item("n1")], "namespaces": [item("s1")]}
    server.lists += [once_it_is_time]
    bus, readiness = MemoryBus(), Readiness()
    async with running(bus=bus, settings=settings, readiness=readiness, clock=StillClock()):
        await soon(lambda: len(bus.kept(NODES.name)) == len(bus.kept(NAMESPACES.name)) == 1)
        await asyncio.sleep(0.02)
        assert not bus.kept(WATERMARKS.name)
        listed.set()
        await soon(lambda: len(bus.kept(WATERMARKS.name)) == PODS.partitions)
    decoder = decoder_of(WATERMARKS.name, Watermark)
    found = [decoder.decode(each.value or b"") for each in bus.kept(WATERMARKS.name)]
    assert {(each.component, each.topic) for each in found} == {("podwatch", PODS.name)}
    assert [each.next_offset for each in found if each.next_offset] == [1]


def test_each_kind_has_watermarks_of_its_own_component() -> None:
    with_watermarks = {
        kind.name: kind.watermark_component for kind in KINDS if kind.watermark_component
    }
    assert tuple(with_watermarks) == pod_metrics.KINDS_WITH_WATERMARKS
    assert len(set(with_watermarks.values())) == len(with_watermarks)


def cut(kind: str) -> float:
    """Return how many records of a kind were cut."""
    name = "gpuledger_podwatch_records_cut_total"
    return REGISTRY.get_sample_value(name, {"kind": kind}) or 0.0


def test_nodes_and_namespaces_with_too_much_are_cut_and_counted() -> None:
    times: dict[str, Any] = {"cluster": "default", "created_time_ns": 1, "resource_version": "7"}
    node = NodeRecord(uid="u", name="n", pool="p" * 500, labels={}, **times)
    notes = {f"a{number}": "x" * 250_000 for number in range(5)}
    space = NamespaceRecord(uid="u", name="n", labels={"a": "b"}, annotations=notes, **times)
    before = cut("node"), cut("namespace")
    found = NODE.decoder(TOPICS).decode(encode_bounded(node, kind=NODE, topics=TOPICS))
    bare = NAMESPACE.decoder(TOPICS).decode(encode_bounded(space, kind=NAMESPACE, topics=TOPICS))
    assert found.pool == "p" * MAX_LABEL_LENGTH
    assert (bare.name, bare.labels, bare.annotations) == ("n", {}, None)
    assert (cut("node"), cut("namespace")) == (before[0] + 1, before[1] + 1)


async def test_a_node_that_cannot_be_read_is_named_and_the_others_are_published(
    server: MisbehavingServer, settings: PodwatchSettings
) -> None:
    server.others["nodes"] = [item("odd", labels=5), item("n1")]
    bus, readiness = MemoryBus(), Readiness()
    async with running(bus=bus, settings=settings, readiness=readiness, clock=StillClock()):
        await soon(lambda: [uid for uid, _, _ in reported(bus, NODE)] == ["n1"])
        check = readiness.check("nodes.objects")
        await soon(lambda: check.has_failed)
        assert check.detail.startswith("cannot read name-odd and 0 others: not a node")
        assert readiness.check("pods.objects").is_ok
