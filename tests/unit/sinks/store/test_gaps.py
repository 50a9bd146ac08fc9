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


def test_a_row_says_what_is_missing_where_when_and_how_much() -> None:
    assert row(gap(51, 801), stored=50, recorded=None) == (
        *(*AT, "retention", 51, 801, 750),
        *(5, 9000, 7, "topic"),
    )


@pytest.mark.parametrize(
    ("stored", "recorded", "expected"),
    [
        (50, None, (51, 801)),
        (None, None, (51, 801)),
        # The group had committed less than the table has.
        (99, None, (100, 801)),
        (800, None, None),
        # It was recorded before, in part or all of it.
        (50, 700, (700, 801)),
        (50, 801, None),
        (50, 900, None),
        # Of an earlier gap, behind which rows were stored.
        (50, 20, (51, 801)),
    ],
)
def test_what_is_stored_or_recorded_is_not_missing_again(
    stored: int | None, recorded: int | None, expected: tuple[int, int] | None
) -> None:
    made = row(gap(51, 801), stored=stored, recorded=recorded)
    assert (made and made[3:5]) == expected


def test_of_a_topic_that_is_gone_nobody_knows_how_much_is_missing() -> None:
    gone = gap(51, 0, reason=GapReason.TOPIC_RECREATED, after=None)
    made = row(gone, stored=50, recorded=None)
    assert made == (*(*AT, "topic_recreated", 51, None, None), *(5, None, 7, "topic"))
    assert row(gone, stored=50, recorded=recorded_up_to(gone)) is None


def test_a_batch_that_cannot_be_unpacked_has_both_its_ends() -> None:
    unreadable = gap(51, 61, reason=GapReason.UNREADABLE)
    made = row(unreadable, stored=50, recorded=None)
    assert made == (*(*AT, "unreadable", 51, 61, 10), *(5, 9000, 7, "topic"))
    assert row(unreadable, stored=50, recorded=recorded_up_to(unreadable)) is None
