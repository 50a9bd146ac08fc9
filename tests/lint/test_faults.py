"""The faults of `make chaos` name alerts that the shipped rules have."""

from tests.chaos.alerting import alert_names
from tests.chaos.faults import FAULTS


def test_each_alert_of_a_fault_is_in_the_rules() -> None:
    named = {
        (fault.name, alert)
        for fault in FAULTS
        for alert in fault.alerts | fault.consequences | fault.at_once
    }
    assert not {(fault, alert) for fault, alert in named if alert not in alert_names()}
