"""What is acknowledged when: in order, and once all that it brought is answered."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from gpuledger.bus.protocol import TopicPartition
from gpuledger_sinks.alerts.active_alerts import ActiveAlert, ActiveAlerts, Now, record_taken
from gpuledger_sinks.alerts.condition_state import NodeStates
from gpuledger_sinks.alerts.unacknowledged import Unacknowledged
from gpuledger_sinks.protocol import SinkContext
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS
from tests.unit.sinks.builders import START_NS

AT = TopicPartition(EVENTS.name, 0)
OTHER = TopicPartition(ATTRIBUTED_INCIDENTS.name, 0)
NO_STATES: NodeStates = {}
NOW = Now(time_ns=START_NS, monotonic_ns=START_NS)


class RecordedContext(SinkContext):
    """A context that keeps what it is told, and has nothing else."""

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
    """What is unacknowledged to a context, and the alerts that stand."""

    def __init__(self) -> None:
        self.context, self.unacknowledged, self.alerts = (
            RecordedContext(),
            Unacknowledged(),
            ActiveAlerts(),
        )

    def fire(self, name: str) -> ActiveAlert:
        key = self.alerts.fire({"alertname": name}, {}, since_ns=START_NS, now=NOW)
        return next(alert for alert in self.alerts if alert.labels == key)

    def add(
        self,
        next_offset: int,
        alerts: Sequence[ActiveAlert] = (),
        *,
        at: TopicPartition = AT,
        states: NodeStates = NO_STATES,
    ) -> None:
        self.unacknowledged.add(
            at,
            context=self.context,
            next_offset=next_offset,
            time_ns=None,
            alerts=alerts,
            states=states,
        )

    def acknowledged(self) -> list[tuple[TopicPartition, int]]:
        """Return what has been acknowledged by now."""
        self.unacknowledged.acknowledge_answered()
        return [(partition, offset) for partition, offset, _ in self.context.acknowledged]


@pytest.fixture
def given() -> Given:
    return Given()


def test_what_brought_no_alert_is_acknowledged_at_once(given: Given) -> None:
    given.add(5)

    assert given.acknowledged() == [(AT, 5)]
    assert given.unacknowledged.count() == 0


def test_what_comes_later_waits_for_what_came_first_and_holds_up_no_other_partition(
    given: Given,
) -> None:
    first, second = given.fire("first"), given.fire("second")
    given.add(1, [first])
    given.add(2, [second])
    given.add(3)
    given.add(7, at=OTHER)
    record_taken([second], "am", now=NOW)
    assert given.acknowledged() == [(OTHER, 7)]
    assert given.unacknowledged.count() == 1

    record_taken([first], "am", now=NOW)
    assert given.acknowledged() == [(OTHER, 7), (AT, 1), (AT, 3)]


def test_an_answer_to_a_later_change_is_one_to_the_earlier(given: Given) -> None:
    given.add(1, [given.fire("same")])
    later = given.fire("same")
    assert given.acknowledged() == []

    record_taken([later], "am", now=NOW)
    assert given.acknowledged() == [(AT, 1)]


def test_an_answer_to_an_earlier_change_is_none_to_a_later(given: Given) -> None:
    earlier = given.fire("same")
    given.add(1, [earlier])
    given.add(2, [given.fire("same")])
    record_taken([earlier], "am", now=NOW)

    assert given.acknowledged() == [(AT, 1)]


def test_what_is_waited_for_is_not_forgotten_before_it_is_answered(given: Given) -> None:
    alert = given.fire("old")
    given.add(1, [alert])
    late = NOW._replace(monotonic_ns=2 * START_NS)
    assert given.alerts.forget(now=late, silent_ns=1) == []

    record_taken([alert], "am", now=NOW)
    assert given.alerts.forget(now=late, silent_ns=1) == [alert]


def test_of_a_partition_that_is_given_up_nothing_is_acknowledged(given: Given) -> None:
    alert = given.fire("one")
    given.add(1, [alert])
    given.unacknowledged.drop(frozenset({AT}))
    record_taken([alert], "am", now=NOW)

    assert given.acknowledged() == []


def test_conditions_are_written_before_what_changed_them_is_acknowledged(given: Given) -> None:
    given.add(1, states={"default/a": None})
    given.add(2)
    assert given.acknowledged() == []

    given.unacknowledged.acknowledge_written(AT, given.unacknowledged.to_write[AT])
    assert given.acknowledged() == [(AT, 2)]
    assert not given.unacknowledged.to_write


def test_what_is_answered_while_conditions_are_written_waits_for_its_own(given: Given) -> None:
    given.add(1, states={"default/a": None})
    assert given.acknowledged() == []
    written = given.unacknowledged.to_write[AT]
    given.add(2, states={"default/b": None})
    assert given.acknowledged() == []

    given.unacknowledged.acknowledge_written(AT, written)
    assert given.acknowledged() == [(AT, 1)]
    assert given.unacknowledged.to_write[AT].states.keys() == {"default/a", "default/b"}


def test_conditions_of_a_partition_that_is_given_up_acknowledge_nothing(given: Given) -> None:
    given.add(1, states={"default/a": None})
    assert given.acknowledged() == []
    written = given.unacknowledged.to_write[AT]
    given.unacknowledged.drop(frozenset({AT}))

    given.unacknowledged.acknowledge_written(AT, written)
    assert given.acknowledged() == []
