"""Alerts of states fire until an end is reported or proven; those of events for their hold."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import AttributedIncident, Severity
from gpuledger_sinks.alerts.active_alerts import Now, record_taken
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from tests.unit.sinks.alerts.alerting import incident
from tests.unit.sinks.builders import SECOND_NS, START_NS, event, reading

HOLD_NS = 300 * SECOND_NS
DAY_SECONDS = 86_400
AM = "http://am"


def at(second: float) -> Now:
    time_ns = START_NS + round(second * SECOND_NS)
    return Now(time_ns=time_ns, monotonic_ns=time_ns)


def reported(kind: str, second: float = 0, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    one = incident(at(second).time_ns)
    values: dict[str, Any] = {"kind": kind, "xid": None, **changes}
    return replace(one, incident=replace(one.incident, **values))


NAMED = (
    "row_remap_failed",
    "sram_threshold_exceeded",
    "fabric_bandwidth_degraded",
    "fabric_route_recovery",
    "fabric_route_unhealthy",
    "fabric_access_timeout",
    "pcie_link_degraded",
    "hardware_thermal_slowdown",
    "power_brake_slowdown",
)
"""States whose end has the same fields as their start."""


def ended(*kinds: str, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    return reported("state_ended", ended_kinds=list(kinds), severity=Severity.INFO, **changes)


REPORTS: dict[str, AttributedIncident] = {
    "lost": reported("gpu_lost"),
    "unavailable": reported("gpu_unavailable"),
    "remap": reported("row_remap_pending"),
    "retirement": reported("page_retirement_pending"),
    "xid 63": reported("xid", xid=63, category="maintenance"),
    "action": reported("recovery_action", action="RESET_GPU"),
    "xid 154": reported("xid", xid=154, category="context", action="RESET_GPU"),
    **{kind: reported(kind) for kind in NAMED},
}
NO_ACTION: dict[str, Any] = {"action": "NONE", "severity": Severity.INFO}


class Watched:
    """The alerts of a partition, each accepted by an Alertmanager."""

    def __init__(self) -> None:
        self.of = PartitionAlerts()

    def add(self, attributed: AttributedIncident, second: float = 0) -> None:
        self.of.add_incident(attributed, hold_ns=HOLD_NS, now=at(second))
        self.take(second)

    def take(self, second: float) -> None:
        record_taken(self.of.alerts, AM, now=at(second))

    def tick(self, second: int, *, boot: str = "boot-1", unresponsive: bool | None = None) -> None:
        change: dict[str, Any] = {"unresponsive": True} if unresponsive else {}
        ticked = event(second, of=reading(**change), entries=[], boot_id=boot)
        self.of.observe(ticked, now=at(second))

    def firing(self, second: float) -> list[str]:
        self.of.forget(now=at(second))
        return [
            dict(alert.labels)["kind"]
            for alert in self.of.alerts
            if self.of.alerts.fires(alert.labels, now=at(second))
        ]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize("report", REPORTS)
def test_a_state_outlives_the_hold(watched: Watched, report: str) -> None:
    watched.add(REPORTS[report])
    assert len(watched.firing(DAY_SECONDS - 1)) == 1


@pytest.mark.parametrize(
    ("report", "end"),
    [
        ("lost", reported("gpu_recovered")),
        ("unavailable", reported("gpu_recovered")),
        ("remap", reported("row_remap_done")),
        ("retirement", reported("row_remap_done")),
        ("xid 63", reported("row_remap_done")),
        ("action", reported("recovery_action", **NO_ACTION)),
        ("action", reported("xid", xid=154, category="context", **NO_ACTION)),
        ("xid 154", reported("recovery_action", **NO_ACTION)),
        ("remap", ended("row_remap_pending", present_at_start=True)),
        ("retirement", ended("page_retirement_pending")),
        ("action", ended("sram_threshold_exceeded", "recovery_action", present_at_start=True)),
        *((kind, ended(kind)) for kind in NAMED),
        *((kind, ended(*NAMED, "of_a_later_version")) for kind in NAMED),
    ],
)
def test_a_state_ends_when_its_end_is_reported(
    watched: Watched, report: str, end: AttributedIncident
) -> None:
    watched.add(REPORTS[report])
    watched.add(end, 1000)
    assert watched.firing(1000) == []


@pytest.mark.parametrize(
    ("report", "end"),
    [
        ("xid 63", reported("row_remap_done")),
        ("xid 154", reported("recovery_action", **NO_ACTION)),
    ],
)
@pytest.mark.parametrize("codes", [[79], [79, 79], [79, 63], [13, 79]])
def test_a_state_ends_when_its_end_is_reported_whatever_bursts_came_before(
    watched: Watched, report: str, end: AttributedIncident, codes: list[int]
) -> None:
    watched.add(REPORTS[report])
    for number, code in enumerate(codes, start=1):
        watched.add(reported("xid", 600 * number, xid=code, category="node"), 600 * number)
    assert len(watched.firing(600 * len(codes) + 1)) >= 2
    if 63 in codes:
        watched.add(reported("row_remap_done"), 4000)
    watched.add(end, 4000)
    assert watched.firing(4001) == []


@pytest.mark.parametrize("kind", NAMED)
def test_a_state_that_a_restarted_agent_repeats_is_the_active_alert(
    watched: Watched, kind: str
) -> None:
    watched.add(reported(kind))
    (before,) = (alert.labels for alert in watched.of.alerts)
    watched.add(reported(kind, 5000, present_at_start=True), 5000)
    assert [alert.labels for alert in watched.of.alerts] == [before]
    watched.add(ended(kind), 6000)
    assert watched.firing(6000) == []


def test_the_end_of_an_inactive_state_creates_no_alert(watched: Watched) -> None:
    watched.add(REPORTS["sram_threshold_exceeded"])
    watched.add(ended("pcie_link_degraded", present_at_start=True), 1000)
    watched.add(ended("of_a_later_version"), 1000)
    assert watched.firing(1001) == ["sram_threshold_exceeded"]


@pytest.mark.parametrize("end", ["gpu_recovered", "row_remap_done", "driver_unbound", "xid"])
def test_the_end_of_one_state_ends_no_other(watched: Watched, end: str) -> None:
    watched.add(REPORTS["action"])
    watched.add(reported(end), 1000)
    assert "recovery_action" in watched.firing(1001)


@pytest.mark.parametrize(
    ("report", "boot", "fires"),
    [
        ("lost", "boot-1", False),
        ("lost", "boot-2", False),
        ("unavailable", "boot-1", True),
        ("unavailable", "boot-2", False),
        ("remap", "boot-1", True),
        ("remap", "boot-2", False),
        ("action", "boot-1", True),
        ("action", "boot-2", False),
    ],
)
def test_ticks_in_which_the_gpu_answers_end_the_states_that_they_disprove(
    watched: Watched, report: str, boot: str, *, fires: bool
) -> None:
    watched.add(REPORTS[report])
    watched.tick(1000, boot=boot)
    assert len(watched.firing(1000)) == 1  # one answer is not a proof
    watched.tick(1001, boot=boot)
    assert bool(watched.firing(1001)) is fires


def test_a_gpu_remains_lost_if_it_is_unresponsive_or_answered_only_before_its_loss(
    watched: Watched,
) -> None:
    watched.add(reported("gpu_lost", 10))
    for second in range(5, 10):
        watched.tick(second)
    for second in range(1000, 1010):
        watched.tick(second, unresponsive=second % 2 == 0)
    assert watched.firing(1010) == ["gpu_lost"]


def test_an_end_within_the_hold_ends_the_alert_with_the_hold(watched: Watched) -> None:
    """Otherwise Alertmanager would not notify anyone of a GPU that was lost briefly."""
    watched.add(REPORTS["lost"])
    watched.add(reported("gpu_recovered", 10), 10)
    assert watched.firing(299) == ["gpu_lost"]
    assert watched.firing(301) == []


def test_a_state_of_a_gpu_that_no_tick_names_is_no_longer_sent_after_a_day(
    watched: Watched,
) -> None:
    watched.add(REPORTS["lost"])
    watched.tick(DAY_SECONDS // 2, unresponsive=True)
    assert watched.firing(DAY_SECONDS + 1) == ["gpu_lost"]
    assert watched.firing(2 * DAY_SECONDS) == []


@pytest.mark.parametrize(
    ("unresponsive", "second_tick", "fires"), [(True, True, True), (False, False, False)]
)
def test_a_restored_state_is_sent_once_a_tick_confirms_it(
    watched: Watched, *, unresponsive: bool, second_tick: bool, fires: bool
) -> None:
    assert watched.of.restore_incident(REPORTS["lost"], now=at(1000))
    assert watched.firing(1000) == []
    watched.tick(1000, unresponsive=unresponsive)
    watched.tick(1001, unresponsive=second_tick)
    assert bool(watched.firing(1001)) is fires


def test_a_restored_state_is_sent_after_a_while_if_no_tick_mentions_it(
    watched: Watched,
) -> None:
    watched.of.restore_incident(REPORTS["lost"], now=at(1000))
    assert watched.firing(1119) == []
    assert watched.firing(1121) == ["gpu_lost"]


def test_ended_states_and_events_are_not_restored(watched: Watched) -> None:
    for one in (
        REPORTS["lost"],
        reported("gpu_recovered"),
        reported("xid", xid=79),
        reported("poison_fatal"),
    ):
        watched.of.restore_incident(one, now=at(1000))
    watched.firing(1200)
    watched.tick(1201, unresponsive=True)
    assert watched.firing(1202) == []


def test_a_restored_state_keeps_its_identity(watched: Watched) -> None:
    watched.add(REPORTS["lost"])
    (before,) = watched.of.alerts
    again = Watched()
    again.of.restore_incident(REPORTS["lost"], now=at(1000))
    again.tick(1000, unresponsive=True)
    (now,) = again.of.alerts
    assert (now.labels, now.starts_ns) == (before.labels, before.starts_ns)


def test_a_state_stamped_by_a_fast_clock_ends_with_the_next_boot(watched: Watched) -> None:
    ahead = reported("row_remap_pending", 36_000)
    watched.add(ahead)
    for second in range(1000, 1010):
        watched.tick(second, boot="boot-2")
    assert watched.firing(1010) == []


def test_a_state_continues_if_its_alert_returns_after_another_one(watched: Watched) -> None:
    watched.add(reported("xid", 0, xid=79, category="node"))
    watched.add(reported("xid", 1, xid=154, category="context", action="RESET_GPU"), 1)
    watched.add(reported("xid", 600, xid=62, category="node"), 600)
    watched.add(reported("xid", 1200, xid=79, category="node"), 1200)
    assert "xid" in watched.firing(DAY_SECONDS - 1)
    watched.add(reported("recovery_action", 5000, **NO_ACTION), DAY_SECONDS - 1)
    assert watched.firing(DAY_SECONDS + 1) == []


def test_ticks_from_before_a_loss_prove_nothing_if_the_clock_is_ahead(watched: Watched) -> None:
    watched.add(reported("gpu_lost", 300))
    for second in range(290, 300):
        watched.of.observe(event(second, of=reading(), entries=[]), now=at(second - 300))
    assert watched.firing(301) == ["gpu_lost"]
