"""What every rule of the table keeps to, and that its page says so."""

import re
from pathlib import Path
from typing import Final

import pytest

from gpuledger.records import GpuBooks, GpuReading
from gpuledger_sinks.alerts.rules import Rule, rules_of
from gpuledger_sinks.settings import AlertsSettings
from tests.unit.sinks.builders import GPU, NODE, event, reading

RULES: Final = rules_of(AlertsSettings())
PAGE: Final = (Path(__file__).parents[4] / "docs" / "alerts.md").read_text()
NAMES: Final = [rule.name for rule in RULES]


def test_no_two_rules_share_a_name() -> None:
    assert len(set(NAMES)) == len(RULES)


def test_the_page_has_the_rules_that_there_are_with_their_severity() -> None:
    """Beside `GpuIncident`, whose severity is the incident's."""
    table = PAGE.partition("## Rules\n")[2].partition("\n\n`for`")[0]
    rows = re.findall(r"^\| `(\w+)` \((\w+)\) \|", table, flags=re.MULTILINE)

    assert rows == [(rule.name, rule.severity.value) for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_its_words_name_the_gpu_and_its_node(rule: Rule) -> None:
    tick = event(of=reading(index=5))

    words = rule.annotations_of(tick, tick.gpus[0], measure=rule.threshold)

    for text in words.values():
        assert "GPU 5" in text
        assert NODE in text


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_its_labels_are_what_does_not_change_while_the_alert_stands(rule: Rule) -> None:
    tick = event()

    labels = rule.labels_of(tick, tick.gpus[0])

    assert labels.keys() == {"alertname", "severity", "cluster", "node", "gpu_uuid", "gpu_index"}
    assert labels["alertname"] == rule.name


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_gpu_of_which_nothing_is_known_is_not_measured(rule: Rule) -> None:
    """None: it neither begins nor ends an alert, where zero would end it."""
    nothing = GpuBooks(reading=GpuReading(uuid=GPU, index=0), entries=[])

    assert rule.measure(nothing, 10**9) is None
