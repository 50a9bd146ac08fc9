"""What aiokafka raises and logs becomes something that a person can act on."""

from __future__ import annotations

import logging

import pytest
from aiokafka import errors as vendor

from gpuledger.bus.kafka_errors import FAILURES, translate
from gpuledger.bus.kafka_logs import QUIET_SECONDS, Thinning, remembered_refusals
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


def test_a_line_that_comes_again_and_again_is_said_once_in_a_while() -> None:
    now = 0.0
    passes = Thinning(seconds=lambda: now)
    said = []
    for _ in range(50):
        said.append(passes(line("Unable to update metadata from %s", [1])))
        now += QUIET_SECONDS / 10

    assert sum(said) == 5


@pytest.mark.parametrize(
    "message",
    [
        "Heartbeat failed for group %s because it is rebalancing",
        "Topic %s not found in cluster metadata",
    ],
)
def test_harmless_lines_are_dropped(message: str) -> None:
    assert not Thinning()(line(message, "x"))


def test_a_refused_connection_is_told_by_the_error_and_not_by_the_log() -> None:
    passes = Thinning()
    with remembered_refusals() as refusals:
        assert not passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))

    assert refusals == ["kafka-0:9092: refused"]
    assert passes(line(BROKEN, "kafka-0", 9092, OSError("refused")))
