"""Topics on a broker are compared with the topic table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuledger.bus.administration import (
    FoundTopic,
    TopicLine,
    compare,
    found_partitions,
    refuse_other_partitions,
)
from gpuledger.errors import TopicsError
from tests.default_topics import SAMPLES, TOPICS
from tests.errors import has_words

GOOD = FoundTopic(partitions=12, replication_factor=3, config=SAMPLES.config(replication_factor=3))


@pytest.mark.parametrize(
    ("found", "status", "message"),
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
        # A single broker cannot keep a second replica in sync.
        (replace(GOOD, replication_factor=1), "config differs", "min.insync.replicas=2"),
    ],
)
def test_a_topic_matches_the_table_or_the_difference_is_reported(
    found: FoundTopic | None, status: str, message: str
) -> None:
    line = compare(SAMPLES, found)

    assert line.status == status
    assert message in line.found


def test_a_different_number_of_partitions_is_refused_with_a_remedy() -> None:
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
        refuse_other_partitions(lines, is_given=False)


@pytest.mark.parametrize("is_given", [False, True])
def test_the_remedy_names_the_option_only_if_it_was_given(*, is_given: bool) -> None:
    lines = [compare(SAMPLES, replace(GOOD, partitions=6))]

    with pytest.raises(TopicsError) as refused:
        refuse_other_partitions(lines, is_given=is_given)

    assert ("--partitions" in str(refused.value)) is is_given


def found_topics(**partitions: int) -> dict[str, FoundTopic]:
    """Return topics by name with these numbers of partitions."""
    return {
        getattr(TOPICS, name).name: replace(GOOD, partitions=count)
        for name, count in partitions.items()
    }


@pytest.mark.parametrize(
    ("found", "partitions"),
    [
        ({}, None),
        ({"dead_letters": 1}, None),
        ({"samples": 48, "events": 12, "pods": 12}, 48),
        ({"events": 24, "pods": 24, "dead_letters": 1}, 24),
        ({"events": 12, "pods": 24, "nodes": 24}, 24),
    ],
)
def test_missing_topics_get_the_partitions_of_the_samples_topic_or_of_most_others(
    found: dict[str, int], partitions: int | None
) -> None:
    assert found_partitions(TOPICS, found_topics(**found)) == partitions
