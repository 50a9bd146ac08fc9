"""A missing component raises an alert: the shipped rules, evaluated by promtool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.real.rule_tests import firing, names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.rule_tests import Labels

COMPONENTS: Final = (
    *("agent", "podwatch", "join", "reports"),
    *("sink-alerts", "sink-remote-write", "sink-rows", "sink-store"),
)
EXPECTED: Final = [name for name in COMPONENTS if name not in ("reports", "sink-rows")]
"""The components of a complete installation; the others are optional."""


def target(component: str, **labels: str) -> str:
    """Return the labels that the shipped scrape configuration gives to a target."""
    place = {"node": "n1", "instance": "n1"} if component == "agent" else {}
    known = {"job": "gpuledger", "component": component, "cluster": "c", "instance": component}
    return ",".join(f'{name}="{value}"' for name, value in (known | place | labels).items())


def up(component: str, **labels: str) -> str:
    return f"up{{{target(component, **labels)}}}"


HEALTHY: Final = {up(name): "1x180" for name in COMPONENTS}
MISSING: Final = {
    "stopped or hung": ("1x10 0x60", "GpuledgerComponentUnreachable"),
    "scaled to 0": ("1x10 stale", "GpuledgerComponentGone"),
}
GONE: Final = {
    "agent": {
        f"gpuledger_agent_driver_up{{{target('agent')}}}": "1x10 stale",
        f"gpuledger_agent_gpus_lost{{{target('agent')}}}": "0x10 stale",
    },
    "podwatch": {
        f"gpuledger_podwatch_leading{{{target('podwatch')}}}": "1x10 stale",
        f'gpuledger_podwatch_watermark_timestamp_seconds{{{target("podwatch")},kind="pods"}}': (
            "0+60x10 stale"
        ),
    },
    "join": {
        f"gpuledger_join_lag_seconds{{{target('join')}}}": "0x10 stale",
        f"gpuledger_join_watermark_timestamp_seconds{{{target('join')}}}": "0+60x10 stale",
        f'gpuledger_check_ok{{{target("join")},check="delivery",severity="critical"}}': (
            "1x10 stale"
        ),
    },
}
"""Series of components: ten minutes of health, and then nothing for hours."""
ALIVE: Final = {
    # Without a join no events arrive, so these sinks have nothing to send.
    f"gpuledger_sink_lag_seconds{{{target('sink-alerts')}}}": "0x60",
    f"gpuledger_sink_lag_seconds{{{target('sink-remote-write')}}}": "0x60",
    f'gpuledger_check_ok{{{target("sink-alerts")},check="alerts.kafka",severity="critical"}}': (
        "1x60"
    ),
}


def test_a_healthy_installation_raises_no_alert(promtool: Path, tmp_path: Path) -> None:
    found = firing(HEALTHY, minutes=[5, 60], promtool=promtool, folder=tmp_path)
    assert found == {5: [], 60: []}


@pytest.mark.parametrize("how", MISSING)
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_missing_component_raises_one_alert_that_names_its_cluster_and_itself(
    component: str, how: str, promtool: Path, tmp_path: Path
) -> None:
    values, alert = MISSING[how]
    series = HEALTHY | GONE.get(component, {}) | ALIVE | {up(component): values}
    found = firing(series, minutes=[60], promtool=promtool, folder=tmp_path)
    assert [
        (one["alertname"], one["cluster"], one["component"], one.get("node")) for one in found[60]
    ] == [
        (alert, "c", component, "n1" if alert.endswith("able") and component == "agent" else None)
    ]


def test_a_component_that_ends_again_and_again_raises_an_alert(
    promtool: Path, tmp_path: Path
) -> None:
    """Each time, it runs long enough to be scraped."""
    starts = f"process_start_time_seconds{{{target('join')}}}"
    for values, expected in (("0+300x60", 1), ("0x30 7x30", 0)):
        found = firing(HEALTHY | {starts: values}, minutes=[60], promtool=promtool, folder=tmp_path)
        assert names(found[60]) == ["GpuledgerComponentRestarting"] * expected


@pytest.mark.parametrize("component", EXPECTED)
def test_a_component_that_was_never_scraped_raises_an_alert(
    component: str, promtool: Path, tmp_path: Path
) -> None:
    series = {name: values for name, values in HEALTHY.items() if name != up(component)}
    found = firing(series, minutes=[5, 20], promtool=promtool, folder=tmp_path)
    assert found[5] == []
    (alert,) = found[20]
    assert (alert["alertname"], alert["component"]) == ("GpuledgerComponentAbsent", component)


def test_the_alert_on_a_component_that_was_removed_passes_to_the_one_on_its_absence(
    promtool: Path, tmp_path: Path
) -> None:
    series = HEALTHY | {up("podwatch"): "1x2 stale", up("reports"): "1x2 stale"}
    found = firing(
        series, minutes=[1400, 1500], promtool=promtool, folder=tmp_path, step_minutes=10
    )
    assert [(one["alertname"], one["component"]) for one in found[1400]] == [
        ("GpuledgerComponentGone", "podwatch"),
        ("GpuledgerComponentGone", "reports"),
    ]
    assert [(one["alertname"], one["component"]) for one in found[1500]] == [
        ("GpuledgerComponentAbsent", "podwatch")
    ]


def test_a_node_without_samples_raises_an_alert_that_names_it(
    promtool: Path, tmp_path: Path
) -> None:
    """This holds if the agent is no longer a target, and if two workers report the node."""
    since = "gpuledger_join_node_unresponsive_since_timestamp_seconds"
    series = HEALTHY | {
        f'{since}{{cluster="c",node="n2",instance="{worker}"}}': "_x5 300x30 stale"
        for worker in ("join-1", "join-2")
    }
    found = firing(series, minutes=[10, 30, 60], promtool=promtool, folder=tmp_path)
    expected: Labels = {
        "alertname": "GpuledgerNodeUnresponsive",
        "cluster": "c",
        "node": "n2",
        "severity": "critical",
    }
    assert found == {10: [], 30: [expected], 60: []}


def test_a_store_whose_watermark_is_stuck_raises_an_alert(promtool: Path, tmp_path: Path) -> None:
    """Even if the join before it is missing."""
    series = HEALTHY | {
        'gpuledger_join_watermark_timestamp_seconds{instance="j"}': "0+60x10 stale",
        'gpuledger_sink_watermark_timestamp_seconds{instance="store"}': "1+60x10 601x230",
    }
    found = firing(series, minutes=[40], promtool=promtool, folder=tmp_path)
    assert names(found[40]) == ["GpuledgerSinkWatermarkStalled"]


@pytest.mark.parametrize(("name", "expected"), [("new", 2), ("old", 0)])
def test_a_gpu_under_two_node_names_raises_an_alert_for_each(
    name: str, expected: int, promtool: Path, tmp_path: Path
) -> None:
    series = HEALTHY | {
        f'gpuledger_gpu_info{{cluster="prod",node="{node}",gpu_uuid="GPU-a"}}': "1x60"
        for node in ("old", name)
    }
    found = firing(series, minutes=[60], promtool=promtool, folder=tmp_path)
    assert names(found[60]) == ["GpuledgerGpuOnTwoNodes"] * expected


LOSSES: Final = {
    "GpuledgerSamplesOverlapping": {"gpuledger_join_samples_overlapping_total": "0+60x60"},
    "GpuledgerSamplesUnbalanced": {"gpuledger_join_samples_unbalanced_total": "0x55 1x5"},
    "GpuledgerSamplesBehindWatermark": {
        "gpuledger_join_samples_behind_watermark_total": "0x55 120x5"
    },
    "GpuledgerMessagesRejected": {
        'gpuledger_agent_messages_rejected_total{reason="future"}': "0+1x60"
    },
    "GpuledgerKernelLogMissed": {"gpuledger_agent_kmsg_overruns_total": "0x40 1x20"},
    "GpuledgerReadingsDropped": {
        'gpuledger_agent_readings_dropped_total{reading="r",reason="x"}': "0+1x60"
    },
    "GpuledgerValuesCut": {'gpuledger_agent_values_cut_total{field="f"}': "0+1x60"},
    "GpuledgerProcessesUnrecognized": {"gpuledger_agent_processes_unrecognized_total": "0+1x60"},
    "GpuledgerDescriptionsCut": {'gpuledger_join_descriptions_cut_total{what="node"}': "0+1x60"},
    "GpuledgerSamplesUnwritten": {"gpuledger_sink_remote_write_unwritten_samples_total": "0+1x60"},
    "GpuledgerGapsSeen": {
        "gpuledger_join_samples_total": "0+60x60",
        "gpuledger_join_gap_seconds_total": "0+1x60",
    },
    "GpuledgerPodsUnnamed": {
        "gpuledger_join_events_total": "0+60x60",
        "gpuledger_join_pending_descriptions_total": "0+10x60",
        "gpuledger_join_named_descriptions_total": "0+4x240",
    },
    "GpuPodsUnnamed": {
        **{
            f'gpuledger_pod_gpu_busy_ratio{{cluster="c",gpu_uuid="g{number}",pod="p"}}': "1x60"
            for number in range(9)
        },
        'gpuledger_pod_gpu_busy_ratio{cluster="c",gpu_uuid="g9",pod_uid="u"}': "1x60",
    },
}
"""For each alert, series that show a loss."""
NO_LOSSES: Final = {
    "restarts of agents": {
        "gpuledger_join_samples_total": "0+60x60",
        "gpuledger_join_gap_seconds_total": "0x50 20x10",
    },
    "first samples of new nodes": {"gpuledger_join_samples_behind_watermark_total": "0x55 60x5"},
    "a fleet without samples": {
        "gpuledger_join_samples_total": "0x60",
        "gpuledger_join_gap_seconds_total": "0x60",
    },
    "names from the kubelet": {
        "gpuledger_join_events_total": "0+60x60",
        "gpuledger_join_pending_descriptions_total": "0+10x60",
        "gpuledger_join_named_descriptions_total": "0+10x60",
    },
    "samples that a restarted sink sent again": {
        'gpuledger_sink_dropped_total{reason="repeated"}': "0+10x60",
    },
}


@pytest.mark.parametrize("alert", LOSSES)
def test_each_loss_raises_its_alert(alert: str, promtool: Path, tmp_path: Path) -> None:
    found = firing(HEALTHY | LOSSES[alert], minutes=[60], promtool=promtool, folder=tmp_path)
    assert names(found[60]) == [alert]


@pytest.mark.parametrize("case", NO_LOSSES)
def test_normal_operation_raises_no_alert_on_a_loss(
    case: str, promtool: Path, tmp_path: Path
) -> None:
    found = firing(HEALTHY | NO_LOSSES[case], minutes=[60], promtool=promtool, folder=tmp_path)
    assert found[60] == []
