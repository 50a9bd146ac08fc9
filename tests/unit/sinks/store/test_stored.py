"""What is remembered of the table between a look into it and the next."""

import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger_sinks.store.stored import Stored, Streams, number_of

AT = TopicPartition("t", 3)
STREAMS = Streams(group="g", generation="")
TOPIC_ID = "b3l2cTJ1cGE0c2Rm"
OFFSETS = {STREAMS.of(AT): 7}
IDENTITY = {STREAMS.identity_of(AT): number_of(TOPIC_ID)}


def looked(*numbers: dict[str, int]) -> Stored:
    """Return what is remembered after looks at which the table said this."""
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
        # A table that was put back to an earlier state knows less than it did.
        ([OFFSETS | IDENTITY, OFFSETS], {AT: 7}, True),
        ([OFFSETS | IDENTITY, {}], {}, True),
    ],
)
def test_the_last_look_alone_tells_what_the_table_has(
    looks: list[dict[str, int]], last_offsets: dict[TopicPartition, int], *, is_new: bool
) -> None:
    stored = looked(*looks)

    assert stored.last_offsets == last_offsets
    assert stored.new_identities([AT]) == (IDENTITY if is_new else {})


def test_what_was_written_was_written_with_the_topics_identity() -> None:
    stored = looked({})
    stored.advance({AT: 4})

    assert stored.last_offsets == {AT: 4}
    assert stored.new_identities([AT]) == {}
