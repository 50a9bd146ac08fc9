"""The views of a store: whole numbers, readable units beside them, and names that came late."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.errors import UserError
from gpuledger.records import Account, EventHolder, GpuEvent, PodDescription, PodState
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import READABLE, create_views, valid_through
from sinks.settings import StoreSettings
from sinks.store.maintainer import Maintainer
from tests.default_topics import NAMESPACES, NODES
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
HELD = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        create_views(connection, str(path))
        return connection.execute(sql).fetchall()


async def stored(on: MemoryBus, path: Path, *, events: int, **rows: int) -> None:
    """Run a sink until all events and so many rows of other tables are there, then sum up."""
    clock = ManualClock()
    async with running(store(path, on, clock=clock, entries=0)):
        await eventually(lambda: clock.advance(1) and is_committed(on, events)())
        for table, count in rows.items():
            await eventually(
                lambda table=table, count=count: (  # type: ignore[misc]  # bound here
                    clock.advance(1) and len(found(path, table, "*")) >= count
                )
            )
    Maintainer(StoreSettings(uri=str(path)), clock=clock).run()


def two_users() -> GpuEvent:
    held = entry(Account.IDLE, holder=0, held_ns=10**9)
    holders = [EventHolder(pod=1, container="trainer", resources=["nvidia.com/gpu"])]
    return event(entries=[entry(), held], pods=[UNKNOWN], held_by=[HELD], holders=holders)


@pytest.mark.parametrize("table", ["usage", "usage_hourly", "usage_daily"])
async def test_rows_have_the_names_that_came_after_them(table: str, tmp_path: Path) -> None:
    on = bus()
    await publish(on, two_users())
    await tell(on, record(), seconds=-100)
    await tell_of(on, NODES, node())
    await tell_of(on, NAMESPACES, namespace(), key="default/research")
    await stored(on, tmp_path, events=1, pods=1, nodes=1, namespaces=1)
    names = (
        "pod, owner_name, labels, holder_uid, holder_owner_name, node_pool, instance_type,"
        " namespace_labels"
    )
    vision, cluster = '{"team":"vision"}', ("h100", "p5.48xlarge", '{"team":"vision"}')
    assert ask(tmp_path, f"SELECT {names} FROM {table} ORDER BY account") == [  # noqa: S608  # our own file
        (None, None, None, "uid-train", "train", *cluster),
        ("train-0", "train", vision, None, None, *cluster),
    ]


async def test_a_known_pod_s_owner_is_looked_up_as_well_and_another_node_s_is_not(
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


async def test_numbers_stay_whole_and_units_beside_them_are_exact(tmp_path: Path) -> None:
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


async def test_a_version_has_the_time_at_which_another_replaced_it(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event())
    await tell_of(on, NODES, node(), node(resource_version="8", pool="l4"))
    await stored(on, tmp_path, events=1, nodes=2)
    sql = "SELECT node_pool, valid_to IS NULL FROM nodes ORDER BY resource_version"
    assert ask(tmp_path, sql) == [("h100", False), ("l4", True)]


HOUR_NS = 3600 * 10**9
HOUR_BEGIN_NS = START_NS // HOUR_NS * HOUR_NS


@pytest.mark.parametrize(
    ("told", "pool"),
    [
        # A version of long ago, and what it was changed to within the hour: as of its beginning.
        ([(-2 * HOUR_NS, {}), (10**9, {"pool": "l4"})], "h100"),
        # The first that is known of the node came late.
        ([(10**9, {"pool": "l4"})], "l4"),
        # Deleted in the hour before, and made anew of another kind within the hour.
        (
            [(-1, {"deleted_time_ns": HOUR_BEGIN_NS - 1}), (10**9, {"pool": "l4", "uid": "new"})],
            "l4",
        ),
        # Deleted within the hour: the one that was there.
        (
            [
                (-2 * HOUR_NS, {}),
                (10**9, {"deleted_time_ns": HOUR_BEGIN_NS + 10**9}),
                (2 * 10**9, {"pool": "l4", "uid": "new"}),
            ],
            "h100",
        ),
    ],
    ids=["changed", "late", "made anew", "deleted"],
)
async def test_an_hour_has_the_node_that_was_there_at_its_beginning_or_else_came_within_it(
    tmp_path: Path, told: list[tuple[int, dict[str, Any]]], pool: str
) -> None:
    on = bus()
    await publish(on, event(3))
    for number, (after_ns, changes) in enumerate(told):
        time_ms = (HOUR_BEGIN_NS + after_ns) // 10**6
        version = node(resource_version=str(number), **changes)
        await tell_of(on, NODES, version, time_ms=time_ms)
    await stored(on, tmp_path, events=1, nodes=len(told))
    assert ask(tmp_path, "SELECT DISTINCT node_pool FROM usage_hourly") == [(pool,)]


def test_where_there_is_no_store_it_is_said_so(tmp_path: Path) -> None:
    with duckdb.connect() as connection, pytest.raises(UserError, match="no store with rows"):
        create_views(connection, str(tmp_path))


def test_of_a_table_that_is_not_there_nobody_knows_up_to_when_it_is_complete(
    tmp_path: Path,
) -> None:
    assert valid_through(str(tmp_path), "usage") is None
