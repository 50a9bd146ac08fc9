"""Two clusters on one real Kafka and in one store: equal names in both, and no collision.

The nodes have equal names, and the pods equal names and equal UIDs; only a label distinguishes
them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
import yaml

from gpuledger.errors import UserError
from gpuledger.keys import key_in, split_key
from gpuledger.store.query import entries_sql
from tests.default_topics import DEAD_LETTERS, EVENTS, PODS, ROWS, WATERMARKS
from tests.real.end_to_end.components import BIN, Component, refuse_stray_settings
from tests.real.services.ports import free_ports
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.real.services.kafka import KafkaBroker
    from tests.real.services.kcat import Kcat

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
NODE = "gpu-node-1"
POD = "llm-finetune-worker-0"
CLUSTERS = ("blue", "green")
DEADLINE_SECONDS = 300.0


class OneCluster:
    """A cluster's simulated API server, with one agent and a podwatch."""

    def __init__(self, name: str, *, servers: str, folder: Path) -> None:
        self.name = name
        self._folder = folder / name
        self._folder.mkdir()
        self._kafka = {"CLUSTER": name, "KAFKA__BOOTSTRAP_SERVERS": servers}
        # One epoch for both, so their pods have the same UIDs.
        self._epoch = folder / "epoch"

    def agent(self) -> Component:
        """Return the agent of the node that both clusters have."""
        return self._component("agent", {
            "NODE_NAME": NODE,
            "SOURCE": f"simulated:{self.scenario(has_pods=True)}",
            "SIMULATOR__EPOCH_FILE": str(self._epoch),
            "SPOOL__DIRECTORY": "",
        })  # fmt: skip

    def podwatch(self, url: str, name: str = "podwatch") -> Component:
        """Return a podwatch of an API server."""
        return self._component(name, {"KUBERNETES__URL": url})

    def api_server(self, *, has_pods: bool) -> tuple[Process, str]:
        """Return an API server, with the pods of the scenario or without any, and its address."""
        (port,) = free_ports(1)
        listen = f"127.0.0.1:{port}"
        process = Process(
            name=f"{self.name}-api-{has_pods}",
            argv=[
                Path(sys.executable), "-m", "gpuledger_simulator", "kube-api", "--listen", listen,
                "--scenario", str(self.scenario(has_pods=has_pods)),
                "--epoch-file", str(self._epoch),
            ],
            folder=self._folder / f"api-{has_pods}",
            environment=None,
        )  # fmt: skip
        return process, f"http://{listen}"

    def scenario(self, *, has_pods: bool) -> Path:
        """Return the scenario; its pods have the cluster's name as their team."""
        played = yaml.safe_load(SCENARIO.read_text())
        for pod in played["pods"]:
            pod["labels"]["team"] = self.name
        if not has_pods:
            played["pods"] = []
        path = self._folder / f"scenario-{has_pods}.yaml"
        path.write_text(yaml.safe_dump(played))
        return path

    def _component(self, name: str, environment: Mapping[str, str]) -> Component:
        command = name.partition("-")[0]
        return Component(
            name=f"{self.name}-{name}",
            command=["gpuledger", command],
            folder=self._folder / name,
            environment={**self._kafka, **environment},
        )


class Written:
    """The content of the topics and of the store."""

    def __init__(self, *, servers: str, kcat: Kcat, store: str) -> None:
        self._servers = servers
        self._kcat = kcat
        self._store = store

    def messages(self, topic: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield key and value of each record of a topic."""
        for message in self._kcat.consume(self._servers, topic):
            value = json.loads(message.value) if message.value else None
            yield (message.key or b"").decode(), value

    def teams(self) -> dict[str, set[str]]:
        """Return, by cluster, the team of the pod that both have, from the events."""
        found: dict[str, set[str]] = {}
        for key, event in self.messages(EVENTS.name):
            assert event is not None
            assert key == key_in(event["cluster"], event["node"])
            for pod in event["pods"]:
                if pod.get("name") == POD:
                    found.setdefault(event["cluster"], set()).add(pod["labels"]["team"])
        return found

    def pods(self, cluster: str) -> list[dict[str, Any] | None]:
        """Return the records of a cluster's pods, including tombstones."""
        return [value for key, value in self.messages(PODS.name) if split_key(key)[0] == cluster]

    def training(self, cluster: str) -> set[str]:
        """Return all published states of the pod that always runs: `there`, `deleted`."""
        mine = [pod for pod in self.pods(cluster) if pod and pod["name"] == POD]
        return {"deleted" if "deleted_time_ns" in pod else "there" for pod in mine}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return cluster, node and team of that pod's rows in the store; empty without a store."""
        try:
            relation = entries_sql(self._store)
        except UserError:
            return []
        sql = (
            "SELECT DISTINCT cluster, node, labels"  # noqa: S608  # the relation's own text
            f" FROM {relation} WHERE pod = '{POD}' AND labels IS NOT NULL ORDER BY ALL"
        )
        found = duckdb.connect().execute(sql).fetchall()
        return [(cluster, node, json.loads(labels)["team"]) for cluster, node, labels in found]


@pytest.fixture
def servers(kafka_of_this_run: KafkaBroker) -> str:
    """Return the address of a broker with the topics."""
    refuse_stray_settings()
    servers = kafka_of_this_run.bootstrap_servers
    command = [str(BIN / "gpuledger"), "topics", "create", "--bootstrap-servers", servers]
    subprocess.run(command, check=True, timeout=120)
    return servers


def test_two_clusters_with_equal_names_on_one_kafka_and_in_one_store_do_not_collide(
    servers: str, kcat: Kcat, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    written = Written(servers=servers, kcat=kcat, store=store)
    podwatches: dict[str, tuple[OneCluster, Component]] = {}
    with ExitStack() as stack:

        def start(one: Process | Component) -> None:
            stack.callback(one.kill)
            one.start()

        for name in CLUSTERS:
            cluster = OneCluster(name, servers=servers, folder=tmp_path)
            api, url = cluster.api_server(has_pods=True)
            start(api)
            podwatches[name] = cluster, cluster.podwatch(url)
            start(podwatches[name][1])
            # The second one finds the first one's records, with the UIDs of its own pods.
            await_true(partial(written.pods, name))
            start(cluster.agent())
        for one in central(servers, store=store, folder=tmp_path):
            start(one)
        await_true(lambda: written.teams().keys() == set(CLUSTERS))
        await_true(lambda: len(written.rows()) == len(CLUSTERS))

        # Equal except for the cluster, and each with the labels of its own pods.
        assert written.teams() == {name: {name} for name in CLUSTERS}
        await_true(lambda: uids_of(written, "blue") == uids_of(written, "green"))
        assert {key for key, _ in written.messages(ROWS.name)} == {
            key_in(name, NODE) for name in CLUSTERS
        }
        assert written.rows() == [(name, NODE, name) for name in CLUSTERS]

        # A podwatch that finds none of its pods any more deletes only those of its own cluster.
        cluster, podwatch = podwatches["green"]
        podwatch.kill()
        api, url = cluster.api_server(has_pods=False)
        start(api)
        start(cluster.podwatch(url, "podwatch-again"))
        await_true(lambda: "deleted" in written.training("green"))
        await_true(lambda: set(CLUSTERS) <= published_complete(written))
    assert written.training("blue") == {"there"}
    assert list(written.messages(DEAD_LETTERS.name)) == []


def uids_of(written: Written, cluster: str) -> set[str]:
    return {pod["uid"] for pod in written.pods(cluster) if pod}


def central(servers: str, *, store: str, folder: Path) -> list[Component]:
    """Return the components that the clusters share: a join, a sink of rows, and one of a store."""
    commands = {
        "join": (["gpuledger", "join"], {}),
        "rows": (["gpuledger", "sink", "rows"], {}),
        "store": (
            ["gpuledger", "sink", "store"],
            {"STORE__URI": store, "STORE__ENTRIES": "true", "STORE__FLUSH_SECONDS": "2"},
        ),
    }
    return [
        Component(
            name=name,
            command=command,
            folder=folder / f"central-{name}",
            environment={"KAFKA__BOOTSTRAP_SERVERS": servers, **settings},
        )
        for name, (command, settings) in commands.items()
    ]


def published_complete(written: Written) -> set[str]:
    """Return the clusters for which the join has published a watermark."""
    keys = (key.split("/") for key, _ in written.messages(WATERMARKS.name))
    return {cluster for stage, cluster, _ in keys if stage == "join"}


def await_true(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)
