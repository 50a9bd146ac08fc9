"""How podwatch follows a real API server that denies requests, loses roles, or dies."""

import asyncio
import re
from collections.abc import Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Literal

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.events import Interrupted, Phase
from gpuledger_enricher.podwatch.kinds import NODE, POD
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from tests.podwatch_cluster import (
    DEADLINE_SECONDS,
    Following,
    following,
    published,
    running,
    versions,
)
from tests.real.deployment.chart import render
from tests.real.services.cluster_tools import Helm
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubernetes import KubeApi
from tests.real.test_podwatch import RealCluster, bind

OLD = ["--feature-gates=WatchList=false"]


def errors(found: Following) -> list[str]:
    """Return the interruptions, with the server's own messages."""
    return [str(step.error) for step in found.steps if isinstance(step, Interrupted)]


async def test_a_server_without_watch_lists_is_queried_for_pages_instead(
    start_kube_api: Callable[..., KubeApi],
) -> None:
    server = await asyncio.to_thread(lambda: start_kube_api(arguments=OLD))
    cluster = await RealCluster.prepared(server)
    uids = {await cluster.create_pod(f"p{number}") for number in range(3)}
    async with following(cluster) as found:
        await found.until(lambda: Phase.WATCHING in found.steps)
    assert published(found.steps) == dict.fromkeys(uids, "alive")
    requested = ["watch" in query for query in found.requests]
    # The watch list is rejected, then come two pages, then the watch.
    assert requested == [True, False, False, True]
    assert errors(found) == []


async def test_a_server_killed_during_a_watch_loses_nothing(
    start_kube_api: Callable[[], KubeApi],
) -> None:
    server = await asyncio.to_thread(start_kube_api)
    cluster = await RealCluster.prepared(server)
    stays, goes = [await cluster.create_pod(name) for name in ("stays", "goes")]
    async with following(cluster) as found:
        await found.until(lambda: Phase.WATCHING in found.steps)
        await asyncio.to_thread(server.kill)
        await found.until(lambda: bool(errors(found)))
        await asyncio.to_thread(server.start)
        await cluster.delete_pod("goes")
        comes = await cluster.create_pod("comes")
        expected = {stays: "alive", goes: "deleted", comes: "alive"}
        await found.until(lambda: published(found.steps) == expected)


async def test_a_server_that_lost_its_history_reports_deletions_by_a_new_list(
    start_kube_api: Callable[[], KubeApi],
) -> None:
    server = await asyncio.to_thread(start_kube_api)
    cluster = await RealCluster.prepared(server)
    stays, goes = [await cluster.create_pod(name) for name in ("stays", "goes")]
    async with following(cluster) as before:
        await before.until(lambda: Phase.WATCHING in before.steps)
    await cluster.delete_pod("goes")
    await cluster.force_expired()
    async with following(cluster, resumed=before) as found:
        await found.until(lambda: Phase.LISTED in found.steps)
    assert "410" in errors(found)[0]
    expected = {stays: "alive", goes: "deleted"}
    assert published([*before.steps, *found.steps]) == expected


async def test_a_server_on_which_no_pod_changes_is_not_a_failure_and_the_next_pod_is_seen(
    kube_api: KubeApiClient,
) -> None:
    """Bookmarks come after one or two minutes, so the watch is silent during the whole test."""
    cluster = await RealCluster.prepared(kube_api)
    async with following(cluster, idle_timeout_seconds=0.5) as found:
        await found.until(lambda: found.steps.count(Phase.WATCHING) == 4)
        uid = await cluster.create_pod("comes")
        await found.until(lambda: published(found.steps) == {uid: "alive"})
    assert errors(found) == []
    assert found.steps.count(Phase.LISTING) == 1


def role(*, without: str) -> dict[str, Any]:
    """Return the role of podwatch's manifests without one of its verbs."""
    (found,) = render().of_kind("ClusterRole")
    found["metadata"] = {"name": f"podwatch-without-{without or 'nothing'}"}
    for rule in found["rules"]:
        rule["verbs"] = [verb for verb in rule["verbs"] if verb != without]
    return found


@pytest.mark.parametrize("verb", ["watch", "list"])
async def test_a_reduced_role_is_reported_and_podwatch_continues_once_it_is_complete(
    kube_api: KubeApiClient, helm: Helm, verb: str
) -> None:
    account = {"namespace": "podwatch-cut", "name": f"without-{verb}"}
    kubeconfig = await asyncio.to_thread(lambda: kube_api.service_account_kubeconfig(**account))
    await asyncio.to_thread(bind, kube_api, role(without=verb), account)
    async with following(RealCluster(kube_api, kubeconfig=kubeconfig), watch_list="off") as found:
        await found.until(lambda: bool(errors(found)))
        first = next(step.error for step in found.steps if isinstance(step, Interrupted))
        assert first.status == HTTPStatus.FORBIDDEN
        assert f'cannot {verb} resource "pods"' in str(first)
        assert "grant its account get, list and watch on pods" in str(first)
        await asyncio.to_thread(bind, kube_api, role(without=""), account)
        await found.until(lambda: Phase.WATCHING in found.steps)


async def test_without_permission_for_nodes_the_other_kinds_continue(
    kube_api: KubeApiClient, helm: Helm
) -> None:
    """As with a role of an earlier version."""
    account = {"namespace": "podwatch-cut", "name": "without-nodes"}
    kubeconfig = await asyncio.to_thread(lambda: kube_api.service_account_kubeconfig(**account))
    old = role(without="")
    old["metadata"]["name"] = "podwatch-without-nodes"
    whole = {**old, "rules": [dict(rule) for rule in old["rules"]]}
    old["rules"][0]["resources"] = ["pods", "namespaces"]
    await asyncio.to_thread(bind, kube_api, old, account)
    cluster = RealCluster(kube_api, kubeconfig=kubeconfig)
    await cluster.prepare()
    uid = await cluster.create_pod("web")
    node = await cluster.create(NODE, "one")
    bus, readiness = MemoryBus(), Readiness()
    settings = PodwatchSettings(kubernetes=KubernetesSettings(kubeconfig=str(kubeconfig)))
    async with running(bus, settings, readiness), asyncio.timeout(DEADLINE_SECONDS):
        async with aclosing(versions(bus, uid, kind=POD)) as pods:
            assert (await anext(pods)).name == "web"
        while not readiness.check("nodes.api").has_failed:  # noqa: ASYNC110  # a check has no event to wait on
            await asyncio.sleep(0.05)
        assert 'cannot list resource "nodes"' in readiness.check("nodes.api").detail
        await asyncio.to_thread(bind, kube_api, whole, account)
        async with aclosing(versions(bus, node, kind=NODE)) as nodes:
            assert (await anext(nodes)).name == cluster.named("one")


async def create_deep_pod(cluster: RealCluster, server: KubeApiClient, name: str) -> str:
    """Create a pod with 2,000 levels of `managedFields`, as any tenant may; return its UID."""
    fields = '{"f:a":' * 2000 + "{}" + "}" * 2000
    managed = (
        '[{"manager":"tenant","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1",'
        f'"time":"2026-11-21T08:00:00Z","fieldsV1":{fields}}}]'
    )
    spec = '{"nodeName":"node-a","containers":[{"name":"main","image":"cuda"}]}'
    body = f'{{"metadata":{{"name":"{name}","managedFields":{managed}}},"spec":{spec}}}'
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    answer = await asyncio.to_thread(server.fetch, "POST", path, body.encode())
    assert answer.status == HTTPStatus.CREATED, answer.body[:300]
    assert answer.body.count(b'"f:a":') == 2000
    found = re.search(rb'"uid":"([^"]+)"', answer.body)
    assert found
    return found[1].decode()


@pytest.mark.parametrize("watch_list", ["auto", "off"])
@pytest.mark.parametrize("comes", ["before", "meanwhile"])
async def test_a_pod_nested_deeper_than_any_decoder_allows_ends_nothing(
    kube_api: KubeApiClient, watch_list: Literal["auto", "off"], comes: str
) -> None:
    cluster = await RealCluster.prepared(kube_api)
    uids = {await cluster.create_pod("first")}
    if comes == "before":
        uids.add(await create_deep_pod(cluster, kube_api, "deep"))
    async with following(cluster, watch_list=watch_list) as found:
        await found.until(lambda: Phase.WATCHING in found.steps)
        if comes == "meanwhile":
            uids.add(await create_deep_pod(cluster, kube_api, "deep"))
        uids.add(await cluster.create_pod("last"))
        await found.until(lambda: set(published(found.steps)) == uids)
    assert errors(found) == []
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/deep"
    body = {"gracePeriodSeconds": 0}
    assert (await asyncio.to_thread(kube_api.fetch, "DELETE", path, body)).status == HTTPStatus.OK
