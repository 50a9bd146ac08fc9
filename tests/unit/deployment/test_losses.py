"""Each counter of a loss is read by an alert, and no inhibition hides one."""

import re
from typing import Final

import pytest
import yaml
from prometheus_client import Counter

from tests.docs_gen.metrics_page import METRICS_MODULES, collectors_of
from tests.unit.deployment import watching
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.test_rules import RULES

LOSS: Final = re.compile(
    r"_(dropped|lost|failed|rejected|missed|gaps?|overlapping|unbalanced|behind|unwritten|cut|over"
    r"|unreadable|undecodable|unrecognized|unidentified|unreported|overruns|evicted|forgotten"
    r"|ended_early|quarantined|unknown|dead_letters|timeouts)_"
)
"""Words for a loss in the names of counters."""
READ_OTHERWISE: Final = {
    "gpuledger_agent_call_groups_failed_total": "GpuledgerCallGroupBroken reads its breaker",
    "gpuledger_agent_fast_polls_failed_total": "the sample that follows covers the same time",
    "gpuledger_agent_job_files_rejected_total": "the check job_files fails",
    "gpuledger_agent_process_series_dropped_total": "a limit of /metrics; samples are complete",
    "gpuledger_agent_spool_files_quarantined_total": "its samples are dropped with `damaged`",
    "gpuledger_gaps_total": "the check gaps fails",
    "gpuledger_join_gaps_total": "GpuledgerGapsSeen reads their length",
    "gpuledger_join_samples_overlapping_seconds_total": "GpuledgerSamplesOverlapping counts them",
    "gpuledger_join_podwatch_timeouts_total": "GpuledgerPodsUnnamed reads the effect",
    "gpuledger_join_unknown_pods_total": "GpuledgerPodsUnnamed reads the share",
    "gpuledger_podwatch_objects_undecodable_total": "the check <kind>.objects fails",
    "gpuledger_podwatch_records_undecodable_total": "podwatch publishes the objects again",
    "gpuledger_podwatch_tombstones_evicted_total": "the objects were deleted and stay in the store",
    "gpuledger_records_missed_total": "the check gaps fails",
    "gpuledger_sink_counters_ended_early_total": "counters restart without a loss of usage",
    "gpuledger_sink_nodes_forgotten_total": "receivers end the series after five minutes",
}
"""Counters of a loss that no rule reads, with the reason."""
COUNTERS: Final = {
    family.name + "_total"
    for module in METRICS_MODULES.values()
    for collector in collectors_of(module)
    if isinstance(collector, Counter)
    for family in collector.describe()
}
LOSSES: Final = {name for name in COUNTERS if LOSS.search(name)}
READ: Final = {name for rule in RULES for name in re.findall(r"gpuledger_\w+", rule["expr"])}
INHIBITIONS: Final = yaml.safe_load(
    (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
)["inhibit_rules"]


def alerts_in(matchers: list[str]) -> set[str]:
    """Return the names of alerts that matchers select."""
    return {name for one in matchers for name in re.findall(r"\bGpu\w+", one)}


def test_each_counter_of_a_loss_is_read_by_a_rule_or_has_a_reason_not_to_be() -> None:
    assert len(LOSSES) > 20
    assert READ_OTHERWISE.keys() == LOSSES - READ


def test_the_checks_that_replace_a_counter_have_a_rule() -> None:
    assert "gpuledger_check_ok" in READ


@pytest.mark.parametrize("reason", ["duplicate", "repeated", "superseded"])
def test_events_that_a_sink_has_sent_before_are_no_loss(reason: str) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "GpuledgerSinkDroppingEvents")
    (selector,) = watching.selectors(rule["expr"])
    assert not selector.selects({"reason": reason})
    assert selector.selects({"reason": "rejected"})


def test_each_inhibition_names_shipped_alerts_and_applies_to_one_cluster() -> None:
    shipped = {rule["alert"] for rule in RULES}
    for one in INHIBITIONS:
        named = alerts_in(one["source_matchers"]) | alerts_in(one["target_matchers"])
        assert named <= shipped
        assert "cluster" in one["equal"]


def test_no_inhibition_hides_a_loss_of_usage() -> None:
    """Late samples and missing names are no loss: they arrive, or can be joined later."""
    later = {"gpuledger_join_samples_behind_watermark_total", "gpuledger_sink_retries_total"}
    lost = {
        rule["alert"]
        for rule in RULES
        if set(re.findall(r"gpuledger_\w+", rule["expr"])) & (LOSSES - later)
    } - {"GpuledgerGpuDeadlinesMissed"}  # its cause, GpuledgerGpusLost, reports the same loss
    assert "GpuledgerSpoolSamplesDropped" in lost
    for one in INHIBITIONS:
        assert not alerts_in(one["target_matchers"]) & lost
