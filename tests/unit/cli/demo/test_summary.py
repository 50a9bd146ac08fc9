"""The summary at the end, and the exit code."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger_cli.demo.run_bill import OwnerCost, RunBill, bill_run
from gpuledger_cli.demo.screen import HELP
from gpuledger_cli.demo.sending import SinkLine
from gpuledger_cli.demo.summary import (
    StoreLine,
    Summary,
    draw_summary,
    exit_code,
    incident_lines,
    next_commands,
    pod_lines,
    truth_error_ratio,
)
from gpuledger_cli.demo.totals import AlertLine, AllocationTotal, PodTotal
from tests.unit.cli.demo.events import incident


def totals(**gpu_seconds: float) -> dict[str, PodTotal]:
    """Return totals by UID."""
    return {
        f"default/{uid}": PodTotal(uid=uid, busy_ns=round(used * 10**9))
        for uid, used in gpu_seconds.items()
    }


def by_key(truth: dict[str, float]) -> dict[str, float]:
    """Return a truth by UID as a truth by key."""
    return {f"default/{uid}": seconds for uid, seconds in truth.items()}


@pytest.mark.parametrize(
    ("booked", "truth", "expected"),
    [
        ({"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 1.0}, 0.0),
        ({"a": 10.0}, {"a": 9.0, "b": 1.0}, 0.2),
        ({"a": 1.0}, {}, 0.0),
        ({}, {"a": 2.0}, 1.0),
    ],
)
def test_the_error_is_the_wrongly_booked_time_divided_by_the_used_time(
    booked: dict[str, float], truth: dict[str, float], expected: float
) -> None:
    """Too much on one pod and too little on another both count."""
    assert truth_error_ratio(totals(**booked), by_key(truth)) == pytest.approx(expected)


def test_a_pod_that_used_a_gpu_without_being_booked_has_a_line() -> None:
    """Its booked GPU time is zero, and its true one is not."""
    lines = pod_lines(totals(a=1.0), by_key({"a": 1.0, "b": 2.0, "c": 0.0}), {})
    assert [(line.uid, line.gpu_seconds, line.true_gpu_seconds) for line in lines] == [
        ("a", 1.0, 1.0),
        ("b", 0.0, 2.0),
    ]


def test_without_a_scenario_there_is_no_truth() -> None:
    """Absent is not zero."""
    assert pod_lines(totals(a=1.0), None, {})[0].true_gpu_seconds is None


def test_a_pod_with_an_allocated_gpu_has_a_line_whether_it_uses_it_or_not() -> None:
    """The one that uses nothing is known only to the kubelet, and without a UID."""
    trained = PodTotal(
        uid="a", namespace="research", pod="train-0", owner="Job/train", busy_ns=10**9
    )
    allocations = {
        ("default", "research", "train-0"): AllocationTotal(
            unused_ns=3 * 10**9, allocated_ns=5 * 10**9
        ),
        ("default", "research", "notebook-0"): AllocationTotal(
            owner="StatefulSet/notebook", unused_ns=4 * 10**9, allocated_ns=4 * 10**9
        ),
    }
    lines = pod_lines({"default/a": trained}, {"default/a": 1.0}, allocations)
    assert [line.allocated_gpu_seconds for line in lines] == [5.0, 4.0]
    assert [line.owner for line in lines] == ["Job/train", "StatefulSet/notebook"]
    assert [(line.uid, line.pod, line.gpu_seconds, line.unused_gpu_seconds) for line in lines] == [
        ("a", "train-0", 1.0, 3.0),
        (None, "notebook-0", 0.0, 4.0),
    ]


def test_incidents_are_listed_in_order_with_the_index_of_the_gpu() -> None:
    reported = [incident("gpu_lost", second=5, gpu=1), incident("xid", second=4, gpu=1, xid=79)]
    lines = incident_lines(reported)
    assert [(line.kind, line.xid, line.gpu_index) for line in lines] == [
        ("xid", 79, 1),
        ("gpu_lost", None, 1),
    ]


SENT = SinkLine(sink="remote_write", receiver="http://p/w", sent=10, retries=0, rejected=0)
AWAY = replace(SENT, sent=0, retries=3, failing="http://p/w: connection refused")
ALERTS = SinkLine(sink="alerts", receiver="http://a", sent=0, retries=0, rejected=0)
SUMMARY = Summary(
    samples=4,
    events=4,
    entries=9,
    pods=pod_lines({"a": PodTotal(uid="a", namespace="n", pod="p", busy_ns=2 * 10**9)}, None, {}),
    without_pod_gpu_seconds=1.5,
    incidents=[],
    alerts=[],
    conservation_error_max_ratio=0.0,
    store=StoreLine(path="/store", rows=9),
    dead_letters=0,
    sinks=[SENT],
)


SIMULATED = replace(SUMMARY, truth_error_ratio=0.0123)
"""A summary of a run whose scenario contains the true usage."""


def texts_of(summary: Summary, *, width: int = 160) -> list[str]:
    return [line.text for line in draw_summary(summary, width=width)]


def test_usage_of_an_unknown_category_is_shown_by_its_name() -> None:
    reported, unreported = (
        " ".join(texts_of(summary))
        for summary in (replace(SUMMARY, other_gpu_seconds={"lease": 2.25}), SUMMARY)
    )
    assert "; 2.25 GPU-s of category lease." in reported
    assert "of category" not in unreported


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "Accuracy: entries sum to the device exactly."),
        (
            {"truth_error_ratio": 0.0123},
            "Accuracy: 1.23 % of GPU time attributed wrongly; entries sum to the device exactly.",
        ),
        (
            {"conservation_error_max_ratio": 2e-5},
            "Accuracy: entries differ from the device by 2.0e-05.",
        ),
    ],
)
def test_one_line_gives_the_accuracy(changes: dict[str, float], line: str) -> None:
    lines = texts_of(replace(SUMMARY, **changes))
    assert [text for text in lines if text.startswith("Accuracy")] == [line]


def test_one_line_gives_the_totals() -> None:
    line = "Totals: 4 samples, 4 events, 9 entries; sent 10 by remote_write."
    assert line in texts_of(SUMMARY)
    rejected = line.replace(".", "; 2 records rejected.")
    assert rejected in texts_of(replace(SUMMARY, dead_letters=2))


@pytest.mark.parametrize(("width", "hidden"), [(200, ""), (44, "Hidden, widen the terminal: ")])
def test_columns_without_room_are_named(width: int, hidden: str) -> None:
    shown = [line.text for line in draw_summary(SUMMARY, width=width)]
    titles = next(line for line in shown if line.startswith("Pod "))
    notes = [line for line in shown if line.startswith("Hidden")]

    assert bool(notes) == bool(hidden)
    assert all(note.startswith(hidden) for note in notes)
    assert "Workload" in (notes[0] if notes else titles)


def test_a_run_ends_with_three_commands_for_its_store() -> None:
    summary = replace(SUMMARY, store=StoreLine(path="/my store", rows=9))
    commands = next_commands("bin/gpuledger", summary, is_simulated=True)
    shown = [line.text for line in draw_summary(summary, width=40, commands=commands)]
    assert shown[-5:-2] == ["", "Next:", "  bin/gpuledger bill --store '/my store' --by namespace"]
    assert shown[-2].startswith("  bin/gpuledger query --store '/my store' ")
    assert shown[-1] == (
        "  bin/gpuledger agent --no-kafka --listen 127.0.0.1:9400 --source simulated"
    )
    assert "simulated" not in next_commands("gpuledger", summary, is_simulated=False)[-1]
    assert "Next:" not in texts_of(summary)


def test_the_help_is_named_instead_of_a_legend() -> None:
    assert texts_of(SUMMARY)[-1] == HELP
    assert not any("kernels" in line for line in texts_of(SIMULATED))


@pytest.mark.parametrize(
    ("sink", "events", "code", "message"),
    [
        pytest.param(SENT, 4, 0, None, id="all is well"),
        pytest.param(ALERTS, 4, 0, None, id="no alert was due"),
        pytest.param(
            AWAY,
            4,
            1,
            "remote_write: nothing delivered to http://p/w in 3 attempts: connection refused",
            id="no response",
        ),
        pytest.param(
            replace(ALERTS, retries=2, failing="http://a: no route"),
            4,
            1,
            "alerts: nothing delivered to http://a in 2 attempts: no route",
            id="no alert delivered",
        ),
        pytest.param(
            replace(SENT, sent=0, rejected=4),
            4,
            1,
            "remote_write: http://p/w rejected all 4 items",
            id="all rejected",
        ),
        pytest.param(
            replace(SENT, sent=0),
            4,
            1,
            "remote_write: nothing delivered to http://p/w before the end",
            id="no response before the end",
        ),
        pytest.param(replace(SENT, sent=0), 0, 0, None, id="there was no event to send"),
        pytest.param(
            replace(AWAY, sent=7),
            4,
            0,
            "remote_write: http://p/w no longer responds: connection refused",
            id="unavailable at the end",
        ),
        pytest.param(
            replace(SENT, rejected=2), 4, 0, "remote_write: http://p/w rejected 2 items", id="some"
        ),
        pytest.param(replace(SENT, retries=2), 4, 0, None, id="unavailable for a while"),
        pytest.param(
            replace(SENT, missing=2),
            4,
            1,
            "remote_write: 2 events not delivered to http://p/w",
            id="last events missing",
        ),
    ],
)
def test_the_exit_code_is_1_and_a_line_names_the_sink_if_something_was_not_delivered(
    sink: SinkLine, events: int, code: int, message: str | None
) -> None:
    summary = replace(SUMMARY, sinks=[SENT, sink], samples=events, events=events)
    shown = texts_of(summary)
    assert exit_code(summary) == code
    assert [line for line in shown if "http://" in line] == ([message] if message else [])


def test_the_summary_leaves_alerts_to_the_table_above_it() -> None:
    alert = AlertLine(
        name="GpuIncident",
        severity="critical",
        node="gpu-node-2",
        gpu_uuid="u",
        text="XID 79",
        started="2026-01-01T00:00:00Z",
    )
    assert draw_summary(replace(SUMMARY, alerts=[alert]), width=80) == draw_summary(
        SUMMARY, width=80
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_of_pods_fits_the_screen(width: int) -> None:
    """Without a truth there is no column for it."""
    pod = PodTotal(
        uid="a", namespace="research", pod="llm-finetune-worker-0", owner="Job/" + "x" * 99
    )
    summary = replace(SUMMARY, pods=pod_lines({"a": pod}, None, {}))
    title, headings, row, *_ = texts_of(summary, width=width)
    assert title == "Usage by pod"
    assert "True GPU-s" not in headings
    assert "research/llm-finetune-worker-0" in row
    assert len(row) <= width


@pytest.mark.parametrize("width", [40, 160])
def test_unavailable_brokers_are_reported_and_the_usage_is_shown(width: int) -> None:
    """The number of samples is then unknown, and not zero."""
    summary = replace(SUMMARY, bus_away="one:9092", samples=None)
    shown = texts_of(summary, width=width)
    assert exit_code(summary) == 1
    reported = " ".join(" ".join(shown).split())
    assert "Kafka at one:9092 was unavailable at the end;" in reported
    assert "Totals: an unknown number of samples, 4 events, 9 entries;" in reported
    assert any("n/p" in line for line in shown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 6}, "2 samples had not become events at the end."),
        ({"failures": ("store failed: no space",)}, "store failed: no space"),
        (
            {"missing_topics": ("samples",), "samples": None},
            "Topics were deleted during the run: samples;",
        ),
    ],
)
def test_an_incomplete_run_is_reported_with_exit_code_1(
    changes: dict[str, Any], message: str
) -> None:
    summary = replace(SUMMARY, **changes)
    assert exit_code(summary) == 1
    shown = [line for line in draw_summary(summary, width=160) if line.text.startswith(message)]
    assert [line.style for line in shown] == ["bold red"]
    assert not any("Kafka" in line.text for line in shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bill_has_a_title_and_a_total_and_fits_the_screen(width: int) -> None:
    line = OwnerCost(
        owner="StatefulSet/notebook-of-somebody",
        allocated_gpu_seconds=19.4,
        billed_gpu_seconds=19.4,
        used_gpu_seconds=0.0,
        cost="0.0371",
        unused_cost="0.0371",
    )
    used = replace(line, owner="Job/train", cost="0.1113", unused_cost="0.0000")
    bill = RunBill(currency="USD", prices="list prices", lines=[used, line], cost="0.1484")
    shown = texts_of(replace(SUMMARY, bill=bill), width=width)
    assert max(map(len, shown)) <= max(width, 46)
    assert "Bill by workload, at list prices" in shown
    total = "Total 0.1484 USD; 0.0371 USD (25 %) for GPUs that were allocated and unused."
    assert total in " ".join(" ".join(shown).split())
    assert not any("Bill" in text for text in texts_of(SUMMARY, width=width))


def test_a_store_without_usage_gives_no_bill(tmp_path: Path) -> None:
    assert bill_run(tmp_path, began_ns=0, ended_ns=1) is None
