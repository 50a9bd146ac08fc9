"""A node without samples has a series with the time of its last one, if the node still exists."""

from collections.abc import Iterator

import pytest

from gpuledger.clock import NS_PER_SECOND
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.pods.test_places import namespace, node, read
from tests.unit.enricher.join.ticks import SECOND_NS

SINCE = "gpuledger_join_node_unresponsive_since_timestamp_seconds"
T_SECONDS = T_NS / NS_PER_SECOND


@pytest.fixture
def given() -> Iterator[Given]:
    given = Given()
    yield given
    given.stage.forget(3)


def since(given: Given, name: str = "node-a") -> float:
    """Return the time that is shown for a node after the worker read everything; 0 if none is."""
    given.stage.find_complete(3, is_at_end=True)
    return value_of(SINCE, cluster="default", node=name)


def tick(given: Given, name: str = "node-a") -> None:
    given.take(node=name, time_ns=given.now_ns)
    assert since(given, name) == 0


def test_a_node_is_shown_from_two_minutes_after_its_last_sample_to_its_next(given: Given) -> None:
    tick(given)
    given.wait(119)
    assert since(given) == 0
    given.wait(1)
    assert since(given) == T_SECONDS
    given.wait(7200)
    assert since(given) == T_SECONDS
    tick(given)
    assert since(given) == 0


def test_each_node_has_its_own_series(given: Given) -> None:
    tick(given)
    given.wait(60)
    tick(given, "node-b")
    given.wait(90)
    assert (since(given), since(given, "node-b")) == (T_SECONDS, 0)
    given.wait(90)
    assert (since(given), since(given, "node-b")) == (T_SECONDS, T_SECONDS + 60)


def test_a_node_that_podwatch_sees_deleted_is_not_missed(given: Given) -> None:
    """An autoscaler removed it together with its agent."""
    read(given, namespace())
    read(given, node())
    tick(given)
    given.wait(300)
    assert since(given) == T_SECONDS
    read(given, node("8", deleted_time_ns=given.now_ns - SECOND_NS))
    assert since(given) == 0


def test_without_podwatch_a_node_is_missed_until_it_is_forgotten(given: Given) -> None:
    tick(given)
    given.wait(86_000)
    assert since(given) == T_SECONDS


def test_a_lost_partition_takes_its_nodes_along(given: Given) -> None:
    tick(given)
    given.wait(300)
    assert since(given) == T_SECONDS
    given.stage.forget(3)
    assert value_of(SINCE, cluster="default", node="node-a") == 0


def test_time_without_kafka_does_not_count(given: Given) -> None:
    tick(given)
    given.wait(3600)
    given.stage.restart_listening()
    assert since(given) == 0
