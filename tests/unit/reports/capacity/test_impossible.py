"""Rows with impossible amounts change no report, and are named."""

from pathlib import Path

import duckdb
import pytest

from gpuledger.store.distributions import BUSY
from gpuledger_reports.capacity.asking import answer, ask, open_store
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Answer
from gpuledger_reports.pricing.policy import BillPolicy
from tests.tables import for_each
from tests.unit.reports.stores import HOUR_NS, Row, allocated, inventory_row, used, write_store

WHOLE_HOUR = (1 << 60) - 1


def answers(store: Path, damaged: list[Row]) -> dict[str, Answer]:
    """Return the answer of each report on a pod that is idle for two days."""
    known: Row = {"allocated_minutes": WHOLE_HOUR, "used_minutes": 0, BUSY.columns[0]: 60}
    hours = [allocated(hour, "idler", busy_ns=HOUR_NS, **known) for hour in range(50)]
    days = [allocated(day * 24, "idler", 24 * HOUR_NS) for day in range(2)]
    return answers_on(
        write_store(
            store,
            inventory=[inventory_row()],
            usage_hourly=[*hours, *damaged],
            usage_daily=[*days, *damaged],
        )
    )


def answers_on(uri: str) -> dict[str, Answer]:
    """Return the answer of each report on a store."""
    found = {}
    for name, report in REPORTS.items():
        with duckdb.connect() as connection:
            complete = open_store(connection, uri)
            question = ask(
                report,
                {},
                complete=complete,
                policy=BillPolicy(),
                now_us=0,
                advance=lambda _: None,
            )
            found[name] = answer(report, question, connection)
    return found


@for_each(
    "damaged",
    [
        allocated(30, "idler", -5),
        allocated(30, "forger", 2**63 - 1, gpu="GPU-b"),
        allocated(30, "forger", unresponsive_ns=2**62),
        allocated(30, "forger", busy_ns=-1, gpu="GPU-b"),
        used(30, "idler", 2**63 - 1),
        used(30, "idler", HOUR_NS, memory_bytes_max=2**62),
    ],
)
def test_rows_with_impossible_amounts_change_no_report(
    damaged: Row, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = answers(tmp_path_factory.mktemp("without"), [])
    found = answers(tmp_path_factory.mktemp("with"), [damaged, damaged])
    note = "Left out: 2 rows with impossible amounts, from nodes prod/n."
    for name, answer_with in found.items():
        assert answer_with.rows == expected[name].rows
        assert answer_with.notes == [*expected[name].notes, note]


SLICE: Row = {
    "parent_uuid": "GPU-a",
    "compute_slices": 2,
    "gpu_compute_slices": 8,
    "mig_profile": "1g",
}


@for_each(
    "hours_of_m, fields, twice",
    [
        (range(20, 32), {}, 12.0),
        (range(20, 32), SLICE, 3.0),
        (range(30, 50), {"gpu": "GPU-b"}, None),
        (range(50, 60), {}, None),
    ],
)
def test_gpu_hours_that_two_nodes_sample_are_noted(
    hours_of_m: range,
    fields: Row,
    twice: float | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    days = [allocated(day * 24, "one", 24 * HOUR_NS) for day in range(2)]
    hours = [allocated(hour, "one") for hour in range(50)]
    of_m = [allocated(hour, "two", node="m", **fields) for hour in hours_of_m]
    sums_of_m = [
        allocated(day * 24, "two", len(of_day) * HOUR_NS, node="m", **fields)
        for day in range(3)
        if (of_day := [hour for hour in hours_of_m if hour // 24 == day])
    ]
    inventory = [inventory_row(gpu, node=node) for node in "nm" for gpu in ("GPU-a", "GPU-b")]
    store = write_store(
        tmp_path_factory.mktemp("store"),
        inventory=inventory,
        usage_hourly=[*hours, *of_m],
        usage_daily=[*days, *sums_of_m],
    )
    note = (
        f"{twice} allocated GPU-hours count twice, because two nodes sampled the same GPU; bills"
        " count them once. See the alert GpuledgerGpuOnTwoNodes."
    )
    expected = [] if twice is None else [note]
    for found in answers_on(store).values():
        assert [text for text in found.notes if "count twice" in text] == expected
