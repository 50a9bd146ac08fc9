"""A metric is made in one place only, and says what it is."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import Metric

from gpuledger_cli.docs_gen.metrics_page import DEPLOYABLES, collectors_of
from tests.tables import for_each

ROOT = Path(__file__).parents[4]
PACKAGES = ["gpuledger", "agent", "enricher", "sinks", "reports", "simulator", "cli"]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
COLLECTORS = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
METRICS = [
    metric
    for module in DEPLOYABLES.values()
    for collector in collectors_of(module)
    for metric in collector.describe()
]
PREFIXES: dict[str, str | tuple[str, ...]] = {
    "agent": "gpuledger_agent_",
    "podwatch": "gpuledger_podwatch_",
    # The law that all books keep is the project's, and the join is where it is checked.
    "join": ("gpuledger_join_", "gpuledger_conservation_"),
    "sinks": "gpuledger_sink_",
    "reports": "gpuledger_reports_",
    "join and sinks": "gpuledger_",
    "every consumer of a topic": "gpuledger_",
    "every component": "gpuledger_",
}


def makes_metrics(path: Path) -> bool:
    """Return whether a file imports one of the client's collectors, or all of the client."""
    imports = [
        (node.module if isinstance(node, ast.ImportFrom) else None, name.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    return any(
        (module or name).split(".")[0] == "prometheus_client" and (not module or name in COLLECTORS)
        for module, name in imports
    )


def test_metrics_are_made_in_the_metrics_modules_and_the_dead_letter_queue_only() -> None:
    made = {str(path.relative_to(ROOT)) for path in SOURCES if makes_metrics(path)}

    assert made == {
        "agent/gpuledger_agent/metrics.py",
        "enricher/gpuledger_enricher/join/join_metrics.py",
        "enricher/gpuledger_enricher/podwatch/pod_metrics.py",
        "gpuledger/bus/gaps.py",
        "gpuledger/dead_letter_queue.py",
        "gpuledger/runtime/process_metrics.py",
        "reports/gpuledger_reports/api/metrics.py",
        "sinks/gpuledger_sinks/metrics.py",
    }
    assert {str(Path(m.__file__ or "").relative_to(ROOT)) for m in DEPLOYABLES.values()} == made


@pytest.mark.parametrize("part", DEPLOYABLES)
def test_a_metric_is_named_after_its_deployable_and_says_in_a_sentence_what_it_is(
    part: str,
) -> None:
    described = [one for each in collectors_of(DEPLOYABLES[part]) for one in each.describe()]

    assert described
    for metric in described:
        assert metric.name.startswith(PREFIXES[part])
        assert metric.documentation.endswith("."), metric.name


@for_each("metric", METRICS)
def test_a_metric_of_time_has_its_unit_in_its_name(metric: Metric) -> None:
    is_time = re.search(r"\bin (whole )?seconds\b", metric.documentation)

    assert bool(is_time) == metric.name.endswith("_seconds")
