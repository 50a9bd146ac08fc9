"""The alerts of a run: by the sink's rules, and independent of the sink's receivers."""

import pytest

from gpuledger_cli.demo.totals import RunAlerts, as_line
from gpuledger_simulator.clock import ManualClock
from gpuledger_sinks.settings import AlertsSettings
from tests.unit.cli.demo.events import SECOND_NS, event, incident, uuid_of

SETTINGS = AlertsSettings(incident_hold_seconds=300)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=10 * SECOND_NS)


@pytest.fixture
def alerts(clock: ManualClock) -> RunAlerts:
    return RunAlerts(settings=SETTINGS, clock=clock)


def test_an_alert_names_its_gpu_and_its_node(alerts: RunAlerts, clock: ManualClock) -> None:
    alerts.add_incident(incident("gpu_lost", second=10, gpu=1))
    clock.advance(1)
    alerts.add_incident(incident("xid", second=11, gpu=3, xid=79))

    assert [as_line(alert) for alert in alerts.firing()] == [
        "GpuIncident critical  GPU 3 on node node-a: XID 79, It happened",
        "GpuIncident critical  GPU 1 on node node-a: gpu_lost, It happened",
    ]
    youngest, _ = alerts.firing()
    assert (youngest.gpu_uuid, youngest.gpu_index, youngest.node) == (uuid_of(3), 3, "node-a")


def test_a_resolved_alert_no_longer_fires_and_is_in_the_summary(
    alerts: RunAlerts, clock: ManualClock
) -> None:
    alerts.add_incident(incident("ecc_uncorrected", second=6))
    clock.advance(400)
    alerts.add(event(second=7))

    assert alerts.firing() == []
    assert [alert.name for alert in alerts.fired()] == ["GpuIncident"]


def test_a_repeated_incident_is_the_same_alert(alerts: RunAlerts) -> None:
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
