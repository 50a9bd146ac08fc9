"""The views of a store: integers, readable units next to them, and names that came late."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from arro3.core import DataType
from deltalake import write_deltalake

from gpuledger.bus.memory import MemoryBus
from gpuledger.errors import UserError
from gpuledger.records import Category, EventAllocation, GpuEvent, PodDescription, PodState
from gpuledger.store.bill_table import BILL_LINES, append_revision
from gpuledger.store.schema import TableSchema, table_uri
from gpuledger.store.usage_schema import INVENTORY, USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.usage_schema import NODES as NODES_TABLE
from gpuledger.store.views import READABLE, TABLES, create_views, valid_through, with_nodes
from gpuledger_sinks.store.maintainer import Maintainer, MaintenanceSettings
from tests.default_topics import NAMESPACES, NODES
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_US,
    allocated,
    inventory_row,
    node_row,
    pod_row,
    write_store,
)
from tests.unit.sinks.builders import (
    START_NS,
    ManualClock,
    bus,
    entry,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.store.storing import is_committed, store
from tests.unit.sinks.store.test_dimensions import found, namespace, node
from tests.unit.sinks.store.test_dimensions import tell as tell_of
from tests.unit.sinks.store.test_pod_names import record, tell

UNKNOWN = PodDescription(uid="uid-train", state=PodState.PENDING)
ALLOCATEE = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        create_views(connection, str(path))
        return connection.execute(sql).fetchall()


async def stored(on: MemoryBus, path: Path, *, events: int, **rows: int) -> None:
    """Run a sink until the store has all events and these rows of other tables, then aggregate."""
    clock = ManualClock()
    async with running(store(path, on, clock=clock, entries=0)):
        await eventually(lambda: clock.advance(1) and is_committed(on, events)())
        for table, count in rows.items():
            await eventually(
                lambda table=table, count=count: (  # type: ignore[misc]  # bound here
                    clock.advance(1) and len(found(path, table, "*")) >= count
                )
            )
    Maintainer(MaintenanceSettings(uri=str(path)), clock=clock).run()


def two_users() -> GpuEvent:
    allocated = entry(Category.IDLE, allocation=0, allocated_ns=10**9)
    holders = [EventAllocation(pod=1, container="trainer", resources=["nvidia.com/gpu"])]
    return event(
        entries=[entry(), allocated], pods=[UNKNOWN], allocated_to=[ALLOCATEE], allocations=holders
    )


@pytest.mark.parametrize("table", ["usage", "usage_hourly", "usage_daily"])
async def test_rows_get_names_that_came_after_them(table: str, tmp_path: Path) -> None:
    on = bus()
    await publish(on, two_users())
    await tell(on, record(), seconds=-100)
    await tell_of(on, NODES, node())
    await tell_of(on, NAMESPACES, namespace(), key="default/research")
    await stored(on, tmp_path, events=1, pods=1, nodes=1, namespaces=1)
    names = (
        "pod, owner_name, labels, allocated_pod_uid, allocated_owner_name, node_pool,"
        " instance_type, namespace_labels"
    )
    vision, cluster = '{"team":"vision"}', ("h100", "p5.48xlarge", '{"team":"vision"}')
    assert ask(tmp_path, f"SELECT {names} FROM {table} ORDER BY category") == [  # noqa: S608  # our own file
        (None, None, None, "uid-train", "train", *cluster),
        ("train-0", "train", vision, None, None, *cluster),
    ]


async def test_unnamed_rows_have_the_same_sums_and_no_names_that_came_later(tmp_path: Path) -> None:
    on = bus()
    await publish(on, two_users())
    await tell(on, record(), seconds=-100)
    await tell_of(on, NODES, node())
    await stored(on, tmp_path, events=1, pods=1, nodes=1)
    sums = "SELECT category, sum(busy_ns), sum(allocated_gpu_hours) FROM {} GROUP BY ALL ORDER BY 1"
    for table, period in [("usage_hourly", "hour"), ("usage_daily", "day")]:
        unnamed = f"{table}_unnamed"
        assert ask(tmp_path, sums.format(unnamed)) == ask(tmp_path, sums.format(table))
        rows = f"(SELECT DISTINCT cluster, node, {period} AS time, pod FROM {unnamed})"  # noqa: S608  # our own file
        sql = f"SELECT pod, node_pool FROM {with_nodes(rows)}"  # noqa: S608  # our own file
        assert ask(tmp_path, sql) == [(None, "h100")]


async def test_the_owner_of_a_known_pod_is_looked_up_but_not_that_of_a_foreign_one(
    tmp_path: Path,
) -> None:
    on = bus()
    foreign = PodDescription(uid="uid-foreign", state=PodState.FOREIGN)
    await publish(
        on,
        event(entries=[entry(), entry(pod_uid="uid-foreign", container_id="e" * 64)]),
        event(1, entries=[entry(pod_uid="uid-foreign", container_id=None)], pods=[foreign]),
    )
    await tell(on, record(), seconds=-100)
    await stored(on, tmp_path, events=2, pods=1)
    sql = "SELECT pod_uid, owner_name FROM usage_hourly ORDER BY pod_uid, pod_state"
    assert ask(tmp_path, sql) == [
        ("uid-foreign", None),
        ("uid-foreign", None),
        ("uid-train", "train"),
    ]


async def test_numbers_stay_integers_and_the_units_next_to_them_are_exact(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(entries=[entry(busy_ns=1, memory_bytes=3, energy_millijoules=5)]))
    await stored(on, tmp_path, events=1)
    columns = "busy_ns, busy_seconds, memory_byte_ns, memory_byte_seconds, joules, measured_joules"
    assert ask(tmp_path, f"SELECT {columns} FROM usage_hourly") == [  # noqa: S608  # our own file
        (1, Decimal("1E-9"), 3 * 10**9, Decimal(3), Decimal("0.005"), Decimal("0.005"))
    ]


async def test_each_view_of_usage_has_every_column_of_its_table_and_the_readable_ones(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event())
    await stored(on, tmp_path, events=1)
    for schema in (USAGE, USAGE_HOURLY, USAGE_DAILY):
        columns = {row[0] for row in ask(tmp_path, f"DESCRIBE {schema.name}")}
        assert columns >= {column.name for column in schema.columns} | READABLE.keys()


async def test_a_version_has_the_time_at_which_the_next_one_replaced_it(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event())
    await tell_of(on, NODES, node(), node(resource_version="8", pool="l4"))
    await stored(on, tmp_path, events=1, nodes=2)
    sql = "SELECT node_pool, valid_to IS NULL FROM nodes ORDER BY resource_version"
    assert ask(tmp_path, sql) == [("h100", False), ("l4", True)]


def test_all_gpus_of_an_inventory_end_when_the_nodes_next_inventory_takes_effect(
    tmp_path: Path,
) -> None:
    """The last version in force counts, whichever was written first; bills do the same."""
    store = write_store(
        tmp_path / "store",
        usage_hourly=[],
        inventory=[
            *(inventory_row(gpu, hour=0, kafka_offset=7) for gpu in ("GPU-a", "GPU-b")),
            inventory_row("GPU-a", hour=2, kafka_offset=5),
            inventory_row(None, hour=5, kafka_offset=9),
            inventory_row("GPU-z", hour=1, node="m"),
        ],
    )
    sql = (
        "SELECT gpu_uuid, date_diff('hour', in_force_from, valid_to) FROM inventory"
        " ORDER BY node DESC, in_force_from, gpu_uuid"
    )
    expected = [("GPU-a", 2), ("GPU-b", 2), ("GPU-a", 3), (None, None), ("GPU-z", None)]
    assert ask(Path(store), sql) == expected


HOUR_NS = 3600 * 10**9
HOUR_BEGIN_NS = START_NS // HOUR_NS * HOUR_NS


@pytest.mark.parametrize(
    ("reported", "pool"),
    [
        # An old version that is changed within the hour: the hour has the version of its
        # beginning.
        ([(-2 * HOUR_NS, {}), (10**9, {"pool": "l4"})], "h100"),
        # The first version known of the node came late.
        ([(10**9, {"pool": "l4"})], "l4"),
        # Deleted in the hour before, and recreated as another kind within the hour.
        (
            [(-1, {"deleted_time_ns": HOUR_BEGIN_NS - 1}), (10**9, {"pool": "l4", "uid": "new"})],
            "l4",
        ),
        # Deleted within the hour: the hour has the deleted one.
        (
            [
                (-2 * HOUR_NS, {}),
                (10**9, {"deleted_time_ns": HOUR_BEGIN_NS + 10**9}),
                (2 * 10**9, {"pool": "l4", "uid": "new"}),
            ],
            "h100",
        ),
    ],
    ids=["changed", "late", "recreated", "deleted"],
)
async def test_an_hour_has_the_node_of_its_beginning_or_else_the_first_within_it(
    tmp_path: Path, reported: list[tuple[int, dict[str, Any]]], pool: str
) -> None:
    on = bus()
    await publish(on, event(3))
    for number, (after_ns, changes) in enumerate(reported):
        time_ms = (HOUR_BEGIN_NS + after_ns) // 10**6
        version = node(resource_version=str(number), **changes)
        await tell_of(on, NODES, version, time_ms=time_ms)
    await stored(on, tmp_path, events=1, nodes=len(reported))
    assert ask(tmp_path, "SELECT DISTINCT node_pool FROM usage_hourly") == [(pool,)]


def test_a_version_of_a_pod_ends_with_the_next_one_whatever_its_containers(
    tmp_path: Path,
) -> None:
    hours = (0, 1, 1, 2)
    containers = (None, "one", "two", "one")
    rows = [
        pod_row("a", hour=hour, container_id=container)
        for hour, container in zip(hours, containers, strict=True)
    ]
    store = write_store(tmp_path, pods=rows)
    sql = (
        "SELECT date_diff('hour', in_force_from, valid_to), container_id FROM pods"
        " ORDER BY in_force_from, container_id"
    )
    assert ask(Path(store), sql) == [(1, None), (1, "one"), (1, "two"), (None, "one")]


@pytest.mark.parametrize(
    ("later", "pool"),
    [
        ({"hour": 0, "kafka_offset": 2000, "node_pool": "new"}, "new"),
        ({"hour": 0, "kafka_offset": 1, "node_pool": "new"}, "old"),
        # A deletion that does not describe the deleted node.
        ({"hour": 1, "deleted_time": BEGIN_US + HOUR_US}, "old"),
    ],
    ids=["newer", "older", "deleted"],
)
def test_a_node_has_its_latest_version(tmp_path: Path, later: dict[str, Any], pool: str) -> None:
    first = node_row(hour=0, node_pool="old")
    nodes = [node_row(hour=-9, node_pool="before"), first, node_row(**later)]
    store = write_store(tmp_path, usage_hourly=[allocated(2, "a")], nodes=nodes)
    assert ask(Path(store), "SELECT node_pool FROM usage_hourly") == [(pool,)]


def test_closed_bills_are_a_view_as_well(tmp_path: Path) -> None:
    line = {
        column.name: "x" if column.kind == DataType.utf8() else 0 for column in BILL_LINES.columns
    }
    append_revision(str(tmp_path), [line], stream="a", revision=1)
    assert ask(tmp_path, "SELECT line, cost FROM bill_lines") == [("x", 0)]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_without_rows_is_a_view_of_the_same_columns_and_types(
    tmp_path: Path, table: TableSchema
) -> None:
    other = INVENTORY if table is not INVENTORY else NODES_TABLE
    values = {DataType.utf8(): "x", DataType.bool(): True}
    for path, written in ((tmp_path / "without", other), (tmp_path / "with", table)):
        row = tuple(values.get(each.kind, 0) for each in written.columns)
        write_deltalake(
            table_uri(str(path), written.name),
            written.table_of([row]),
            partition_by=[*written.partition_by],
        )
    without, filled = (
        ask(tmp_path / name, f"SELECT column_name, column_type FROM (DESCRIBE {table.name})")  # noqa: S608  # our own names
        for name in ("without", "with")
    )

    assert without == filled
    assert ask(tmp_path / "without", f"SELECT * FROM {table.name}") == []  # noqa: S608  # our own names


def test_a_missing_store_is_reported(tmp_path: Path) -> None:
    with duckdb.connect() as connection, pytest.raises(UserError, match="no store with rows"):
        create_views(connection, str(tmp_path))


def test_a_missing_table_has_no_time_through_which_it_is_complete(
    tmp_path: Path,
) -> None:
    assert valid_through(str(tmp_path), "usage") is None
