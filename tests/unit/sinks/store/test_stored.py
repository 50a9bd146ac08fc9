"""The copy of the table's offsets that a sink keeps between two reads."""

import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger_sinks.store.stored import Stored, Streams, number_of

AT = TopicPartition("t", 3)
STREAMS = Streams(group="g", generation="")
TOPIC_ID = "b3l2cTJ1cGE0c2Rm"
OFFSETS = {STREAMS.of(AT): 7}
IDENTITY = {STREAMS.identity_of(AT): number_of(TOPIC_ID)}


def after_reads(*numbers: dict[str, int]) -> Stored:
    """Return the copy after the table was read with these numbers."""
    stored = Stored(streams=STREAMS, topic_id=TOPIC_ID)
    for each in numbers:
        stored.learn(AT, each)
    return stored


@pytest.mark.parametrize(
    ("looks", "last_offsets", "is_new"),
    [
        ([{}], {}, True),
        ([OFFSETS], {AT: 7}, True),
        ([OFFSETS | IDENTITY], {AT: 7}, False),
        # A table that was restored to an earlier state has fewer numbers.
        ([OFFSETS | IDENTITY, OFFSETS], {AT: 7}, True),
        ([OFFSETS | IDENTITY, {}], {}, True),
    ],
)
def test_the_copy_equals_the_last_read_of_the_table(
    looks: list[dict[str, int]], last_offsets: dict[TopicPartition, int], *, is_new: bool
) -> None:
    stored = after_reads(*looks)

    assert stored.last_offsets == last_offsets
    assert stored.new_identities([AT]) == (IDENTITY if is_new else {})


def test_written_offsets_have_the_topics_identity() -> None:
    stored = after_reads({})
    stored.advance({AT: 4})

    assert stored.last_offsets == {AT: 4}
    assert stored.new_identities([AT]) == {}
