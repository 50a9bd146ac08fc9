"""The minimum length and the identity of a topic to which the table's offsets apply."""

import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger.errors import UserError
from gpuledger_sinks.store.stored import is_same_topic, number_of, refuse_shorter_topic

AT = TopicPartition("gpuledger.events.v1", 3)


@pytest.mark.parametrize("last_offset", [-1, 0, 4])
@pytest.mark.parametrize("end", range(7))
def test_only_a_partition_that_lacks_the_last_stored_record_is_rejected(
    last_offset: int, end: int
) -> None:
    is_refused = False
    try:
        refuse_shorter_topic(AT, last_offset=last_offset, end=end)
    except UserError as error:
        is_refused = f"up to offset {last_offset}, " in str(error) and f"ends at {end}: " in str(
            error
        )

    assert is_refused is (end <= last_offset)


@pytest.mark.parametrize(
    ("stored", "topic_id", "is_same"),
    [
        (number_of("a"), "a", True),
        (number_of("a"), "b", False),
        (number_of("a") + 1, "a", False),
        (None, "a", True),
        (number_of("a"), None, True),
    ],
)
def test_only_a_known_identity_that_differs_is_that_of_another_topic(
    *, stored: int | None, topic_id: str | None, is_same: bool
) -> None:
    assert is_same_topic(stored=stored, topic_id=topic_id) is is_same


def test_an_identity_is_a_number_that_a_table_can_store() -> None:
    assert all(0 <= number_of(str(topic_id)) < 2**63 for topic_id in range(99))
