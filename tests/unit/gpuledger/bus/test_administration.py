"""The topics found on a broker are compared with the topic table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.bus.administration import (
    FoundTopic,
    TopicLine,
    compare,
    refuse_other_partitions,
    subscribed_topics,
)
from gpuledger.errors import TopicsError
from tests.default_topics import SAMPLES, TOPICS
from tests.errors import has_words

GOOD = FoundTopic(partitions=12, replication_factor=3, config=SAMPLES.config(replication_factor=3))


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (GOOD, "ok", ""),
        (None, "missing", ""),
        (replace(GOOD, partitions=6), "partitions differ", "partitions=6"),
        (
            replace(GOOD, config={**GOOD.config, "retention.ms": "1000"}),
            "config differs",
            "retention.ms=1000",
        ),
        (replace(GOOD, config={}), "config differs", "retention.ms=(unset)"),
        # On one broker nothing can be kept in sync with a second one.
        (replace(GOOD, replication_factor=1), "config differs", "min.insync.replicas=2"),
    ],
)
def test_a_topic_is_as_wanted_or_it_is_said_what_is_not(
    found: FoundTopic | None, status: str, said: str
) -> None:
    line = compare(SAMPLES, found)

    assert line.status == status
    assert said in line.found


def test_another_number_of_partitions_is_refused_with_the_remedy() -> None:
    lines = [compare(topic, GOOD) for topic in TOPICS]
    assert (
        TopicLine(
            topic="gpuledger.dead-letters.v1",
            status="partitions differ",
            wanted="partitions=1",
            found="partitions=12",
        )
        in lines
    )

    with pytest.raises(TopicsError, check=has_words("partitions=12", "partitions=1")):
        refuse_other_partitions(lines)


def described(metadata: bytes) -> tuple[str, str, str, bytes, bytes]:
    """Return a member of a group as aiokafka hands it over."""
    return ("member", "client", "/host", metadata, b"")


def test_the_topics_of_a_group_are_those_that_its_members_subscribe_to() -> None:
    """As clients in Java say it too, whose newer form ends with more than was known of."""
    ours = b"\x00\x00" + b"\x00\x00\x00\x01" + b"\x00\x03one" + b"\x00\x00\x00\x00"
    java = b"\x00\x03" + b"\x00\x00\x00\x02" + b"\x00\x03one\x00\x03two" + b"\xff\xff\xff\xff\x00"
    assert subscribed_topics([described(ours)]) == {"one"}
    assert subscribed_topics([described(ours), described(java)]) == {"one", "two"}


@pytest.mark.parametrize("metadata", [b"", b"\x00", b"\x00\x00\x00\x00\x00\x09\x00\x03on"])
def test_a_member_that_says_nothing_readable_counts_for_nothing(metadata: bytes) -> None:
    """A group that forms has no metadata yet; members of other kinds have another form."""
    assert subscribed_topics([described(metadata)]) == frozenset()
