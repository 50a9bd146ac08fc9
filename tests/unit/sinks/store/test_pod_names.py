"""Rows that were written before their pod was known, and the store's records of pods."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    Category,
    EventAllocation,
    GpuEvent,
    PodDescription,
    PodRecord,
    PodState,
)
from gpuledger.records.cluster import ContainerRequest, PodContainer
from gpuledger.runtime import Readiness
from gpuledger.store.schema import PODS as PODS_SCHEMA
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.dimensions import open_followed
from gpuledger_sinks.store.stored import Streams
from gpuledger_sinks.store.table import StreamTable
from tests.default_topics import PODS
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.store.storing import is_committed, query, store

CONTAINER, OTHER = "c" * 64, "d" * 64
AT = place_of(NODE, PODS.name)


def record(uid: str = "uid-train", **changes: Any) -> PodRecord:  # noqa: ANN401  # any field
    values: dict[str, Any] = {
        "cluster": "default",
        "uid": uid,
        "namespace": "research",
        "name": "train-0",
        "node": NODE,
        "owner_kind": "StatefulSet",
        "owner_name": "train",
        "labels": {"team": "vision"},
        "containers": [PodContainer(name="trainer", container_id=CONTAINER, restarts=0)],
        "phase": "Running",
        "created_time_ns": START_NS,
        "resource_version": "1",
    }
    return PodRecord(**(values | changes))


async def tell(
    on: MemoryBus, *pods: PodRecord | None, seconds: int = 0, partition: int = AT.partition
) -> None:
    """Publish records of pods in one node's partition; `None` is the deletion of the first."""
    async with on.producer() as producer:
        for one in pods:
            time_ms = START_NS // 10**6 + 1000 * seconds
            key = "default/uid-train" if one is None else key_in(one.cluster, one.uid)
            value = None if one is None else encode(one)
            await producer.publish(PODS.name, partition, [Message(key.encode(), value, time_ms)])


def described(state: PodState, **changes: Any) -> PodDescription:  # noqa: ANN401  # any field
    values = {"uid": "uid-train", "state": state}
    return PodDescription(**(values | changes))


def unknown(tick: int, state: PodState = PodState.PENDING, **changes: Any) -> GpuEvent:  # noqa: ANN401  # any field
    return event(tick, entries=[entry()], pods=[described(state, **changes)])


def pods_there(path: Path) -> list[tuple[int, int]]:
    """Return the offsets of the records in the table `pods`, each with its number of rows."""
    if not list(path.glob("pods/*.parquet")):
        return []
    if not (files := DeltaTable(str(path / "pods")).file_uris()):
        return []  # written but not committed
    sql = f"SELECT kafka_offset, count(*) FROM read_parquet({files}) GROUP BY ALL ORDER BY 1"  # noqa: S608  # our own files
    with duckdb.connect() as connection:
        return connection.execute(sql).fetchall()


NAMES = (
    "SELECT DISTINCT pod_uid, pod_state, namespace, pod, container, owner_kind, owner_name, labels"
    " FROM {entries}"
)
KNOWN = ("known", "research", "train-0", "trainer", "StatefulSet", "train", '{"team":"vision"}')


@pytest.mark.parametrize(
    ("annotations", "column"), [({"cost-center": "42"}, '{"cost-center":"42"}'), (None, None)]
)
async def test_annotations_that_podwatch_keeps_are_stored(
    tmp_path: Path, annotations: dict[str, str] | None, column: str | None
) -> None:
    on = bus()
    await publish(on, event(entries=[entry()]))
    await tell(on, record(annotations=annotations))
    await stored(on, tmp_path, records=1, events=1)
    with duckdb.connect() as connection:
        files = DeltaTable(str(tmp_path / "pods")).file_uris()
        found = connection.execute("SELECT annotations FROM read_parquet($1)", [files]).fetchall()
    assert found == [(column,)]


LIFE = "created_time, scheduled_time, started_time, ended_time, priority, priority_class"


@pytest.mark.parametrize(
    ("changes", "after_seconds", "priority"),
    [
        ({}, (0, None, None, None), (None, None)),
        (
            {
                "scheduled_time_ns": START_NS + 10**9,
                "started_time_ns": START_NS + 2 * 10**9,
                "ended_time_ns": START_NS + 5 * 10**9,
                "priority": -10,
                "priority_class": "batch-low",
            },
            (0, 1, 2, 5),
            (-10, "batch-low"),
        ),
    ],
)
async def test_a_pods_life_and_priority_are_stored(
    tmp_path: Path,
    changes: dict[str, Any],
    after_seconds: tuple[int | None, ...],
    priority: tuple[int | None, str | None],
) -> None:
    on = bus()
    await publish(on, event(entries=[entry()]))
    await tell(on, record(**changes))
    await stored(on, tmp_path, records=1, events=1)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        files = DeltaTable(str(tmp_path / "pods")).file_uris()
        sql = f"SELECT {LIFE} FROM read_parquet($1)"  # noqa: S608  # a constant
        (found,) = connection.execute(sql, [files]).fetchall()
    begin = datetime.fromtimestamp(START_NS / 1e9, tz=UTC)
    assert found[4:] == priority
    assert found[:4] == tuple(
        None if seconds is None else begin + timedelta(seconds=seconds) for seconds in after_seconds
    )


async def stored(on: MemoryBus, path: Path, *, records: int, events: int) -> None:
    clock = ManualClock()
    async with running(store(path, on, clock=clock)):
        await eventually(lambda: clock.advance(1) and is_committed(on, events)())
        await eventually(lambda: clock.advance(1) and len(pods_there(path)) == records)


@pytest.mark.parametrize(
    ("case", "one", "expected"),
    [
        ("pending by uid", unknown(0), KNOWN),
        (
            "pending by container",
            event(
                entries=[entry(pod_uid=None)],
                pods=[described(PodState.PENDING, uid=None)],
            ),
            KNOWN,
        ),
        (
            "pending, whose cgroup shows no container",
            event(
                entries=[entry(container_id=None)],
                pods=[described(PodState.PENDING)],
            ),
            (*KNOWN[:3], None, *KNOWN[4:]),
        ),
        ("missing from the event", event(entries=[entry()], pods=[]), KNOWN),
        ("named", unknown(0, PodState.NAMED, namespace="research", name="train-0"), KNOWN),
        (
            "a name is kept",
            event(entries=[entry()]),
            (*KNOWN[:-1], '{"app":"train","team":"vision"}'),
        ),
        ("foreign", unknown(0, PodState.FOREIGN), ("foreign", *[None] * 6)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_row_without_names_gets_those_that_arrive_later(
    case: str, one: GpuEvent, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    on = bus()
    await publish(on, one)
    await stored(on, tmp_path, records=0, events=1)
    await tell(on, record(), seconds=10)
    await stored(on, tmp_path, records=1, events=1)

    found = query(tmp_path, NAMES)
    assert found == [("uid-train", *expected)], case


async def test_the_record_of_a_pod_replaces_the_name_that_the_node_reported(
    tmp_path: Path,
) -> None:
    """By the device alone, the kubelet's answer may be about another pod than the running one."""
    on = bus()
    await publish(on, unknown(0, PodState.NAMED, namespace="payments", name="victim-0"))
    await tell(on, record(), seconds=10)
    await stored(on, tmp_path, records=1, events=1)
    assert query(tmp_path, NAMES) == [("uid-train", *KNOWN)]


ASKING = PodContainer(
    name="trainer",
    container_id=CONTAINER,
    requested=ContainerRequest(resources={"nvidia.com/gpu": 2, "memory": 8}),
    restarts=0,
)


@pytest.mark.parametrize(
    ("case", "one", "expected"),
    [
        ("a user", unknown(0), '{"memory":"8","nvidia.com/gpu":"2"}'),
        (
            "an allocatee",
            event(
                entries=[entry(Category.IDLE, allocation=0)],
                pods=[],
                allocated_to=[
                    PodDescription(state=PodState.NAMED, namespace="research", name="train-0")
                ],
                allocations=[
                    EventAllocation(pod=0, container="trainer", resources=["nvidia.com/gpu"])
                ],
            ),
            '{"memory":"8","nvidia.com/gpu":"2"}',
        ),
        ("a user of another node", unknown(0, PodState.FOREIGN), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_row_from_before_its_pods_record_has_the_containers_requests(
    case: str, one: GpuEvent, expected: str | None, tmp_path: Path
) -> None:
    on = bus()
    await publish(on, one)
    await tell(on, record(containers=[ASKING]), seconds=10)
    await stored(on, tmp_path, records=1, events=1)
    assert query(tmp_path, "SELECT requested FROM {entries}") == [(expected,)], case


async def test_time_allocated_to_a_deleted_pods_name_goes_to_the_next_pod_of_that_name(
    tmp_path: Path,
) -> None:
    on = bus()
    named = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")
    allocated = [entry(Category.IDLE, allocation=0)]
    await publish(
        on, *(event(tick, entries=allocated, pods=[], allocated_to=[named]) for tick in (5, 60))
    )
    hour_ago_ns = START_NS - 3_600 * SECOND_NS
    gone = {"created_time_ns": hour_ago_ns, "deleted_time_ns": START_NS - 30 * SECOND_NS}
    await tell(on, record("old", created_time_ns=hour_ago_ns), record("old", **gone), seconds=-30)
    new = record("new", created_time_ns=START_NS + 50 * SECOND_NS, labels={"team": "nlp"})
    await tell(on, new, seconds=62)
    await stored(on, tmp_path, records=3, events=2)
    sql = (
        "SELECT allocated_pod_state, allocated_pod_uid, allocated_labels"
        " FROM {entries} ORDER BY time"
    )
    assert query(tmp_path, sql) == [
        # By the node's clock the new pod arrived 45 s before the API server created it: it counts.
        ("known", "new", '{"team":"nlp"}'),
        ("known", "new", '{"team":"nlp"}'),
    ]


async def test_an_allocatee_whose_name_no_pod_had_keeps_the_name_that_the_node_reported(
    tmp_path: Path,
) -> None:
    on = bus()
    named = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")
    allocated = [entry(Category.IDLE, allocation=0)]
    await publish(on, event(5, entries=allocated, pods=[], allocated_to=[named]))
    gone = {"created_time_ns": START_NS - 10**12, "deleted_time_ns": START_NS - 30 * SECOND_NS}
    late = {"created_time_ns": START_NS + 300 * SECOND_NS}
    await tell(on, record("old", **gone), record("late", **late), seconds=400)
    await stored(on, tmp_path, records=2, events=1)
    sql = "SELECT allocated_pod_state, allocated_pod_uid, allocated_pod FROM {entries}"
    assert query(tmp_path, sql) == [("named", None, "train-0")]


async def test_a_recreated_static_pod_is_the_one_of_the_rows_time(
    tmp_path: Path,
) -> None:
    """The kubelet identifies both by the hash of their manifest."""
    on = bus()
    pending = [described(PodState.PENDING, uid="hash")]
    entries = [entry(pod_uid="hash", container_id=None)]
    await publish(on, *(event(tick, entries=entries, pods=pending) for tick in (0, 20)))
    await tell(on, record("mirror-1", config_hash="hash", containers=[]), seconds=1)
    await tell(on, record("mirror-2", config_hash="hash", containers=[]), seconds=10)
    # A pod whose hash equals another pod's UID takes no usage from that pod.
    await tell(on, record("hash-2", config_hash="mirror-2", name="other"), seconds=11)
    await stored(on, tmp_path, records=3, events=2)
    sql = "SELECT pod_uid, pod FROM {entries} ORDER BY time"
    assert query(tmp_path, sql) == [("mirror-1", "train-0"), ("mirror-2", "train-0")]


async def test_a_late_version_is_ordered_by_its_resource_version(tmp_path: Path) -> None:
    on = bus()
    await publish(on, unknown(20))
    await tell(on, record(labels={"v": "10"}, resource_version="10"), seconds=1)
    await tell(on, record(labels={"v": "9"}, resource_version="9"), seconds=2)
    await stored(on, tmp_path, records=2, events=1)
    assert query(tmp_path, "SELECT labels FROM {entries}") == [('{"v":"10"}',)]


async def test_a_record_in_the_partition_of_another_node_gives_no_name(tmp_path: Path) -> None:
    """Otherwise a writer of one partition could name the users of another node's GPUs."""
    on = bus()
    await publish(on, unknown(0))
    await tell(on, record(), partition=1 - AT.partition)
    await tell(on, record("another", containers=[]), seconds=1)
    await stored(on, tmp_path, records=1, events=1)
    assert query(tmp_path, NAMES)[0][:2] == ("uid-train", "pending")


async def test_versions_are_ordered_by_their_resource_version_whatever_their_stamps(
    tmp_path: Path,
) -> None:
    """Podwatch's clock was set back between them."""
    on = bus()
    await publish(on, unknown(20))
    await tell(on, record(labels={"v": "1"}), seconds=10)
    await tell(on, record(labels={"v": "2"}, resource_version="2"), seconds=5)
    await stored(on, tmp_path, records=2, events=1)
    assert query(tmp_path, "SELECT labels FROM {entries}") == [('{"v":"2"}',)]


async def test_an_allocatee_known_by_name_gets_the_owner_of_the_pod_of_that_time(
    tmp_path: Path,
) -> None:
    """The pods of a StatefulSet reuse the name, each with its own UID."""
    on = bus()
    named = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")
    allocated = [entry(Category.IDLE, allocation=0)]
    await publish(
        on, *(event(tick, entries=allocated, pods=[], allocated_to=[named]) for tick in range(4))
    )
    await tell(on, record("first"), seconds=1)
    second = record("second", labels={"team": "nlp"}, created_time_ns=START_NS + 3 * SECOND_NS)
    await tell(on, second, seconds=3)
    await stored(on, tmp_path, records=2, events=4)

    sql = (
        "SELECT allocated_pod_state, allocated_pod_uid, allocated_owner_name, allocated_labels,"
        " count(*) FROM {entries} GROUP BY ALL ORDER BY 2"
    )
    assert query(tmp_path, sql) == [
        ("known", "first", "train", '{"team":"vision"}', 3),
        ("known", "second", "train", '{"team":"nlp"}', 1),
    ]


@pytest.mark.parametrize("elsewhere", [{"node": "node-of-others"}, {"cluster": "other"}])
async def test_a_pod_of_another_node_gives_no_name(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    on = bus()
    await publish(on, unknown(0))
    await tell(on, record(**elsewhere))
    await stored(on, tmp_path, records=1, events=1)

    assert query(tmp_path, "SELECT pod_state, pod FROM {entries}") == [("pending", None)]


async def test_labels_are_those_in_force_and_no_row_is_counted_twice(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *(unknown(tick) for tick in range(6)))
    others = [
        PodContainer(
            name="trainer", container_id=OTHER, previous_container_id=CONTAINER, restarts=1
        ),
        PodContainer(name="side", container_id="e" * 64, restarts=0),
    ]
    await tell(on, record(), seconds=2)
    await tell(on, record(labels={"team": "nlp"}, containers=others), None, seconds=4)
    await stored(on, tmp_path, records=2, events=6)

    sql = (
        "SELECT labels, container, count(*), sum(busy_ns)::BIGINT FROM {entries}"
        " GROUP BY ALL ORDER BY 1"
    )
    half = 500_000_000
    assert query(tmp_path, sql) == [
        ('{"team":"nlp"}', "trainer", 2, 2 * half),
        ('{"team":"vision"}', "trainer", 4, 4 * half),
    ]


async def test_each_record_is_stored_once_across_restarts_and_deletions(tmp_path: Path) -> None:
    on = bus()
    await publish(on, unknown(0))
    await tell(on, record("a"), None, record("b"))
    await stored(on, tmp_path, records=2, events=1)
    await tell(on, None)
    await stored(on, tmp_path, records=2, events=1)
    await tell(on, record("c"))
    await stored(on, tmp_path, records=3, events=1)

    assert pods_there(tmp_path) == [(0, 1), (2, 1), (4, 1)]


async def test_two_sinks_with_the_same_partition_write_each_record_once(tmp_path: Path) -> None:
    """The one that lost it has not noticed yet."""
    on, clock = bus(), ManualClock()
    streams = Streams(group="gpuledger-store", generation="")

    def opened() -> Any:  # noqa: ANN401  # a context
        return open_followed(
            {"pods": StreamTable(PODS_SCHEMA, store_uri=str(tmp_path))},
            bus=on,
            streams=streams,
            readiness=Readiness(),
            clock=clock,
            settings=StoreSettings(uri=str(tmp_path), flush_seconds=1.0),
        )

    async with opened() as (one,), opened() as (other,):
        for each in (one, other):
            each.follow([AT])
        for number in range(12):
            await tell(on, record(f"uid-{number}"))
            for each in (one, other):
                each.begin_if_due()
            clock.advance(2)
            await asyncio.sleep(0.01 * (number % 3))

        def written() -> bool:
            for each in (one, other):
                each.begin_if_due()
            return clock.advance(2) and len(pods_there(tmp_path)) >= 12

        await eventually(written)
    assert pods_there(tmp_path) == [(number, 1) for number in range(12)]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_all_records_of_a_recreated_topic_are_read(count: int, tmp_path: Path) -> None:
    """Whether it is shorter, as long, or longer than before; and without any configuration."""
    on, clock = bus(), ManualClock()
    await publish(on, unknown(0))
    await tell(on, record("a"), record("b"))
    async with running(store(tmp_path, on, clock=clock)):
        await eventually(lambda: clock.advance(1) and len(pods_there(tmp_path)) == 2)
        on.recreate(PODS.name)
        await tell(on, *(record(f"new-{number}") for number in range(count)))
        await eventually(lambda: clock.advance(1) and uids_there(tmp_path) >= {f"new-{count - 1}"})
    assert uids_there(tmp_path) == {"a", "b", *(f"new-{number}" for number in range(count))}


def uids_there(path: Path) -> set[str]:
    files = DeltaTable(str(path / "pods")).file_uris()
    sql = f"SELECT DISTINCT pod_uid FROM read_parquet({files})"  # noqa: S608  # our own files
    with duckdb.connect() as connection:
        return {row[0] for row in connection.execute(sql).fetchall()}
