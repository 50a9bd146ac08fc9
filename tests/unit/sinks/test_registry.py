"""The kinds of sink: each has everything that the table requires."""

import inspect

import pytest

from gpuledger_sinks.metrics import DROPPED_TOTAL, count_sink_from_zero
from gpuledger_sinks.protocol import OpenSink
from gpuledger_sinks.registry import KINDS, SinkKind
from gpuledger_sinks.settings import SinkSettings
from tests.default_topics import TOPICS

ALL = list(KINDS.values())


@pytest.mark.parametrize("kind", ALL, ids=KINDS)
def test_the_settings_of_each_kind_limit_the_records_of_a_poll(kind: SinkKind) -> None:
    assert getattr(SinkSettings(kind=kind.name), kind.name).max_poll_records >= 1


@pytest.mark.parametrize("kind", ALL, ids=KINDS)
def test_a_kinds_module_opens_a_sink_with_the_declared_parameters(kind: SinkKind) -> None:
    wanted = set(inspect.signature(OpenSink.__call__).parameters) - {"self"}

    assert set(inspect.signature(kind.load()).parameters) == wanted


@pytest.mark.parametrize("kind", ALL, ids=KINDS)
def test_the_drop_counters_of_a_kind_start_at_zero(kind: SinkKind) -> None:
    DROPPED_TOTAL.clear()
    count_sink_from_zero(kind, TOPICS)
    counted = {
        sample.labels["reason"]: sample.value
        for family in DROPPED_TOTAL.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["sink"] == kind.name
    }
    assert counted == dict.fromkeys(kind.drop_reasons, 0.0)
    assert counted


def test_no_two_kinds_share_a_group() -> None:
    assert len({kind.group for kind in ALL}) == len(ALL)
