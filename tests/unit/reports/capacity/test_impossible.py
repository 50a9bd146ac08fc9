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
    uri = write_store(
        store,
        inventory=[inventory_row()],
        usage_hourly=[*hours, *damaged],
        usage_daily=[*days, *damaged],
    )
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
    note = "Left out: 4 rows with impossible amounts, from nodes prod/n."
    for name, answer_with in found.items():
        assert answer_with.rows == expected[name].rows
        assert answer_with.notes == [*expected[name].notes, note]
