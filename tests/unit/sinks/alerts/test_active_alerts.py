"""Active alerts: their memory, how long they are kept, and whose answers count."""

import tracemalloc
from collections.abc import Callable

import pytest

from gpuledger_sinks.alerts.active_alerts import (
    MAX_CHARACTERS,
    ActiveAlert,
    ActiveAlerts,
    Now,
    record_rejected,
    record_taken,
)
from gpuledger_sinks.alerts.send_order import SendOrder
from gpuledger_sinks.alerts.slots import MAX_HELD, MAX_HELD_OF_NODE, AlertSlots
from tests.unit.sinks.builders import SECOND_NS, START_NS

NOW = Now(time_ns=START_NS, monotonic_ns=START_NS)


def bytes_to_hold(alerts: ActiveAlerts, *, gpu: int) -> int:
    """Return the peak memory of adding an active alert."""
    tracemalloc.start()
    try:
        labels = {"alertname": "GpuIncident", "gpu_uuid": f"GPU-{gpu}"}
        alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_memory_of_an_alert_does_not_depend_on_the_number_of_active_alerts() -> None:
    alerts = ActiveAlerts()
    alone = bytes_to_hold(alerts, gpu=0)
    for gpu in range(2000):
        bytes_to_hold(alerts, gpu=gpu)

    assert bytes_to_hold(alerts, gpu=0) < 2 * alone


Answering = Callable[[ActiveAlert], object]
LATER = Now(time_ns=START_NS + 9000 * SECOND_NS, monotonic_ns=START_NS + 9000 * SECOND_NS)
SOON = Now(time_ns=START_NS + 900 * SECOND_NS, monotonic_ns=START_NS + 900 * SECOND_NS)
HOLD_NS = 300 * SECOND_NS


def hold(alerts: ActiveAlerts, *, node: str, gpu: int) -> bool:
    """Keep an incident's alert active; return whether another one was dropped for it."""
    labels = {"alertname": "GpuIncident", "node": node, "gpu_uuid": f"GPU-{gpu}"}
    return alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)


def nodes(alerts: ActiveAlerts) -> list[str]:
    return [dict(alert.labels)["node"] for alert in alerts]


def test_a_flood_of_one_node_drops_only_that_nodes_oldest_alerts() -> None:
    alerts = ActiveAlerts()
    hold(alerts, node="quiet", gpu=0)
    dropped = [hold(alerts, node="loud", gpu=gpu) for gpu in range(3 * MAX_HELD_OF_NODE)]

    assert sum(dropped) == 2 * MAX_HELD_OF_NODE
    assert nodes(alerts).count("quiet") == 1
    assert len(list(alerts)) == MAX_HELD_OF_NODE + 1


def test_a_flood_of_many_nodes_keeps_a_bounded_number_of_alerts() -> None:
    slots = AlertSlots()
    parts = [ActiveAlerts(slots=slots) for _ in range(12)]
    for number in range(MAX_HELD + 5_000):
        hold(parts[number // 100 % 12], node=f"n{number // 100}", gpu=number)

    assert sum(len(list(part)) for part in parts) == MAX_HELD
    assert slots.take_left_out().number == 5_000
    late = NOW._replace(monotonic_ns=NOW.monotonic_ns + 3_600 * SECOND_NS)
    assert sum(len(part.forget(now=late)) for part in parts) == MAX_HELD
    assert not hold(parts[0], node="n0", gpu=0)


def test_a_newer_incident_takes_the_slot_of_the_oldest_one_of_the_node_with_most_alerts() -> None:
    alerts = ActiveAlerts()
    hold(alerts, node="early", gpu=0)
    for number in range(MAX_HELD):
        hold(alerts, node=f"n{number // 400}", gpu=number)
    assert hold(alerts, node="late", gpu=0)

    assert {"early", "late"} <= set(nodes(alerts))
    assert len(nodes(alerts)) == MAX_HELD


def test_an_alert_that_is_already_active_drops_no_other() -> None:
    alerts = ActiveAlerts()
    for _ in range(2):
        assert not any(hold(alerts, node="n", gpu=gpu) for gpu in range(MAX_HELD_OF_NODE))


def test_texts_of_an_alert_are_cut_so_that_a_record_cannot_fill_the_memory() -> None:
    alerts = ActiveAlerts()
    long = "x" * 500_000
    alerts.hold(
        {"node": "n", "kind": long}, {"summary": long}, at_ns=START_NS, hold_ns=SECOND_NS, now=NOW
    )
    (alert,) = alerts

    assert len(dict(alert.labels)["kind"]) == len(alert.annotations["summary"]) == MAX_CHARACTERS


@pytest.mark.parametrize(
    ("answers", "offered", "held_from"),
    [
        ([], LATER, LATER),
        ([lambda one: record_taken([one], "am", now=NOW)], SOON, NOW),
        ([lambda one: record_rejected(one, "am", now=NOW)], SOON, SOON),
        ([lambda one: record_rejected(one, "am", now=NOW)], LATER, NOW),
    ],
    ids=["no answer", "accepted", "rejected", "rejected for long"],
)
def test_an_alerts_hold_restarts_with_each_attempt_until_an_alertmanager_accepts_it(
    answers: list[Answering], offered: Now, held_from: Now
) -> None:
    alerts = ActiveAlerts()
    alerts.hold({"alertname": "GpuIncident"}, {}, at_ns=START_NS, hold_ns=HOLD_NS, now=NOW)
    (alert,) = alerts
    for answer in answers:
        answer(alert)
    alert.hold_until_taken(offered)

    assert alert.ends_ns == held_from.time_ns + HOLD_NS


def test_an_alert_that_is_always_rejected_is_forgotten() -> None:
    alerts = ActiveAlerts()
    alerts.hold({"alertname": "GpuIncident"}, {}, at_ns=START_NS, hold_ns=HOLD_NS, now=NOW)
    turns = SendOrder("am", resend_ns=60 * SECOND_NS)
    minutes = 0
    while list(alerts):
        minutes += 1
        time_ns = START_NS + minutes * 60 * SECOND_NS
        now = Now(time_ns=time_ns, monotonic_ns=time_ns)
        while due := turns.next(alerts, now=now):
            (alert,) = due
            alert.hold_until_taken(now)
            record_rejected(alert, "am", now=now)
        alerts.forget(now=now)

    assert minutes == 59 + 5 + 5  # the last hold, and the time for which its end is sent


def test_an_answer_to_a_firing_alert_is_not_an_answer_to_its_end() -> None:
    alerts, labels = ActiveAlerts(), {"alertname": "GpuIncident"}
    alerts.stand(labels, {}, at_ns=START_NS, hold_ns=0, unresponsive_ns=HOLD_NS, now=NOW)
    on_its_way = list(alerts)
    alerts.end_state(alerts.identity_of(labels), at_ns=START_NS, now=NOW)
    record_taken(on_its_way, "am", now=NOW)
    record_rejected(on_its_way[0], "am", now=NOW)

    (due,) = SendOrder("am", resend_ns=HOLD_NS).next(alerts, now=NOW)
    assert due.ends_ns == START_NS
    assert on_its_way[0].ends_ns is None
