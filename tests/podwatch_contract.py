"""The podwatch tests for every API server; they keep the simulator's like the real one.

A subclass has fixtures for the clusters: `cluster` may be shared with other tests; `own_cluster`
may be restarted and compacted.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.records import ContainerRequest, PendingContainer
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.events import Deleted, Interrupted, Phase, Upserted
from gpuledger_enricher.podwatch.kinds import NAMESPACE, NODE, PENDING_POD, POD, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from tests.podwatch_cluster import (
    DEADLINE_SECONDS,
    Cluster,
    following,
    published,
    running,
    versions,
)

each_other_kind = pytest.mark.parametrize("kind", [NODE, NAMESPACE], ids=lambda kind: kind.name)


class PodwatchContract:
    """Laws that hold against any API server."""

    @pytest.mark.parametrize("watch_list", ["off", "auto"])
    async def test_existing_pods_are_listed_in_pages_or_by_a_watch(
        self, cluster: Cluster, watch_list: Literal["off", "auto"]
    ) -> None:
        uids = {await cluster.create_pod(f"p{number}") for number in range(5)}
        async with following(cluster, watch_list=watch_list) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            last = await cluster.create_pod("last")
            await found.until_seen(last)
        end = found.steps.index(Phase.LISTED)
        listed = [step.record for step in found.steps[:end] if isinstance(step, Upserted)]
        assert ({pod.uid for pod in listed}, len(listed)) == (uids, 5)
        # Objects missing from a list are deleted at its version, which must exceed their records'.
        assert found.listed_version >= max(int(pod.resource_version) for pod in listed)
        # A watch that lists is one request; pages of two and the watch after them are several.
        assert (len(found.requests) == 1) == (watch_list == "auto")
        assert not any(isinstance(step, Interrupted) for step in found.steps)

    async def test_a_pod_is_followed_from_its_creation_to_its_deletion(
        self, cluster: Cluster
    ) -> None:
        async with following(cluster) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            uid = await cluster.create_pod("web")
            fresh = await found.until_seen(uid)
            await cluster.set_status("web", phase="Running", container_id="c1" * 32)
            running = await found.until_seen(uid, phase="Running")
            await cluster.delete_pod("web")
            await found.until(lambda: any(isinstance(step, Deleted) for step in found.steps))
        assert (fresh.name, fresh.node, fresh.labels) == ("web", "node-a", {"app": "web"})
        (main,) = fresh.containers
        assert main.requested == ContainerRequest(resources={"nvidia.com/gpu": 1})
        assert [one.container_id for one in fresh.containers] == [None]
        assert [one.container_id for one in running.containers] == ["c1" * 32]
        assert int(running.resource_version) > int(fresh.resource_version)
        gone = [step.record for step in found.steps if isinstance(step, Deleted)]
        assert [(pod.uid, pod.phase) for pod in gone] == [(uid, "Running")]
        # So that no earlier record can be taken for newer than the deletion.
        assert int(gone[0].resource_version) > int(running.resource_version)

    async def test_a_pod_without_a_node_is_ignored(self, cluster: Cluster) -> None:
        await cluster.create_pod("unscheduled", node=None)
        async with following(cluster) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            await cluster.create_pod("unscheduled-too", node=None)
            uid = await cluster.create_pod("scheduled")
            await found.until_seen(uid)
        assert {step.record.name for step in found.steps if isinstance(step, Upserted)} == {
            "scheduled"
        }

    async def test_a_pod_that_requests_gpus_waits_until_it_has_a_node(
        self, cluster: Cluster
    ) -> None:
        queue = {"kueue.x-k8s.io/queue-name": "nlp"}
        async with (
            following(cluster, kind=PENDING_POD) as waiting,
            following(cluster) as placed,
        ):
            await waiting.until(lambda: Phase.WATCHING in waiting.steps)
            await placed.until(lambda: Phase.WATCHING in placed.steps)
            await cluster.create_pod("without-gpus", node=None, gpus=0)
            await cluster.create_pod("placed-at-once")
            uid = await cluster.create_pod("train", node=None, gpus=8, labels=queue)
            await waiting.until(lambda: bool(waiting.upserted()))
            message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
            await cluster.refuse("train", reason="Unschedulable", message=message)
            await waiting.until(lambda: waiting.upserted()[-1].reason is not None)
            await cluster.bind("train")
            await waiting.until(lambda: bool(waiting.deleted()))
            pod = await placed.until_seen(uid)
        first, last = waiting.upserted()[0], waiting.upserted()[-1]
        (left,) = waiting.deleted()
        requested = ContainerRequest(resources={"nvidia.com/gpu": 8})
        assert {each.name for each in waiting.upserted()} == {"train"}
        assert first.containers == [PendingContainer(name="main", requested=requested)]
        assert (first.queue, first.labels) == ("nlp", {"app": "train"})
        assert (first.reason, last.reason, last.message) == (None, "Unschedulable", message)
        assert (left.uid, left.reason, left.left_time_ns) == (uid, "Unschedulable", None)
        assert pod.scheduled_time_ns >= first.created_time_ns
        versions_seen = [int(each.resource_version) for each in (first, last, left)]
        assert versions_seen == sorted(set(versions_seen))

    async def test_a_pod_with_a_scheduling_gate_waits_until_it_is_deleted(
        self, cluster: Cluster
    ) -> None:
        gates = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
        async with following(cluster, kind=PENDING_POD) as waiting:
            await waiting.until(lambda: Phase.WATCHING in waiting.steps)
            uid = await cluster.create_pod("gated", node=None, spec=gates)
            await waiting.until(lambda: bool(waiting.upserted()))
            await cluster.delete_pod("gated")
            await waiting.until(lambda: bool(waiting.deleted()))
        (gone,) = waiting.deleted()
        assert (gone.uid, gone.scheduling_gates) == (uid, ["kueue.x-k8s.io/admission"])

    async def test_a_new_list_ends_the_waiting_of_pods_that_got_a_node_in_the_meantime(
        self, own_cluster: Cluster
    ) -> None:
        stays, leaves = [await own_cluster.create_pod(name, node=None) for name in ("a", "b")]
        async with following(own_cluster, kind=PENDING_POD) as before:
            await before.until(lambda: Phase.WATCHING in before.steps)
        await own_cluster.bind("b")
        await own_cluster.force_expired()
        async with following(own_cluster, kind=PENDING_POD, resumed=before) as found:
            await found.until(lambda: Phase.LISTED in found.steps)
        expected = {stays: "alive", leaves: "deleted"}
        assert published([*before.steps, *found.steps], kind=PENDING_POD) == expected

    async def test_a_bookmark_advances_the_version_without_any_pod(self, cluster: Cluster) -> None:
        async with following(cluster, watch_timeout_seconds=4.0) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            listed = int(found.reflector.version or 0)
            await cluster.create_pod("nowhere", node=None)
            await found.until(lambda: int(found.reflector.version or 0) > listed)
        assert not any(isinstance(step, Upserted | Interrupted) for step in found.steps)

    async def test_an_expired_version_leads_to_a_new_list(self, own_cluster: Cluster) -> None:
        await own_cluster.create_pod("old")
        async with following(own_cluster) as before:
            await before.until(lambda: Phase.WATCHING in before.steps)
        await own_cluster.delete_pod("old")
        uid = await own_cluster.create_pod("new")
        await own_cluster.force_expired()
        async with following(own_cluster, resumed=before) as found:
            await found.until(lambda: Phase.LISTED in found.steps)
        end = found.steps.index(Phase.LISTED)
        first = next(step for step in found.steps if isinstance(step, Interrupted))
        assert (first.error.status, first.error.expired) == (410, True)
        assert [step.record.uid for step in found.steps[:end] if isinstance(step, Upserted)] == [
            uid
        ]

    async def test_a_restart_during_a_watch_loses_nothing(self, own_cluster: Cluster) -> None:
        async with following(own_cluster) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            before = await own_cluster.create_pod("before")
            await found.until_seen(before)
            watches = found.steps.count(Phase.WATCHING)
            await own_cluster.restart()
            after = await own_cluster.create_pod("after")
            await found.until_seen(after)
            assert found.steps.count(Phase.WATCHING) > watches

    @each_other_kind
    @pytest.mark.parametrize("watch_list", ["off", "auto"])
    async def test_nodes_and_namespaces_are_listed_in_pages_or_by_a_watch(
        self, cluster: Cluster, kind: ObjectKind[Any], watch_list: Literal["off", "auto"]
    ) -> None:
        uids = {await cluster.create(kind, f"n{number}") for number in range(5)}
        async with following(cluster, kind=kind, watch_list=watch_list) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
        end = found.steps.index(Phase.LISTED)
        listed = [step.record for step in found.steps[:end] if isinstance(step, Upserted)]
        assert ({each.uid for each in listed}, len(listed)) == (uids, 5)
        assert found.listed_version >= max(int(each.resource_version) for each in listed)
        # A watch that lists is one request; pages of two and the watch after them are several.
        assert (len(found.requests) == 1) == (watch_list == "auto")
        assert not any(isinstance(step, Interrupted) for step in found.steps)

    async def test_cordons_of_a_node_are_followed(self, cluster: Cluster) -> None:
        async with following(cluster, kind=NODE) as found:

            def cordons() -> list[bool | None]:
                return [each.unschedulable for each in found.upserted()]

            await found.until(lambda: Phase.WATCHING in found.steps)
            await cluster.create(NODE, "one")
            await cluster.cordon("one", is_cordoned=True)
            await found.until(lambda: True in cordons())
            await cluster.cordon("one", is_cordoned=False)
            await found.until(lambda: cordons()[-1] is False)

    @each_other_kind
    async def test_a_node_or_a_namespace_is_followed_from_its_creation_to_its_deletion(
        self, cluster: Cluster, kind: ObjectKind[Any]
    ) -> None:
        async with following(cluster, kind=kind) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            uid = await cluster.create(kind, "one", labels={"team": "red"})
            await found.until(lambda: bool(found.upserted()))
            notes = {"example.com/cost-center": "4711"}
            labels = {"team": "blue", "karpenter.sh/nodepool": "gpus"}
            await cluster.change(kind, "one", labels=labels, annotations=notes)
            await found.until(lambda: found.upserted()[-1].labels == {"team": "blue"})
            changed = found.upserted()[-1]
            await cluster.delete(kind, "one")
            await found.until(lambda: bool(found.deleted()))
        (gone,) = found.deleted()
        first = found.upserted()[0]
        assert (first.uid, first.name, first.labels) == (uid, cluster.named("one"), {"team": "red"})
        assert first.created_time_ns > 0
        if kind is NODE:
            assert (first.pool, changed.pool) == (None, "gpus")
        else:
            assert (first.annotations, changed.annotations) == (None, notes)
        assert (gone.uid, gone.labels) == (uid, {"team": "blue"})
        versions_seen = [int(each.resource_version) for each in (first, changed, gone)]
        assert versions_seen == sorted(set(versions_seen))

    @each_other_kind
    async def test_a_new_list_has_the_nodes_or_namespaces_that_an_expired_watch_missed(
        self, own_cluster: Cluster, kind: ObjectKind[Any]
    ) -> None:
        stays, goes = [await own_cluster.create(kind, name) for name in ("stays", "goes")]
        async with following(own_cluster, kind=kind) as before:
            await before.until(lambda: Phase.WATCHING in before.steps)
        await own_cluster.delete(kind, "goes")
        comes = await own_cluster.create(kind, "comes")
        await own_cluster.force_expired()
        async with following(own_cluster, kind=kind, resumed=before) as found:
            await found.until(lambda: Phase.LISTED in found.steps)
        first = next(step for step in found.steps if isinstance(step, Interrupted))
        assert (first.error.status, first.error.expired) == (410, True)
        expected = {stays: "alive", goes: "deleted", comes: "alive"}
        assert published([*before.steps, *found.steps], kind=kind) == expected

    @each_other_kind
    async def test_a_watch_of_nodes_or_namespaces_that_is_cut_loses_nothing(
        self, own_cluster: Cluster, kind: ObjectKind[Any]
    ) -> None:
        async with following(own_cluster, kind=kind) as found:
            await found.until(lambda: Phase.WATCHING in found.steps)
            before = await own_cluster.create(kind, "before")
            await found.until(lambda: bool(found.upserted()))
            await own_cluster.restart()
            after = await own_cluster.create(kind, "after")
            await found.until(lambda: {each.uid for each in found.upserted()} == {before, after})

    async def test_changes_and_deletions_of_a_node_and_of_a_namespace_are_published(
        self, cluster: Cluster
    ) -> None:
        note = "example.com/cost-center"
        settings = PodwatchSettings(
            kubernetes=KubernetesSettings(kubeconfig=str(cluster.kubeconfig)),
            node_labels=["team"],
            namespace_annotations=[note],
        )
        uids = {kind.name: await cluster.create(kind, "one") for kind in (NODE, NAMESPACE)}
        bus, readiness = MemoryBus(), Readiness()
        async with running(bus, settings, readiness), asyncio.timeout(DEADLINE_SECONDS):
            nodes = versions(bus, uids["node"], kind=NODE)
            namespaces = versions(bus, uids["namespace"], kind=NAMESPACE)
            async with aclosing(nodes), aclosing(namespaces):
                assert (await anext(nodes)).labels == {}
                assert (await anext(namespaces)).annotations is None
                await cluster.change(NODE, "one", labels={"team": "red", "agentpool": "gpu"})
                await cluster.change(NAMESPACE, "one", annotations={note: "4711"})
                node = await anext(nodes)
                assert (node.labels, node.pool) == ({"team": "red"}, "gpu")
                assert (await anext(namespaces)).annotations == {note: "4711"}
                following_up: list[tuple[ObjectKind[Any], AsyncGenerator[Any]]]
                following_up = [(NODE, nodes), (NAMESPACE, namespaces)]
                for kind, records in following_up:
                    await cluster.delete(kind, "one")
                    last = await anext(records)
                    if last.deleted_time_ns is None:
                        # A real server finalizes a namespace, and first reports that it is
                        # terminating.
                        assert last.deletion_time_ns is not None
                        last = await anext(records)
                    assert last.deleted_time_ns is not None
            assert readiness.is_ready()

    async def test_a_pod_and_its_deletion_are_published(self, cluster: Cluster) -> None:
        uid = await cluster.create_pod("short")
        settings = PodwatchSettings(
            kubernetes=KubernetesSettings(kubeconfig=str(cluster.kubeconfig))
        )
        bus, readiness = MemoryBus(), Readiness()
        async with running(bus, settings, readiness):
            records = versions(bus, uid, kind=POD)
            async with asyncio.timeout(DEADLINE_SECONDS), aclosing(records):
                assert (await anext(records)).deleted_time_ns is None
                await cluster.delete_pod("short")
                after = await anext(records)
                if after.deleted_time_ns is None:
                    # A real server first reports that a deletion was requested, whatever the grace
                    # period.
                    assert after.deletion_time_ns is not None
                    after = await anext(records)
                assert after.deleted_time_ns is not None
            # Nodes and namespaces are listed in parallel with pods.
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not readiness.is_ready():  # noqa: ASYNC110  # checks send no event
                    await asyncio.sleep(0.01)
