"""A bill and a query find pods, nodes and namespaces by one rule, whatever arrives when."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.store.views import create_views
from gpuledger_reports.pricing.tenants import UNALLOCATED
from gpuledger_reports.reading.charging_sql import UNITS
from tests.examples import examples
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    allocated,
    inventory_row,
    namespace_row,
    node_row,
    pod_row,
    usage_row,
    write_store,
)
from tests.unit.reports.test_bill import bill_of

LONG_GONE = pod_row(
    "a",
    hour=-30,
    pod_uid="uid-0",
    container_id="c0",
    owner_name="j",
    created_time=BEGIN_US - 30 * HOUR_US,
    deleted_time=BEGIN_US - 30 * HOUR_US,
)
# Around the edges of hours, and of the seconds by which clocks may differ.
moments = st.sampled_from([-30.0, -1, -1 / 3600, 0, 4 / 3600, 6 / 3600, 0.5, 1, 1.01, 1.5, 2])


@st.composite
def pods(draw: st.DrawFn) -> list[Row]:
    """Draw the versions of some pods, some of which reuse a name."""
    rows: list[Row] = []
    for number in range(draw(st.integers(0, 3))):
        created, length = draw(moments), draw(st.sampled_from([None, 0.0, 0.5, 1.0]))
        ends = None if length is None else created + length
        for version, hour in enumerate(sorted({created, draw(moments), *([ends] if ends else [])})):
            is_last = ends is not None and hour >= ends
            rows.append(
                pod_row(
                    draw(st.sampled_from(["x", "y"])) if version == 0 else str(rows[-1]["pod"]),
                    hour=hour,
                    pod_uid=f"uid-{number}",
                    owner_kind="Job",
                    owner_name=f"job-{number}-{version}",
                    created_time=BEGIN_US + round(created * HOUR_US),
                    deleted_time=BEGIN_US + round(hour * HOUR_US) if is_last else None,
                    container_id=f"c{number}" if version else None,
                    container="main" if version else None,
                    resource_version=str(10 * number + version),
                    kafka_offset=10 * number + version,
                )
            )
    return rows


numbers = st.integers(0, 3)
users = st.one_of(
    numbers.map(lambda number: {"pod_uid": f"uid-{number}", "pod_state": "pending"}),
    numbers.map(lambda number: {"container_id": f"c{number}", "pod_state": "pending"}),
)
holders = st.one_of(
    st.sampled_from(["x", "y"]).map(
        lambda pod: {
            "allocated_pod_state": "named",
            "allocated_namespace": "ns",
            "allocated_pod": pod,
        }
    ),
    numbers.map(
        lambda number: {"allocated_pod_state": "known", "allocated_pod_uid": f"uid-{number}"}
    ),
    numbers.map(
        lambda number: {"allocated_pod_state": "pending", "allocated_pod_uid": f"uid-{number}"}
    ),
    # The join has assumed that a pod that used the GPU has the name.
    st.tuples(st.sampled_from(["x", "y"]), numbers).map(
        lambda drawn: {
            "allocated_pod_state": "named",
            "allocated_namespace": "ns",
            "allocated_pod": drawn[0],
            "allocated_pod_uid": f"uid-{drawn[1]}",
        }
    ),
)
Drawn = list[tuple[int, dict[str, Any]]]


@examples(40)
@given(
    records=pods(),
    using=st.lists(st.tuples(st.integers(0, 1), users), max_size=3),
    holding=st.lists(st.tuples(st.integers(0, 1), holders), max_size=2),
)
@example(
    records=[pod_row("a", pod_uid="uid-0", container_id="c0", container="m", owner_name="j")],
    using=[(0, {"container_id": "c0", "pod_state": "pending"})],
    holding=[],
)
# Deleted long ago, and yet in rows that contain only the name.
@example(
    records=[LONG_GONE],
    using=[(0, {"pod_uid": "uid-0", "pod_state": "pending"})],
    holding=[(1, {"allocated_pod_state": "known", "allocated_pod_uid": "uid-0"})],
)
@example(
    records=[LONG_GONE],
    using=[(0, {"container_id": "c0", "pod_state": "pending"})],
    holding=[],
)
# Versions without a number are older than those with one.
@example(
    records=[
        pod_row("a", pod_uid="uid-0", owner_name=owner, resource_version=number, kafka_offset=at)
        for at, (owner, number) in enumerate([("old", "5"), ("new", "x")])
    ],
    using=[(0, {"pod_uid": "uid-0", "pod_state": "pending"})],
    holding=[],
)
def test_a_bill_and_a_query_find_the_same_pods(
    records: list[Row], using: Drawn, holding: Drawn
) -> None:
    rows = [usage_row(hour, category="pod", busy_ns=HOUR_NS // 4, **user) for hour, user in using]
    rows += [allocated(hour, None, HOUR_NS // 2, **holder) for hour, holder in holding]
    rows += [allocated(hour, None, 0) for hour in range(2)]
    with TemporaryDirectory() as folder, duckdb.connect() as connection:
        store = write_store(
            Path(folder), usage_hourly=rows, pods=records, inventory=[inventory_row()]
        )
        create_views(connection, store)
        found = connection.execute(
            "SELECT coalesce(owner_name, allocated_owner_name), busy_ns,"
            " coalesce(allocated_ns, 0), category FROM usage_hourly"
            " WHERE category = 'pod' OR allocated_pod_state IS NOT NULL"
        ).fetchall()
        bill = bill_of(store, by=["owner_name"], hours=2)
    used: Counter[str] = Counter()
    having: Counter[str] = Counter()
    for owner, busy_ns, allocated_ns, category in found:
        used[owner or UNALLOCATED] += busy_ns if category == "pod" else 0
        having[owner or UNALLOCATED] += allocated_ns
    tenants = [line for line in bill.lines if not line.idle_kind]
    assert {line.values[0]: line.used // UNITS for line in tenants if line.used} == +used
    assert {
        line.values[0]: line.allocated // UNITS for line in tenants if line.allocated
    } == +having


Said = tuple[float, bool, str | None, str | None]
"""A version: its hour, whether it is a deletion, its resource version, and its team."""
deletions = st.sampled_from([False, False, True])
resource_versions = st.sampled_from([None, "x", "7", "10"])
teams = st.sampled_from(["blue", "red", None])


@st.composite
def versions(draw: st.DrawFn) -> list[Said]:
    """Draw the versions of a node or a namespace."""
    hours = draw(st.lists(st.sampled_from([-1.0, 0.25, 0.75, 1, 1.5, 2]), max_size=5))
    return [(hour, draw(deletions), draw(resource_versions), draw(teams)) for hour in hours]


def fields_of(offset: int, message: Said) -> dict[str, Any]:
    """Return a version's fields, as it was written at an offset."""
    hour, is_deletion, number, team = message
    return {
        "hour": hour,
        "kafka_offset": offset,
        "resource_version": number,
        "deleted_time": BEGIN_US + round(hour * HOUR_US) if is_deletion else None,
        "labels": None if team is None else f'{{"team": "{team}"}}',
    }


@examples(60)
@given(of_node=versions(), of_namespace=versions())
# Deleted before the hour, and recreated within it.
@example(
    of_node=[(-1, False, "1", "blue"), (0.75, True, "2", None), (1.5, False, "3", "red")],
    of_namespace=[(-1, False, "1", "red"), (0.75, True, "2", None), (1.5, False, "3", "blue")],
)
@example(of_node=[(-1, False, "10", "red"), (-1, False, "7", "blue")], of_namespace=[])
@example(of_node=[(0.25, True, "1", None), (1.5, False, "2", "red")], of_namespace=[])
def test_a_bill_and_a_query_find_the_same_nodes_and_namespaces(
    of_node: list[Said], of_namespace: list[Said]
) -> None:
    with TemporaryDirectory() as folder, duckdb.connect() as connection:
        store = write_store(
            Path(folder),
            usage_hourly=[allocated(hour, "a") for hour in range(3)],
            nodes=[node_row(**fields_of(*message)) for message in enumerate(of_node)],
            namespaces=[
                namespace_row("ns", **fields_of(*message)) for message in enumerate(of_namespace)
            ],
        )
        create_views(connection, store)
        found = connection.execute(
            "SELECT coalesce(node_labels->>'team', $absent),"
            " coalesce(namespace_labels->>'team', $absent), sum(allocated_ns)"
            " FROM usage_hourly GROUP BY ALL",
            {"absent": UNALLOCATED},
        ).fetchall()
        bill = bill_of(store, by=["node-label:team", "namespace-label:team"], hours=3)
    billed = {line.values: line.allocated // UNITS for line in bill.lines}
    assert billed == {(node, namespace): allocated_ns for node, namespace, allocated_ns in found}
