"""What fires in a run: by the sink's rules, and whatever becomes of what the sink sends."""

import pytest

from gpuledger.records import Account, GpuEvent
from gpuledger_cli.demo.totals import RunAlerts, as_line
from gpuledger_simulator.clock import ManualClock
from gpuledger_sinks.settings import AlertsSettings, BusyWithoutPodSettings
from tests.unit.cli.demo.events import SECOND_NS, entry, event, incident, uuid_of

SETTINGS = AlertsSettings(
    incident_hold_seconds=300, busy_without_pod=BusyWithoutPodSettings(for_seconds=2)
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=10 * SECOND_NS)


@pytest.fixture
def alerts(clock: ManualClock) -> RunAlerts:
    return RunAlerts(settings=SETTINGS, clock=clock)


def stray(second: float) -> GpuEvent:
    """Return a second in which GPU 1 worked for no pod."""
    busy = [entry(Account.HOST, 0.5), entry(Account.IDLE, 0.5)]
    return event(second=second, entries=busy, gpus=[1])


def test_an_alert_names_its_rule_its_gpu_and_its_node(
    alerts: RunAlerts, clock: ManualClock
) -> None:
    for second in range(1, 5):
        alerts.add(stray(second))
    clock.advance(1)
    alerts.add_incident(incident("xid", second=11, gpu=3, xid=79))

    assert [as_line(alert) for alert in alerts.firing()] == [
        "GpuIncident critical  GPU 3 on node node-a: XID 79, It happened",
        "GpuBusyWithoutPod warning  GPU 1 on node node-a works for no pod",
    ]
    youngest, _ = alerts.firing()
    assert (youngest.gpu_uuid, youngest.gpu_index, youngest.node) == (uuid_of(3), 3, "node-a")


def test_what_is_over_fires_no_more_and_stands_in_the_summary(
    alerts: RunAlerts, clock: ManualClock
) -> None:
    for second in range(1, 5):
        alerts.add(stray(second))
    alerts.add(event(second=5, gpus=[1]))
    alerts.add_incident(incident("ecc_uncorrected", second=6))
    clock.advance(400)
    alerts.add(event(second=7))

    assert alerts.firing() == []
    assert [alert.name for alert in alerts.fired()] == ["GpuBusyWithoutPod", "GpuIncident"]


def test_an_incident_that_comes_again_is_the_same_alert(alerts: RunAlerts) -> None:
    for second in (6, 7):
        alerts.add_incident(incident("gpu_lost", second=second))
    assert len(alerts.firing()) == len(alerts.fired()) == 1


def test_many_alerts_take_bounded_memory(alerts: RunAlerts, clock: ManualClock) -> None:
    for number in range(300):
        clock.advance(400)
        alerts.add_incident(incident("xid", second=number, xid=1000 + number, gpu=number % 20))
    assert len(alerts.firing()) == 1
    assert [alert.text.split(",")[0][-3:] for alert in alerts.fired()[-2:]] == ["298", "299"]
    assert len(alerts.fired()) == 200
