"""Objects of a large training cluster, as an API server writes and serves them.

Measures nothing.
"""

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from aiohttp import web

_NUMBER: Final = "@NUMBER@"
_NODES: Final = 2000
_FIRST: Final = datetime(2026, 8, 1, tzinfo=UTC)
_APART: Final = timedelta(seconds=7)
_END: Final = {"k8s.io/initial-events-end": "true"}
_VERSION: Final = "999999999"
_WRITE_BYTES: Final = 256 * 1024


def training_pods(count: int) -> Iterator[bytes]:
    """Yield distinct pods of about seven kilobytes, spread over nodes, namespaces and workloads.

    Each was created in a different second, as in a cluster that has grown for weeks.
    """
    template = json.dumps(_training_pod(), separators=(",", ":"))
    for number in range(count):
        yield _filled(template, number).encode()


def _filled(template: str, number: int) -> str:
    created = _FIRST + number * _APART
    text = template.replace(_NUMBER, f"{number:08d}").replace("@NODE@", str(number % _NODES))
    for mark, seconds in (("@CREATED@", 0), ("@TAKEN@", 1), ("@STARTED@", 5)):
        text = text.replace(mark, f"{created + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}")
    return text


def gpu_nodes(count: int) -> Iterator[bytes]:
    """Yield the metadata of distinct nodes in pools of a provider, each with tens of labels."""
    for number in range(count):
        zone = f"us-east-1{'abc'[number % 3]}"
        labels = {
            "node.kubernetes.io/instance-type": ("p5.48xlarge", "g6.12xlarge")[number % 2],
            "topology.kubernetes.io/zone": zone,
            "topology.kubernetes.io/region": "us-east-1",
            "karpenter.sh/nodepool": f"pool-{number % 20}",
            "karpenter.sh/capacity-type": ("spot", "on-demand", "reserved")[number % 3],
            "kubernetes.io/hostname": f"gpu-node-{number}",
            "team": f"team-{number % 50}",
            **{f"feature.node.kubernetes.io/cpu-{feature}": "true" for feature in range(40)},
        }
        yield _metadata(f"gpu-node-{number}", number, labels=labels)


def team_namespaces(count: int) -> Iterator[bytes]:
    """Yield the metadata of distinct namespaces, each with its own cost centre."""
    for number in range(count):
        name = f"team-{number}"
        labels = {"kubernetes.io/metadata.name": name, "team": name, "project": f"p-{number % 99}"}
        yield _metadata(name, number, labels=labels, annotations={"cost": f"{number:06d}"})


def _metadata(name: str, number: int, **more: dict[str, str]) -> bytes:
    """Return an object as a server writes it for clients that request only metadata."""
    metadata = {
        "name": name,
        "uid": f"0b7c1d2e-4d5e-4f60-8a7b-0000{number:08d}",
        "resourceVersion": f"80{number:08d}",
        "creationTimestamp": f"{_FIRST + number * _APART:%Y-%m-%dT%H:%M:%SZ}",
        **more,
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:metadata": {"f:labels": {}}}}],
    }
    item = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return json.dumps(item, separators=(",", ":")).encode()


def watch_line(kind: str, item: bytes) -> bytes:
    """Return a pod as a line of a watch, without its end."""
    return b'{"type":"%s","object":%s}' % (kind.encode(), item)


def list_page(items: Iterator[bytes], *, more: str) -> bytes:
    """Return a page of a list; `more` is the token for the next one."""
    meta = json.dumps({"resourceVersion": _VERSION, "continue": more}).encode()
    return b'{"kind":"PodList","apiVersion":"v1","metadata":%s,"items":[%s]}' % (
        meta,
        b",".join(items),
    )


@contextmanager
def pod_server(count: int) -> Iterator[str]:
    """Serve this many pods, in pages and as a watch, from a separate process; yield its URL."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(count, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(count: int, started: Connection) -> None:
    asyncio.run(_server(list(training_pods(count)), started))


async def _server(pods: list[bytes], started: Connection) -> None:
    app = web.Application()
    app.router.add_get("/api/v1/pods", partial(_answer, pods))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    started.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


async def _answer(pods: list[bytes], request: web.Request) -> web.StreamResponse:
    if "watch" in request.query:
        return await _watch(pods, request)
    begin, limit = int(request.query.get("continue") or 0), int(request.query["limit"])
    end = begin + limit
    more = str(end) if end < len(pods) else ""
    return web.Response(body=list_page(iter(pods[begin:end]), more=more))


async def _watch(pods: list[bytes], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    waiting = bytearray()
    for pod in pods if "sendInitialEvents" in request.query else ():
        waiting += watch_line("ADDED", pod) + b"\n"
        if len(waiting) >= _WRITE_BYTES:
            await response.write(bytes(waiting))
            waiting.clear()
    mark = {"metadata": {"resourceVersion": _VERSION, "annotations": _END}}
    await response.write(bytes(waiting) + watch_line("BOOKMARK", json.dumps(mark).encode()) + b"\n")
    await asyncio.Event().wait()
    return response


def _training_pod() -> dict[str, Any]:
    """Return a pod of a distributed training as a server describes it, of about seven kilobytes."""
    managed: dict[str, Any] = {
        f"f:field{number}": {"f:inner": {}, "f:other": {}} for number in range(70)
    }
    variables = [{"name": f"NCCL_OPTION_{n}", "value": f"value-{n}"} for n in range(25)]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T08:00:00Z"}
        for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    limits = {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": f"llama-worker-{_NUMBER}",
            "namespace": "team-@NODE@",
            "uid": f"6f1a2b3c-4d5e-4f60-8a7b-0000{_NUMBER}",
            "resourceVersion": f"90{_NUMBER}",
            "creationTimestamp": "@CREATED@",
            "labels": {
                "app": "llama",
                "app.kubernetes.io/name": "llama",
                "team": "team-@NODE@",
                "training.kubeflow.org/job-name": "llama",
                "training.kubeflow.org/replica-index": _NUMBER,
            },
            "annotations": {"sidecar.istio.io/inject": "false", "note": "x" * 300},
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": "llama-@NODE@",
                    "uid": "0d9c8b7a-0000-4000-8000-000000000000",
                    "controller": True,
                }
            ],
            "managedFields": [{"manager": "kubelet", "fieldsV1": managed}],
        },
        "spec": {
            "nodeName": "gpu-node-@NODE@",
            "priority": 1000,
            "priorityClassName": "training",
            "containers": [
                {
                    "name": "pytorch",
                    "image": "registry.example/train:1.2.3",
                    "args": [f"--option-{n}=value-{n}" for n in range(20)],
                    "env": variables,
                    "resources": {"limits": limits, "requests": limits},
                }
            ],
            "tolerations": [{"key": f"key-{n}", "operator": "Exists"} for n in range(6)],
            "volumes": [{"name": f"volume-{n}", "emptyDir": {}} for n in range(8)],
        },
        "status": {
            "phase": "Running",
            "qosClass": "Burstable",
            "startTime": "@TAKEN@",
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": "pytorch",
                    "restartCount": 0,
                    "containerID": f"containerd://{'ab' * 28}{_NUMBER}",
                    "image": "registry.example/train:1.2.3",
                    "imageID": "registry.example/train@sha256:5e",
                    "ready": True,
                    "started": True,
                    "state": {"running": {"startedAt": "@STARTED@"}},
                }
            ],
        },
    }
