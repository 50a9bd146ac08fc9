"""Ticks as thousands of agents write them: 8 GPUs, 20 processes in 10 containers, random values.

Ratios have six digits, like an agent's. Each GPU is allocated to one pod as a whole. Nodes have a
provider's labels, and the pods' namespace has two labels.

Data for benchmarks only; nothing is measured here.
"""

import random
import uuid
from dataclasses import dataclass
from typing import Final

from gpuledger.codec import encode
from gpuledger.records import (
    ContainerRef,
    ContainerRequest,
    DeviceAllocation,
    EnergyMethod,
    GpuProcess,
    GpuReading,
    NamespaceRecord,
    NodeRecord,
    NodeSample,
    PodContainer,
    PodRecord,
    ProcessKind,
)

GPUS, PROCESSES, CONTAINERS = 8, 20, 10
SEQ_PER_TICK: Final = 1_000
"""The increase of a node's `seq`, milliseconds since its boot, from a tick to the next one."""
_NS_PER_TICK: Final = SEQ_PER_TICK * 1_000_000
_BYTES = 80 * 2**30
_MAX_PROCESS_BYTES = 16 * 2**30
# No GPU has more than three processes, and drivers report the memory of all of them as used.
_USED_BYTES = 3 * _MAX_PROCESS_BYTES
_START_NS = 1_790_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class TickTemplate:
    """A node's tick without `seq` and time, from which many ticks can be made cheaply."""

    node: str
    head: bytes
    tail: bytes

    def at(self, *, seq: int, time_ns: int) -> bytes:
        """Return the tick with this `seq` (milliseconds since boot) and time, encoded."""
        return b'%b"seq":%d,"time_ns":%d%b' % (self.head, seq, time_ns, self.tail)


def template_of(tick: NodeSample) -> TickTemplate:
    """Return a tick without its `seq` and time."""
    head, found, tail = encode(tick).partition(b'"seq":%d,"time_ns":%d' % (tick.seq, tick.time_ns))
    if not found:
        raise ValueError("seq and time are no longer adjacent in an encoded tick")
    return TickTemplate(node=tick.node, head=head, tail=tail)


class Fleet:
    """Nodes that tick; the same seed gives the same ticks."""

    def __init__(self, *, nodes: int, seed: int = 1) -> None:
        self.nodes = nodes
        self._random = random.Random(seed)  # noqa: S311 - data for a benchmark
        self._gpus = [[self._uuid("GPU-") for _ in range(GPUS)] for _ in range(nodes)]
        self._boots = [self._uuid() for _ in range(nodes)]
        self._allocations = [
            [_allocation(node, gpu, uuid) for gpu, uuid in enumerate(gpus)]
            for node, gpus in enumerate(self._gpus)
        ]
        self._containers = [[self._container() for _ in range(CONTAINERS)] for _ in range(nodes)]

    def tick(self, node: int, number: int) -> NodeSample:
        """Return a node's tick with this number; it ticks once per second from its boot on."""
        return NodeSample(
            cluster="default",
            node=node_name(node),
            boot_id=self._boots[node],
            seq=number * SEQ_PER_TICK,
            time_ns=_START_NS + number * _NS_PER_TICK,
            interval_ns=_NS_PER_TICK + self._random.randrange(10**6),
            gpus=[self._reading(gpu, uuid) for gpu, uuid in enumerate(self._gpus[node])],
            containers=self._containers[node],
            processes=[self._process(place) for place in range(PROCESSES)],
            allocations=self._allocations[node],
        )

    def template(self, node: int) -> TickTemplate:
        """Return the common part of all ticks of a node."""
        return template_of(self.tick(node, 0))

    def pods(self, node: int) -> list[PodRecord]:
        """Return the pods of a node."""
        return [
            _pod(node, place, container) for place, container in enumerate(self._containers[node])
        ]

    def places(self) -> tuple[NamespaceRecord, list[NodeRecord]]:
        """Return the pods' namespace, and all nodes."""
        namespace = NamespaceRecord(
            cluster="default",
            uid="0f2f3c1e-5a86-4a0a-9a52-8d3b0a6d3f11",
            name="research",
            labels={"team": "vision", "cost-center": "4711"},
            created_time_ns=_START_NS,
            resource_version="1",
        )
        nodes = [
            NodeRecord(
                cluster="default",
                uid=self._boots[node],
                name=node_name(node),
                pool="h100-training",
                instance_type="p5.48xlarge",
                zone="eu-west-1a",
                region="eu-west-1",
                capacity_type="on_demand",
                labels={},
                created_time_ns=_START_NS,
                resource_version="1",
            )
            for node in range(self.nodes)
        ]
        return namespace, nodes

    def _reading(self, index: int, uuid_: str) -> GpuReading:
        chance = self._random
        drawn = chance.randrange(100_000, 700_000)
        return GpuReading(
            uuid=uuid_,
            index=index,
            model="NVIDIA H100 80GB HBM3",
            mig_enabled=False,
            utilization_ratio=round(chance.random(), 6),
            memory_utilization_ratio=round(chance.random(), 6),
            memory_total_bytes=_BYTES,
            memory_used_bytes=_USED_BYTES + chance.randrange(2**30),
            memory_reserved_bytes=600 * 2**20,
            power_milliwatts=drawn,
            energy_millijoules=drawn,
            energy_total_millijoules=chance.randrange(10**9, 10**12),
            energy_method=EnergyMethod.COUNTER,
            idle_draw_milliwatts=71_250,
            temperature_celsius=chance.randrange(30, 90),
            sm_clock_hertz=1_980_000_000,
            memory_clock_hertz=2_619_000_000,
            sm_active_ratio=round(chance.random(), 6),
            tensor_active_ratio=round(chance.random(), 6),
            dram_active_ratio=round(chance.random(), 6),
            compute_slices=7,
            memory_slices=8,
        )

    def _process(self, place: int) -> GpuProcess:
        chance = self._random
        return GpuProcess(
            gpu=place % GPUS,
            pid=chance.randrange(4_000_000),
            started_boottime_ns=chance.randrange(10**15),
            container=place % CONTAINERS,
            kind=ProcessKind.COMPUTE,
            memory_used_bytes=chance.randrange(_MAX_PROCESS_BYTES),
            sm_utilization_ratio=round(chance.random(), 6),
        )

    def _container(self) -> ContainerRef:
        return ContainerRef(
            container_id=f"{self._random.getrandbits(256):064x}", pod_uid=self._uuid()
        )

    def _uuid(self, prefix: str = "") -> str:
        return prefix + str(uuid.UUID(int=self._random.getrandbits(128)))


def node_name(node: int) -> str:
    """Return the name of a node."""
    return f"gpu-node-{node:05d}"


def _allocation(node: int, place: int, uuid_: str) -> DeviceAllocation:
    return DeviceAllocation(
        gpu_uuid=uuid_,
        device_id=uuid_,
        resource_name="nvidia.com/gpu",
        namespace="research",
        pod=f"train-{node}-{place}",
        container="main",
    )


def _pod(node: int, place: int, container: ContainerRef) -> PodRecord:
    return PodRecord(
        cluster="default",
        uid=container.pod_uid or "",
        namespace="research",
        name=f"train-{node}-{place}",
        node=node_name(node),
        owner_kind="Job",
        owner_name=f"train-{node}",
        labels={"app": "train", "team": "vision"},
        containers=[
            PodContainer(
                name="main",
                container_id=container.container_id,
                requested=ContainerRequest(resources={"nvidia.com/gpu": 1}),
                restarts=0,
            )
        ],
        phase="Running",
        created_time_ns=_START_NS,
        resource_version="1",
    )
