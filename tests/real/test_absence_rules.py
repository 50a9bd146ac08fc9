"""A missing component raises an alert: the shipped rules, evaluated by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

RULES: Final = Path(__file__).parents[2] / "deploy" / "prometheus" / "gpuledger.rules.yaml"
GONE: Final = {
    "agent": {
        'up{job="gpuledger",component="agent",instance="n1"}': "1x10 0x230",
        'gpuledger_agent_driver_up{instance="n1"}': "1x10 stale",
        'gpuledger_agent_gpus_lost{instance="n1"}': "0x10 stale",
    },
    "podwatch": {
        'up{job="gpuledger",component="podwatch",instance="pw"}': "1x10 0x230",
        'gpuledger_podwatch_leading{cluster="default",instance="pw"}': "1x10 stale",
        'gpuledger_podwatch_watermark_timestamp_seconds{cluster="default",kind="pods",'
        'instance="pw"}': "0+60x10 stale",
    },
    "join": {
        'up{job="gpuledger",component="join",instance="j"}': "1x10 0x230",
        'gpuledger_join_lag_seconds{instance="j"}': "0x10 stale",
        'gpuledger_join_watermark_timestamp_seconds{instance="j"}': "0+60x10 stale",
        'gpuledger_check_ok{check="delivery",severity="critical",instance="j"}': "1x10 stale",
    },
}
"""Each component's series: ten minutes of health, and then nothing for hours."""
ALIVE: Final = {
    # Without a join no events arrive, so these sinks have nothing to send.
    'gpuledger_sink_lag_seconds{instance="alerts"}': "0x240",
    'gpuledger_sink_lag_seconds{instance="rw"}': "0x240",
    'gpuledger_check_ok{check="alerts.kafka",severity="critical",instance="alerts"}': "1x240",
}


def alerts_firing(
    series: dict[str, str], *, at: str, promtool: Path, folder: Path, alert: str = ".+"
) -> int:
    """Return how many alerts fire after this time of these series, with a value per minute."""
    firing = f'ALERTS{{alertname=~"{alert}",alertstate="firing"}}'
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f"count({firing}) or vector(0)",
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": -1}],
                    }
                ],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test))
    command: list[str | Path] = [promtool, "test", "rules", file]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)
    got = re.search(r"got:.*?\{\} ([-+.0-9E]+)", judged.stderr, re.DOTALL)
    if got is None:
        raise RuntimeError(judged.stderr)
    return round(float(got[1]))


@pytest.mark.xfail(raises=AssertionError, reason="no rule sees that a component is not there")
@pytest.mark.parametrize("component", GONE)
def test_a_component_that_is_missing_for_hours_raises_an_alert(
    component: str, promtool: Path, tmp_path: Path
) -> None:
    series = ALIVE | GONE[component]
    assert alerts_firing(series, at="4h", promtool=promtool, folder=tmp_path) > 0


def test_a_store_whose_watermark_is_stuck_raises_an_alert(promtool: Path, tmp_path: Path) -> None:
    """Even if the join before it is missing."""
    series = {
        'gpuledger_join_watermark_timestamp_seconds{instance="j"}': "0+60x10 stale",
        'gpuledger_sink_watermark_timestamp_seconds{instance="store"}': "1+60x10 601x230",
    }
    alert = "GpuledgerSinkWatermarkStalled"
    firing = alerts_firing(series, at="40m", promtool=promtool, folder=tmp_path, alert=alert)
    assert firing == 1


def test_seconds_that_two_agents_published_raise_an_alert(promtool: Path, tmp_path: Path) -> None:
    series = {'gpuledger_join_samples_overlapping_total{instance="j"}': "0+60x240"}
    assert alerts_firing(series, at="4h", promtool=promtool, folder=tmp_path) > 0


@pytest.mark.parametrize(("name", "firing"), [("new", 2), ("old", 0)])
def test_a_gpu_under_two_node_names_raises_an_alert_for_each(
    name: str, firing: int, promtool: Path, tmp_path: Path
) -> None:
    series = {
        f'gpuledger_gpu_info{{cluster="prod",node="{node}",gpu_uuid="GPU-a"}}': "1x240"
        for node in ("old", name)
    }
    alert = "GpuledgerGpuOnTwoNodes"
    found = alerts_firing(series, at="1h", promtool=promtool, folder=tmp_path, alert=alert)
    assert found == firing
