"""Alerts that the shipped rules fire for given series, evaluated by Prometheus' promtool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RULES: Final = Path(__file__).parents[2] / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml"
Labels = dict[str, str]


def firing(
    series: Mapping[str, str],
    *,
    minutes: Iterable[int],
    promtool: Path,
    folder: Path,
    step_minutes: int = 1,
) -> dict[int, list[Labels]]:
    """Return the labels of the alerts that fire at each of these minutes.

    `series` has a value per step of each series, as promtool writes them. The rules are evaluated
    once per step.
    """
    asked = list(minutes)
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{step_minutes}m",
        "tests": [
            {
                "interval": f"{step_minutes}m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'ALERTS{alertstate="firing"} or vector(0)',
                        "eval_time": f"{minute}m",
                        # Never the result, so that promtool prints the result.
                        "exp_samples": [{"labels": "{}", "value": -1}],
                    }
                    for minute in asked
                ],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test))
    command: list[str | Path] = [promtool, "test", "rules", file]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)
    results = re.findall(r"got:(.*?)(?=\n\s*expr:|\Z)", judged.stderr, re.DOTALL)
    if len(results) != len(asked):
        raise RuntimeError(judged.stderr)
    return dict(zip(asked, map(_alerts, results), strict=True))


def names(alerts: Iterable[Labels]) -> list[str]:
    """Return the names of alerts in order."""
    return sorted(alert["alertname"] for alert in alerts)


def _alerts(result: str) -> list[Labels]:
    found = re.findall(r'\{__name__="ALERTS", (.*?)\} 1E\+00', result)
    read = [re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', labels) for labels in found]
    return [
        {name: json.loads(value) for name, value in labels if name != "alertstate"}
        for labels in read
    ]
