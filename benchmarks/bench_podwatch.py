"""The pod watch: events, memory and CPU for 100,000 pods, against json.loads and client models.

Measured up to the table of records to publish, without Kafka: events and memory from the bytes of a
recorded watch, lists over HTTP without TLS from a server in a separate process.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from kubernetes_asyncio.client.api_client import ApiClient

from benchmarks.figure import Figure
from benchmarks.pods import (
    gpu_nodes,
    list_page,
    pod_server,
    team_namespaces,
    training_pods,
    watch_line,
)
from gpuledger.clock import SystemClock
from gpuledger_enricher.podwatch.api import JSON, Answer, Api
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import Phase, Upserted
from gpuledger_enricher.podwatch.kinds import NAMESPACE, NODE, POD, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_enricher.podwatch.reflector import Reflector
from gpuledger_enricher.podwatch.table import ObjectTable
from gpuledger_enricher.watched_records import RecordT

NAME = "podwatch"
_EVENTS: Final = 8_000
_NODES: Final = 5_000
_NAMESPACES: Final = 3_000
_PODS: Final = 100_000
_SAMPLE: Final = 500
_ROUNDS: Final = 3
_CHUNK_BYTES: Final = 256 * 1024


def run() -> Iterator[Figure]:
    """Measure the memory of a large cluster's pods, the rate of events, and two ways to list."""
    pods, cluster = _memory_of_a_cluster()
    yield Figure(
        name="podwatch_bytes_100k_pods",
        value=pods,
        unit="bytes",
        reference=_memory_of_dictionaries(),
    )
    yield Figure(
        name="podwatch_bytes_100k_pods_5k_nodes_3k_namespaces", value=cluster, unit="bytes"
    )
    lines = list(_lines(_EVENTS))
    yield Figure(
        name="podwatch_events_per_core_second",
        value=_best_rate(lambda: asyncio.run(_follow(_chunks(lines), events=_EVENTS, kind=POD))),
        unit="events/s/core",
        reference=_best_rate(lambda: _parse_all(lines)),
    )
    yield Figure(name="podwatch_bytes_an_event", value=len(lines[0]), unit="bytes/event")
    yield from _lists()


def _lists() -> Iterator[Figure]:
    """Measure the CPU of listing a large cluster; the reference is scaled up from one page."""
    reference = asyncio.run(_seconds_of_client_models()) * _PODS / _SAMPLE
    with pod_server(_PODS) as url:
        for name, settings in (
            ("podwatch_list_100k_seconds", KubernetesSettings(url=url, watch_list="off")),
            ("podwatch_watch_list_100k_seconds", KubernetesSettings(url=url)),
        ):
            seconds = _cpu_seconds(partial(asyncio.run, _list(settings)))
            yield Figure(name=name, value=seconds, unit="seconds", reference=reference)


async def _seconds_of_client_models() -> float:
    """Return the CPU time in which the Kubernetes client creates its models of one page."""
    page = cast("Any", SimpleNamespace(data=list_page(training_pods(_SAMPLE), more="")))
    async with ApiClient() as client:
        return _cpu_seconds(lambda: client.deserialize(page, "V1PodList"))


def _best_rate(work: Callable[[], object]) -> float:
    """Return the events per second of CPU of the best of a few rounds."""
    return max(_EVENTS / _cpu_seconds(work) for _ in range(_ROUNDS))


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _parse_all(lines: Iterable[bytes]) -> None:
    for line in lines:
        json.loads(line)


def _memory_of_a_cluster() -> tuple[float, float]:
    """Return the growth of the process for a table of that many pods, and for all tables.

    In this order and at the start, because freed memory is not returned to the system.
    """
    before = _resident_bytes()
    tables: list[ObjectTable[Any]] = [_published(POD, _lines(_PODS), _PODS)]
    pods = _resident_bytes() - before
    nodes = (watch_line("ADDED", each) for each in gpu_nodes(_NODES))
    tables.append(_published(NODE, nodes, _NODES))
    namespaces = (watch_line("ADDED", each) for each in team_namespaces(_NAMESPACES))
    tables.append(_published(NAMESPACE, namespaces, _NAMESPACES))
    return float(pods), float(_resident_bytes() - before)


def _published(
    kind: ObjectKind[RecordT], lines: Iterable[bytes], count: int
) -> ObjectTable[RecordT]:
    """Return a table of these objects with no record left to publish."""
    table = asyncio.run(_follow(_chunks(lines), events=count, kind=kind))
    while batch := table.batch(PodwatchSettings().publish_batch):
        table.acknowledge(batch)
    if len(table) != count:
        raise AssertionError(f"{len(table)} {kind.plural} in the table, not {count}")
    return table


def _memory_of_dictionaries() -> float:
    """Return the memory of the same pods from `json.loads`, scaled up from a part."""
    before = _resident_bytes()
    kept = [json.loads(pod) for pod in training_pods(_PODS // 20)]
    return float(_resident_bytes() - before) * _PODS / len(kept)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _follow(
    chunks: Iterable[bytes], *, events: int, kind: ObjectKind[RecordT]
) -> ObjectTable[RecordT]:
    """Run a watch's bytes through the reflector into a table."""
    table = _table(kind)
    # It is only queried, never written to.
    recorded = cast("Api", _Recorded(chunks))
    reflector = _reflector(recorded, KubernetesSettings(watch_list="off"), kind)
    async with aclosing(reflector.run()) as steps:
        async for step in steps:
            if isinstance(step, Upserted):
                table.upsert(step.record, time_ns=0)
                events -= 1
                if not events:
                    return table
    raise AssertionError("the watch ended before its events")


async def _list(settings: KubernetesSettings) -> None:
    """List all pods into a table."""
    table = _table(POD)
    async with open_api(settings) as api, aclosing(_reflector(api, settings, POD).run()) as steps:
        async for step in steps:
            match step:
                case Upserted(pod):
                    table.upsert(pod, time_ns=0)
                case Phase.LISTING:
                    table.begin_list()
                case Phase.LISTED:
                    table.end_list(time_ns=0)
                    break
                case _:
                    raise AssertionError(step)
    if len(table) != _PODS:
        raise AssertionError(f"{len(table)} pods in the table, not {_PODS}")


def _table(kind: ObjectKind[RecordT]) -> ObjectTable[RecordT]:
    return ObjectTable(
        node_of=kind.node_of,
        identity_of=kind.identity_of,
        tombstone_after_seconds=900,
        max_tombstones=1000,
    )


def _reflector(
    api: Api, settings: KubernetesSettings, kind: ObjectKind[RecordT]
) -> Reflector[RecordT]:
    reader = kind.reader(PodwatchSettings(node_labels=["team"], namespace_annotations=["cost"]))
    return Reflector(kind=kind, api=api, reader=reader, settings=settings, clock=SystemClock())


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
        idle_timeout_seconds: float,  # noqa: ARG002  # the form of the seam
        total_seconds: float,  # noqa: ARG002  # the form of the seam
        accept: str = JSON,  # noqa: ARG002  # the form of the seam
    ) -> AsyncIterator[Answer]:
        """Yield the same answer to every request."""
        yield cast("Answer", _RecordedAnswer(self._chunks))


class _RecordedAnswer:
    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks

    async def read(self, *, max_bytes: int) -> bytes:  # noqa: ARG002  # the form of the seam
        return b'{"metadata":{"resourceVersion":"1"},"items":[]}'

    async def chunks(self) -> AsyncGenerator[bytes]:
        for chunk in self._chunks:
            yield chunk


def _chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines as a socket would: in pieces that ignore line ends."""
    waiting = bytearray()
    for line in lines:
        waiting += line + b"\n"
        while len(waiting) >= _CHUNK_BYTES:
            yield bytes(waiting[:_CHUNK_BYTES])
            del waiting[:_CHUNK_BYTES]
    yield bytes(waiting)


def _lines(count: int) -> Iterator[bytes]:
    return (watch_line("MODIFIED", pod) for pod in training_pods(count))
