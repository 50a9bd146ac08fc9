"""reference/metrics.md: the metrics that components have of themselves."""

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from prometheus_client.metrics import MetricWrapperBase

import gpuledger.bus.gaps
import gpuledger.dead_letter_queue
import gpuledger.runtime.process_metrics
import gpuledger_agent.metrics
import gpuledger_enricher.join.join_metrics
import gpuledger_enricher.podwatch.pod_metrics
import gpuledger_reports.api.metrics
import gpuledger_sinks.metrics
from tests.docs_gen.markdown import code, head, table

METRICS_MODULES: Final = {
    "agent": gpuledger_agent.metrics,
    "podwatch": gpuledger_enricher.podwatch.pod_metrics,
    "join": gpuledger_enricher.join.join_metrics,
    "sinks": gpuledger_sinks.metrics,
    "reports": gpuledger_reports.api.metrics,
    "join and sinks": gpuledger.dead_letter_queue,
    "every consumer of a topic": gpuledger.bus.gaps,
    "every component": gpuledger.runtime.process_metrics,
}
_HEAD: Final = head(
    "Metrics",
    audience="SRE",
    about="""\
Metrics that each component exposes on `/metrics` about its own work. Use this page to write queries
and alert rules. For GPU metrics, see [Series](series.md) and
[GPU metrics of the agent](agent-metrics.md).""",
)
_OWN: Final = """
Histograms are exposed as `…_bucket`, `…_sum` and `…_count`. Each component also exposes the
metrics `process_*` and `python_*` of its Prometheus client. The response is compressed if the
client accepts gzip, as Prometheus does.
"""
_COLUMNS: Final = ("metric", "type", "labels", "meaning")
_Row = tuple[str, str, str, str]


def metrics_page() -> str:
    """Return the page, in Markdown."""
    own = (
        line
        for name, module in METRICS_MODULES.items()
        for line in ("", f"## {name.capitalize()}", "", *table(_COLUMNS, _own_rows(module)))
    )
    lines = (
        *_HEAD.splitlines(),
        *own,
        *_OWN.splitlines(),
    )
    return "\n".join((*lines, ""))


def collectors_of(module: ModuleType) -> list[MetricWrapperBase]:
    """Return the metrics that a module defines, in order."""
    return [value for value in vars(module).values() if isinstance(value, MetricWrapperBase)]


def label_names_of(collector: MetricWrapperBase) -> tuple[str, ...]:
    """Return the names of a metric's labels, in order."""
    return tuple(collector._labelnames)  # noqa: SLF001  # the client has no public access to them


def _own_rows(module: ModuleType) -> Iterator[_Row]:
    for collector in collectors_of(module):
        labels = label_names_of(collector)
        for family in collector.describe():
            # The client's name of a counter lacks the suffix of its samples.
            suffix = "_total" if family.type == "counter" else ""
            # The values of a label become a sentence of their own.
            meaning = re.sub(r", by (\w+): ", r". By \1: ", family.documentation)
            yield code(f"{family.name}{suffix}"), family.type, code(*labels), meaning
