"""podwatches as processes between a real API server and a real Kafka: killed and restarted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.keys import split_key
from gpuledger.settings import KafkaSettings
from tests.default_topics import PODS
from tests.real.changed_topics import recreate
from tests.real.deployment.chart import render
from tests.real.deployment.rendering import RBAC
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.cluster_tools import Helm
    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.kubernetes import KubeApi

NAMESPACE = "gpuledger"
PODS_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
LEASE_PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpuledger-podwatch"
DEADLINE_SECONDS = 120.0


class Cluster:
    """An API server, a broker, and podwatches with the permissions that k8s/ grants them."""

    def __init__(self, *, api: KubeApi, kafka: Kafka, kcat: Kcat, folder: Path) -> None:
        self._api = api
        self._kafka = kafka
        self._kcat = kcat
        self._folder = folder
        self._started: list[Component] = []
        api.create_namespace(NAMESPACE)
        for manifest in render().of_kind(*RBAC):
            api.apply(manifest)
        self._kubeconfig = api.service_account_kubeconfig(
            namespace=NAMESPACE, name="gpuledger-podwatch"
        )

    def podwatch(self, name: str, **settings: str) -> Component:
        """Start a podwatch."""
        made = Component(
            name=name,
            command=["gpuledger", "podwatch"],
            folder=self._folder / name,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": self._kafka.bootstrap_servers,
                "KUBERNETES__KUBECONFIG": str(self._kubeconfig),
                **settings,
            },
        )
        self._started.append(made)
        made.start()
        return made

    def end(self) -> None:
        """End everything that still runs."""
        for each in self._started:
            each.kill()

    def create_pods(self, *names: str) -> dict[str, str]:
        """Create pods; return their UIDs."""
        return {name: self._create(name) for name in names}

    def _create(self, name: str) -> str:
        containers = [{"name": "main", "image": "cuda"}]
        body = {
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"nodeName": f"node-{len(name)}", "containers": containers},
        }
        status, found = self._api.request("POST", PODS_PATH, body)
        assert status == 201, found
        uid: str = found["metadata"]["uid"]
        return uid

    def delete_pod(self, name: str) -> None:
        """Delete a pod immediately."""
        status, found = self._api.request(
            "DELETE", f"{PODS_PATH}/{name}", {"gracePeriodSeconds": 0}
        )
        assert status == 200, found

    def touch_pod(self, name: str) -> None:
        """Change a field that no record has, so that only the pod's version changes."""
        self._patch(name, {"annotations": {"touched": "yes"}})

    def relabel_pod(self, name: str) -> None:
        """Change a field that a record has."""
        self._patch(name, {"labels": {"app": "relabelled"}})

    def _patch(self, name: str, metadata: dict[str, object]) -> None:
        body = {"metadata": metadata}
        status, found = self._api.request(
            "PATCH", f"{PODS_PATH}/{name}", body, content_type="application/merge-patch+json"
        )
        assert status == 200, found

    def holder(self) -> str:
        """Return the holder of the Lease."""
        status, found = self._api.request("GET", LEASE_PATH)
        return (found["spec"].get("holderIdentity") or "") if status == 200 else ""

    def history(self) -> dict[str, list[str]]:
        """Return, by UID, each pod's states on the topic, in order.

        The state `leaves` is left out: it comes just before the deletion, and may be overtaken by
        it.
        """
        found: dict[str, list[str]] = {}
        for message in self._kcat.consume(self._kafka.bootstrap_servers, PODS.name):
            if (state := _state(message.value)) != "leaves":
                key = (message.key or b"").decode()
                found.setdefault(split_key(key)[1], []).append(state)
        return found

    def recreate_topic(self) -> None:
        """Delete and recreate the topic of pods."""
        asyncio.run(recreate(KafkaSettings(bootstrap_servers=self._kafka.bootstrap_servers), PODS))

    def kill_broker(self) -> None:
        """Kill the broker."""
        self._kafka.kill()

    def await_history(self, expected: dict[str, list[str]]) -> None:
        """Wait until the topic has exactly these states."""
        try:
            until(lambda: self.history() == expected)
        except TimeoutError:
            assert self.history() == expected


def _state(value: bytes | None) -> str:
    if value is None:
        return "tombstone"
    pod: dict[str, Any] = msgspec.json.decode(value)
    if "deleted_time_ns" in pod:
        return "deleted"
    return "leaves" if "deletion_time_ns" in pod else "lives"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; raises TimeoutError if it does not become true."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


@pytest.fixture
def cluster(
    start_kafka: Callable[[], Kafka],
    start_kube_api: Callable[[], KubeApi],
    kcat: Kcat,
    helm: Helm,
    tmp_path: Path,
) -> Iterator[Cluster]:
    refuse_stray_settings()
    kafka = start_kafka()
    asyncio.run(create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)))
    cluster = Cluster(api=start_kube_api(), kafka=kafka, kcat=kcat, folder=tmp_path)
    yield cluster
    cluster.end()


@pytest.mark.extended
def test_a_killed_podwatch_repeats_nothing_and_misses_nothing(cluster: Cluster) -> None:
    uids = cluster.create_pods("stays", "changes", "goes", "gone-before")
    settings = {"TOMBSTONE_AFTER_SECONDS": "20"}
    first = cluster.podwatch("first", **settings)
    cluster.await_history({uid: ["lives"] for uid in uids.values()})
    cluster.delete_pod("gone-before")
    before = {uid: ["lives"] for uid in uids.values()}
    before[uids["gone-before"]].append("deleted")
    cluster.await_history(before)
    first.kill()
    cluster.touch_pod("stays")
    cluster.relabel_pod("changes")
    cluster.delete_pod("goes")
    new = cluster.create_pods("comes")

    second = cluster.podwatch("second", **settings)

    expected = before | {new["comes"]: ["lives"]}
    expected[uids["changes"]].append("lives")
    expected[uids["goes"]] += ["deleted", "tombstone"]
    expected[uids["gone-before"]].append("tombstone")
    cluster.await_history(expected)
    assert second.stop() == 0
    assert cluster.history() == expected


def test_a_killed_leader_is_replaced_and_no_pod_is_missed(cluster: Cluster) -> None:
    lease = {"LEASE__ENABLED": "true", "LEASE__NAMESPACE": NAMESPACE}
    podwatches = {
        name: cluster.podwatch(name, **lease, LEASE__IDENTITY=name) for name in ("one", "two")
    }
    for each in podwatches.values():
        each.wait_until_ready()
    until(lambda: cluster.holder() in podwatches)
    leader = cluster.holder()
    (other,) = podwatches.keys() - {leader}
    uids = cluster.create_pods("stays", "goes")
    expected = {uid: ["lives"] for uid in uids.values()}
    cluster.await_history(expected)

    podwatches[leader].kill()
    cluster.delete_pod("goes")
    expected[uids["goes"]].append("deleted")
    expected[cluster.create_pods("comes")["comes"]] = ["lives"]

    until(lambda: cluster.holder() == other)
    cluster.await_history(expected)
    again = cluster.podwatch("again", **lease, LEASE__IDENTITY="again")
    again.wait_until_ready()
    assert podwatches[other].stop() == 0
    assert cluster.holder() != other, "released, so that no podwatch waits for its expiry"
    until(lambda: cluster.holder() == "again")
    expected[cluster.create_pods("last")["last"]] = ["lives"]
    cluster.await_history(expected)


@pytest.mark.extended
def test_a_leader_that_was_suspended_does_not_publish_again(cluster: Cluster) -> None:
    lease = {"LEASE__ENABLED": "true", "LEASE__NAMESPACE": NAMESPACE}
    stopped = cluster.podwatch("stopped", **lease, LEASE__IDENTITY="stopped")
    stopped.wait_until_ready()
    until(lambda: cluster.holder() == "stopped")
    other = cluster.podwatch("other", **lease, LEASE__IDENTITY="other")
    other.wait_until_ready()
    expected = {cluster.create_pods("a")["a"]: ["lives"]}
    cluster.await_history(expected)
    stopped.pause()
    expected[cluster.create_pods("b")["b"]] = ["lives"]
    until(lambda: cluster.holder() == "other")
    cluster.await_history(expected)
    stopped.resume()
    expected[cluster.create_pods("c")["c"]] = ["lives"]
    until(lambda: "lease_lost" in stopped.log_tail())
    stopped.wait_until_ready()
    cluster.await_history(expected)
    assert cluster.holder() == "other"
    assert stopped.stop() == 0
    assert cluster.history() == expected


def test_a_recreated_topic_gets_all_pods_and_a_dead_broker_is_reported_while_no_pod_changes(
    cluster: Cluster,
) -> None:
    expected = {uid: ["lives"] for uid in cluster.create_pods("one", "other").values()}
    podwatch = cluster.podwatch("podwatch", KAFKA__REQUEST_TIMEOUT_SECONDS="5")
    podwatch.wait_until_ready()
    cluster.await_history(expected)

    cluster.recreate_topic()

    cluster.await_history(expected)
    cluster.kill_broker()
    until(lambda: not podwatch.readyz()["checks"]["pods.kafka"]["ok"])
