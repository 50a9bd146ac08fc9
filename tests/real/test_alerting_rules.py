"""The shipped rules, evaluated by Prometheus's promtool: when alerts fire, and their text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from gpuledger_sinks.registry import KINDS

RULES = Path(__file__).parents[2] / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml"
ALERTS = {"critical": "GpuledgerCriticalCheckFailing", "warning": "GpuledgerCheckFailing"}


def message_of(alert: str, labels: dict[str, str]) -> dict[str, str]:
    """Return the rule's message for a series with these labels."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule["alert"] == alert)
    message: dict[str, str] = rule["annotations"]
    for name, value in labels.items():
        message = {
            key: text.replace(f"{{{{ $labels.{name} }}}}", value) for key, text in message.items()
        }
    assert message["summary"].startswith("sink, check kafka: ")
    return message


@pytest.mark.parametrize("severity", ALERTS)
def test_a_failing_check_is_one_alert_of_its_own_severity(
    severity: str, promtool: Path, tmp_path: Path
) -> None:
    labels = {"instance": "sink", "check": "kafka", "severity": severity}
    series = ",".join(f'{name}="{value}"' for name, value in labels.items())
    fires = {"exp_labels": labels, "exp_annotations": message_of(ALERTS[severity], labels)}
    expected = {alert: [fires] if kind == severity else [] for kind, alert in ALERTS.items()}
    test = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": f"gpuledger_check_ok{{{series}}}", "values": "0x20"}],
                "alert_rule_test": [
                    {"eval_time": "15m", "alertname": alert, "exp_alerts": alerts}
                    for alert, alerts in expected.items()
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(test))
    command: list[str | Path] = [promtool, "test", "rules", file]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)

    assert judged.returncode == 0, judged.stderr


REASONS = [reason for kind in KINDS.values() for reason in kind.drop_reasons]
STANDS = {
    "GpuledgerJoinWatermarkStalled": ("gpuledger_join_watermark_timestamp_seconds", {}, 900),
    "GpuledgerPodwatchWatermarkStalled": (
        "gpuledger_podwatch_watermark_timestamp_seconds",
        {"cluster": "default", "kind": "pod"},
        300,
    ),
    "GpuledgerSinkWatermarkStalled": (
        "gpuledger_sink_watermark_timestamp_seconds",
        {"sink": "store"},
        900,
    ),
}
MOVES = {
    # A value per minute, and whether the rule fires after an hour.
    "moves": ("0+60x60", False),
    "is behind and moves": ("-240+60x60", False),
    "stands": ("1000+0x60", True),
    "stood for a while and moves again": ("0+0x30 1860+60x30", False),
}


@pytest.mark.parametrize("case", MOVES)
@pytest.mark.parametrize("alert", STANDS)
def test_a_stuck_watermark_fires_and_a_moving_one_does_not(
    alert: str, case: str, promtool: Path, tmp_path: Path
) -> None:
    metric, labels, _ = STANDS[alert]
    values, fires = MOVES[case]
    assert fires_at_the_end(alert, {metric: (labels, values)}, promtool, tmp_path) is fires


@pytest.mark.parametrize("alert", STANDS)
def test_a_watermark_fires_only_after_it_was_stuck_for_its_time(
    alert: str, promtool: Path, tmp_path: Path
) -> None:
    """Its bound, plus the five minutes for which the condition must hold."""
    metric, labels, bound_seconds = STANDS[alert]
    for stood_minutes, fires in (
        (bound_seconds // 60 + 4, False),
        (bound_seconds // 60 + 7, True),
    ):
        moved = 60 - stood_minutes
        values = f"0+60x{moved} {moved * 60}+0x{stood_minutes}"
        assert fires_at_the_end(alert, {metric: (labels, values)}, promtool, tmp_path) is fires


def test_a_worker_without_a_watermark_is_not_a_stuck_watermark(
    promtool: Path, tmp_path: Path
) -> None:
    """A worker without partitions shows zero; of the podwatches only the leader has a watermark."""
    for alert in ("GpuledgerJoinWatermarkStalled", "GpuledgerSinkWatermarkStalled"):
        metric, labels, _ = STANDS[alert]
        assert not fires_at_the_end(alert, {metric: (labels, "0+0x60")}, promtool, tmp_path)
    metric, labels, _ = STANDS["GpuledgerPodwatchWatermarkStalled"]
    two = {metric: (labels, "0+60x60"), f"{metric} ": (labels | {"instance": "b"}, "0+0x60")}
    assert not fires_at_the_end("GpuledgerPodwatchWatermarkStalled", two, promtool, tmp_path)


NO_LOSS = {"duplicate", "repeated", "superseded"}
"""Reasons of records that the receiver has already, or whose news is older than what it has."""


@pytest.mark.parametrize("reason", sorted({*REASONS} | NO_LOSS))
def test_a_dropped_record_fires_unless_the_receiver_lacks_nothing(
    reason: str, promtool: Path, tmp_path: Path
) -> None:
    series = {"gpuledger_sink_dropped_total": ({"sink": "s", "reason": reason}, "0+1x60")}
    fires = fires_at_the_end("GpuledgerSinkDroppingEvents", series, promtool, tmp_path)
    assert fires is (reason not in NO_LOSS)


LEADERS = "gpuledger_podwatch_leading"


@pytest.mark.parametrize(
    ("leading", "fires"),
    [
        ({"east": "1", "west": "1"}, False),
        ({"east": "1", "west": "0"}, True),
        ({"east": "0"}, True),
        ({"east": "1"}, False),
    ],
)
def test_each_cluster_needs_a_leading_podwatch_of_its_own(
    leading: dict[str, str], *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    """One Prometheus may scrape the podwatches of several clusters."""
    series = {
        LEADERS + " " * place: ({"cluster": cluster}, f"{value}+0x60")
        for place, (cluster, value) in enumerate(leading.items())
    }
    assert fires_at_the_end("GpuledgerPodwatchLeaders", series, promtool, tmp_path) is fires


def test_a_cluster_whose_podwatch_is_silent_is_not_hidden_by_another_one(
    promtool: Path, tmp_path: Path
) -> None:
    metric, labels, _ = STANDS["GpuledgerPodwatchWatermarkStalled"]
    moves, stands = (MOVES[case][0] for case in ("moves", "stands"))
    two = {metric: (labels, stands), f"{metric} ": (labels | {"cluster": "west"}, moves)}
    assert fires_at_the_end("GpuledgerPodwatchWatermarkStalled", two, promtool, tmp_path)


@pytest.mark.parametrize(
    ("denied", "fires"),
    [("0+0x30 2+0x30", False), ("0+0x55 2+2x5", False), ("0+0x30 2+2x30", True)],
    ids=["for a moment", "for minutes", "for longer"],
)
def test_a_denied_watch_fires_only_if_it_stays_denied(
    denied: str, *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    """An API server that has just started denies watches until it has read the roles."""
    series = {"gpuledger_podwatch_watch_errors_total": ({"kind": "pod", "status": "403"}, denied)}
    assert fires_at_the_end("GpuledgerPodwatchForbidden", series, promtool, tmp_path) is fires


GPU = {"cluster": "default", "node": "n", "gpu_uuid": "GPU-1"}
BUSY = "gpuledger_category_gpu_busy_ratio"


@pytest.mark.parametrize(
    ("busy", "fires"),
    [
        ({"host": "0.05+0x240"}, True),
        ({"host": "0.03+0x240", "unattributed": "0.03+0x240"}, True),
        ({"host": "0.04+0x240"}, False),
        ({"idle": "1+0x240", "job": "1+0x240"}, False),
        ({"host": "0+0x237 1+0x3"}, False),
        ({"host": "0+0x235 1+0x5"}, True),
        ({"host": "1+0x239 0"}, False),
    ],
)
def test_a_gpu_that_works_for_no_pod_fires_after_a_minute(
    busy: dict[str, str], *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    """A value every 15 seconds, as remote-write sends them."""
    series = {
        f"{BUSY}{' ' * number}": (GPU | {"category": category}, values)
        for number, (category, values) in enumerate(busy.items())
    }
    series["gpuledger_gpu_info"] = (GPU | {"gpu_index": "0"}, "1+0x240")
    found = fires_at_the_end("GpuBusyWithoutPod", series, promtool, tmp_path, interval="15s")
    assert found is fires


POD_BUSY = "gpuledger_pod_gpu_busy_ratio"
ALLOCATION = "gpuledger_allocation_gpu_ratio"
USER = {"namespace": "c", "pod": "user-0", "pod_uid": "uid-user", "container": "main"}
Labels = dict[str, str]


def allocated_to(**allocatee: str) -> Labels:
    """Return the labels of a part of the GPU that is allocated."""
    return GPU | {f"allocated_{name}": value for name, value in allocatee.items()}


TO_OTHER = allocated_to(namespace="a", pod="other-0", pod_uid="uid-other", container="main")
TO_USER = allocated_to(namespace="c", pod="user-0", pod_uid="uid-user", container="worker")
USES: dict[str, tuple[list[Labels], bool]] = {
    "allocated to another pod": ([TO_OTHER], True),
    "allocated to nobody": ([GPU], False),
    "allocated to the pod": ([TO_USER], False),
    "shared with the pod": ([TO_OTHER, TO_USER, GPU], False),
    "partly allocated to another pod": ([TO_OTHER, GPU], True),
    "allocated to a job": ([allocated_to(job_id="7")], True),
    "allocated to the pod, by its name": (
        [allocated_to(namespace="c", pod="user-0", pod_state="named"), TO_OTHER],
        False,
    ),
    "allocated to a pod of the same name": (
        [allocated_to(namespace="c", pod="user-0", pod_uid="uid-newer")],
        True,
    ),
    "another GPU allocated to the pod": ([TO_OTHER, TO_USER | {"gpu_uuid": "GPU-2"}], True),
    "allocated on another node": ([TO_OTHER | {"node": "m"}], False),
}


def uses(*allocations: Labels, busy: str, user: Labels = USER) -> dict[str, tuple[Labels, str]]:
    """Return the series of a pod that uses a GPU with these allocations."""
    series = {
        ALLOCATION + " " * number: (labels, "0.5+0x240")
        for number, labels in enumerate(allocations)
    }
    info = GPU | {"gpu_index": "0"}
    return {POD_BUSY: (GPU | user, busy), "gpuledger_gpu_info": (info, "1+0x240"), **series}


@pytest.mark.parametrize("case", USES)
def test_use_of_a_gpu_that_is_allocated_to_another_pod_fires(
    case: str, promtool: Path, tmp_path: Path
) -> None:
    allocations, fires = USES[case]
    series = uses(*allocations, busy="0.05+0x240")
    found = fires_at_the_end("GpuUsedWithoutAllocation", series, promtool, tmp_path, interval="15s")
    assert found is fires


@pytest.mark.parametrize(
    ("allocatee", "fires"),
    [
        ({"job_id": "7"}, False),
        ({"job_id": "8"}, True),
        ({"namespace": "a", "pod": "other-0", "pod_uid": "uid-other"}, True),
        ({}, False),
    ],
)
def test_use_of_a_gpu_by_a_job_fires_if_another_pod_or_job_has_it(
    allocatee: Labels, *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    series = {
        "gpuledger_category_gpu_busy_ratio": (
            GPU | {"category": "job", "job_id": "7"},
            "0.05+0x240",
        ),
        ALLOCATION: (allocated_to(**allocatee), "1+0x240"),
        "gpuledger_gpu_info": (GPU | {"gpu_index": "0"}, "1+0x240"),
    }
    alert = "GpuUsedWithoutAllocation"
    assert fires_at_the_end(alert, series, promtool, tmp_path, interval="15s") is fires


@pytest.mark.parametrize(
    ("busy", "fires"),
    [("0.04+0x240", False), ("0+0x225 1+0x15", False), ("0+0x215 1+0x25", True)],
)
def test_use_without_an_allocation_fires_after_five_minutes(
    busy: str, *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    series = uses(TO_OTHER, busy=busy)
    found = fires_at_the_end("GpuUsedWithoutAllocation", series, promtool, tmp_path, interval="15s")
    assert found is fires


def test_a_user_without_a_name_may_be_the_allocatee(promtool: Path, tmp_path: Path) -> None:
    series = uses(TO_OTHER, busy="1+0x240", user={"pod_uid": "uid-user"})
    alert = "GpuUsedWithoutAllocation"
    assert not fires_at_the_end(alert, series, promtool, tmp_path, interval="15s")


@pytest.mark.parametrize(
    ("method", "samples", "fires"),
    [("scaled", "1+0x240", True), ("scaled", "_x225 1+0x15", False), ("other", "1+0x240", False)],
)
def test_a_gpu_that_is_allocated_twice_fires_after_ten_minutes(
    method: str, samples: str, *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    series = {
        "gpuledger_gpu_method_info": (
            GPU | {"quantity": "allocated", "method": method},
            samples,
        ),
        "gpuledger_gpu_info": (GPU | {"gpu_index": "0"}, "1+0x240"),
    }
    found = fires_at_the_end("GpuAllocatedTwice", series, promtool, tmp_path, interval="15s")
    assert found is fires


@pytest.mark.parametrize(
    ("deleted", "busy", "fires"),
    [
        ("uid-user", "0.05+0x240", True),
        ("uid-user", "0.04+0x240", False),
        ("uid-user", "0+0x225 1+0x15", False),
        ("uid-other", "1+0x240", False),
    ],
)
def test_use_by_a_deleted_pod_fires(
    deleted: str, busy: str, *, fires: bool, promtool: Path, tmp_path: Path
) -> None:
    named = {"namespace": "c", "pod": "user-0", "pod_uid": deleted}
    place = {"cluster": GPU["cluster"], "node": GPU["node"]}
    series = uses(TO_USER, busy=busy)
    series["gpuledger_pod_deleted_timestamp_seconds"] = (place | named, "1795000000+0x240")
    found = fires_at_the_end("GpuUsedByDeletedPod", series, promtool, tmp_path, interval="15s")
    assert found is fires


GIB = 2**30


@pytest.mark.parametrize(
    ("used", "share", "method", "fires"),
    [
        (f"{23 * GIB}+0x240", 0.25, "none", True),
        (f"{21 * GIB}+0x240", 0.25, "none", False),
        (f"{79 * GIB}+0x240", 1, "none", False),
        (f"{23 * GIB}+0x240", 0.25, "scaled", False),
        (f"0+0x215 {23 * GIB}+0x25", 0.25, "none", False),
        (f"0+0x195 {23 * GIB}+0x45", 0.25, "none", True),
    ],
)
@pytest.mark.parametrize("device", ["gpu", "mig_instance"])
def test_a_pod_with_more_memory_than_its_share_fires_after_ten_minutes(
    device: str,
    used: str,
    share: float,
    method: str,
    *,
    fires: bool,
    promtool: Path,
    tmp_path: Path,
) -> None:
    """A share of a GPU of 80 GiB, with a tolerance of a tenth; whole and scaled shares differ."""
    series = {
        "gpuledger_pod_gpu_memory_bytes": (GPU | USER, used),
        ALLOCATION: (TO_USER, f"{share}+0x240"),
        ALLOCATION + " ": (TO_OTHER, f"{1 - share}+0x240"),
        f"gpuledger_{device}_memory_total_bytes": (
            GPU | {"gpu_index": "0", "model": "H100"},
            f"{80 * GIB}+0x240",
        ),
        "gpuledger_gpu_method_info": (
            GPU | {"quantity": "allocated", "method": method},
            "1+0x240",
        ),
        "gpuledger_gpu_info": (GPU | {"gpu_index": "0"}, "1+0x240"),
    }
    found = fires_at_the_end("GpuMemoryOverShare", series, promtool, tmp_path, interval="15s")
    assert found is fires


def fires_at_the_end(
    alert: str,
    series: dict[str, tuple[dict[str, str], str]],
    promtool: Path,
    tmp_path: Path,
    *,
    interval: str = "1m",
) -> bool:
    """Return whether a rule fires after an hour of these series, with a value per interval."""

    def named(metric: str, labels: dict[str, str]) -> str:
        shown = {"instance": "a"} | labels
        pairs = ",".join(f'{name}="{value}"' for name, value in shown.items())
        return f"{metric.strip()}{{{pairs}}}"

    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    test = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": interval,
                "input_series": [
                    {"series": named(metric, labels), "values": values}
                    for metric, (labels, values) in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f"count({firing}) or vector(0)",
                        "eval_time": "1h",
                        "exp_samples": [{"labels": "{}", "value": 0}],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(test))
    command: list[str | Path] = [promtool, "test", "rules", file]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)
    if judged.returncode == 0:
        return False
    assert "{} 1E+00" in judged.stderr, judged.stderr
    return True
