"""What it costs that many alerts stand."""

import tracemalloc

from sinks.alerts.standing import (
    MOST_CHARACTERS,
    MOST_HELD,
    MOST_HELD_OF_NODE,
    Now,
    StandingAlerts,
)
from tests.unit.sinks.given import SECOND_NS, START_NS

NOW = Now(time_ns=START_NS, monotonic_ns=START_NS)


def bytes_to_hold(alerts: StandingAlerts, *, gpu: int) -> int:
    """Return how much memory it takes at most to let an alert stand."""
    tracemalloc.start()
    try:
        labels = {"alertname": "GpuIncident", "gpu_uuid": f"GPU-{gpu}"}
        alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_alert_that_is_held_costs_the_same_however_many_others_stand() -> None:
    alerts = StandingAlerts()
    alone = bytes_to_hold(alerts, gpu=0)
    for gpu in range(2000):
        bytes_to_hold(alerts, gpu=gpu)

    assert bytes_to_hold(alerts, gpu=0) < 2 * alone


def hold(alerts: StandingAlerts, *, node: str, gpu: int) -> bool:
    """Let an incident's alert stand; tell whether another one had to go for it."""
    labels = {"alertname": "GpuIncident", "node": node, "gpu_uuid": f"GPU-{gpu}"}
    held = alerts.hold(labels, {}, at_ns=START_NS, hold_ns=300 * SECOND_NS, now=NOW)
    return held is not None


def nodes(alerts: StandingAlerts) -> list[str]:
    return [dict(alert.labels)["node"] for alert in alerts]


def test_a_flood_of_one_node_pushes_out_none_but_its_own_oldest() -> None:
    alerts = StandingAlerts()
    hold(alerts, node="quiet", gpu=0)
    dropped = [hold(alerts, node="loud", gpu=gpu) for gpu in range(3 * MOST_HELD_OF_NODE)]

    assert sum(dropped) == 2 * MOST_HELD_OF_NODE
    assert nodes(alerts).count("quiet") == 1
    assert len(alerts.due("r", now=NOW, resend_ns=1)) == MOST_HELD_OF_NODE + 1


def test_a_flood_of_many_nodes_is_bounded_and_what_a_turn_looks_at_with_it() -> None:
    alerts = StandingAlerts()
    for number in range(MOST_HELD + 5_000):
        hold(alerts, node=f"n{number // 100}", gpu=number)

    assert len(alerts.due("r", now=NOW, resend_ns=1)) == MOST_HELD
    late = NOW._replace(monotonic_ns=NOW.monotonic_ns + 3_600 * SECOND_NS)
    assert len(alerts.forget(now=late, silent_ns=SECOND_NS)) == MOST_HELD
    assert not hold(alerts, node="n0", gpu=0)


def test_what_stands_already_is_held_on_and_pushes_out_nothing() -> None:
    alerts = StandingAlerts()
    for _ in range(2):
        assert not any(hold(alerts, node="n", gpu=gpu) for gpu in range(MOST_HELD_OF_NODE))


def test_words_of_an_alert_are_cut_so_that_a_record_cannot_fill_the_memory() -> None:
    alerts = StandingAlerts()
    long = "x" * 500_000
    alerts.hold(
        {"node": "n", "kind": long}, {"summary": long}, at_ns=START_NS, hold_ns=SECOND_NS, now=NOW
    )
    (alert,) = alerts

    assert len(dict(alert.labels)["kind"]) == len(alert.annotations["summary"]) == MOST_CHARACTERS
