"""The API server that the podwatch tests need, and podwatch running against it."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    suppress,
)
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from uuid import uuid4

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.clock import SystemClock
from gpuledger.records import PendingPodRecord, PodRecord
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.api import Answer, Api, Request
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import Deleted, Phase, Skipped, Step, Upserted
from gpuledger_enricher.podwatch.kinds import NODE, POD, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_enricher.podwatch.pod_watch import run_podwatch
from gpuledger_enricher.podwatch.reflector import Reflector
from gpuledger_enricher.podwatch.table import ObjectTable
from gpuledger_enricher.watched_records import RecordT, WatchedRecord, gone_time_ns

DEADLINE_SECONDS = 120.0
MERGE = "application/merge-patch+json"


class Cluster(ABC):
    """An API server that a test can write to; the test has its own namespace for pods."""

    def __init__(self, *, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = f"podwatch-{uuid4().hex[:8]}"

    @abstractmethod
    async def send(self, method: str, path: str, body: object, *, content_type: str) -> Any:  # noqa: ANN401  # any JSON
        """Send a request; raise AssertionError if it is rejected."""

    @abstractmethod
    async def force_expired(self) -> None:
        """Make all versions until now expire."""

    @abstractmethod
    async def restart(self) -> None:
        """Break all connections, like a restart."""

    async def prepare(self) -> None:
        """Create the namespace."""
        await self._post("/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    async def create_pod(
        self,
        name: str,
        *,
        node: str | None = "node-a",
        gpus: int = 1,
        labels: Mapping[str, str] = MappingProxyType({}),
        spec: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Create a pod with one container that requests GPUs; return its UID."""
        limits = {"limits": {"nvidia.com/gpu": str(gpus)} if gpus else {}}
        container = {"name": "main", "image": "cuda", "resources": limits}
        spec = {**spec, "containers": [container], **({"nodeName": node} if node else {})}
        metadata = {"name": name, "labels": {"app": name, **labels}}
        made = await self._post(self._pods, {"metadata": metadata, "spec": spec})
        uid: str = made["metadata"]["uid"]
        return uid

    async def set_status(self, name: str, *, phase: str, container_id: str) -> None:
        """Write the status that the kubelet would."""
        container = {
            "name": "main",
            "containerID": f"containerd://{container_id}",
            "restartCount": 0,
            "image": "cuda",
            "imageID": "",
            "ready": True,
        }
        status = {"phase": phase, "containerStatuses": [container]}
        path = f"{self._pods}/{name}/status"
        await self.send("PATCH", path, {"status": status}, content_type=MERGE)

    async def refuse(self, name: str, *, reason: str, message: str) -> None:
        """Write the condition that a scheduler writes for a pod without a node."""
        condition = {"type": "PodScheduled", "status": "False", "reason": reason}
        status = {"conditions": [{**condition, "message": message}]}
        path = f"{self._pods}/{name}/status"
        await self.send("PATCH", path, {"status": status}, content_type=MERGE)

    async def bind(self, name: str, *, node: str = "node-a") -> None:
        """Assign a pod to a node, as a scheduler does."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        await self._post(f"{self._pods}/{name}/binding", {**binding, "target": target})

    def named(self, name: str) -> str:
        """Return the name of a node or a namespace that only this test uses."""
        return f"{self.namespace}-{name}"

    async def create(self, kind: ObjectKind[Any], name: str, **metadata: object) -> str:
        """Create a node or a namespace; return its UID."""
        made = await self._post(kind.path, {"metadata": {"name": self.named(name), **metadata}})
        uid: str = made["metadata"]["uid"]
        return uid

    async def change(self, kind: ObjectKind[Any], name: str, **metadata: object) -> None:
        """Change labels or annotations of a node or a namespace."""
        path = f"{kind.path}/{self.named(name)}"
        await self.send("PATCH", path, {"metadata": metadata}, content_type=MERGE)

    async def cordon(self, name: str, *, is_cordoned: bool) -> None:
        """Cordon or uncordon a node, as `kubectl` does."""
        path = f"{NODE.path}/{self.named(name)}"
        body = {"spec": {"unschedulable": is_cordoned or None}}
        await self.send("PATCH", path, body, content_type=MERGE)

    async def delete(self, kind: ObjectKind[Any], name: str) -> None:
        """Delete a node or a namespace."""
        path = f"{kind.path}/{self.named(name)}"
        await self.send("DELETE", path, {}, content_type="application/json")

    async def delete_pod(self, name: str) -> None:
        """Delete a pod at once."""
        body = {"gracePeriodSeconds": 0}
        await self.send("DELETE", f"{self._pods}/{name}", body, content_type="application/json")

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def _post(self, path: str, body: object) -> Any:  # noqa: ANN401  # any JSON
        return await self.send("POST", path, body, content_type="application/json")


class Following:
    """A reflector that runs in the background, and its steps for one test's objects."""

    def __init__(
        self, reflector: Reflector[Any], *, namespace: str, requested: Sequence[Mapping[str, str]]
    ) -> None:
        self.reflector = reflector
        self.requests = requested
        self.steps: list[Step[Any]] = []
        self.listed_version = 0
        """The version of the last list."""
        self._namespace = namespace
        self._more = asyncio.Event()

    async def run(self) -> None:
        """Take steps without end."""
        async with aclosing(self.reflector.run()) as steps:
            async for step in steps:
                if not isinstance(step, Upserted | Deleted) or self._is_own(step.record):
                    self.steps.append(step)
                if step is Phase.LISTED:
                    self.listed_version = int(self.reflector.version or 0)
                self._more.set()

    def _is_own(self, record: WatchedRecord) -> bool:
        if isinstance(record, PodRecord | PendingPodRecord):
            return record.namespace == self._namespace
        return record.name.startswith(f"{self._namespace}-")

    def upserted(self) -> list[Any]:
        """Return the records of all upserts until now, repeats included."""
        return [step.record for step in self.steps if isinstance(step, Upserted)]

    def deleted(self) -> list[Any]:
        """Return the records of all deletions until now."""
        return [step.record for step in self.steps if isinstance(step, Deleted)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until steps make the condition true."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), 0.05)
                self._more.clear()

    async def until_seen(self, uid: str, *, phase: str = "Pending") -> PodRecord:
        """Wait for a pod in this phase."""
        await self.until(lambda: bool(self._seen(uid, phase)))
        return self._seen(uid, phase)[0]

    def _seen(self, uid: str, phase: str) -> list[PodRecord]:
        return [pod for pod in self.upserted() if pod.uid == uid and pod.phase == phase]


def published(steps: Iterable[Step[Any]], *, kind: ObjectKind[Any] = POD) -> dict[str, str]:
    """Return which objects the table publishes after these steps, as `alive` or `deleted`."""
    table = ObjectTable(
        node_of=kind.node_of,
        identity_of=kind.identity_of,
        as_known=kind.as_known,
        tombstone_after_seconds=900,
        max_tombstones=100,
    )
    for step in steps:
        match step:
            case Upserted(found):
                table.upsert(found, time_ns=1)
            case Deleted(found):
                table.delete(found, time_ns=1)
            case Skipped():
                table.keep(kind.identity_of(step))
            case Phase.LISTING:
                table.begin_list()
            case Phase.LISTED:
                table.end_list(time_ns=2)
            case _:
                pass
    return {
        one.record.uid if one.record else one.identity: "deleted"
        if one.record and gone_time_ns(one.record)
        else "alive"
        for one in table.batch(100)
    }


class _Noting(Api):
    """Forwards requests and keeps their queries."""

    def __init__(self, api: Api, settings: KubernetesSettings) -> None:
        super().__init__(settings)
        self._api = api
        self.requests: list[Mapping[str, str]] = []

    @override
    def request(self, request: Request) -> AbstractAsyncContextManager[Answer]:
        self.requests.append(request.query)
        return self._api.request(request)


@asynccontextmanager
async def following(
    cluster: Cluster,
    *,
    kind: ObjectKind[Any] = POD,
    resumed: Following | None = None,
    watch_timeout_seconds: float = 60.0,
    watch_list: Literal["auto", "off"] = "auto",
    idle_timeout_seconds: float = 90.0,
) -> AsyncIterator[Following]:
    """Follow a kind while the context is open; with `resumed`, continue from its version."""
    settings = KubernetesSettings(
        kubeconfig=str(cluster.kubeconfig),
        watch_list=watch_list,
        page_limit=2,
        watch_timeout_seconds=watch_timeout_seconds,
        idle_timeout_seconds=idle_timeout_seconds,
        backoff_first_seconds=0.02,
        backoff_max_seconds=0.5,
    )
    chosen = PodwatchSettings(
        labels=["app"], node_labels=["team"], namespace_annotations=["example.com/cost-center"]
    )
    async with open_api(settings) as opened:
        api = _Noting(opened, settings)
        reflector = Reflector(
            kind=kind,
            api=api,
            reader=kind.reader(chosen),
            settings=settings,
            clock=SystemClock(),
            chance=lambda: 0.0,
            version=resumed.reflector.version if resumed else None,
        )
        found = Following(reflector, namespace=cluster.namespace, requested=api.requests)
        task = asyncio.create_task(found.run())
        try:
            yield found
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def running(
    bus: MemoryBus, settings: PodwatchSettings, readiness: Readiness
) -> AsyncIterator[None]:
    """Run all of podwatch while the context is open."""
    async with open_api(settings.kubernetes) as api:
        task = asyncio.create_task(
            run_podwatch(
                api=api, bus=bus, settings=settings, readiness=readiness, clock=SystemClock()
            )
        )
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def versions(
    bus: MemoryBus, uid: str, *, kind: ObjectKind[RecordT]
) -> AsyncGenerator[RecordT]:
    """Yield the records of one object from its kind's topic, as they arrive."""
    subscription = Subscription(group=f"contract-{uid}", topics=[kind.topic(bus.topics).name])
    async with bus.consumer(subscription) as consumer:
        while True:
            polled = await consumer.poll(timeout_seconds=1, max_records=100)
            for record in itertools.chain.from_iterable(polled.values()):
                if record.value is None:
                    continue
                found = kind.decoder(bus.topics).decode(record.value)
                if found.uid == uid:
                    yield found
