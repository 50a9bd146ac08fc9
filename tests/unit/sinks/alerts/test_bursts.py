"""XIDs of one fault are one alert, named by their root; its labels do not change."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import AttributedIncident, PodDescription, PodState, Severity
from gpuledger.xids import find_xid
from gpuledger_sinks.alerts.active_alerts import Now, record_taken, rfc3339
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from tests.unit.sinks.alerts.alerting import incident
from tests.unit.sinks.builders import GPU, SECOND_NS, START_NS, event, pod

HOLD_NS = 300 * SECOND_NS
OTHER_POD = pod(uid="uid-other", name="other-0")
UNNAMED = PodDescription(uid="uid-train", state=PodState.PENDING)


def at(second: float) -> Now:
    time_ns = START_NS + round(second * SECOND_NS)
    return Now(time_ns=time_ns, monotonic_ns=time_ns)


def xid(code: int, second: float = 0, *pods: PodDescription, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    one, known = incident(at(second).time_ns), find_xid(code)
    values = {"xid": code, "category": known.category, "severity": known.severity} | changes
    return AttributedIncident(incident=replace(one.incident, **values), pods=list(pods))


class Watched:
    """The alerts of a partition, and those of them that fire."""

    def __init__(self) -> None:
        self.of = PartitionAlerts()

    def add(self, *incidents: AttributedIncident) -> None:
        for one in incidents:
            now = at((one.incident.time_ns - START_NS) / SECOND_NS)
            self.of.add_incident(one, hold_ns=HOLD_NS, now=now)
            record_taken(self.of.alerts, "http://am", now=now)

    def firing(self, second: float) -> dict[str, str]:
        """Return the other XIDs of each firing alert, by its own XID."""
        self.of.forget(now=at(second))
        return {
            dict(alert.labels)["xid"]: alert.annotations.get("other_xids", "")
            for alert in self.of.alerts
            if self.of.alerts.fires(alert.labels, now=at(second))
        }


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("codes", "firing"),
    [
        ([62, 45, 154], {"62": "45, 154"}),
        ([45, 62, 154], {"62": "45, 154"}),
        ([154, 45, 62, 62], {"62": "154, 45"}),
        ([45, 45, 45, 62], {"62": "45 (3 times)"}),
        ([48, 171, 63], {"48": "171, 63"}),
        ([63, 64], {"64": "63"}),
        ([62, 79], {"79": "62"}),
        ([79, 62], {"79": "62"}),
        ([45, 13], {"13": "45"}),
        ([62, 999], {"62": "999"}),
        ([45], {"45": ""}),
    ],
)
def test_xids_of_one_fault_are_one_alert_of_the_worst_of_them(
    watched: Watched, codes: list[int], firing: dict[str, str]
) -> None:
    watched.add(*(xid(code, second, pod()) for second, code in enumerate(codes)))
    assert watched.firing(len(codes)) == firing


def test_a_worse_xid_is_a_new_alert_and_ends_that_of_the_lesser_one(watched: Watched) -> None:
    watched.add(xid(63), xid(79, 10))
    lesser, worse = watched.of.alerts
    posted = lesser.as_json(now=at(20), resend_ns=SECOND_NS)
    lesser.taken_ns.clear()
    lesser.hold_until_taken(at(20))
    assert lesser.as_json(now=at(20), resend_ns=SECOND_NS) == posted
    assert posted["endsAt"] == rfc3339(at(10).time_ns)
    assert (dict(worse.labels)["xid"], worse.annotations["other_xids"]) == ("79", "63")


def test_a_critical_xid_is_the_root_whatever_its_class(watched: Watched) -> None:
    watched.add(xid(13), xid(154, 1, severity=Severity.CRITICAL, action="RESET_GPU"))
    assert watched.firing(2) == {"154": "13"}


@pytest.mark.parametrize(
    ("pause_seconds", "firing"), [(180, {"62": "46"}), (181, {"62": "", "46": ""})]
)
def test_a_burst_ends_after_three_minutes_without_an_xid(
    watched: Watched, pause_seconds: int, firing: dict[str, str]
) -> None:
    watched.add(xid(62), xid(46, pause_seconds))
    assert watched.firing(pause_seconds + 1) == firing


def test_each_gpu_has_its_own_bursts(watched: Watched) -> None:
    watched.add(xid(62), xid(46, gpu_uuid=f"{GPU}-other"))
    assert watched.firing(1) == {"62": "", "46": ""}


def test_incidents_that_concern_two_pods_owners_are_two_alerts(watched: Watched) -> None:
    watched.add(xid(13, 0, pod()), xid(31, 1, OTHER_POD), xid(62, 2, pod()))
    assert watched.firing(3) == {"13": "", "31": "", "62": ""}


def test_the_drivers_recovery_action_outranks_the_catalogue(watched: Watched) -> None:
    watched.add(xid(62, action="RESET_GPU"), xid(154, 1, action="RESTART_BM"))
    (alert,) = watched.of.alerts
    assert alert.annotations["action"] == "RESTART_BM"


@pytest.mark.parametrize("kind", ["xid", "ecc_uncorrected", "gpu_lost"])
def test_an_alert_keeps_its_identity_if_the_pods_name_arrives_later(
    watched: Watched, kind: str
) -> None:
    watched.add(xid(79, 0, UNNAMED, kind=kind), xid(79, 10, pod(), kind=kind))
    (alert,) = watched.of.alerts
    assert "pod" not in dict(alert.labels)
    assert alert.annotations["pods"] == "research/train-0"


def test_a_name_that_arrives_with_a_tick_appears_in_the_texts(watched: Watched) -> None:
    watched.add(xid(79, 0, UNNAMED))
    (before,) = [alert.labels for alert in watched.of.alerts]
    watched.of.observe(event(1, pods=[pod()]), now=at(1))
    (alert,) = watched.of.alerts
    assert (alert.labels, alert.annotations["pods"]) == (before, "research/train-0")


def test_a_pod_known_by_its_uid_and_by_its_name_is_named_once(watched: Watched) -> None:
    by_name = PodDescription(state=PodState.NAMED, namespace="research", name="train-0")
    watched.add(xid(79, 0, UNNAMED, by_name))
    watched.of.observe(event(1, pods=[pod()]), now=at(1))
    (alert,) = watched.of.alerts
    assert alert.annotations["pods"] == "research/train-0"
    assert "(pod research/train-0)" in alert.annotations["summary"]


def test_an_equal_event_of_another_pod_is_another_alert(watched: Watched) -> None:
    event_of = {"kind": "ecc_uncorrected", "xid": None}
    watched.add(xid(79, 0, pod(), **event_of), xid(79, 1, OTHER_POD, **event_of))
    assert {dict(alert.labels)["pod"] for alert in watched.of.alerts} == {"train-0", "other-0"}


def test_a_burst_names_a_bounded_number_of_xids(watched: Watched) -> None:
    watched.add(*(xid(1000 + number, number / 10) for number in range(500)))
    (others,) = watched.firing(60).values()
    assert others.count(",") == 30
