"""The store's versions of nodes, namespaces, GPUs and incidents: each one once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from msgspec import structs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    AttributedIncident,
    ContainerRequest,
    GpuFacts,
    Incident,
    Inventory,
    NamespaceRecord,
    NodeRecord,
    PendingContainer,
    PendingPodRecord,
    PodDescription,
    PodState,
    Severity,
)
from gpuledger.topics import Topic
from gpuledger_sinks.store.dimensions import StampBounds
from tests.default_topics import ATTRIBUTED_INCIDENTS, INVENTORY, NAMESPACES, NODES, PENDING_PODS
from tests.unit.sinks.builders import (
    GPU,
    NODE,
    START_NS,
    ManualClock,
    bus,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.store.storing import store

KEY = key_in("default", NODE)


def node(**changes: Any) -> NodeRecord:  # noqa: ANN401  # any field
    values: dict[str, Any] = {
        "cluster": "default",
        "uid": "uid-node",
        "name": NODE,
        "pool": "h100",
        "instance_type": "p5.48xlarge",
        "labels": {"b": "2", "a": "1"},
        "created_time_ns": START_NS,
        "resource_version": "7",
    }
    return NodeRecord(**values | changes)


def namespace() -> NamespaceRecord:
    return NamespaceRecord(
        cluster="default",
        uid="uid-namespace",
        name="research",
        labels={"team": "vision"},
        created_time_ns=START_NS,
        resource_version="3",
    )


def inventory(*gpus: str) -> Inventory:
    return Inventory(
        cluster="default",
        node=NODE,
        boot_id="boot-1",
        time_ns=START_NS,
        gpus=[
            GpuFacts(uuid=uuid, index=index, model="H100", instances=[], capabilities=[])
            for index, uuid in enumerate(gpus)
        ],
    )


def incident() -> AttributedIncident:
    reported = Incident(
        cluster="default",
        node=NODE,
        boot_id="boot-1",
        gpu_uuid=GPU,
        time_ns=START_NS,
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        message="GPU has fallen off the bus",
        processes=[],
    )
    pod = PodDescription(uid="uid-1", state=PodState.KNOWN, namespace="research", name="train-0")
    return AttributedIncident(incident=reported, pods=[pod])


async def tell(
    on: MemoryBus,
    topic: Topic,
    *records: object | None,
    key: str = KEY,
    partition: int | None = None,
    time_ms: int = START_NS // 10**6,
) -> None:
    at = place_of(NODE, topic.name).partition if topic.partitioner == "node" else 0
    async with on.producer() as producer:
        for each in records:
            value = None if each is None else encode(each)
            message = Message(key.encode(), value, time_ms)
            await producer.publish(topic.name, at if partition is None else partition, [message])


def found(path: Path, table: str, columns: str) -> list[tuple[Any, ...]]:
    if not DeltaTable.is_deltatable(str(path / table)):
        return []
    if not (files := DeltaTable(str(path / table)).file_uris()):
        return []
    sql = f"SELECT {columns} FROM read_parquet({files}) ORDER BY ALL"  # noqa: S608  # our own files
    with duckdb.connect() as connection:
        return connection.execute(sql).fetchall()


async def stored(
    on: MemoryBus, path: Path, table: str, columns: str, expected: Sequence[tuple[Any, ...]]
) -> None:
    clock = ManualClock()
    async with running(store(path, on, clock=clock)):
        await eventually(
            lambda: clock.advance(1) and len(found(path, table, columns)) >= len(expected)
        )
    assert found(path, table, columns) == list(expected)


async def test_each_version_of_a_node_is_stored_once_across_restarts(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0))
    await tell(on, NODES, node())
    columns = (
        "node, node_pool, labels, resource_version, deleted_time IS NULL,"
        " allocatable_cpu_millicores, allocatable_memory_bytes, allocatable_resources,"
        " unschedulable"
    )
    first = (NODE, "h100", '{"a":"1","b":"2"}', "7", True, None, None, None, None)
    await stored(on, tmp_path, "nodes", columns, [first])
    has: dict[str, Any] = {
        "allocatable_cpu_millicores": 63_770,
        "allocatable_memory_bytes": 2**40,
        "allocatable_resources": {"nvidia.com/gpu": 8},
        "unschedulable": True,
    }
    await tell(on, NODES, node(resource_version="8", deleted_time_ns=START_NS, **has), None)
    second = (*first[:3], "8", False, 63_770, 2**40, '{"nvidia.com/gpu":"8"}', True)
    await stored(on, tmp_path, "nodes", columns, [first, second])


def pending(**changes: Any) -> PendingPodRecord:  # noqa: ANN401  # any field
    requested = ContainerRequest(resources={"nvidia.com/gpu": 4})
    values: dict[str, Any] = {
        "cluster": "default",
        "uid": "uid-train",
        "namespace": "research",
        "name": "train-0",
        "labels": {},
        "containers": [PendingContainer(name=name, requested=requested) for name in ("a", "b")],
        "created_time_ns": START_NS,
        "resource_version": "7",
    }
    return PendingPodRecord(**values | changes)


async def test_each_version_of_a_pod_that_waits_is_stored_once_across_restarts(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0))
    key = key_in("default", "uid-train")
    refused: dict[str, Any] = {
        "resource_version": "8",
        "priority": -10,
        "priority_class": "batch",
        "queue": "nlp",
        "scheduling_gates": ["example.com/quota", "other"],
        "reason": "SchedulingGated",
        "message": "blocked",
        "requested_cpu_millicores": 4000,
        "requested_memory_bytes": 2**30,
    }
    columns = (
        "pod_uid, requested, priority, priority_class, queue, scheduling_gates, reason, message,"
        " epoch_us(created_time), epoch_us(left_time), requested_cpu_millicores,"
        " requested_memory_bytes, resource_version"
    )
    created_us, left_us = START_NS // 1000, START_NS // 1000 + 5_000_000
    begin = ("uid-train", '{"nvidia.com/gpu":"8"}')
    gates = '["example.com/quota","other"]'
    about = (-10, "batch", "nlp", gates, "SchedulingGated", "blocked", created_us)
    needs = (4000, 2**30)
    first = (*begin, *[None] * 6, created_us, None, None, None, "7")
    second = (*begin, *about, None, *needs, "8")
    last = (*begin, *about, left_us, *needs, "9")
    await tell(on, PENDING_PODS, pending(), pending(**refused), key=key)
    await stored(on, tmp_path, "pending_pods", columns, [second, first])
    refused |= {"resource_version": "9", "left_time_ns": left_us * 1000}

    await tell(on, PENDING_PODS, pending(**refused), None, key=key)

    await stored(on, tmp_path, "pending_pods", columns, [last, second, first])


async def test_namespaces_are_stored_by_the_sink_that_has_the_first_partition(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0))
    await tell(on, NAMESPACES, namespace(), key=key_in("default", "research"))
    columns = "namespace, labels, annotations"
    await stored(on, tmp_path, "namespaces", columns, [("research", '{"team":"vision"}', None)])


async def test_an_inventory_has_a_row_per_gpu_or_a_row_that_states_that_there_is_none(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0))
    first = inventory("GPU-a", "GPU-b")
    limited = structs.replace(first.gpus[0], power_limit_milliwatts=700_000)
    first = structs.replace(first, gpus=[limited, first.gpus[1]])
    await tell(on, INVENTORY, first, inventory(), None)
    columns = "kafka_offset, node, gpu_uuid, gpu_index, power_limit_milliwatts"
    expected: list[tuple[Any, ...]] = [
        (0, NODE, "GPU-a", 0, 700_000),
        (0, NODE, "GPU-b", 1, None),
        (1, NODE, None, None, None),
    ]
    await stored(on, tmp_path, "inventory", columns, [*expected, (2, NODE, None, None, None)])


async def test_an_inventory_that_repeats_the_one_before_has_no_rows(tmp_path: Path) -> None:
    """As agents do each hour; a return to an earlier inventory is a change."""
    on = bus()
    await publish(on, event(0))
    a, b = inventory("GPU-a"), inventory("GPU-b")
    await tell(on, INVENTORY, a, a, b, b, b, a, a)
    expected = [(0, "GPU-a"), (2, "GPU-b"), (5, "GPU-a")]
    await stored(on, tmp_path, "inventory", "kafka_offset, gpu_uuid", expected)


async def test_an_incident_is_stored_with_its_pods(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0))
    await tell(on, ATTRIBUTED_INCIDENTS, incident())
    pods = '[{"uid":"uid-1","namespace":"research","pod":"train-0"}]'
    columns = "kind, severity, xid, gpu_uuid, pods"
    await stored(on, tmp_path, "incidents", columns, [("xid", "critical", 79, GPU, pods)])


async def test_records_that_arrive_just_before_the_end_are_stored(tmp_path: Path) -> None:
    """A pipeline in one process ends with its bus, so that nobody could read them later."""
    on = bus()
    await publish(on, event(0))
    await tell(on, NODES, node())
    async with running(store(tmp_path, on, clock=ManualClock())):
        await eventually(lambda: found(tmp_path, "nodes", "node"))
        await tell(on, ATTRIBUTED_INCIDENTS, incident())
    assert found(tmp_path, "incidents", "kind") == [("xid",)]


async def test_records_in_the_partition_of_another_node_are_ignored(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0))
    elsewhere = 1 - place_of(NODE).partition
    await tell(on, NODES, node(pool="of others"), partition=elsewhere)
    await tell(on, INVENTORY, None, partition=elsewhere)
    await tell(on, NODES, node(), key=key_in("default", "another"))
    await tell(on, NODES, node())
    await tell(on, INVENTORY, inventory("GPU-a"))
    await stored(on, tmp_path, "nodes", "node_pool", [("h100",)])
    await stored(on, tmp_path, "inventory", "gpu_uuid", [("GPU-a",)])


@pytest.mark.parametrize(
    ("stamp_us", "is_of_node", "is_new", "expected_us"),
    [
        (500, False, True, 500),
        (1_100, True, True, 1_100),
        (1_101, False, True, 1_000),
        (2**70, True, False, 1_000),
        (-1, False, False, 1_000),
        (5, True, True, 1_000),
        (5, True, False, 100),
        (100, True, True, 100),
        # An old record of podwatch may still be true, if nothing has changed since.
        (5, False, True, 5),
    ],
)
def test_a_version_is_in_force_from_a_plausible_time(
    stamp_us: int, expected_us: int, *, is_of_node: bool, is_new: bool
) -> None:
    bounds = StampBounds(now_us=1_000, first_us=100, last_us=1_100, is_new=is_new)
    assert bounds.believed(stamp_us, is_of_node=is_of_node) == expected_us


async def test_a_record_with_an_absurd_stamp_blocks_none_after_it(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0))
    async with on.producer() as producer:
        message = Message(KEY.encode(), None, 2**60)
        at = place_of(NODE, INVENTORY.name).partition
        await producer.publish(INVENTORY.name, at, [message])
    await tell(on, INVENTORY, inventory("GPU-a"))
    await stored(on, tmp_path, "inventory", "gpu_uuid", [("GPU-a",), (None,)])


async def test_an_inventory_stamped_in_1970_is_in_force_from_its_arrival(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock()
    days = f"gpu_uuid, round((epoch(in_force_from) - {START_NS // 10**9}) / 86400)::INTEGER"
    await publish(on, event(0))
    await tell(on, INVENTORY, structs.replace(inventory("GPU-a"), time_ns=5_000_000_000))
    async with running(store(tmp_path, on, clock=clock, max_age_seconds=10 * 86_400.0)):
        for gpu in ("GPU-b", "GPU-c"):
            await eventually(
                lambda gpu=gpu: (  # type: ignore[misc]  # bound here
                    clock.advance(1)
                    and len(found(tmp_path, "inventory", "*")) >= 1 + (gpu == "GPU-c")
                )
            )
            await tell(on, INVENTORY, structs.replace(inventory(gpu), time_ns=6_000_000_000))
        await eventually(lambda: clock.advance(1) and len(found(tmp_path, "inventory", "*")) == 3)
    # The first one existed before: it is in force from the first stored day.
    assert found(tmp_path, "inventory", days) == [("GPU-a", -10), ("GPU-b", 0), ("GPU-c", 0)]
