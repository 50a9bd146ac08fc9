"""The alerts that stand: what they cost, for how long they are held, and whose answer counts."""

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
    """Return how much memory it takes at most to let an alert stand."""
    tracemalloc.start()
    try:
        labels = {"alertname": "GpuIncident", "gpu_uuid": f"GPU-{gpu}"}
        alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_alert_that_is_held_costs_the_same_however_many_others_stand() -> None:
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
    """Let an incident's alert stand; tell whether another one had to go for it."""
    labels = {"alertname": "GpuIncident", "node": node, "gpu_uuid": f"GPU-{gpu}"}
    return alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)


def fire(alerts: ActiveAlerts, *, node: str, gpu: int) -> bool:
    """Let a rule's alert begin; tell whether there was room for it."""
    labels = {"alertname": "GpuBusyWithoutPod", "node": node, "gpu_uuid": f"GPU-{gpu}"}
    return alerts.fire(labels, {}, since_ns=START_NS, now=NOW) is not None


def nodes(alerts: ActiveAlerts) -> list[str]:
    return [dict(alert.labels)["node"] for alert in alerts]


def test_a_flood_of_one_node_pushes_out_none_but_its_own_oldest() -> None:
    alerts = ActiveAlerts()
    hold(alerts, node="quiet", gpu=0)
    dropped = [hold(alerts, node="loud", gpu=gpu) for gpu in range(3 * MAX_HELD_OF_NODE)]

    assert sum(dropped) == 2 * MAX_HELD_OF_NODE
    assert nodes(alerts).count("quiet") == 1
    assert len(list(alerts)) == MAX_HELD_OF_NODE + 1


def test_a_flood_of_many_nodes_is_bounded_and_what_a_turn_looks_at_with_it() -> None:
    alerts = ActiveAlerts()
    for number in range(MAX_HELD + 5_000):
        hold(alerts, node=f"n{number // 100}", gpu=number)

    assert len(list(alerts)) == MAX_HELD
    late = NOW._replace(monotonic_ns=NOW.monotonic_ns + 3_600 * SECOND_NS)
    assert len(alerts.forget(now=late, silent_ns=SECOND_NS)) == MAX_HELD
    assert not hold(alerts, node="n0", gpu=0)


def test_alerts_of_rules_that_one_node_has_too_many_of_are_left_out() -> None:
    alerts = ActiveAlerts()
    fired = [fire(alerts, node="loud", gpu=gpu) for gpu in range(3 * MAX_HELD_OF_NODE)]

    assert fired == [True] * MAX_HELD_OF_NODE + [False] * 2 * MAX_HELD_OF_NODE
    assert fire(alerts, node="quiet", gpu=0)
    assert fire(alerts, node="loud", gpu=0)  # it stands already


def test_alerts_of_rules_are_bounded_over_all_partitions_and_take_no_incident_its_slot() -> None:
    slots = AlertSlots()
    parts = [ActiveAlerts(slots=slots) for _ in range(12)]
    hold(parts[0], node="quiet", gpu=0)
    refused = sum(
        not fire(parts[number // 256 % 12], node=f"n{number // 256}", gpu=number)
        for number in range(400 * 256)
    )

    assert slots.take_left_out().number == 400 * 256 - MAX_HELD - refused
    standing = [node for part in parts for node in nodes(part)]
    assert standing.count("quiet") == 1
    assert len(standing) == MAX_HELD + 1
    parts[3].drop_all()
    assert sum(fire(parts[0], node=f"new{n}", gpu=n) for n in range(2 * MAX_HELD)) > MAX_HELD // 12


def test_a_node_with_few_alerts_has_room_whatever_many_others_have() -> None:
    alerts = ActiveAlerts()
    assert all(fire(alerts, node="early", gpu=gpu) for gpu in range(8))
    for number in range(400 * 256):
        fire(alerts, node=f"n{number // 256}", gpu=number)

    assert all(fire(alerts, node="late", gpu=gpu) for gpu in range(8))
    assert nodes(alerts).count("early") == nodes(alerts).count("late") == 8
    assert len(nodes(alerts)) == MAX_HELD


def test_where_no_node_has_more_than_another_what_stands_goes_on_to_stand() -> None:
    alerts = ActiveAlerts()
    fired = [fire(alerts, node=f"n{number}", gpu=0) for number in range(MAX_HELD + 9)]
    assert fired == [True] * MAX_HELD + [False] * 9


def test_a_newer_incident_takes_the_slot_of_an_older_one_of_the_node_that_has_most() -> None:
    alerts = ActiveAlerts()
    hold(alerts, node="early", gpu=0)
    for number in range(MAX_HELD):
        hold(alerts, node=f"n{number // 400}", gpu=number)
    assert hold(alerts, node="late", gpu=0)

    assert {"early", "late"} <= set(nodes(alerts))
    assert len(nodes(alerts)) == MAX_HELD


def test_what_stands_already_is_held_on_and_pushes_out_nothing() -> None:
    alerts = ActiveAlerts()
    for _ in range(2):
        assert not any(hold(alerts, node="n", gpu=gpu) for gpu in range(MAX_HELD_OF_NODE))


def test_words_of_an_alert_are_cut_so_that_a_record_cannot_fill_the_memory() -> None:
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
    ids=["nobody answered", "taken", "refused", "refused for long"],
)
def test_what_is_held_is_held_from_when_it_is_sent_until_somebody_takes_it(
    answers: list[Answering], offered: Now, held_from: Now
) -> None:
    alerts = ActiveAlerts()
    alerts.hold({"alertname": "GpuIncident"}, {}, at_ns=START_NS, hold_ns=HOLD_NS, now=NOW)
    (alert,) = alerts
    for answer in answers:
        answer(alert)
    alert.hold_until_taken(offered)

    assert alert.ends_ns == held_from.time_ns + HOLD_NS


def test_what_is_refused_for_ever_is_forgotten() -> None:
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
        alerts.forget(now=now, silent_ns=600 * SECOND_NS)

    assert minutes == 59 + 5 + 5  # the last hold, and for how long its end is told


def test_an_answer_to_an_alert_that_fired_is_none_to_its_end() -> None:
    alerts = ActiveAlerts()
    key = alerts.fire({"alertname": "GpuBusyWithoutPod"}, {}, since_ns=START_NS, now=NOW)
    assert key is not None
    on_its_way = list(alerts)
    alerts.end(key, at_ns=START_NS, now=NOW)
    record_taken(on_its_way, "am", now=NOW)
    record_rejected(on_its_way[0], "am", now=NOW)

    (due,) = SendOrder("am", resend_ns=HOLD_NS).next(alerts, now=NOW)
    assert due.ends_ns == START_NS
    assert on_its_way[0].ends_ns is None
