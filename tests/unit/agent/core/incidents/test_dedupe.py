"""Detections of one event by two sources are reported once."""

from collections.abc import Iterable
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.core.incidents import WINDOW_NS, Deduplicator
from tests.held_objects import is_bounded

KEY = ("GPU-1", 79)
Seen = tuple[str, int]
"""Source and time stamp."""


def news(detections: Iterable[Seen], key: tuple[str, int] = KEY) -> int:
    pairing = Deduplicator()
    return sum(pairing.is_new(key, source=source, time_ns=at) for source, at in detections)


def interleaved(draw: st.DrawFn, first: list[Seen], second: list[Seen]) -> list[Seen]:
    """Return both lists merged at random, each in its own order."""
    picks = draw(st.permutations([0] * len(first) + [1] * len(second)))
    rests = [iter(first), iter(second)]
    return [next(rests[pick]) for pick in picks]


@st.composite
def seen_by_both(draw: st.DrawFn) -> tuple[int, list[Seen]]:
    """Return events however close together, each detected by both sources in its own order."""
    gaps_ns = draw(st.lists(st.integers(0, 5 * NS_PER_SECOND), max_size=12))
    times = list(accumulate(gaps_ns))
    # If each pair differs by at most the window, so do the sorted lists, element by element.
    late = sorted(at + draw(st.integers(0, WINDOW_NS)) for at in times)
    prompt, slow = draw(st.permutations(["nvml", "kmsg"]))
    return len(times), interleaved(
        draw, [(prompt, at) for at in times], [(slow, at) for at in late]
    )


@st.composite
def far_apart(draw: st.DrawFn) -> tuple[int, list[Seen]]:
    """Return events five seconds apart, each detected by one source or by both, in any order."""
    count = draw(st.integers(0, 12))
    seen: list[Seen] = []
    for number in range(count):
        at = (number + 1) * 5 * NS_PER_SECOND
        sources = draw(st.sampled_from([["nvml"], ["kmsg"], ["nvml", "kmsg"]]))
        # The sources differ by at most the window, and both are within one second of the event.
        seen += [(s, at + draw(st.integers(-WINDOW_NS // 2, WINDOW_NS // 2))) for s in sources]
    return count, draw(st.permutations(seen))


@given(seen_by_both())
def test_each_occurrence_that_both_sources_see_is_news_once_whoever_comes_first(
    drawn: tuple[int, list[Seen]],
) -> None:
    count, detections = drawn
    assert news(detections) == count


@given(far_apart())
def test_each_occurrence_is_news_once_whoever_sees_it_and_in_any_order(
    drawn: tuple[int, list[Seen]],
) -> None:
    count, detections = drawn
    assert news(detections) == count


def test_two_equal_xids_five_seconds_apart_are_two_whoever_sees_them() -> None:
    first, second = 100 * NS_PER_SECOND, 105 * NS_PER_SECOND
    assert news([("nvml", first), ("kmsg", second)]) == 2
    assert news([("nvml", first), ("kmsg", first), ("kmsg", second), ("nvml", second)]) == 2


def test_a_burst_that_one_source_sees_is_reported_one_by_one() -> None:
    assert news([("nvml", NS_PER_SECOND)] * 100) == 100


def test_the_window_holds_its_ends_and_no_more() -> None:
    assert news([("nvml", 0), ("kmsg", WINDOW_NS)]) == 1
    assert news([("nvml", 0), ("kmsg", WINDOW_NS + 1)]) == 2


def test_another_gpu_and_another_xid_are_another_thing() -> None:
    pairing = Deduplicator()
    assert pairing.is_new(("GPU-1", 79), source="nvml", time_ns=0)
    assert pairing.is_new(("GPU-2", 79), source="kmsg", time_ns=0)
    assert pairing.is_new(("GPU-1", 48), source="kmsg", time_ns=0)


def test_what_is_remembered_is_bounded_and_the_newest_is_kept() -> None:
    pairing = Deduplicator()

    def report(number: int) -> None:
        pairing.is_new(("GPU-1", 31), source="nvml", time_ns=number * NS_PER_SECOND)
        pairing.is_new((f"GPU-{number}", 79), source="nvml", time_ns=number * NS_PER_SECOND)

    assert is_bounded(pairing, report, times=10_000)
    assert not pairing.is_new(("GPU-1", 31), source="kmsg", time_ns=19_999 * NS_PER_SECOND)
    assert not pairing.is_new(("GPU-19999", 79), source="kmsg", time_ns=19_999 * NS_PER_SECOND)
