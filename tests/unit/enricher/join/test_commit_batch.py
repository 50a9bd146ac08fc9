"""A commit batch until it is delivered: how much it collects, how long, and up to which tick."""

import pytest

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger_enricher.join.delivery import CommitBatch, CommitBatches
from tests.default_topics import INCIDENTS, PROCESSES, SAMPLES, TOPICS

MAX_RECORDS, MAX_SECONDS = 10, 2.0


def records(topic: str, number: int, *, count: int, time_ms: int = 0) -> list[Record]:
    return [Record(topic, number, offset, time_ms, None, None) for offset in range(count)]


def gathered(*sizes: tuple[int, int, float]) -> CommitBatches:
    """Return batches of that many records by partition number and time of arrival."""
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
        # Dropped records count neither by their number nor by their age.
        ([(0, 9, 0.0), (1, 1, 0.0)], [0], 1.0),
        ([(0, 1, 0.0), (1, 1, 0.5)], [0], 1.5),
        ([(0, 10, 0.0)], [0], None),
        ([(0, 10, 0.0)], [7], 0.0),
    ],
)
def test_a_batch_is_due_when_it_is_large_or_its_first_record_is_old(
    sizes: list[tuple[int, int, float]], dropped: list[int], expected: float | None
) -> None:
    slices = gathered(*sizes)
    slices.drop(dropped)

    assert slices.seconds_left(now=1.0) == expected


def test_a_batch_is_taken_only_once_and_a_new_one_begins() -> None:
    slices = gathered((0, 9, 0.0), (1, 9, 0.0))

    assert [made.partition for made in slices.take()] == [0, 1]
    assert slices.take() == []
    slices.at(2, now=4.0)
    assert slices.seconds_left(now=5.0) == 1.0


def test_only_ticks_determine_the_time_of_the_last_tick() -> None:
    made = CommitBatch(partition=0, begun_seconds=0.0, topics=TOPICS)
    for topic, time_ms in ((PROCESSES, 5_000), (SAMPLES, 1_000), (INCIDENTS, 9_000)):
        partition = TopicPartition(topic.name, 0)
        made.count(partition, records(*partition, count=3, time_ms=time_ms))

    assert made.last_tick_ms == 1_000
    assert (made.records, set(made.offsets.values())) == (9, {3})
