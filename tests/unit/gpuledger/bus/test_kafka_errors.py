"""aiokafka's exceptions and log lines become messages that a person can act on."""

from __future__ import annotations

import ast
import contextvars
import logging
from functools import cache
from pathlib import Path

import aiokafka
import pytest
from aiokafka import errors as vendor

from gpuledger.bus.kafka_errors import (
    FAILURES,
    LOGGED,
    MAX_BROKERS,
    QUIET_SECONDS,
    REFUSED,
    Demotion,
    RefusedConnections,
    remembering,
    translate,
)
from gpuledger.errors import (
    BusUnavailableError,
    MessageTooLargeError,
    NotAssignedError,
    RefusedError,
    TopicsError,
)

BROKEN = 'Unable connect to "%s:%s": %s'


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (vendor.TopicAuthorizationFailedError("events"), RefusedError),
        (vendor.GroupAuthorizationFailedError("join"), RefusedError),
        (vendor.ClusterAuthorizationFailedError(), RefusedError),
        (vendor.TransactionalIdAuthorizationFailed(), RefusedError),
        (vendor.IncompatibleBrokerVersion("InitProducerIdRequest"), RefusedError),
        (vendor.UnknownTopicOrPartitionError(), TopicsError),
        (vendor.MessageSizeTooLargeError(), MessageTooLargeError),
        (vendor.OutOfOrderSequenceNumber(), BusUnavailableError),
        (vendor.CommitFailedError("rebalanced"), BusUnavailableError),
        (vendor.IllegalStateError("not assigned"), NotAssignedError),
        (vendor.ConsumerStoppedError(), BusUnavailableError),
        (ConnectionResetError("reset"), BusUnavailableError),
        (AssertionError("Invalid state transition ABORTING -> COMMITTING"), BusUnavailableError),
    ],
)
def test_each_failure_names_the_operation_and_where_it_happened(
    raised: Exception, expected: type[Exception]
) -> None:
    assert isinstance(raised, FAILURES)
    reported = translate(raised, doing="committing in the group 'join'", servers="a:1,b:2")

    assert type(reported) is expected
    assert "committing in the group 'join'" in str(reported)
    assert "a:1,b:2" in str(reported)


def line(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("aiokafka", level, __file__, 1, message, args, None)


@pytest.mark.parametrize(
    "message",
    [
        "Heartbeat failed for group %s because it is rebalancing",
        "Topic %s not found in cluster metadata",
        "Unable to update metadata from %s",
        "Got error produce response on topic-partition %s, retrying. Error: %s",
    ],
)
def test_errors_that_the_client_retries_are_logged_at_debug_level(message: str) -> None:
    output = line(message, "x", level=logging.ERROR)

    assert Demotion()(output)
    assert (output.levelno, output.levelname) == (logging.DEBUG, "DEBUG")


def test_messages_that_have_no_other_source_are_kept_and_logged_once_an_hour() -> None:
    now_seconds = 0.0
    passes = Demotion(seconds=lambda: now_seconds)
    levels = []
    for _ in range(20):
        output = line(LOGGED[-1])
        assert passes(output)
        levels.append(output.levelno)
        now_seconds += QUIET_SECONDS / 10

    assert levels.count(logging.WARNING) == 2


@pytest.mark.parametrize("template", LOGGED)
def test_the_kept_messages_are_those_of_the_client(template: str) -> None:
    """If a new version changed the wording, the message would silently be demoted."""
    assert template in _constants()


@cache
def _constants() -> frozenset[object]:
    sources = [path.read_text() for path in Path(aiokafka.__file__).parent.rglob("*.py")]
    return frozenset(
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
    )


def test_a_refused_connection_is_reported_by_the_error_and_not_by_the_log() -> None:
    passes = Demotion()
    refusals = RefusedConnections()
    with remembering(refusals):
        assert not passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))

    assert refusals.of_last(60) == ["kafka-0:9092: refused"]
    assert passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))


@pytest.mark.parametrize("template", REFUSED)
def test_the_remembered_refusals_are_messages_of_the_client(template: str) -> None:
    assert template in _constants()


def test_a_lost_connection_is_remembered_with_its_cause() -> None:
    lost = vendor.KafkaConnectionError("Connection at kafka-0:9092 closed")
    lost.__cause__ = OSError("tlsv13 alert certificate expired")
    refusals = RefusedConnections()
    with remembering(refusals):
        assert not Demotion()(line("Unable connect to node with id %s: %s", 1, lost))

    (output,) = refusals.of_last(60)
    assert output.startswith("node 1: ")
    assert output.endswith("tlsv13 alert certificate expired")


def test_a_task_that_keeps_connecting_is_remembered_after_the_call_that_started_it() -> None:
    refusals = RefusedConnections()
    with remembering(refusals):
        begun = contextvars.copy_context()
    begun.run(Demotion(), line(BROKEN, "kafka-0", 9092, OSError("SaslAuthenticationFailed")))

    assert refusals.of_last(60) == ["kafka-0:9092: SaslAuthenticationFailed"]


def test_only_the_last_refusal_of_a_broker_counts_and_only_for_a_limited_time() -> None:
    now_seconds = 0.0
    refusals = RefusedConnections(seconds=lambda: now_seconds)
    refusals.note("a", "first")
    refusals.note("a", "second")
    now_seconds = 30.0
    refusals.note("b", "third")

    assert refusals.of_last(60) == ["a: second", "b: third"]
    assert refusals.of_last(10) == ["b: third"]


def test_memory_for_refusals_is_bounded_however_many_brokers_refuse() -> None:
    refusals = RefusedConnections()
    for number in range(1000):
        refusals.note(f"broker-{number}", "refused")

    assert len(refusals.of_last(60)) == MAX_BROKERS


@pytest.mark.parametrize("raised", [vendor.NodeNotReadyError(), vendor.KafkaConnectionError("")])
def test_an_error_includes_the_reasons_of_refused_connections(raised: Exception) -> None:
    refusals = ["kafka-0:9092: SaslAuthenticationFailed"]
    error = translate(raised, doing="publishing", servers="kafka-0:9092", refusals=refusals)

    assert "kafka-0:9092: SaslAuthenticationFailed; check kafka.sasl_username" in str(error)


def test_an_error_of_the_only_broker_contains_its_address_once() -> None:
    refusals = ["kafka-0:9092: [Errno 111] Connect call failed ('10.0.0.1', 9092)"]
    raised = vendor.KafkaConnectionError("")
    error = translate(raised, doing="publishing", servers="kafka-0:9092", refusals=refusals)

    assert "at kafka-0:9092: Connection refused; check" in str(error)
