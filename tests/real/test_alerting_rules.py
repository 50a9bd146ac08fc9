"""The rules that are shipped, judged by Prometheus' own promtool: what an alert of a check says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "gpuledger.rules.yaml"
ALERTS = {"critical": "GpuledgerCriticalCheckFails", "warning": "GpuledgerCheckFails"}


def said_of(alert: str, labels: dict[str, str]) -> dict[str, str]:
    """Return what the rule says of a series with these labels."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule["alert"] == alert)
    said: dict[str, str] = rule["annotations"]
    for name, value in labels.items():
        said = {key: text.replace(f"{{{{ $labels.{name} }}}}", value) for key, text in said.items()}
    assert said["summary"].startswith("sink, check kafka: ")
    return said


@pytest.mark.parametrize("severity", ALERTS)
def test_a_check_that_fails_is_one_alert_of_its_own_severity(
    severity: str, promtool: Path, tmp_path: Path
) -> None:
    labels = {"instance": "sink", "check": "kafka", "severity": severity}
    series = ",".join(f'{name}="{value}"' for name, value in labels.items())
    fires = {"exp_labels": labels, "exp_annotations": said_of(ALERTS[severity], labels)}
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
