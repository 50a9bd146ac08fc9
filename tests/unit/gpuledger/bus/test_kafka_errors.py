"""What aiokafka raises and logs becomes something that a person can act on."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import aiokafka
import pytest
from aiokafka import errors as vendor

from gpuledger.bus.kafka_errors import FAILURES, translate
from gpuledger.bus.kafka_logs import QUIET_SECONDS, TOLD, Demotion, remembered_refusals
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
def test_each_failure_says_what_was_done_and_where(
    raised: Exception, expected: type[Exception]
) -> None:
    assert isinstance(raised, FAILURES)
    told = translate(raised, doing="committing in the group 'join'", servers="a:1,b:2")

    assert type(told) is expected
    assert "committing in the group 'join'" in str(told)
    assert "a:1,b:2" in str(told)


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
def test_what_the_client_tries_again_is_a_debug_line(message: str) -> None:
    said = line(message, "x", level=logging.ERROR)

    assert Demotion()(said)
    assert (said.levelno, said.levelname) == (logging.DEBUG, "DEBUG")


def test_what_nobody_else_says_stays_and_is_said_once_an_hour() -> None:
    now_seconds = 0.0
    passes = Demotion(seconds=lambda: now_seconds)
    levels = []
    for _ in range(20):
        said = line(TOLD[-1])
        assert passes(said)
        levels.append(said.levelno)
        now_seconds += QUIET_SECONDS / 10

    assert levels.count(logging.WARNING) == 2


@pytest.mark.parametrize("template", TOLD)
def test_what_stays_is_what_the_client_says(template: str) -> None:
    """A new version may say it otherwise, and then it would be demoted unseen."""
    sources = [path.read_text() for path in Path(aiokafka.__file__).parent.rglob("*.py")]
    constants = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
    }

    assert template in constants


def test_a_refused_connection_is_told_by_the_error_and_not_by_the_log() -> None:
    passes = Demotion()
    with remembered_refusals() as refusals:
        assert not passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))

    assert refusals == ["kafka-0:9092: refused"]
    assert passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))
