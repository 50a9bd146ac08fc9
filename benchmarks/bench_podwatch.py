"""The pod watch: events per second and core, against json.loads of the same lines; memory per pod.

From the bytes of a watch to the table of what is to be published; without sockets and Kafka.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.figure import Figure
from enricher.podwatch.api import Answer
from enricher.podwatch.decode import PodReader
from enricher.podwatch.reflector import Reflector
from enricher.podwatch.settings import KubernetesSettings, PodwatchSettings
from enricher.podwatch.steps import Seen
from enricher.podwatch.table import PodTable
from gpuledger.clock import SystemClock

NAME = "podwatch"
_EVENTS: Final = 8_000
_PODS: Final = 100_000
_ROUNDS: Final = 3
_CHUNK_BYTES: Final = 256 * 1024
_MARK: Final = "@NUMBER@"


def run() -> Iterator[Figure]:
    """Measure the rate, the reference's rate, and the memory of a large cluster's pods."""
    yield Figure(name="podwatch.bytes_100k_pods", value=_memory_of_pods(), unit="bytes")
    lines = list(_lines(_EVENTS))
    rate = _best_rate(lambda: asyncio.run(_follow(_chunks(lines), events=_EVENTS)))
    reference = _best_rate(lambda: _parse_all(lines))
    yield Figure(
        name="podwatch.events_per_core_second",
        value=rate,
        unit="events/s/core",
        reference=reference,
    )
    yield Figure(name="podwatch.bytes_an_event", value=len(lines[0]), unit="bytes/event")


def _best_rate(work: Callable[[], object]) -> float:
    """Give the events per second of CPU of the best of a few rounds."""
    return max(_EVENTS / _cpu_seconds(work) for _ in range(_ROUNDS))


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _parse_all(lines: Iterable[bytes]) -> None:
    for line in lines:
        json.loads(line)


def _memory_of_pods() -> float:
    """Give by how much the process grew for a table of that many pods."""
    before = _resident_bytes()
    table = asyncio.run(_follow(_chunks(_lines(_PODS)), events=_PODS))
    table.acknowledge(table.batch(_PODS))
    grown = _resident_bytes() - before
    if len(table) != _PODS:
        raise AssertionError(f"{len(table)} pods in the table, not {_PODS}")
    return float(grown)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _follow(chunks: Iterable[bytes], *, events: int) -> PodTable:
    """Run a watch's bytes through the reflector into a table."""
    settings = PodwatchSettings()
    reader = PodReader(labels=settings.labels, gpu_resource_prefixes=settings.gpu_resource_prefixes)
    reflector = Reflector(
        api=_Recorded(chunks), reader=reader, settings=KubernetesSettings(), clock=SystemClock()
    )
    table = PodTable(tombstone_after_seconds=900, tombstones_most=1000)
    async with aclosing(reflector.forever()) as steps:
        async for step in steps:
            if isinstance(step, Seen):
                table.see(step.pod, time_ns=0)
                events -= 1
                if not events:
                    return table
    raise AssertionError("the watch ended before its events")


class _Recorded:
    """An API server with an empty list and one recorded watch."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    @asynccontextmanager
    async def get(
        self,
        path: str,  # noqa: ARG002  # the form of the seam
        *,
        query: Mapping[str, str],  # noqa: ARG002  # the form of the seam
        silence_seconds: float,  # noqa: ARG002  # the form of the seam
        total_seconds: float,  # noqa: ARG002  # the form of the seam
    ) -> AsyncIterator[Answer]:
        """Give the same answer to everything."""
        yield _RecordedAnswer(self._chunks)


class _RecordedAnswer:
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    async def read(self) -> bytes:
        return b'{"metadata":{"resourceVersion":"1"},"items":[]}'

    async def chunks(self) -> AsyncGenerator[bytes]:
        for chunk in self._chunks:
            yield chunk


def _chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Give the lines as a socket would: in pieces that know nothing of lines."""
    waiting = bytearray()
    for line in lines:
        waiting += line + b"\n"
        while len(waiting) >= _CHUNK_BYTES:
            yield bytes(waiting[:_CHUNK_BYTES])
            del waiting[:_CHUNK_BYTES]
    yield bytes(waiting)


def _lines(count: int) -> Iterator[bytes]:
    """Give events of distinct pods, spread over nodes, namespaces and workloads."""
    template = json.dumps({"type": "MODIFIED", "object": _training_pod()}, separators=(",", ":"))
    fill = partial(template.replace, _MARK)
    for number in range(count):
        yield fill(f"{number:08d}").replace("@NODE@", str(number % 2000)).encode()


def _training_pod() -> dict[str, Any]:
    """Give a pod of a distributed training as a server describes it, of about seven kilobytes."""
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
            "name": f"llama-worker-{_MARK}",
            "namespace": "team-@NODE@",
            "uid": f"6f1a2b3c-4d5e-4f60-8a7b-0000{_MARK}",
            "resourceVersion": f"90{_MARK}",
            "creationTimestamp": "2026-11-21T08:00:00Z",
            "labels": {
                "app": "llama",
                "app.kubernetes.io/name": "llama",
                "team": "team-@NODE@",
                "training.kubeflow.org/job-name": "llama",
                "training.kubeflow.org/replica-index": _MARK,
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
            "startTime": "2026-11-21T08:00:01Z",
            "conditions": conditions,
            "containerStatuses": [
                {
                    "name": "pytorch",
                    "restartCount": 0,
                    "containerID": f"containerd://{'ab' * 28}{_MARK}",
                    "image": "registry.example/train:1.2.3",
                    "state": {"running": {"startedAt": "2026-11-21T08:00:05Z"}},
                }
            ],
        },
    }
