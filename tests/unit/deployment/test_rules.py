"""The shipped alerting rules: their series, their severities and their runbooks."""

import re
import subprocess
import sys
from functools import cache
from typing import Any, Final

from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gpuledger.ledger.families import FAMILIES
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.runtime import CheckSeverity
from gpuledger_sinks.registry import KINDS
from tests.docs_gen.metrics_page import METRICS_MODULES, collectors_of
from tests.docs_gen.series_page import rules_by_group
from tests.tables import for_each
from tests.unit.deployment import watching
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.watching import Row, Selector

ROWS: Final = watching.rows()
GROUPS: Final = rules_by_group()
RULES: Final = [rule for rules in GROUPS.values() for rule in rules]
RUNBOOKS: Final = ROOT / "docs" / "reference" / "alerts.md"
OF_WHICH: Final = "{{ $labels.instance }}: "
OF_WHICH_CHECK: Final = "{{ $labels.instance }}, check {{ $labels.check }}: "
COME_LATER: Final = {
    "gpuledger_agent_breaker_open",
    "gpuledger_agent_allocations_unresolved",
    "gpuledger_check_ok",
    "gpuledger_sink_lag_seconds",
    "gpuledger_open_transaction_seconds",
    "gpuledger_certificate_not_after_timestamp_seconds",
    "gpuledger_agent_spool_usable",
    "gpuledger_join_node_unresponsive_since_timestamp_seconds",
    "gpuledger_agent_readings_dropped_total",
    "gpuledger_agent_values_cut_total",
}
"""Metrics without a series until their first value; the page documents this."""
COUNTED: Final = sorted(
    {
        selector
        for row in ROWS
        for selector in watching.selectors(row.expression)
        if selector.metric.endswith("_total") and selector.metric not in COME_LATER
    }
)
DOCUMENTED: Final = watching.MONITORING.partition("These metrics appear later:")[2].partition(
    "\n#"
)[0]
_TOPICS: Final = "from gpuledger.topics import Topics"
_JOIN_METRICS: Final = "import gpuledger_enricher.join.join_metrics as m"
FRESH: Final = (
    *(
        f"import gpuledger_agent.metrics as m; {_TOPICS}; m.count_published_from_zero(Topics())",
        "import gpuledger_enricher.podwatch.pod_metrics as m; m.count_cluster_from_zero('default')",
        "import gpuledger_enricher.podwatch.events",
        f"{_JOIN_METRICS}; {_TOPICS}; m.count_topics_from_zero(Topics())",
    ),
    "import gpuledger.bus.gaps",
    *(
        f"import gpuledger_sinks.metrics as m, gpuledger_sinks.registry as r; {_TOPICS};"
        f" m.count_sink_from_zero(r.KINDS[{kind!r}], Topics())"
        for kind in KINDS
    ),
    "import gpuledger_sinks.metrics as m; m.count_scaler_from_zero()",
    "import gpuledger_reports.api.metrics",
)
"""Statements that each component's processes run before their work begins."""


@cache
def fresh_samples() -> list[Sample]:
    """Return the metrics of new processes, one of each component."""
    show = "import prometheus_client; print(prometheus_client.generate_latest().decode())"
    pages = [
        subprocess.run(
            [sys.executable, "-c", f"{start}\n{show}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for start in FRESH
    ]
    return [
        sample
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]


def selected(selector: Selector) -> list[float]:
    return [
        sample.value
        for sample in fresh_samples()
        if sample.name == selector.metric and selector.selects(sample.labels)
    ]


def test_the_rules_file_contains_rules() -> None:
    assert len(ROWS) > 20


@for_each("selector", COUNTED)
def test_every_counter_in_a_rule_starts_at_zero_with_the_process(selector: Selector) -> None:
    assert set(selected(selector)) == {0}


@for_each("row", ROWS)
def test_each_series_in_a_rule_exists_at_the_start_or_is_documented_to_appear_later(
    row: Row,
) -> None:
    found = watching.selectors(row.expression)

    assert found
    for selector in found:
        comes_later = selector.metric in COME_LATER
        assert comes_later or selected(selector), selector
        assert not comes_later or f"`{selector.metric}`" in DOCUMENTED


def test_each_counter_starts_at_zero_or_is_documented_not_to() -> None:
    counters = {
        family.name + "_total"
        for module in METRICS_MODULES.values()
        for collector in collectors_of(module)
        if isinstance(collector, Counter)
        for family in collector.describe()
    }
    shown = {sample.name for sample in fresh_samples()}

    assert [name for name in sorted(counters - shown) if f"`{name}`" not in DOCUMENTED] == []


def test_an_incident_of_each_kind_is_counted_from_zero_by_agent_and_join() -> None:
    """The join reads the kinds of other versions of the agent as well."""
    kinds = {
        "gpuledger_agent_incidents_total": set(INCIDENT_KINDS),
        "gpuledger_join_incidents_total": {*INCIDENT_KINDS, "other"},
    }
    for metric, expected in kinds.items():
        shown = {one.labels["kind"] for one in fresh_samples() if one.name == metric}
        assert shown == expected


def test_each_sink_documents_why_it_drops_events() -> None:
    assert all(kind.drop_reasons for kind in KINDS.values())


@for_each("row", ROWS)
def test_a_rule_that_selects_any_check_fires_with_the_checks_own_severity(row: Row) -> None:
    """Its label replaces the metric's, which shows whether the component can do its work."""
    for selector in watching.selectors(row.expression):
        wanted = {(label, operator): value for label, operator, value in selector.matchers}
        if selector.metric == "gpuledger_check_ok" and ("check", "=~") not in wanted:
            assert wanted["severity", "="] == row.severity


def test_each_severity_of_a_check_has_a_rule() -> None:
    severities = {
        value
        for row in ROWS
        for selector in watching.selectors(row.expression)
        for label, _, value in selector.matchers
        if selector.metric == "gpuledger_check_ok" and label == "severity"
    }

    assert severities == {severity.value for severity in CheckSeverity}


@for_each("rule", RULES)
def test_a_rule_has_a_severity_two_sentences_and_a_section_of_the_page_as_its_runbook(
    rule: dict[str, Any],
) -> None:
    of_which = OF_WHICH_CHECK if "gpuledger_check_ok" in rule["expr"] else OF_WHICH
    # A sum has no instance.
    is_summed = re.search(r"\bby \(cluster|^\(absent\b", rule["expr"])

    assert rule["labels"].keys() == {"severity"}
    assert rule["annotations"].keys() == {"runbook_url", "summary", "description"}
    assert rule["annotations"]["summary"].startswith(of_which) != bool(is_summed)
    base, _, anchor = rule["annotations"]["runbook_url"].partition("/docs/reference/alerts.md#")
    headings = re.findall(r"^### (\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert base == "https://gpuledger.example"
    assert anchor == rule["alert"].lower()
    assert anchor in map(str.lower, headings)


@for_each("rule", RULES)
def test_an_alert_has_the_labels_of_its_target_or_names_its_cluster_and_place(
    rule: dict[str, Any],
) -> None:
    """The shipped scrape configuration gives each target a cluster, a component and an instance.

    A sum over targets has only the labels that it keeps.
    """
    expression, summary = rule["expr"], rule["annotations"]["summary"]
    kept = re.search(r"\bby \((cluster[^)]*)\)", expression)
    if kept is None:
        assert "$labels.instance" in summary or "$labels.component" in summary
        return
    places = {"node", "component"} & set(kept[1].split(", "))

    assert "$labels.cluster" in summary
    assert all(f"$labels.{place}" in summary for place in places)
    assert places or re.search(r"podwatch|Kafka|series of pods", summary)


@for_each("rule", RULES)
def test_every_page_and_heading_that_a_rule_names_exists(rule: dict[str, Any]) -> None:
    texts = "\n".join(rule["annotations"].values())
    for page, anchor in re.findall(r"\((docs/[\w/-]+\.md)(?:#([\w-]+))?\)", texts):
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not anchor or anchor in anchors


def test_a_rule_on_gpus_selects_series_that_remote_write_sends() -> None:
    sent = {metric.name for family in FAMILIES for metric in family.metrics}
    for rule in GROUPS["gpuledger-gpus"]:
        for selector in watching.selectors(rule["expr"]):
            assert selector.metric in sent


@for_each("row", ROWS)
def test_the_window_of_a_rule_that_waits_is_shorter_than_its_wait(row: Row) -> None:
    """Otherwise a single event stays in the window longer than the wait, and fires the alert."""
    windows = [_minutes(window) for window in re.findall(r"\[(\d+[mh])\]", row.expression)]

    assert all(window < _minutes(row.lasts) for window in windows if row.lasts)


def _minutes(duration: str) -> int:
    return int(duration[:-1]) * {"m": 1, "h": 60}[duration[-1]]
