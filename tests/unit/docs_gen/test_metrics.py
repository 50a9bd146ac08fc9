"""A metric is created in only one place, and has a description."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client import Metric

from tests.docs_gen.metrics_page import METRICS_MODULES, collectors_of
from tests.tables import for_each

ROOT = Path(__file__).parents[3]
PACKAGES = ["gpuledger", "agent", "enricher", "sinks", "reports", "simulator", "cli"]
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
COLLECTORS = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
METRICS = [
    metric
    for module in METRICS_MODULES.values()
    for collector in collectors_of(module)
    for metric in collector.describe()
]
PREFIXES: dict[str, str | tuple[str, ...]] = {
    "agent": "gpuledger_agent_",
    "podwatch": "gpuledger_podwatch_",
    # The law that all books must satisfy belongs to the project; the join checks it.
    "join": ("gpuledger_join_", "gpuledger_conservation_"),
    "sinks": "gpuledger_sink_",
    "reports": "gpuledger_reports_",
    "join and sinks": "gpuledger_",
    "every consumer of a topic": "gpuledger_",
    "every component": "gpuledger_",
}


def makes_metrics(path: Path) -> bool:
    """Return whether a file imports one of the client's collectors, or the whole client."""
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


def test_metrics_are_created_only_in_the_metrics_modules_and_the_dead_letter_queue() -> None:
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
    assert {str(Path(m.__file__ or "").relative_to(ROOT)) for m in METRICS_MODULES.values()} == made


@pytest.mark.parametrize("part", METRICS_MODULES)
def test_the_name_of_a_metric_starts_with_its_component_and_its_help_is_a_sentence(
    part: str,
) -> None:
    described = [one for each in collectors_of(METRICS_MODULES[part]) for one in each.describe()]

    assert described
    for metric in described:
        assert metric.name.startswith(PREFIXES[part])
        assert metric.documentation.endswith("."), metric.name


@for_each("metric", METRICS)
def test_a_metric_of_time_has_its_unit_in_its_name(metric: Metric) -> None:
    is_time = re.search(r"\bin (whole )?seconds\b", metric.documentation)

    assert bool(is_time) == metric.name.endswith("_seconds")
