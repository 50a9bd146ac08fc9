"""The faults of `make chaos` name alerts that the rules have and the documents list."""

import re
from pathlib import Path
from typing import Final

from tests.chaos.alerting import alert_names
from tests.chaos.faults import FAULTS, Fault
from tests.tables import for_each

_PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "alerts.md"
_ROW: Final = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|", re.MULTILINE)
_ALERT: Final = re.compile(r"\[(\w+)\]")


def documented() -> dict[str, frozenset[str]]:
    """Return the alerts of each fault that the page lists."""
    table = _PAGE.read_text().partition("\n## Faults\n")[2].partition("\n<!--")[0]
    return {fault: frozenset(_ALERT.findall(alerts)) for fault, alerts in _ROW.findall(table)}


@for_each("fault", FAULTS)
def test_each_alert_of_a_fault_is_in_the_rules(fault: Fault) -> None:
    assert fault.alerts | fault.consequences | fault.at_once <= alert_names()


@for_each("fault", FAULTS)
def test_each_fault_with_an_alert_is_documented_with_that_alert(fault: Fault) -> None:
    assert bool(fault.documented) == bool(fault.alerts)
    if fault.alerts:
        assert fault.alerts & documented()[fault.documented]
