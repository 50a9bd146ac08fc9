"""Metrics of capacity are columns of the reports; what is unknown has no series."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuledger_reports.api import metrics
from gpuledger_reports.api.answering import ReportAnswer, answer_to
from gpuledger_reports.api.capacity_metrics import HEADLINES, CapacityMetrics
from gpuledger_reports.api.processes import LateError
from gpuledger_reports.api.questions import CapacityQuestion, Question
from gpuledger_reports.capacity.registry import REPORTS
from tests.unit.reports.api.report_requests import fleet_store, settings_for
from tests.unit.reports.stores import node_row, write_store

Series = dict[tuple[str, ...], float]
GAUGES = {gauge for one in HEADLINES.values() for gauge, *_ in one.columns.values()}


@pytest.fixture(autouse=True)
def no_series() -> Iterator[None]:
    yield
    for gauge in (*GAUGES, metrics.CAPACITY_TIMESTAMP_SECONDS):
        gauge.clear()


def series() -> dict[str, Series]:
    """Return the values of all metrics of capacity, by name and by the values of their labels."""
    families = [f for gauge in GAUGES for f in gauge.collect()]
    families += metrics.CAPACITY_TIMESTAMP_SECONDS.collect()
    return {
        family.name.removeprefix("gpuledger_reports_capacity_"): {
            tuple(sample.labels.values()): sample.value for sample in family.samples
        }
        for family in families
    }


class Reports:
    """Answers of reports, with a row each; a report without a row fails."""

    def __init__(self, **rows: dict[str, object]) -> None:
        self.rows = rows

    async def ask(self, question: Question) -> ReportAnswer:
        assert isinstance(question, CapacityQuestion)
        if question.report not in self.rows:
            raise LateError("no answer within 30 s")
        columns = dict.fromkeys(
            [*REPORTS[question.report].columns, *question.given["by"].split(",")]
        )
        rows = [columns | self.rows[question.report]]
        content = {"to": "2026-10-01T00:00:00Z", "rows": rows}
        return ReportAnswer(body=json.dumps(content).encode())


async def test_metrics_are_the_columns_of_the_reports(tmp_path: Path) -> None:
    settings = fleet_store(tmp_path)

    async def ask(question: Question) -> ReportAnswer:
        return answer_to(question, settings)

    await CapacityMetrics(ask).update()
    found = series()
    group = ("prod", "", "NVIDIA H100 80GB HBM3")
    states = {labels[-1]: value for labels, value in found["gpus"].items()}
    assert (states["total"], states["allocated"], states["free"]) == (12, 9, 3)
    assert found["unused_gpu_hours"] == {group: pytest.approx(71 * 9)}
    assert found["unused_cost"] == {group: pytest.approx(71 * 9 * 7)}
    assert found["waiting_pods"] == {("prod",): 1}
    assert found["failures"] == {group: 1}
    assert found["stranded_gpus"].keys() == {group}
    # The history is too short for a forecast.
    assert found["expected_gpus"] == found["full_days"] == {}
    assert found["timestamp_seconds"].keys() == {(report,) for report in HEADLINES}


async def test_an_unknown_value_has_no_series_and_zero_has_one() -> None:
    rows = {"cluster": "prod", "model": "H100"}
    reports = Reports(forecast=rows | {"expected": 0.0}, queue={"cluster": "prod", "waiting": 0})
    await CapacityMetrics(reports.ask).update()
    found = series()
    assert found["expected_gpus"] == {("prod", "", "H100"): 0}
    assert found["waiting_pods"] == {("prod",): 0}
    assert found["full_days"] == found["unmet_gpus"] == found["gpus"] == {}
    assert found["timestamp_seconds"].keys() == {("forecast",), ("queue",)}


@pytest.mark.parametrize(
    ("gpus", "failures", "unused"),
    [
        ({"healthy": 8, "allocatable": 8, "allocated": 0}, 0, 0),
        ({"healthy": 8, "allocatable": 7.9, "allocated": 0, "cordoned": 0.1}, 0, 0),
        ({"healthy": 8, "allocatable": 8, "allocated": 3}, 0, None),
        ({"healthy": 8, "allocatable": 6, "allocated": 0}, 0, None),
        ({"healthy": 0, "allocatable": 0, "allocated": 0}, None, None),
        ({"healthy": None, "allocatable": None, "allocated": 1}, None, None),
    ],
)
async def test_a_group_without_a_row_is_zero_only_if_its_gpus_imply_it(
    gpus: dict[str, float | None], failures: int | None, unused: int | None
) -> None:
    lab: dict[str, object] = {"cluster": "lab", "failures": 2, "unused_gpu_hours": 5}
    row: dict[str, object] = {"cluster": "prod", "pool": "a", "mean_cordoned": 0}
    row |= {f"mean_{name}": count for name, count in gpus.items()}
    reports = Reports(fleet=row, faults=lab, waste=lab)
    await CapacityMetrics(reports.ask).update()
    found = series()
    prod = ("prod", "a", "")
    assert found["failures"].pop(("lab", "", "")) == 2
    assert found["failures"] == {} if failures is None else {prod: failures}
    assert found["unused_gpu_hours"] == {("lab", "", ""): 5} | (
        {} if unused is None else {prod: unused}
    )


async def test_a_group_that_is_no_longer_reported_loses_its_series() -> None:
    reports = Reports(queue={"cluster": "prod", "waiting": 3})
    updated = CapacityMetrics(reports.ask)
    await updated.update()
    reports.rows["queue"] = {"cluster": "dev", "waiting": 1}
    await updated.update()
    assert series()["waiting_pods"] == {("dev",): 1}


async def test_metrics_are_kept_for_two_failures_and_then_absent_until_the_next_answer() -> None:
    row = {"cluster": "prod", "waiting": 3}
    reports = Reports(queue=row)
    updated = CapacityMetrics(reports.ask)
    await updated.update()
    kept = []
    with capture_logs() as logged:
        for answers in (False, False, True, False, False, False, True):
            reports.rows = {"queue": row} if answers else {}
            await updated.update()
            assert bool(series()["waiting_pods"]) == (("queue",) in series()["timestamp_seconds"])
            kept.append(bool(series()["waiting_pods"]))
    assert kept == [True, True, True, True, True, False, True]
    failed = [line for line in logged if line["event"] == "capacity_metrics_failed"]
    assert failed[0]["error"] == "no answer within 30 s"
    assert {line["report"] for line in failed} == {*HEADLINES}


class Hours:
    """A clock on which each wait adds a row to a store, until the third."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        match len(self.slept):
            case 1:
                write_store(self._folder / "store", nodes=[node_row()])
            case 2:
                fleet_store(self._folder)
            case _:
                raise EndError


class EndError(Exception):
    """The test has seen enough updates."""


async def test_a_new_installation_is_asked_soon_again_and_is_no_failure(tmp_path: Path) -> None:
    """The log names each reason once: no store, and then no complete hour."""
    settings = settings_for(str(tmp_path / "store"))
    clock = Hours(tmp_path)

    async def ask(question: Question) -> ReportAnswer:
        return answer_to(question, settings)

    with capture_logs() as logged, pytest.raises(EndError):
        await CapacityMetrics(ask, clock=clock).follow(interval_seconds=3600)
    assert clock.slept == [300, 300, 3600]
    assert [(one["log_level"], one["error"][:12]) for one in logged] == [
        ("info", "no such dire"),
        ("info", "usage_hourly"),
    ]
    assert series()["timestamp_seconds"].keys() == {(name,) for name in HEADLINES}


class Pauses:
    """A clock that answers the report `fleet` after the first wait, and ends at the third."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 3:
            raise EndError
        self._reports.rows["fleet"] = {"cluster": "prod", "total": 8}


async def test_reports_for_which_the_service_is_busy_are_asked_once_more_after_a_short_wait() -> (
    None
):
    row: dict[str, object] = {"cluster": "prod"}
    reports = Reports(**{name: row for name in HEADLINES if name != "fleet"})
    asked: list[str] = []

    async def ask(question: Question) -> ReportAnswer:
        assert isinstance(question, CapacityQuestion)
        asked.append(question.report)
        return await reports.ask(question)

    clock = Pauses(reports)
    with pytest.raises(EndError):
        await CapacityMetrics(ask, clock=clock).follow(interval_seconds=3600)
    assert clock.slept == [300, 3300, 3600]
    assert asked == [*HEADLINES, "fleet", *HEADLINES]


async def test_asking_once_more_does_not_end_metrics_sooner() -> None:
    reports = Reports(queue={"cluster": "prod", "waiting": 3})
    kept: list[bool] = []

    class Clock:
        async def sleep(self, _: float) -> None:
            reports.rows = {}
            kept.append(bool(series()["waiting_pods"]))
            if not kept[-1]:
                raise EndError

    with pytest.raises(EndError):
        await CapacityMetrics(reports.ask, clock=Clock()).follow(interval_seconds=3600)
    assert kept == [True] * 6 + [False]


def test_each_metric_is_a_column_of_its_report_by_its_dimensions() -> None:
    for name, headlines in HEADLINES.items():
        assert {*headlines.columns} <= {*REPORTS[name].columns}
        assert {*headlines.by} <= {*REPORTS[name].dimensions}
