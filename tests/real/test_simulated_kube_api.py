"""The simulator's API server compared with a real one: same requests, same kind of answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kube import KubeApi, serve_kube_api
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.real.services.kube_client import KubeApiClient

NAMESPACE = "manners"
OURS = f"/api/v1/namespaces/{NAMESPACE}/pods"
EMPTY = {"name": "empty", "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}}]}

# Requests to both servers; each answer is compared by status, kind and reason.
REQUESTS: list[tuple[str, str, dict[str, str]]] = [
    ("GET", OURS, {}),
    ("GET", OURS, {"limit": "1"}),
    ("GET", OURS, {"resourceVersion": "0"}),
    ("GET", OURS, {"resourceVersion": "99999999"}),
    ("GET", OURS, {"resourceVersion": "x"}),
    ("GET", OURS, {"continue": "x"}),
    ("GET", OURS, {"fieldSelector": "spec.color=red"}),
    ("GET", OURS, {"watch": "1", "resourceVersion": "x"}),
    ("GET", OURS, {"watch": "1", "sendInitialEvents": "true"}),
    ("GET", f"{OURS}/none", {}),
    ("GET", "/api/v1/unknowns", {}),
    ("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/replicasets/none", {}),
    ("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/none", {}),
    ("POST", OURS, {}),
    ("DELETE", f"{OURS}/none", {}),
]


@dataclass(frozen=True)
class Server:
    """An API server to send requests to."""

    url: str
    session: aiohttp.ClientSession

    async def send(
        self, method: str, path: str, query: dict[str, str], body: object = None
    ) -> tuple[int, list[Any]]:
        """Send a request; return the status and the lines of the answer."""
        kind = "merge-patch+json" if method == "PATCH" else "json"
        async with self.session.request(
            method,
            self.url + path,
            params=query,
            data=None if body is None else orjson.dumps(body),
            headers={"Content-Type": f"application/{kind}"},
        ) as answer:
            lines = (await answer.read()).splitlines()
            return answer.status, [orjson.loads(line) for line in lines if line.strip()]


@asynccontextmanager
async def simulated() -> AsyncIterator[Server]:
    simulation = Simulation(parse_scenario(EMPTY), epoch_ns=1, clock=ManualClock(start_ns=1))
    async with (
        serve_kube_api(KubeApi(simulation), play=False) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Server(url, session)


@asynccontextmanager
async def real(client: KubeApiClient) -> AsyncIterator[Server]:
    connector = aiohttp.TCPConnector(ssl=client.tls_context())
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Server(client.url, session)
    await asyncio.sleep(0.1)  # TLS ends with a message to the peer


def pod(name: str) -> dict[str, Any]:
    """Return a pod on a node; a pod whose name begins with `un` is on none."""
    place = {} if name.startswith("un") else {"nodeName": "n"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**place, "containers": [{"name": "c", "image": "i"}]},
    }


def reported(event: dict[str, Any]) -> tuple[str, str, str, bool]:
    """Return the fields that a reader of pods uses."""
    item = event["object"]
    name, phase = item["metadata"]["name"], item["status"]["phase"]
    return event["type"], name, phase, "deletionTimestamp" in item["metadata"]


async def live(server: Server) -> tuple[list[Any], list[Any]]:
    """Create, run, end and delete pods; return the events of two watches afterwards."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await server.send("POST", "/api/v1/namespaces", {}, namespace)
    _, (before,) = await server.send("GET", OURS, {})
    for name in ("a", "b", "c"):
        await server.send("POST", OURS, {}, pod(name))
        await server.send("PATCH", f"{OURS}/{name}/status", {}, {"status": {"phase": "Running"}})
    await server.send("POST", OURS, {}, pod("unscheduled"))
    await server.send("DELETE", f"{OURS}/unscheduled", {})
    await server.send("PATCH", f"{OURS}/a/status", {}, {"status": {"phase": "Succeeded"}})
    await server.send("DELETE", f"{OURS}/b", {}, {"gracePeriodSeconds": 30})
    await server.send("DELETE", f"{OURS}/b", {}, {"gracePeriodSeconds": 0})
    await server.send("DELETE", f"{OURS}/c", {"gracePeriodSeconds": "0"})
    query = {
        "watch": "1",
        "timeoutSeconds": "1",
        "resourceVersion": before["metadata"]["resourceVersion"],
    }
    _, everything = await server.send("GET", OURS, query)
    unended = {"fieldSelector": "status.phase!=Succeeded,spec.nodeName!="}
    _, selected = await server.send("GET", OURS, {**query, **unended})
    return [reported(event) for event in everything], [reported(event) for event in selected]


async def answers(server: Server) -> list[tuple[int, str, str]]:
    """Send all requests of `REQUESTS`; return each answer's status, kind and reason."""
    given = []
    for method, path, query in REQUESTS:
        body = pod("a") if method == "POST" else None
        status, lines = await server.send(method, path, query, body)
        given.append((status, lines[0]["kind"], lines[0].get("reason", "")))
    return given


async def test_the_simulated_api_server_answers_and_reports_like_a_real_one(
    kube_api: KubeApiClient,
) -> None:
    async with simulated() as ours, real(kube_api) as theirs:
        sent_by_us, sent_by_them = await live(ours), await live(theirs)
        assert sent_by_us == sent_by_them
        labels = [f"{method} {path} {query}" for method, path, query in REQUESTS]
        given = await answers(ours), await answers(theirs)
        assert dict(zip(labels, given[0], strict=True)) == dict(zip(labels, given[1], strict=True))
        await theirs.send("DELETE", f"{OURS}/a", {}, {"gracePeriodSeconds": 0})
