"""Agent, podwatch and join on a real node with simulated GPUs, on a bus in memory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.clock import SystemClock
from gpuledger.codec import decoder_of
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.context import run_agent
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.settings import AgentSettings, KubeletSettings, SpoolSettings
from gpuledger_agent.source_selection import find_source
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import (
    KubernetesSettings,
    LeaseSettings,
    PodwatchSettings,
)
from gpuledger_enricher.podwatch.pod_watch import run_podwatch
from gpuledger_simulator.identities import gpu_uuid
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import EVENTS
from tests.fakes.nvml import NO_INSTANCE, Altered
from tests.real.services.kubelet_node import NODE, read_or_empty

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gpuledger.bus.protocol import Consumer
    from gpuledger.records.events import EventAllocation
    from tests.real.services.kubelet_node import KubeletNode

GPU_COUNT = 4
UUIDS = [gpu_uuid(0, NODE, index) for index in range(GPU_COUNT)]
SAMPLING_SECONDS = 0.25
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.05
SCAN_NS = 100_000_000
VISIBLE = b"NVIDIA_VISIBLE_DEVICES="
SCENARIO = {
    "name": "node",
    "seed": 0,
    "nodes": [{"name": NODE, "gpus": {"model": "NVIDIA L4", "count": GPU_COUNT}}],
    "host_processes": [
        {"node": NODE, "command": "any", "memory_bytes": 1 << 30, "gpus": [index]}
        for index in range(GPU_COUNT)
    ],
}


def visible_gpus(pid: int) -> list[str]:
    """Return the GPUs that a process may open, from its environment."""
    variables = read_or_empty(Path(f"/proc/{pid}/environ")).split(b"\0")
    found = next((one for one in variables if one.startswith(VISIBLE)), VISIBLE)
    return [one for one in found.removeprefix(VISIBLE).decode().split(",") if one]


@lru_cache(maxsize=1)
def _users(_moment: int) -> list[tuple[int, list[str]]]:
    """Return the processes with GPUs; a new `_moment` makes the cache read them again."""
    pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [(pid, gpus) for pid in pids if (gpus := visible_gpus(pid))]


def processes_on(uuid: str) -> list[int]:
    """Return the machine's processes that may open a GPU; the list is at most 0.1 s old."""
    moment = time.monotonic_ns() // SCAN_NS
    return [pid for pid, gpus in _users(moment) if uuid in gpus]


def play_gpus() -> Altered:
    """Return NVML with busy GPUs; each process of the machine uses all GPUs that it may open."""
    simulation = Simulation(parse_scenario(SCENARIO), epoch_ns=time.time_ns())

    def running(handle: Any) -> list[Any]:  # noqa: ANN401  # NVML's structs have no types
        facts = {"usedGpuMemory": 1 << 30, "gpuInstanceId": NO_INSTANCE}
        facts["computeInstanceId"] = NO_INSTANCE
        return [
            pynvml.nvmlFriendlyObject({"pid": pid, **facts})
            for pid in processes_on(UUIDS[handle.index])
        ]

    nvml = Altered(
        simulation.node(NODE).nvml,
        nvmlDeviceGetComputeRunningProcesses_v3=running,
    )
    nvml.refuse("nvmlDeviceGetProcessUtilization", pynvml.NVML_ERROR_NOT_FOUND)
    return nvml


@dataclass(frozen=True, kw_only=True)
class Booked:
    """One GPU in one event: nanoseconds by container, as `namespace/pod/container`.

    The name is empty for time that is not allocated, and `?` if the allocation is unknown.
    """

    allocated: Counter[str]
    used: Counter[str]
    container_ids: set[str | None]
    pod_uids: set[str | None]


def booked(event: GpuEvent, uuid: str) -> Booked:
    """Return how an event divides a GPU."""
    found = Booked(allocated=Counter(), used=Counter(), container_ids=set(), pod_uids=set())
    (books,) = (one for one in event.gpus if one.reading.uuid == uuid)
    for entry in books.entries:
        if entry.allocated_ns:
            allocation = None if entry.allocation is None else event.allocations[entry.allocation]
            name = "?" if entry.allocation_unknown else _name(event, allocation)
            found.allocated[name] += entry.allocated_ns
        if entry.container is not None:
            container = event.containers[entry.container]
            pod = event.pods[container.pod or 0]
            found.used[f"{pod.namespace}/{pod.name}/{container.name}"] += entry.busy_ns or 0
            found.container_ids.add(container.container_id)
            found.pod_uids.add(pod.uid)
    return found


def _name(event: GpuEvent, allocation: EventAllocation | None) -> str:
    if allocation is None:
        return ""
    pod = event.pods[allocation.pod]
    return f"{pod.namespace}/{pod.name}/{allocation.container}"


@dataclass(kw_only=True)
class NodePipeline:
    """The events of a node."""

    consumer: Consumer
    tasks: Sequence[asyncio.Task[None]]
    events: list[GpuEvent] = field(default_factory=list)

    async def until(self, probe: Callable[[GpuEvent], bool]) -> GpuEvent:
        """Return the first event from now on for which `probe` returns true."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            begun_ns = time.time_ns()
            while True:
                for event in await self._read():
                    if event.time_ns - event.interval_ns >= begun_ns and probe(event):
                        return event

    async def next_event(self) -> GpuEvent:
        """Return the first event from now on."""
        return await self.until(lambda _: True)

    async def until_time(self, time_ns: int) -> None:
        """Read the events up to this time."""
        await self.until(lambda event: event.time_ns >= time_ns)

    async def _read(self) -> list[GpuEvent]:
        for task in self.tasks:
            if task.done():
                task.result()
        batches = await self.consumer.poll(timeout_seconds=POLL_SECONDS, max_records=500)
        decoder = decoder_of(EVENTS.name, GpuEvent)
        found = [decoder.decode(one.value) for records in batches.values() for one in records]
        self.events += found
        return found


@asynccontextmanager
async def running_on(
    node: KubeletNode, *, refresh_seconds: float = 10.0
) -> AsyncIterator[NodePipeline]:
    """Run the components on a node; the agent queries the kubelet every `refresh_seconds`."""
    settings = AgentSettings(
        node_name=NODE,
        source="nvml",
        sampling_interval_seconds=SAMPLING_SECONDS,
        spool=SpoolSettings(directory=""),
        kubelet=KubeletSettings(
            socket=node.kubelet.socket,
            pod_log_dir=node.kubelet.pod_logs,
            refresh_seconds=refresh_seconds,
        ),
    )
    watched = PodwatchSettings(
        kubernetes=KubernetesSettings(kubeconfig=str(node.kube_api.kubeconfig)),
        lease=LeaseSettings(enabled=False),
    )
    bus, readiness = MemoryBus(), Readiness()
    host = replace(find_source(settings), gpus=NvmlSession(play_gpus()))
    joined = JoinSettings(join=JoinTuning(poll_timeout_seconds=POLL_SECONDS))
    async with (
        open_api(watched.kubernetes) as api,
        bus.consumer(Subscription(group="test", topics=[EVENTS.name])) as consumer,
        run_tasks(
            run_join(bus=bus, settings=joined, readiness=readiness),
            run_podwatch(
                api=api, bus=bus, settings=watched, readiness=readiness, clock=SystemClock()
            ),
            run_agent(host=host, bus=bus, settings=settings, readiness=readiness),
        ) as tasks,
    ):
        yield NodePipeline(consumer=consumer, tasks=tasks)
