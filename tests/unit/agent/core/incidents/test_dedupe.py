"""An occurrence that two sources see is reported once."""

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
    """Return both lists merged, each in its own order."""
    picks = draw(st.permutations([0] * len(first) + [1] * len(second)))
    rests = [iter(first), iter(second)]
    return [next(rests[pick]) for pick in picks]


@st.composite
def seen_by_both(draw: st.DrawFn) -> tuple[int, list[Seen]]:
    """Draw occurrences at any distance, each seen by both sources in order."""
    gaps_ns = draw(st.lists(st.integers(0, 5 * NS_PER_SECOND), max_size=12))
    times = list(accumulate(gaps_ns))
    # The order statistics of both differ by the window at most, because each pair does.
    late = sorted(at + draw(st.integers(0, WINDOW_NS)) for at in times)
    prompt, slow = draw(st.permutations(["nvml", "kmsg"]))
    return len(times), interleaved(
        draw, [(prompt, at) for at in times], [(slow, at) for at in late]
    )


@st.composite
def far_apart(draw: st.DrawFn) -> tuple[int, list[Seen]]:
    """Draw occurrences five seconds apart, each seen by one source or by both, in any order."""
    count = draw(st.integers(0, 12))
    seen: list[Seen] = []
    for number in range(count):
        at = (number + 1) * 5 * NS_PER_SECOND
        sources = draw(st.sampled_from([["nvml"], ["kmsg"], ["nvml", "kmsg"]]))
        # The sources differ by at most the window, and both are within one second of the event.
        seen += [(s, at + draw(st.integers(-WINDOW_NS // 2, WINDOW_NS // 2))) for s in sources]
    return count, draw(st.permutations(seen))


@given(seen_by_both())
def test_an_occurrence_that_both_sources_see_is_new_once_in_either_order(
    drawn: tuple[int, list[Seen]],
) -> None:
    count, detections = drawn
    assert news(detections) == count


@given(far_apart())
def test_occurrences_five_seconds_apart_are_each_new_once_in_any_order(
    drawn: tuple[int, list[Seen]],
) -> None:
    count, detections = drawn
    assert news(detections) == count


def test_equal_xids_five_seconds_apart_count_twice_whichever_source_sees_them() -> None:
    first, second = 100 * NS_PER_SECOND, 105 * NS_PER_SECOND
    assert news([("nvml", first), ("kmsg", second)]) == 2
    assert news([("nvml", first), ("kmsg", first), ("kmsg", second), ("nvml", second)]) == 2


def test_a_burst_that_one_source_sees_is_reported_one_by_one() -> None:
    assert news([("nvml", NS_PER_SECOND)] * 100) == 100


def test_the_window_includes_its_end_but_nothing_later() -> None:
    assert news([("nvml", 0), ("kmsg", WINDOW_NS)]) == 1
    assert news([("nvml", 0), ("kmsg", WINDOW_NS + 1)]) == 2


def test_the_same_xid_on_another_gpu_or_another_xid_is_new() -> None:
    pairing = Deduplicator()
    assert pairing.is_new(("GPU-1", 79), source="nvml", time_ns=0)
    assert pairing.is_new(("GPU-2", 79), source="kmsg", time_ns=0)
    assert pairing.is_new(("GPU-1", 48), source="kmsg", time_ns=0)


def test_memory_is_bounded_and_keeps_the_newest() -> None:
    pairing = Deduplicator()

    def report(number: int) -> None:
        pairing.is_new(("GPU-1", 31), source="nvml", time_ns=number * NS_PER_SECOND)
        pairing.is_new((f"GPU-{number}", 79), source="nvml", time_ns=number * NS_PER_SECOND)

    assert is_bounded(pairing, report, times=10_000)
    assert not pairing.is_new(("GPU-1", 31), source="kmsg", time_ns=19_999 * NS_PER_SECOND)
    assert not pairing.is_new(("GPU-19999", 79), source="kmsg", time_ns=19_999 * NS_PER_SECOND)
