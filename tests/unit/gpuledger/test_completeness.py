"""What a reader may call complete, in whatever order watermarks and records come."""

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
def test_nothing_that_is_read_later_is_of_a_time_that_was_called_complete(
    written: list[int | tuple[int, int]], seen: list[bool]
) -> None:
    """Whoever reads the events slower or faster than the watermarks; what comes late excepted."""
    events: list[int] = []
    marks: list[tuple[int, int]] = []
    for one in written:
        if isinstance(one, int):
            events.append(one)
        else:
            # As a component writes it: of what is there, or of less where it is not the newest.
            until, behind = one
            marks.append((until, max(0, len(events) - behind)))
    # What the law excepts: events that came behind a watermark of a later time.
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


def test_a_watermark_counts_once_the_reader_is_past_what_it_speaks_of() -> None:
    reported = reader()
    reported.take(watermark(100, offset=5))
    assert reported.complete_until_ns([3]) is None
    reported.read_to(3, 4)
    assert reported.complete_until_ns([3]) is None
    reported.read_to(3, 5)
    assert reported.complete_until_ns([3]) == 100


def test_partitions_are_complete_up_to_the_hindmost_and_not_before_each_has_spoken() -> None:
    reported = reader()
    for partition, until in ((0, 100), (1, 70)):
        reported.read_to(partition, 9)
        reported.take(watermark(until, offset=1, partition=partition))
    assert reported.complete_until_ns([0, 1]) == 70
    assert reported.complete_until_ns([0, 1, 2]) is None


def test_a_partition_is_complete_up_to_the_hindmost_of_its_clusters() -> None:
    reported = reader()
    reported.read_to(3, 9)
    for cluster, until in (("east", 100), ("west", 70)):
        reported.take(watermark(until, offset=1, cluster=cluster))
    assert reported.complete_until_ns([3]) == 70


def test_what_was_complete_stays_so_though_a_later_watermark_says_less() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1))
    reported.take(watermark(60, offset=2))
    assert reported.complete_until_ns([3]) == 100


def test_other_stages_and_topics_do_not_count() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1, component="podwatch"))
    reported.take(watermark(100, offset=1, topic="gpuledger.pods.v1"))
    assert reported.complete_until_ns([3]) is None


def test_a_reader_that_is_far_behind_goes_from_one_watermark_to_the_next() -> None:
    """Of very many that wait the newest is kept, and those from where the reader is."""
    reported = reader()
    for number in range(10 * MAX_WAITING):
        reported.take(watermark(number, offset=number))
    reported.read_to(3, 2)
    assert reported.complete_until_ns([3]) == 2
    reported.read_to(3, 10 * MAX_WAITING)
    assert reported.complete_until_ns([3]) == 10 * MAX_WAITING - 1


def test_a_partition_that_was_given_up_is_forgotten() -> None:
    reported = reader()
    reported.read_to(3, 9)
    reported.take(watermark(100, offset=1))
    reported.forget(3)
    assert (reported.of(3), reported.complete_until_ns([3])) == ([], None)
    reported.take(watermark(100, offset=1))
    assert reported.complete_until_ns([3]) is None


def test_a_key_names_stage_cluster_and_partition() -> None:
    assert key_of(watermark(1, offset=1)) == b"join/default/3"


def test_what_was_said_of_a_topic_before_it_was_made_anew_holds_up_nothing() -> None:
    reported = reader()
    reported.read_to(3, 2)
    reported.take(watermark(5, offset=1000))
    reported.take(watermark(9, offset=2))

    assert reported.complete_until_ns([3]) == 9


def test_what_is_taken_back_is_waited_for_no_more_and_counts_again_once_it_is_said_anew() -> None:
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


def test_what_would_be_complete_at_an_offset_is_what_is_once_it_is_read() -> None:
    events = reader()
    events.take(watermark(10, offset=5))
    events.take(watermark(20, offset=9))
    assert [events.complete_with_ns(3, offset) for offset in (4, 5, 8, 9)] == [None, 10, 10, 20]
    assert events.complete_until_ns([3]) is None
    events.expect(watermark(0, offset=0, cluster="another"))
    assert events.complete_with_ns(3, 9) is None
    events.take(watermark(15, offset=7, cluster="another"))
    assert events.complete_with_ns(3, 9) == 15
