"""Which incidents of a partition become alerts, and what Alertmanager receives."""

from datetime import datetime
from typing import Any

import pytest

from gpuledger.records import AttributedIncident, Incident, PodDescription, PodState, Severity
from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now, record_taken, rfc3339
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from gpuledger_sinks.alerts.send_order import SendOrder
from gpuledger_sinks.timelines import TickOrder
from tests.unit.sinks.builders import GPU, NODE, SECOND_NS, START_NS, event, pod

RESEND_NS = 60 * SECOND_NS
AM = "http://am"


def at(number: float) -> int:
    return START_NS + round(number * SECOND_NS)


def now_at(number: float) -> Now:
    return Now(time_ns=at(number), monotonic_ns=at(number))


def reported(of: PartitionAlerts, *, now: float) -> list[ActiveAlert]:
    due = SendOrder(AM, resend_ns=RESEND_NS).next(of.alerts, now=now_at(now))
    record_taken(due, AM, now=now_at(now))
    return due


def incident(*, time_ns: int = START_NS, pods: Any = (), **changes: Any) -> AttributedIncident:  # noqa: ANN401  # a record's fields
    values: dict[str, Any] = {
        "cluster": "default",
        "node": NODE,
        "boot_id": "boot-1",
        "gpu_uuid": GPU,
        "gpu_index": 3,
        "time_ns": time_ns,
        "kind": "xid",
        "source": "nvml",
        "severity": Severity.CRITICAL,
        "xid": 79,
        "message": "GPU has fallen off the bus",
        "processes": [],
    }
    return AttributedIncident(incident=Incident(**(values | changes)), pods=list(pods))


def held(*incidents: AttributedIncident, now: float = 0) -> list[dict[str, Any]]:
    watched = PartitionAlerts()
    for one in incidents:
        watched.add_incident(one, hold_ns=300 * SECOND_NS, now=now_at(now))
    return [one.as_json(now=now_at(now), resend_ns=RESEND_NS) for one in reported(watched, now=now)]


def test_an_incident_is_an_alert_with_its_xid_and_its_first_known_pod() -> None:
    pods: list[PodDescription] = [
        pod(state=PodState.PENDING, name=None, namespace=None),
        pod(),
        pod(name="other"),
    ]

    (sent,) = held(incident(pods=pods))

    assert sent["labels"] == {
        "alertname": "GpuIncident",
        "severity": "critical",
        "cluster": "default",
        "node": NODE,
        "gpu_uuid": GPU,
        "gpu_index": "3",
        "kind": "xid",
        "xid": "79",
        "namespace": "research",
        "pod": "train-0",
        "owner_kind": "StatefulSet",
        "owner_name": "train",
    }
    assert sent["annotations"] == {
        "summary": (
            "GPU 3 on node node-a (pods uid-train, research/train-0, research/other): "
            "XID 79, GPU has fallen off the bus"
        ),
        "description": "GPU has fallen off the bus",
        "pods": "uid-train, research/train-0, research/other",
    }


def test_labels_without_a_value_are_omitted() -> None:
    (sent,) = held(incident(kind="gpu_lost", xid=None, gpu_index=None, message="It is lost"))

    assert sent["labels"].keys() == {"alertname", "severity", "cluster", "node", "gpu_uuid", "kind"}
    assert sent["annotations"]["summary"] == f"{GPU} on node node-a: gpu_lost, It is lost"


@pytest.mark.parametrize(("now", "ends"), [(0, 300), (200, 500)])
def test_an_incidents_alert_fires_for_its_hold_from_its_first_possible_sending(
    now: float, ends: float
) -> None:
    (sent,) = held(incident(), now=now)

    assert sent["startsAt"] == rfc3339(at(0))
    assert sent["endsAt"] == rfc3339(at(ends))


@pytest.mark.parametrize("ahead_seconds", [240, 3600, 365 * 86_400])
def test_an_incident_from_the_future_fires_for_its_hold_and_no_longer(ahead_seconds: int) -> None:
    watched = PartitionAlerts()
    taken = incident(time_ns=at(ahead_seconds))
    watched.add_incident(taken, hold_ns=300 * SECOND_NS, now=now_at(0))
    (alert,) = watched.alerts
    sent = alert.as_json(now=now_at(0), resend_ns=RESEND_NS)
    assert (sent["startsAt"], sent["endsAt"]) == (rfc3339(at(0)), rfc3339(at(300)))
    watched.forget(now=now_at(600))
    assert list(watched.alerts) == []


@pytest.mark.parametrize("back_seconds", [0, 60, 3600])
def test_an_incident_does_not_age_if_a_clock_is_set_back(back_seconds: int) -> None:
    watched = PartitionAlerts()
    for number in range(6):
        shown_ns = at(number) - (back_seconds * SECOND_NS if number >= 3 else 0)
        made = event(number, time_ns=shown_ns)
        watched.observe(made, now=now_at(number))
    taken = incident(time_ns=at(5 - back_seconds))
    assert watched.age_ns(taken, now=now_at(7)) == 2 * SECOND_NS


def test_an_incident_does_not_age_by_the_lag_of_a_clock_after_a_reboot() -> None:
    """Except for the time since the last tick of the previous boot."""
    watched, back_seconds = PartitionAlerts(), 3600
    watched.observe(event(5), now=now_at(5))
    booted = event(boot_id="boot-2", seq=20_000, time_ns=at(70 - back_seconds))
    assert watched.observe(booted, now=now_at(70)) is TickOrder.CURRENT

    taken = incident(boot_id="boot-2", time_ns=at(70 - back_seconds))
    assert watched.age_ns(taken, now=now_at(72)) == (2 + 70 - 20 - 5) * SECOND_NS


def lost(watched: PartitionAlerts, *, now: float, hold_seconds: int = 0) -> None:
    taken = incident(kind="gpu_lost", xid=None)
    watched.add_incident(taken, hold_ns=hold_seconds * SECOND_NS, now=now_at(now))


def test_a_firing_alert_is_resent_regularly_and_its_end_for_five_minutes() -> None:
    watched = PartitionAlerts()
    lost(watched, now=0)

    assert [len(reported(watched, now=now)) for now in (0, 30, 60, 119, 120)] == [1, 0, 1, 0, 1]
    for number in (129, 130):
        watched.observe(event(number), now=now_at(number))
    assert [len(reported(watched, now=now)) for now in (130, 131, 190)] == [1, 0, 1]
    watched.forget(now=now_at(429))
    assert len(list(watched.alerts)) == 1
    watched.forget(now=now_at(430))
    assert len(list(watched.alerts)) == 0


def test_the_end_of_an_alert_is_sent_whatever_its_age_by_the_nodes_clock() -> None:
    watched = PartitionAlerts()
    lost(watched, now=7200)
    reported(watched, now=7200)
    for number in (1, 2):
        watched.observe(event(number), now=now_at(7201))
    watched.forget(now=now_at(7201))
    (ended,) = reported(watched, now=7201)
    assert ended.ends_ns == at(2)


def test_this_machines_wall_clock_moves_no_interval() -> None:
    """Set back by an hour, it still sends active alerts every minute."""
    watched = PartitionAlerts()
    lost(watched, now=0)
    reported(watched, now=0)
    back = Now(time_ns=at(-3600), monotonic_ns=at(60))
    (again,) = SendOrder(AM, resend_ns=RESEND_NS).next(watched.alerts, now=back)
    sent = again.as_json(now=back, resend_ns=RESEND_NS)
    assert sent["startsAt"] <= sent["endsAt"]


def test_a_repeated_incident_prolongs_its_alert() -> None:
    (sent,) = held(incident(), incident(time_ns=at(100)), now=100)

    assert (sent["startsAt"], sent["endsAt"]) == (rfc3339(at(0)), rfc3339(at(400)))


def test_times_are_written_as_rfc_3339_in_utc() -> None:
    assert rfc3339(1_500_000_000_123_456_789) == "2017-07-14T02:40:00.123456+00:00"
    assert datetime.fromisoformat(rfc3339(0)).timestamp() == 0
