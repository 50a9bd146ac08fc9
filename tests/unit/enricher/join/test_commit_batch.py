"""What is gathered until it is delivered: how much, for how long, and up to which tick."""

import pytest

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger_enricher.join.delivery import CommitBatch, CommitBatches
from tests.default_topics import INCIDENTS, PROCESSES, SAMPLES, TOPICS

MAX_RECORDS, MAX_SECONDS = 10, 2.0


def records(topic: str, number: int, *, count: int, time_ms: int = 0) -> list[Record]:
    return [Record(topic, number, offset, time_ms, None, None) for offset in range(count)]


def gathered(*sizes: tuple[int, int, float]) -> CommitBatches:
    """Return slices of so many records, by partition number and when they came."""
    slices = CommitBatches(max_records=MAX_RECORDS, max_seconds=MAX_SECONDS, topics=TOPICS)
    for number, count, now in sizes:
        partition = TopicPartition(SAMPLES.name, number)
        slices.at(number, now=now).count(partition, records(*partition, count=count))
    return slices


@pytest.mark.parametrize(
    ("sizes", "dropped", "expected"),
    [
        ([], [], None),
        ([(0, 1, 0.0)], [], 1.0),
        ([(0, 1, 0.0), (1, 1, 0.5)], [], 1.0),
        ([(0, 9, 0.0), (1, 1, 0.0)], [], 0.0),
        ([(0, 1, -5.0)], [], 0.0),
        # What is dropped counts neither by its records nor by its age.
        ([(0, 9, 0.0), (1, 1, 0.0)], [0], 1.0),
        ([(0, 1, 0.0), (1, 1, 0.5)], [0], 1.5),
        ([(0, 10, 0.0)], [0], None),
        ([(0, 10, 0.0)], [7], 0.0),
    ],
)
def test_more_is_gathered_until_it_is_much_or_the_first_of_it_is_old(
    sizes: list[tuple[int, int, float]], dropped: list[int], expected: float | None
) -> None:
    slices = gathered(*sizes)
    slices.drop(dropped)

    assert slices.seconds_left(now=1.0) == expected


def test_what_is_taken_is_gone_and_gathering_begins_anew() -> None:
    slices = gathered((0, 9, 0.0), (1, 9, 0.0))

    assert [made.partition for made in slices.take()] == [0, 1]
    assert slices.take() == []
    slices.at(2, now=4.0)
    assert slices.seconds_left(now=5.0) == 1.0


def test_how_far_the_ticks_are_done_is_told_by_ticks_alone() -> None:
    made = CommitBatch(partition=0, begun_seconds=0.0, topics=TOPICS)
    for topic, time_ms in ((PROCESSES, 5_000), (SAMPLES, 1_000), (INCIDENTS, 9_000)):
        partition = TopicPartition(topic.name, 0)
        made.count(partition, records(*partition, count=3, time_ms=time_ms))

    assert made.last_tick_ms == 1_000
    assert (made.records, set(made.offsets.values())) == (9, {3})
