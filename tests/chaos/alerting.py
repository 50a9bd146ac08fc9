"""Which of the shipped rules fire on the series of a run, by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from tests.chaos.scrapes import SCRAPE_SECONDS

if TYPE_CHECKING:
    from tests.chaos.scrapes import Scrapes

RULES: Final = Path(__file__).parents[2] / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml"
EXTENDED_SECONDS: Final = 3600
"""Longer than any rule waits."""
_FIRED: Final = (
    'count by (alertname, instance, check) (count_over_time(ALERTS{alertstate="firing"}[1d]))'
)
_FOUND: Final = re.compile(r"\{([^{}]*alertname=[^{}]*)\} [0-9]")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


def alert_names() -> frozenset[str]:
    """Return the names of all alerts in the rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return frozenset(rule["alert"] for group in groups for rule in group["rules"])


def find_fired(
    scrapes: Scrapes,
    *,
    first: int,
    promtool: Path,
    folder: Path,
    extended_seconds: int = EXTENDED_SECONDS,
) -> dict[str, list[str]]:
    """Return the alerts that fire during the first scrapes or the extension of their end.

    The values show the components that each alert names.
    """
    series = scrapes.series(first=first, extended=extended_seconds // SCRAPE_SECONDS)
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": f"{SCRAPE_SECONDS}s",
                "start_timestamp": scrapes.started_seconds,
                "input_series": [
                    {"series": name, "values": values} for name, values in sorted(series.items())
                ],
                "promql_expr_test": [
                    {
                        "expr": _FIRED,
                        "eval_time": f"{first * SCRAPE_SECONDS + extended_seconds}s",
                        "exp_samples": [{"labels": "{}", "value": -1}],
                    }
                ],
            }
        ],
    }
    file = folder / f"alerts-{first}.json"
    file.write_text(json.dumps(test))
    command: list[str | Path] = [promtool, "test", "rules", file]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)
    _, separator, got = judged.stderr.partition("got:")
    if not separator:
        raise RuntimeError(judged.stderr)
    fired: dict[str, list[str]] = {}
    for found in _FOUND.finditer(got):
        labels = dict(_LABEL.findall(found[1]))
        where = [labels[name] for name in ("instance", "check") if name in labels]
        fired.setdefault(labels["alertname"], []).append(" ".join(where))
    return fired
