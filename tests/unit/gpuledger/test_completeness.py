"""The time through which a reader is complete, whatever the order of watermarks and records."""

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.completeness import MAX_WAITING, Completeness, key_of
from gpuledger.records import Watermark
from tests.default_topics import EVENTS


def watermark(until: int, *, offset: int, **changes: object) -> Watermark:
    values: dict[str, object] = {
        "component": "join",
        "cluster": "default",
        "partition": 3,
        "complete_until_ns": until,
        "topic": EVENTS.name,
        "next_offset": offset,
        "publisher": "test",
    }
    return Watermark(**(values | changes))  # type: ignore[arg-type]  # the names are a Watermark's


def reader() -> Completeness:
    return Completeness(component="join", topic=EVENTS.name)


@given(
    written=st.lists(
        st.one_of(st.integers(0, 20), st.tuples(st.integers(0, 20), st.integers(0, 3))),
        max_size=60,
    ),
    seen=st.lists(st.booleans(), min_size=200, max_size=200),
)
def test_no_event_read_later_belongs_to_a_time_that_was_reported_complete(
    written: list[int | tuple[int, int]], seen: list[bool]
) -> None:
    """The reader may read events slower or faster than watermarks; late events are exempt."""
    events: list[int] = []
    marks: list[tuple[int, int]] = []
    for one in written:
        if isinstance(one, int):
            events.append(one)
        else:
            # A component writes the current end, or an earlier offset with an older watermark.
            until, behind = one
            marks.append((until, max(0, len(events) - behind)))
    # The law exempts events that came after a watermark of a later time.
    late = {
        place
        for place, time in enumerate(events)
        if any(offset <= place and time <= until for until, offset in marks)
    }
    reported, position, taken = reader(), 0, 0
    for reads_event in seen:
        if reads_event and position < len(events):
            complete = reported.complete_until_ns([3])
            assert complete is None or events[position] > complete or position in late
            position += 1
            reported.read_to(3, position)
        elif taken < len(marks):
            until, offset = marks[taken]
            reported.take(watermark(until, offset=offset))
            taken += 1


def test_a_watermark_counts_once_the_reader_has_passed_its_offset() -> None:
    reported = reader()
    reported.take(watermark(100, offset=5))
    assert reported.complete_until_ns([3]) is None
    reported.read_to(3, 4)
    assert reported.complete_until_ns([3]) is None
    reported.read_to(3, 5)
    assert reported.complete_until_ns([3]) == 100


def test_partitions_are_complete_through_the_slowest_and_only_once_each_has_a_watermark() -> None:
    reported = reader()
    for partition, until in ((0, 100), (1, 70)):
        reported.read_to(partition, 9)
        reported.take(watermark(until, offset=1, partition=partition))
    assert reported.complete_until_ns([0, 1]) == 70
    assert reported.complete_until_ns([0, 1, 2]) is None


def test_a_partition_is_complete_through_the_slowest_of_its_clusters() -> None:
    reported = reader()
    reported.read_to(3, 9)
    for cluster, until in (("east", 100), ("west", 70)):
        reported.take(watermark(until, offset=1, cluster=cluster))
    assert reported.complete_until_ns([3]) == 70


def test_a_complete_time_stays_complete_after_an_earlier_watermark() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1))
    reported.take(watermark(60, offset=2))
    assert reported.complete_until_ns([3]) == 100


def test_other_components_and_topics_do_not_count() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1, component="podwatch"))
    reported.take(watermark(100, offset=1, topic="gpuledger.pods.v1"))
    assert reported.complete_until_ns([3]) is None


def test_a_reader_that_is_far_behind_advances_from_one_watermark_to_the_next() -> None:
    """If very many wait, the newest is kept, and those from the reader's position on."""
    reported = reader()
    for number in range(10 * MAX_WAITING):
        reported.take(watermark(number, offset=number))
    reported.read_to(3, 2)
    assert reported.complete_until_ns([3]) == 2
    reported.read_to(3, 10 * MAX_WAITING)
    assert reported.complete_until_ns([3]) == 10 * MAX_WAITING - 1


def test_a_revoked_partition_is_forgotten() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1))
    reported.forget(3)
    assert (reported.of(3), reported.complete_until_ns([3])) == ([], None)
    reported.take(watermark(100, offset=1))
    assert reported.complete_until_ns([3]) is None


def test_a_key_names_component_cluster_and_partition() -> None:
    assert key_of(watermark(1, offset=1)) == b"join/default/3"


def test_watermarks_from_before_a_topic_was_recreated_block_nothing() -> None:
    reported = reader()
    reported.read_to(3, 2)
    reported.take(watermark(5, offset=1000))
    reported.take(watermark(9, offset=2))

    assert reported.complete_until_ns([3]) == 9


def test_a_deleted_watermark_is_not_waited_for_and_counts_again_once_republished() -> None:
    reported = reader()
    reported.read_to(3, 10)
    gone, stays = watermark(5, offset=1, cluster="gone"), watermark(9, offset=1)
    reported.expect(gone)
    for each in (gone, stays):
        reported.take(each)
    assert reported.complete_until_ns([3]) == 5
    for key, partition in ((key_of(gone), 2), (b"store/gone/3", 3), (b"join/gone", 3), (b"", 3)):
        reported.take_back(key, partition)
        assert reported.complete_until_ns([3]) == 5
    reported.take_back(key_of(gone), 3)
    assert reported.complete_until_ns([3]) == 9
    reported.take(watermark(7, offset=1, cluster="gone"))
    assert reported.complete_until_ns([3]) == 7


def test_the_completeness_predicted_for_an_offset_is_reached_when_it_is_read() -> None:
    events = reader()
    events.take(watermark(10, offset=5))
    events.take(watermark(20, offset=9))
    assert [events.complete_with_ns(3, offset) for offset in (4, 5, 8, 9)] == [None, 10, 10, 20]
    assert events.complete_until_ns([3]) is None
    events.expect(watermark(0, offset=0, cluster="another"))
    assert events.complete_with_ns(3, 9) is None
    events.take(watermark(15, offset=7, cluster="another"))
    assert events.complete_with_ns(3, 9) == 15
