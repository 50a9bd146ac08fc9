"""The simulated Kubernetes API server; it uses real HTTP, so that real clients can connect.

This module contains routes, sockets and the controls for tests. It also contains `PodDriver`, which
turns the steps of the scenario's pods into writes. The writes go to this server or, through
`driver`, to a real one; both get the same writes. `requests` creates the responses.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import structlog
import yaml
from aiohttp import web

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.groups import parse_listen
from gpuledger_simulator.kube.requests import ApiWatch, KubeRequests, Selector, answer
from gpuledger_simulator.kube.store import (
    ApiError,
    Collection,
    Versions,
    bind_pod,
    create_object,
    delete_object,
    merged_conditions,
    patch_status,
)
from gpuledger_simulator.kube_objects import (
    Json,
    PodStep,
    node_object,
    owner_objects,
    pod_events,
    pod_object,
    pod_status,
)
from gpuledger_simulator.simulation import Simulation

BOOKMARK_SECONDS: Final = 5.0
_KINDS: Final = (
    ("/api/v1", "v1", "nodes", "Node", False),
    ("/api/v1", "v1", "namespaces", "Namespace", False),
    ("/api/v1", "v1", "pods", "Pod", True),
    ("/apis/apps/v1", "apps/v1", "replicasets", "ReplicaSet", True),
    ("/apis/batch/v1", "batch/v1", "jobs", "Job", True),
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class KubeApi:
    """An API server that contains the scenario's objects."""

    def __init__(
        self, simulation: Simulation, *, bookmark_seconds: float = BOOKMARK_SECONDS
    ) -> None:
        self.simulation = simulation
        self.versions = Versions()
        self.collections = {
            plural: Collection(plural, kind, api_version, self.versions)
            for _, api_version, plural, kind, _ in _KINDS
        }
        self.pod_driver = PodDriver(simulation, self)
        self._bookmark_seconds = bookmark_seconds
        self._watchers: set[asyncio.Transport] = set()
        # Objects that exist from the start: nodes, namespaces, the pods' controllers.
        for node in simulation.scenario.nodes:
            self.collections["nodes"].create(node_object(simulation, node))
        for name in sorted({pod.namespace for pod in simulation.scenario.pods}):
            create_object(self.collections["namespaces"], {"metadata": {"name": name}})
        for plural, item in owner_objects(simulation):
            with suppress(ApiError):  # pods share their controllers
                self.collections[plural].create(item)

    async def create_pod(self, pod_key: str, item: Json) -> None:  # noqa: ARG002  # as in `Cluster`
        """Create a pod of the scenario, with the UID that the simulated nodes use."""
        self.collections["pods"].create(item)

    async def patch_pod_status(self, namespace: str, name: str, status: Json) -> None:
        """Write the status that a pod's kubelet would write."""
        key, pods = (namespace, name), self.collections["pods"]
        known = pods.get(key).get("status", {}).get("conditions")
        merged = {**status, "conditions": merged_conditions(known, status.get("conditions", []))}
        patch_status(pods, key, {"status": merged})

    async def bind_pod(self, namespace: str, name: str, node: str) -> None:
        """Assign a pod to its node."""
        time_ns = self.simulation.clock.time_ns()
        bind_pod(self.collections["pods"], (namespace, name), node, time_ns=time_ns)

    async def delete_pod(self, namespace: str, name: str, *, grace_seconds: int) -> None:
        """Delete a pod of the scenario."""
        key = (namespace, name)
        delete_object(self.collections["pods"], key, grace_seconds=grace_seconds)

    def compact(self) -> None:
        """Discard all changes up to now; lists and watches from earlier versions then get 410."""
        for collection in self.collections.values():
            collection.compact()

    def cut_connections(self) -> None:
        """Abort the connections of all watches, like a network failure."""
        for transport in self._watchers:
            transport.abort()

    def app(self) -> web.Application:
        """Return the web application."""

        async def version(_request: web.Request) -> web.Response:
            return answer({"major": "1", "minor": "36", "gitVersion": "v1.36.3+simulated"})

        async def ok(_request: web.Request) -> web.Response:
            return web.Response(text="ok")

        app = web.Application(middlewares=[self._answer_errors])
        app.router.add_get("/version", version)
        for path in ("/readyz", "/livez", "/healthz"):
            app.router.add_get(path, ok)
        for prefix, _, plural, _, is_namespaced in _KINDS:
            requests = KubeRequests(self.collections[plural], self._stream)
            base = f"{prefix}/{plural}"
            app.router.add_get(base, requests.read_many)
            if is_namespaced:
                base = f"{prefix}/namespaces/{{namespace}}/{plural}"
                app.router.add_get(base, requests.read_many)
            app.router.add_post(base, requests.create)
            app.router.add_get(f"{base}/{{name}}", requests.read)
            app.router.add_patch(f"{base}/{{name}}", requests.patch)
            app.router.add_delete(f"{base}/{{name}}", requests.delete)
            app.router.add_patch(f"{base}/{{name}}/status", requests.patch_status)
            if plural == "pods":
                app.router.add_post(f"{base}/{{name}}/binding", requests.bind)
        return app

    async def _stream(
        self, request: web.Request, collection: Collection, select: Selector
    ) -> web.StreamResponse:
        watch = ApiWatch(collection, select, request.query, bookmark_seconds=self._bookmark_seconds)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        transport = request.transport
        if transport:
            self._watchers.add(transport)
        try:
            # A disconnected client is not an error, because watches usually end in this way.
            with suppress(ConnectionError):
                await response.prepare(request)
                async for line in watch.lines():
                    await response.write(line)
        finally:
            if transport:
                self._watchers.discard(transport)
        return response

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return answer(error.status, error.code)
        except web.HTTPException as error:
            message = "the server could not find the requested resource"
            reason = error.reason.replace(" ", "")
            status = ApiError(code=error.status, reason=reason, message=message).status
            return answer(status, error.status)


@asynccontextmanager
async def serve_kube_api(
    simulation: Simulation | KubeApi, *, listen: str = "127.0.0.1:0", play: bool = True
) -> AsyncIterator[str]:
    """Serve the API and yield its URL; with `play`, create and delete the scenario's pods.

    Raise `UserError` if `listen` is invalid or the port cannot be opened.
    """
    api = simulation if isinstance(simulation, KubeApi) else KubeApi(simulation)
    # Without cancellation, a watch of a disconnected client would run until its next line.
    runner = web.AppRunner(
        api.app(), access_log=None, shutdown_timeout=0.5, handler_cancellation=True
    )
    await runner.setup()
    playing = None
    try:
        if play:
            await api.pod_driver.play_due()
        await _listen(runner, listen)
        playing = asyncio.create_task(api.pod_driver.play()) if play else None
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"http://{bound_host}:{bound_port}"
    finally:
        await end_tasks(playing)
        await runner.cleanup()
        if playing and not playing.cancelled():
            playing.result()


async def _listen(runner: web.AppRunner, listen: str) -> None:
    try:
        host, port = parse_listen(listen)
        await web.TCPSite(runner, host, port).start()
    except ValueError as error:
        raise UserError(f"--listen: {error}") from error
    except OSError as error:
        raise UserError(
            f"--listen: cannot listen on {listen}: {error.strerror or error}; choose another port"
        ) from error


_log = structlog.get_logger(__name__)


class Cluster(Protocol):
    """A server to which the scenario's pods are written."""

    async def create_pod(self, pod_key: str, item: Json) -> None:
        """Create a pod; `pod_key` is its namespace and name."""

    async def bind_pod(self, namespace: str, name: str, node: str) -> None:
        """Assign a pod to its node like a scheduler."""

    async def patch_pod_status(self, namespace: str, name: str, status: Json) -> None:
        """Write a part of a pod's status, like its kubelet or a scheduler."""

    async def delete_pod(self, namespace: str, name: str, *, grace_seconds: int) -> None:
        """Delete a pod, or mark it as terminating if the grace period is not zero."""


class PodDriver:
    """Plays the steps of all pods in order of time."""

    def __init__(self, simulation: Simulation, cluster: Cluster) -> None:
        self._simulation = simulation
        self._cluster = cluster
        self._events = pod_events(simulation.pods)
        self._next = 0

    async def play(self) -> None:
        """Play each step when it is due; return after the last step."""
        while self._next < len(self._events):
            await self.play_due()
            if self._next < len(self._events):
                await self._simulation.clock.sleep(max(0.001, self._wait_seconds()))

    async def play_due(self) -> None:
        """Play the steps that are due now."""
        while self._next < len(self._events) and self._wait_seconds() <= 0:
            event = self._events[self._next]
            pod, spec = event.pod, event.pod.spec
            match event.step:
                case PodStep.CREATED:
                    item = pod_object(self._simulation, pod, created_ns=event.at_ns)
                    await self._cluster.create_pod(pod.key, item)
                    if pod.wait_ns:
                        # A real server drops the status of an object that is created.
                        conditions = {"conditions": item["status"]["conditions"]}
                        await self._cluster.patch_pod_status(spec.namespace, spec.name, conditions)
                case PodStep.SCHEDULED:
                    await self._cluster.bind_pod(spec.namespace, spec.name, spec.node)
                case PodStep.RUNNING | PodStep.FINISHED:
                    status = pod_status(self._simulation, pod, event.step)
                    await self._cluster.patch_pod_status(spec.namespace, spec.name, status)
                case PodStep.TERMINATING:
                    await self._cluster.delete_pod(spec.namespace, spec.name, grace_seconds=30)
                case PodStep.DELETED:
                    await self._cluster.delete_pod(spec.namespace, spec.name, grace_seconds=0)
            self._next += 1
            _log.info("pod_step_played", pod=event.pod.key, step=event.step.value)

    def _wait_seconds(self) -> float:
        at_ns = self._simulation.epoch_ns + self._events[self._next].at_ns
        return (at_ns - self._simulation.clock.time_ns()) / NS_PER_SECOND


def write_kubeconfig(path: Path, url: str) -> None:
    """Write a kubeconfig for the simulated API server; its user has no credentials."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "simulated", "cluster": {"server": url}}],
        "users": [{"name": "reader", "user": {}}],
        "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "reader"}}],
        "current-context": "simulated",
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
