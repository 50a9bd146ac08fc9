"""Pods as an API server writes them, and a clock on which pauses take no time."""

import asyncio
import json
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gpuledger.records import PodRecord
from gpuledger_enricher.podwatch.decode import PodReader
from tests.hanging import HANG_SECONDS

CREATED = "2026-11-21T08:00:00Z"
CREATED_NS = 1_795_248_000_000_000_000

Object = dict[str, Any]


def pod(uid: str = "u1", *, node: str | None = "node-a", version: str = "7", **more: Any) -> Object:  # noqa: ANN401  # any field of a pod
    """Return a running pod of one container; `more` replaces whole sections of it."""
    return {
        "metadata": {
            "uid": uid,
            "name": f"pod-{uid}",
            "namespace": "team-red",
            "resourceVersion": version,
            "creationTimestamp": CREATED,
            **more.get("metadata", {}),
        },
        "spec": {
            **({"nodeName": node} if node else {}),
            "containers": [{"name": "main"}],
            **more.get("spec", {}),
        },
        "status": {
            "phase": "Running",
            "startTime": "2026-11-21T08:00:01Z",
            "containerStatuses": [
                {"name": "main", "containerID": f"containerd://{hex_id(uid)}", "restartCount": 0}
            ],
            **more.get("status", {}),
        },
    }


def hex_id(name: str) -> str:
    """Return a container id of the form that runtimes give."""
    return sha256(name.encode()).hexdigest()


def reader_of(
    *,
    labels: Iterable[str] = (),
    gpu_resource_prefixes: Iterable[str] = (),
    annotations: Iterable[str] = (),
) -> PodReader:
    """Return a reader of pods, by default without any of their labels, requests and annotations."""
    return PodReader(
        cluster="default",
        labels=labels,
        gpu_resource_prefixes=gpu_resource_prefixes,
        annotations=annotations,
    )


def pod_record(uid: str = "u1", **changes: Any) -> PodRecord:  # noqa: ANN401  # any field of a record
    """Return the record of that pod with some fields replaced."""
    read = reader_of().read(encoded(pod(uid)))
    assert read is not None
    return msgspec.structs.replace(read, **changes)


def owned_by(kind: str, name: str, *, controller: bool = True) -> Object:
    """Return an entry of `ownerReferences`."""
    return {"kind": kind, "name": name, "uid": "owner", "controller": controller}


def encoded(item: object) -> bytes:
    """Return the JSON of an object as an API server writes it, without spaces."""
    return json.dumps(item, separators=(",", ":")).encode()


class PatientClock:
    """A clock that moves only by its sleeps, which it records and which end at once."""

    def __init__(self, *, start_ns: int = CREATED_NS) -> None:
        self._start_ns = start_ns
        self._passed_ns = 0
        self.slept: list[float] = []

    def time_ns(self) -> int:
        return self._start_ns + self._passed_ns

    def monotonic_ns(self) -> int:
        return self._passed_ns

    def boottime_ns(self) -> int:
        return self._passed_ns

    def advance(self, seconds: float) -> None:
        self._passed_ns += round(seconds * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


async def soon(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds; raise `TimeoutError` if it does not."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110  # a condition has no event to wait on
            await asyncio.sleep(0.001)


def write_kubeconfig(path: Path, *, url: str, token: str) -> Path:
    """Write a kubeconfig for a server that speaks plain HTTP."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document))
    return path
