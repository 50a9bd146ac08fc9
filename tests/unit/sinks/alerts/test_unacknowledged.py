"""Offsets are acknowledged in order, once all alerts of their records are answered."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from gpuledger.bus.protocol import TopicPartition
from gpuledger_sinks.alerts.active_alerts import ActiveAlert, ActiveAlerts, Now, record_taken
from gpuledger_sinks.alerts.unacknowledged import Unacknowledged
from gpuledger_sinks.protocol import SinkContext
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS
from tests.unit.sinks.builders import START_NS

AT = TopicPartition(EVENTS.name, 0)
OTHER = TopicPartition(ATTRIBUTED_INCIDENTS.name, 0)
NOW = Now(time_ns=START_NS, monotonic_ns=START_NS)


class RecordedContext(SinkContext):
    """A context that records only acknowledgements."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[TopicPartition, int, int | None]] = []

    @override
    def acknowledge(
        self,
        partition: TopicPartition,
        next_offset: int,
        *,
        time_ns: int | None = None,
        commits_itself: bool = False,
    ) -> None:
        assert not commits_itself
        self.acknowledged.append((partition, next_offset, time_ns))


class Given:
    """The unacknowledged offsets of a context, and the active alerts."""

    def __init__(self) -> None:
        self.context, self.unacknowledged, self.alerts = (
            RecordedContext(),
            Unacknowledged(),
            ActiveAlerts(),
        )

    def begin(self, name: str) -> ActiveAlert:
        labels = {"alertname": name}
        self.alerts.hold(labels, {}, at_ns=START_NS, hold_ns=1, now=NOW)
        return next(alert for alert in self.alerts if dict(alert.labels) == labels)

    def add(
        self,
        next_offset: int,
        alerts: Sequence[ActiveAlert] = (),
        *,
        at: TopicPartition = AT,
    ) -> None:
        self.unacknowledged.add(
            at, context=self.context, next_offset=next_offset, time_ns=None, alerts=alerts
        )

    def acknowledged(self) -> list[tuple[TopicPartition, int]]:
        """Return the acknowledgements so far."""
        self.unacknowledged.acknowledge_answered()
        return [(partition, offset) for partition, offset, _ in self.context.acknowledged]


@pytest.fixture
def given() -> Given:
    return Given()


def test_a_record_without_an_alert_is_acknowledged_immediately(given: Given) -> None:
    given.add(5)

    assert given.acknowledged() == [(AT, 5)]
    assert given.unacknowledged.count() == 0


def test_a_later_record_waits_for_earlier_ones_only_of_its_own_partition(
    given: Given,
) -> None:
    first, second = given.begin("first"), given.begin("second")
    given.add(1, [first])
    given.add(2, [second])
    given.add(3)
    given.add(7, at=OTHER)
    record_taken([second], "am", now=NOW)
    assert given.acknowledged() == [(OTHER, 7)]
    assert given.unacknowledged.count() == 1

    record_taken([first], "am", now=NOW)
    assert given.acknowledged() == [(OTHER, 7), (AT, 1), (AT, 3)]


def test_an_answer_to_a_later_change_answers_the_earlier_one(given: Given) -> None:
    given.add(1, [given.begin("same")])
    later = given.begin("same")
    assert given.acknowledged() == []

    record_taken([later], "am", now=NOW)
    assert given.acknowledged() == [(AT, 1)]


def test_an_answer_to_an_earlier_change_does_not_answer_a_later_one(given: Given) -> None:
    earlier = given.begin("same")
    given.add(1, [earlier])
    given.add(2, [given.begin("same")])
    record_taken([earlier], "am", now=NOW)

    assert given.acknowledged() == [(AT, 1)]


def test_an_alert_that_an_offset_waits_for_is_not_forgotten_before_its_answer(given: Given) -> None:
    alert = given.begin("old")
    given.add(1, [alert])
    late = NOW._replace(monotonic_ns=2 * START_NS)
    assert given.alerts.forget(now=late) == []

    record_taken([alert], "am", now=NOW)
    assert given.alerts.forget(now=late) == [alert]


def test_offsets_of_a_lost_partition_are_not_acknowledged(given: Given) -> None:
    alert = given.begin("one")
    given.add(1, [alert])
    given.unacknowledged.drop(frozenset({AT}))
    record_taken([alert], "am", now=NOW)

    assert given.acknowledged() == []
