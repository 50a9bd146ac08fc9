"""Builders of ticks and pods for the join's tests: every field has a plausible default."""

from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    ContainerRef,
    ContainerRequest,
    EnergyMethod,
    GpuProcess,
    GpuReading,
    NodeSample,
    PodContainer,
    PodRecord,
    ProcessExit,
    ProcessKind,
)
from tests.default_topics import SAMPLES

GIB = 2**30
SECOND_NS = 10**9
UIDS = [f"00000000-0000-4000-8000-00000000000{digit}" for digit in range(8)]
CONTAINER_IDS = [f"{digit}" * 64 for digit in range(8)]


def reading(**changes: object) -> GpuReading:
    """Return a reading of a GPU that was busy for half of the tick."""
    values: dict[str, object] = {
        "uuid": "GPU-a",
        "index": 0,
        "utilization_ratio": 0.5,
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": 20 * GIB,
        "memory_reserved_bytes": GIB,
        "energy_millijoules": 300_000,
        "energy_method": EnergyMethod.COUNTER,
    }
    return GpuReading(**(values | changes))  # type: ignore[arg-type]  # the names are a GpuReading's


def process(**changes: object) -> GpuProcess:
    """Return a process on the first GPU, in no container."""
    values: dict[str, object] = {
        "gpu": 0,
        "pid": 1000,
        "started_boottime_ns": SECOND_NS,
        "kind": ProcessKind.COMPUTE,
    }
    return GpuProcess(**(values | changes))  # type: ignore[arg-type]  # the names are a GpuProcess's


def process_end(**changes: object) -> ProcessExit:
    """Return the end of a process whose usage ticks reported only in part."""
    values: dict[str, object] = {
        "gpu": 0,
        "pid": 7,
        "started_boottime_ns": SECOND_NS,
        "container": 1,
        "lifetime_ns": 2 * SECOND_NS,
        "busy_ns": 750_000_000,
        "sampled_busy_ns": 250_000_000,
        "reserved_busy_ns": SECOND_NS,
        "from_seq": 998,
        "from_time_ns": 1_789_999_997 * SECOND_NS,
        "until_seq": 1000,
        "until_time_ns": 1_790_000_000 * SECOND_NS,
    }
    return ProcessExit(**(values | changes))  # type: ignore[arg-type]  # the names are a ProcessExit's


def sample(**changes: object) -> NodeSample:
    """Return a tick of one second on one GPU without processes."""
    values: dict[str, object] = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot",
        "seq": 1000,
        "time_ns": 1_790_000_000 * SECOND_NS,
        "interval_ns": SECOND_NS,
        "gpus": [reading()],
        "containers": [
            ContainerRef(pod_uid=uid, container_id=container)
            for uid, container in zip(UIDS, CONTAINER_IDS, strict=True)
        ],
        "processes": [],
        "allocations": [],
    }
    return NodeSample(**(values | changes))  # type: ignore[arg-type]  # the names are a NodeSample's


def pod(number: int = 0, **changes: object) -> PodRecord:
    """Return the pod whose UID and container are at `number` in the tick's containers."""
    values: dict[str, object] = {
        "cluster": "default",
        "uid": UIDS[number],
        "namespace": "research",
        "name": f"train-{number}",
        "node": "node-a",
        "owner_kind": "Job",
        "owner_name": "train",
        "labels": {"team": "vision"},
        "containers": [
            PodContainer(
                name="main",
                container_id=CONTAINER_IDS[number],
                requested=ContainerRequest(resources={"nvidia.com/gpu": 1}),
                restarts=0,
            )
        ],
        "phase": "Running",
        "created_time_ns": 1_789_999_000 * SECOND_NS,
        "resource_version": "7",
    }
    return PodRecord(**(values | changes))  # type: ignore[arg-type]  # the names are a PodRecord's


def anywhere(node: str, partition: int) -> bool:
    """Allow a node's records in any partition."""
    return True


def record(value: object, *, topic: str = SAMPLES.name, offset: int = 0, key: str = "") -> Record:
    """Return a value as a consumer reads it, under its own key; bytes and None are kept."""
    name = str(getattr(value, "uid", None) or getattr(value, "node", "node-a"))
    key = key or key_in(getattr(value, "cluster", "default"), name)
    data = value if isinstance(value, bytes) or value is None else encode(value)
    return Record(topic, 3, offset, 1_790_000_000_000, key.encode(), data)
