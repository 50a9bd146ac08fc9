"""What it costs that many alerts stand."""

import tracemalloc

from sinks.alerts.standing import Now, StandingAlerts
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
