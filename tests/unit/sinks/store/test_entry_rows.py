"""Rows of the table `entries`: the row of each entry, and the rejected types."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from gpuledger.bus.protocol import Record
from gpuledger.records import (
    Category,
    Entry,
    NamespaceDescription,
    NodeDescription,
    PodDescription,
    PodState,
)
from gpuledger.store.schema import ENTRIES
from gpuledger_sinks.store.buffer import rows_of
from tests.errors import has_words
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    entry,
    event,
    holder,
    pod,
    reading,
    settlement,
)

RECORD = Record(
    topic="gpuledger.events.v1", partition=3, offset=17, timestamp_ms=0, key=None, value=b""
)


def rows(**changes: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # as event() takes them
    names = [column.name for column in ENTRIES.columns]
    return [
        dict(zip(names, row, strict=True))
        for row in rows_of(
            event(**changes),
            RECORD,
            ingested_time_ns=START_NS,
        )
    ]


def test_each_entry_is_one_row_with_its_tick_and_its_offset() -> None:
    first, second = rows(entries=[entry(), entry(Category.IDLE)])

    assert first["category"] == "pod"
    assert second["category"] == "idle"
    assert {
        (row["node"], row["seq"], row["kafka_partition"], row["kafka_offset"])
        for row in (first, second)
    } == {("node-a", 1000, 3, 17)}


def test_a_late_adjustment_has_rows_in_the_ticks_that_it_adjusts() -> None:
    """They carry the identity of the event that contains it, and are removed with it."""
    owed, written_off = rows(tick=5, entries=[], late_adjustments=[settlement(250_000_000)])

    assert [(one["category"], one["busy_ns"]) for one in (owed, written_off)] == [
        ("pod", 250_000_000),
        ("unattributed", -250_000_000),
    ]
    assert (owed["busy_method"], owed["pod"], owed["container"]) == (
        "accounting",
        "train-0",
        "trainer",
    )
    until = datetime.fromtimestamp(START_NS / 1e9, UTC)
    for one in (owed, written_off):
        assert (one["seq"], one["time"]) == (6000, START_NS // 1000)
        assert one["interval_ns"] == 3 * SECOND_NS
        assert one["event_date"] == (until.date() - date(1970, 1, 1)).days
        assert (one["gpu_uuid"], one["gpu_index"]) == (reading().uuid, 0)
        assert {one[name] for name in ("energy_millijoules", "memory_bytes", "sm_active_ns")} == {
            None
        }
        assert (one["memory_method"], one["energy_method"]) == (None, None)


def test_a_late_adjustment_on_a_gpu_that_the_event_does_not_list_is_rejected() -> None:
    with pytest.raises(ValueError, check=has_words("gpu", "1")):
        rows(late_adjustments=[settlement(gpu=1)])


NAMELESS = {"container": None, "namespace": None, "pod": None, "owner_kind": None, "labels": None}


@pytest.mark.parametrize(
    ("booked", "pods", "expected"),
    [
        (
            entry(),
            [pod()],
            {
                "pod_uid": "uid-train",
                "container": "trainer",
                "namespace": "research",
                "pod": "train-0",
                "owner_kind": "StatefulSet",
                "owner_name": "train",
                "labels": '{"app":"train","team":"vision"}',
            },
        ),
        (entry(pod_uid=None), [pod()], {"pod_uid": "uid-train", "pod": "train-0"}),
        (entry(container_id=None), [pod()], {"pod": "train-0", "container": None}),
        (
            entry(),
            [PodDescription(uid="uid-train", state=PodState.PENDING)],
            {"pod_uid": "uid-train", **NAMELESS},
        ),
        (entry(), [], {"pod_uid": "uid-train", **NAMELESS}),
        (entry(Category.HOST), [pod()], {"pod_uid": None, **NAMELESS}),
    ],
)
def test_a_pods_names_are_those_of_its_description(
    booked: Entry, pods: list[PodDescription], expected: dict[str, Any]
) -> None:
    (row,) = rows(entries=[booked], pods=pods)

    assert expected == {name: row[name] for name in expected}


NOTEBOOK = {
    "allocated_pod_state": "known",
    "allocated_pod_uid": "uid-notebook-0",
    "allocated_namespace": "research",
    "allocated_pod": "notebook-0",
    "allocated_container": "jupyter",
    "allocated_owner_kind": "StatefulSet",
    "allocated_labels": '{"app":"train","team":"vision"}',
}
NOBODY = dict.fromkeys(NOTEBOOK)


def test_idle_has_a_row_for_each_allocatee_and_one_for_unallocated_time() -> None:
    allocated = [holder("other-0"), holder()]
    booked = [entry(), entry(Category.IDLE, allocation=1), entry(Category.IDLE)]

    found = rows(entries=booked, allocated_to=allocated)

    assert [row["category"] for row in found] == ["pod", "idle", "idle"]
    assert [{name: row[name] for name in NOTEBOOK} for row in found] == [NOBODY, NOTEBOOK, NOBODY]
    assert {(row["pod"], row["namespace"]) for row in found[1:]} == {(None, None)}


def test_rows_contain_the_node_and_the_namespace_of_user_and_allocatee() -> None:
    booked = [entry(), entry(Category.IDLE, allocation=0), entry(Category.IDLE)]
    (found, idle, nobody) = rows(
        entries=booked,
        allocated_to=[PodDescription(state=PodState.NAMED, namespace="web", name="page")],
        namespaces=[
            NamespaceDescription(name="research", labels={"team": "vision"}),
            NamespaceDescription(name="web", annotations={"cost-center": "42"}),
        ],
        node_description=NodeDescription(zone="eu-west-1a", pool="h100", labels={"rack": "7"}),
    )
    for row in (found, idle, nobody):
        message = [row[name] for name in ("node_pool", "zone", "region", "node_labels")]
        assert message == ["h100", "eu-west-1a", None, '{"rack":"7"}']
    names = ("namespace_labels", "namespace_annotations")
    assert [found[name] for name in names] == ['{"team":"vision"}', None]
    assert [idle[name] for name in names] == [None, '{"cost-center":"42"}']
    assert [nobody[name] for name in names] == [None, None]


def test_an_allocatee_on_another_node_has_no_names() -> None:
    """Its time remains allocated, separate from unallocated time."""
    booked = [entry(Category.IDLE, allocation=0)]
    (found,) = rows(entries=booked, allocated_to=[PodDescription(state=PodState.FOREIGN)])

    assert {name: found[name] for name in NOTEBOOK} == NOBODY | {"allocated_pod_state": "foreign"}
    assert found["busy_ns"] == SECOND_NS // 2


def test_a_foreign_pod_has_its_uid_and_no_name() -> None:
    foreign = PodDescription(uid="uid-train", state=PodState.FOREIGN)
    (found,) = rows(entries=[entry()], pods=[foreign])

    assert (found["pod_uid"], found["pod_state"]) == ("uid-train", "foreign")
    assert {name: found[name] for name in NAMELESS} == NAMELESS


@pytest.mark.parametrize("position", [1, 9])
def test_an_allocatee_that_the_event_does_not_list_is_rejected_by_its_position(
    position: int,
) -> None:
    with pytest.raises(ValueError, check=has_words("allocation", str(position))):
        rows(entries=[entry(Category.IDLE, allocation=position)], allocated_to=[holder()])


ACTIVE = ("sm_active_ns", "tensor_active_ns", "dram_active_ns")
COUNTED: dict[str, Any] = {
    "sm_active_ratio": 0.5,
    "tensor_active_ratio": 0.25,
    "dram_active_ratio": 0.125,
}


@pytest.mark.parametrize(
    ("counted", "expected"), [(COUNTED, [500_000_000, 250_000_000, 125_000_000]), ({}, [None] * 3)]
)
def test_activity_is_apportioned_and_is_null_without_the_chips_counters(
    counted: dict[str, Any], expected: list[int | None]
) -> None:
    (row,) = rows(of=reading(**counted), entries=[entry()])

    assert [row[name] for name in ACTIVE] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, (False, None)), ({"late": True, "gap_ns": 2_500_000_000}, (True, 2_500_000_000))],
)
def test_all_rows_of_a_tick_contain_whether_it_was_late_and_the_gap_before_it(
    changes: dict[str, Any], expected: tuple[bool, int | None]
) -> None:
    assert {(row["late"], row["gap_ns"]) for row in rows(**changes)} == {expected}


def test_a_quantity_that_the_driver_does_not_provide_is_null_not_zero() -> None:
    (row,) = rows(entries=[entry(busy_ns=None, memory_bytes=None, energy_millijoules=None)])

    assert row["busy_ns"] is row["memory_bytes"] is row["energy_millijoules"] is None
    assert (
        ENTRIES.table_of(
            list(
                rows_of(
                    event(entries=[entry(energy_millijoules=None)]),
                    RECORD,
                    ingested_time_ns=START_NS,
                )
            )
        ).num_rows
        == 1
    )


def test_time_and_day_are_those_of_the_event_in_utc() -> None:
    table = ENTRIES.table_of(
        list(
            rows_of(
                event(),
                RECORD,
                ingested_time_ns=START_NS,
            )
        )
    )

    at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=START_NS // 1000)
    assert table.column("time").to_pylist()[0] == at
    assert table.column("event_date").to_pylist()[0] == date(at.year, at.month, at.day)


@pytest.mark.parametrize(("column", "value"), [("seq", 2.5), ("node", 7), ("seq", None)])
def test_a_value_of_another_type_is_rejected_and_never_cast(column: str, value: object) -> None:
    (row,) = rows_of(
        event(entries=[entry()]),
        RECORD,
        ingested_time_ns=START_NS,
    )
    position = [one.name for one in ENTRIES.columns].index(column)

    with pytest.raises(Exception, match=r"."):
        ENTRIES.table_of([(*row[:position], value, *row[position + 1 :])])
