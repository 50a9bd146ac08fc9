"""The rows of the table `gaps`: each missing offset once, however often a gap is found."""

import pytest

from gpuledger.bus.protocol import Gap, GapReason, TopicPartition
from gpuledger_sinks.store.resuming import gap_row_of, recorded_up_to

AT = TopicPartition("gpuledger.events.v1", 3)


def gap(
    first: int, next_offset: int, *, reason: GapReason = GapReason.RETENTION, after: int | None = 9
) -> Gap:
    return Gap(
        partition=AT,
        first_offset=first,
        next_offset=next_offset,
        reason=reason,
        time_after_ms=after,
    )


def row(found: Gap, *, stored: int | None, recorded: int | None) -> tuple[object, ...] | None:
    return gap_row_of(
        found,
        stored=stored,
        recorded=recorded,
        topic_id="topic",
        time_before_us=5,
        detected_us=7,
    )


def test_a_row_states_which_offsets_are_missing_where_when_and_how_many() -> None:
    assert row(gap(51, 801), stored=50, recorded=None) == (
        *(*AT, "retention", 51, 801, 750),
        *(5, 9000, 7, "topic"),
    )


@pytest.mark.parametrize(
    ("stored", "recorded", "expected"),
    [
        (50, None, (51, 801)),
        (None, None, (51, 801)),
        # The group's commit was behind the table.
        (99, None, (100, 801)),
        (800, None, None),
        # Part or all of it was recorded before.
        (50, 700, (700, 801)),
        (50, 801, None),
        (50, 900, None),
        # Recorded for an earlier gap, after which rows were stored.
        (50, 20, (51, 801)),
    ],
)
def test_offsets_that_are_stored_or_recorded_are_not_missing_again(
    stored: int | None, recorded: int | None, expected: tuple[int, int] | None
) -> None:
    made = row(gap(51, 801), stored=stored, recorded=recorded)
    assert (made and made[3:5]) == expected


def test_the_number_of_missing_events_of_a_deleted_topic_is_unknown() -> None:
    gone = gap(51, 0, reason=GapReason.TOPIC_RECREATED, after=None)
    made = row(gone, stored=50, recorded=None)
    assert made == (*(*AT, "topic_recreated", 51, None, None), *(5, None, 7, "topic"))
    assert row(gone, stored=50, recorded=recorded_up_to(gone)) is None


def test_an_unreadable_batch_has_its_first_and_last_offset() -> None:
    unreadable = gap(51, 61, reason=GapReason.UNREADABLE)
    made = row(unreadable, stored=50, recorded=None)
    assert made == (*(*AT, "unreadable", 51, 61, 10), *(5, 9000, 7, "topic"))
    assert row(unreadable, stored=50, recorded=recorded_up_to(unreadable)) is None
