"""What is said at the end, and the exit code."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger_cli.demo.run_bill import OwnerCost, RunBill, bill_run
from gpuledger_cli.demo.sending import SinkLine
from gpuledger_cli.demo.summary import (
    StoreLine,
    Summary,
    draw_summary,
    exit_code,
    incident_lines,
    pod_lines,
    truth_error_ratio,
)
from gpuledger_cli.demo.tables import SUMMARY_COLUMNS
from gpuledger_cli.demo.totals import AlertLine, PodTotal
from tests.unit.cli.demo.events import incident


def totals(**gpu_seconds: float) -> dict[str, PodTotal]:
    """Return totals by UID."""
    return {
        f"default/{uid}": PodTotal(uid=uid, busy_ns=round(used * 10**9))
        for uid, used in gpu_seconds.items()
    }


def by_key(truth: dict[str, float]) -> dict[str, float]:
    """Return a truth by UID as one by key."""
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
def test_the_error_is_what_was_booked_wrongly_over_what_was_used(
    booked: dict[str, float], truth: dict[str, float], expected: float
) -> None:
    """Too much on one pod and too little on another both count."""
    assert truth_error_ratio(totals(**booked), by_key(truth)) == pytest.approx(expected)


def test_a_pod_that_used_a_gpu_and_was_not_booked_has_a_line() -> None:
    """Its booked GPU time is zero, and its true one is not."""
    lines = pod_lines(totals(a=1.0), by_key({"a": 1.0, "b": 2.0, "c": 0.0}), {}, {})
    assert [(line.uid, line.gpu_seconds, line.true_gpu_seconds) for line in lines] == [
        ("a", 1.0, 1.0),
        ("b", 0.0, 2.0),
    ]


def test_without_a_scenario_there_is_no_truth() -> None:
    """Absent is not zero."""
    assert pod_lines(totals(a=1.0), None, {}, {})[0].true_gpu_seconds is None


def test_a_pod_that_holds_a_gpu_has_a_line_whether_it_uses_it_or_not() -> None:
    """The one that uses nothing is known by the kubelet's word alone, without a UID."""
    trained = PodTotal(uid="a", namespace="research", pod="train-0", busy_ns=10**9)
    unused = {
        ("default", "research", "train-0"): 3 * 10**9,
        ("default", "research", "notebook-0"): 4 * 10**9,
    }
    held = {
        ("default", "research", "train-0"): 5 * 10**9,
        ("default", "research", "notebook-0"): 4 * 10**9,
    }
    lines = pod_lines({"default/a": trained}, {"default/a": 1.0}, unused, held)
    assert [line.allocated_gpu_seconds for line in lines] == [5.0, 4.0]
    assert [(line.uid, line.pod, line.gpu_seconds, line.unused_gpu_seconds) for line in lines] == [
        ("a", "train-0", 1.0, 3.0),
        (None, "notebook-0", 0.0, 4.0),
    ]


def test_incidents_are_told_in_their_order_with_the_gpu_as_people_number_it() -> None:
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
    pods=pod_lines(
        {"a": PodTotal(uid="a", namespace="n", pod="p", busy_ns=2 * 10**9)}, None, {}, {}
    ),
    without_pod_gpu_seconds=1.5,
    incidents=[],
    alerts=[],
    conservation_error_max_ratio=0.0,
    store=StoreLine(path="/store", rows=9),
    dead_letters=0,
    sinks=[SENT],
)


def test_what_ran_on_an_account_that_is_not_known_is_told_by_its_name() -> None:
    with_others = replace(SUMMARY, other_gpu_seconds={"lease": 2.25})
    reported, unreported = (
        " ".join(line.text for line in draw_summary(summary, width=80))
        for summary in (with_others, SUMMARY)
    )
    assert "2.25 GPU s ran on category lease." in reported
    assert "on category" not in unreported


@pytest.mark.parametrize(
    ("sink", "events", "code", "message"),
    [
        pytest.param(SENT, 4, 0, None, id="all is well"),
        pytest.param(ALERTS, 4, 0, None, id="no alert was due"),
        pytest.param(
            AWAY,
            4,
            1,
            "remote_write: nothing has reached http://p/w in 3 tries: connection refused",
            id="nobody answers",
        ),
        pytest.param(
            replace(ALERTS, retries=2, failing="http://a: no route"),
            4,
            1,
            "alerts: nothing has reached http://a in 2 tries: no route",
            id="no alert has arrived",
        ),
        pytest.param(
            replace(SENT, sent=0, rejected=4),
            4,
            1,
            "remote_write: http://p/w has refused all 4 that it was sent",
            id="all is refused",
        ),
        pytest.param(
            replace(SENT, sent=0),
            4,
            1,
            "remote_write: nothing had reached http://p/w at the end",
            id="no answer before the end",
        ),
        pytest.param(replace(SENT, sent=0), 0, 0, None, id="there was no event to send"),
        pytest.param(
            replace(AWAY, sent=7),
            4,
            0,
            "remote_write: http://p/w is no longer reached: connection refused",
            id="away at the end",
        ),
        pytest.param(
            replace(SENT, rejected=2), 4, 0, "remote_write: http://p/w has refused 2", id="refuses"
        ),
        pytest.param(replace(SENT, retries=2), 4, 0, None, id="was away for a while"),
        pytest.param(
            replace(SENT, missing=2),
            4,
            1,
            "remote_write: 2 of the events had not reached http://p/w at the end",
            id="lacks the last ones",
        ),
    ],
)
def test_the_exit_code_is_1_only_where_a_sink_has_not_handed_over_what_it_should_and_it_is_said(
    sink: SinkLine, events: int, code: int, message: str | None
) -> None:
    summary = replace(SUMMARY, sinks=[SENT, sink], samples=events, events=events)
    shown = [line.text for line in draw_summary(summary, width=80)]
    assert exit_code(summary) == code
    assert [line for line in shown if "http://" in line] == ([message] if message else [])


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_alerts_stand_in_the_summary_and_no_word_of_theirs_is_broken(width: int) -> None:
    alert = AlertLine(
        name="GpuIncident",
        severity="critical",
        node="gpu-node-2",
        gpu_uuid="u",
        text="GPU 3 on node gpu-node-2 (pod vision/transcode-6b8f4-9wkzp): XID 79, it fell off",
        started="2026-01-01T00:00:00Z",
    )
    shown = draw_summary(replace(SUMMARY, alerts=[alert]), width=width)
    lines = [line.text for line in shown if line.style == "red"]
    assert " ".join(" ".join(lines).split()) == f"! GpuIncident critical {alert.text}"
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_column_that_does_not_say_it_itself_is_explained_below_the_table(width: int) -> None:
    """And none that is not there."""
    for truth, expected in ((None, "unused s: "), ({"a": 1.0}, "true: ")):
        pods = pod_lines(totals(a=1.0), truth, {}, {})
        error = None if truth is None else 0.0
        summary = replace(SUMMARY, pods=pods, truth_error_ratio=error)
        shown = draw_summary(summary, width=width)
        message = " ".join(line.text for line in shown if line.style == "dim")
        title, *_ = (line.text for line in shown)
        assert expected in message
        for name in SUMMARY_COLUMNS:
            assert (f"{name}: " in message) == (name in title)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_of_pods_fits_the_screen(width: int) -> None:
    """Without a truth there is no column for it."""
    pod = PodTotal(
        uid="a", namespace="research", pod="llm-finetune-worker-0", owner="Job/" + "x" * 99
    )
    summary = replace(SUMMARY, pods=pod_lines({"a": pod}, None, {}, {}))
    title, row, *_ = (line.text for line in draw_summary(summary, width=width))
    assert "true" not in title
    assert "research/llm-finetune-worker-0" in row
    assert len(row) <= width


@pytest.mark.parametrize("width", [40, 160])
def test_brokers_that_were_away_at_the_end_are_said_beside_what_was_booked(width: int) -> None:
    """How many ticks there were, nobody knows then: absent is not zero."""
    summary = replace(SUMMARY, bus_away="one:9092", samples=None)
    shown = [line.text for line in draw_summary(summary, width=width)]
    assert exit_code(summary) == 1
    assert any(line.startswith("Kafka at one:9092 was away at the end:") for line in shown)
    assert "An unknown number of samples, 4 events, 9 entries." in " ".join(" ".join(shown).split())
    assert any("n/p" in line for line in shown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 6}, "2 samples had not become events at the end."),
        ({"failures": ("store has failed: no room",)}, "store has failed: no room"),
        ({"missing_topics": ("samples",), "samples": None}, "Gone at the end, as somebody has"),
    ],
)
def test_what_is_missing_of_a_run_is_said_with_exit_code_1(
    changes: dict[str, Any], message: str
) -> None:
    summary = replace(SUMMARY, **changes)
    assert exit_code(summary) == 1
    shown = [line for line in draw_summary(summary, width=80) if line.text.startswith(message)]
    assert [line.style for line in shown] == ["bold red"]
    assert not any("Kafka" in line.text for line in shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bill_is_the_last_thing_that_is_shown_and_fits_the_screen(width: int) -> None:
    """Of what went wrong is told behind it."""
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
    shown = [one.text for one in draw_summary(replace(SUMMARY, bill=bill), width=width)]
    reported = " ".join(shown)
    assert max(map(len, shown[-6:])) <= width
    assert "0.1484 USD by list prices, including 0.0371 (25%)" in " ".join(reported.split())
    assert not any("It cost" in one.text for one in draw_summary(SUMMARY, width=width))


def test_a_store_without_usage_gives_no_bill(tmp_path: Path) -> None:
    assert bill_run(tmp_path, began_ns=0, ended_ns=1) is None
