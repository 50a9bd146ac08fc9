"""A replay describes pods as they were described live, even if podwatch's clock was set back."""

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from gpuledger_enricher.join.pods.pods import PodCache
from gpuledger_enricher.podwatch.pod_watch import Stamps
from tests.unit.enricher.podwatch.builders import PatientClock, pod_record

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.just(0)),
        st.tuples(st.just("label"), st.integers(0, 3)),
        st.tuples(st.just("set back"), st.integers(1, 900)),
        st.tuples(st.just("pass"), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=60,
)


class SetClock(PatientClock):
    """A clock that can be set back; its monotonic time is unaffected."""

    off_ns = 0

    @override
    def time_ns(self) -> int:
        return super().time_ns() + self.off_ns


@given(steps=STEPS)
def test_each_tick_is_described_in_a_replay_as_it_was_live(steps: list[tuple[str, int]]) -> None:
    """By up to an hour in total; ticks have clocks of their own, which keep running."""
    clock = SetClock()
    stamps = Stamps(clock)
    live, written = PodCache(), []
    message: list[tuple[int, dict[str, str]]] = []
    for number, (step, value) in enumerate([("label", 0), *steps], start=1):
        if step == "label":
            changed = pod_record(resource_version=str(number), labels={"team": str(value)})
            seen_ns = stamps.next_ns()
            written.append((changed, seen_ns))
            live.put(changed, partition=0, seen_time_ns=seen_ns)
        elif step == "tick":
            tick_ns = PatientClock.time_ns(clock)
            known = live.find("u1", None, node="node-a")
            assert known is not None
            message.append((tick_ns, known.at(tick_ns).labels))
        elif step == "set back":
            clock.off_ns = max(clock.off_ns - value * 10**9, -3599 * 10**9)
        clock.advance(0.001 if step != "pass" else value)
    again = PodCache()
    for changed, seen_ns in written:
        again.put(changed, partition=0, seen_time_ns=seen_ns)
    known = again.find("u1", None, node="node-a")
    assert known is not None
    for tick_ns, labels in message:
        assert known.at(tick_ns).labels == labels


def test_timestamps_continue_after_those_of_a_previous_podwatch() -> None:
    clock = SetClock()
    newest_ns = clock.time_ns() + 60 * 10**9
    stamps = Stamps(clock, newest_ns=newest_ns)
    clock.advance(1)
    assert stamps.next_ns() == newest_ns + 10**9


def test_a_clock_that_is_set_back_by_more_than_an_hour_is_followed() -> None:
    """It was wrong before: brokers would reject its timestamps, or they would lie in the future."""
    clock = SetClock()
    stamps = Stamps(clock)
    first_ns = stamps.next_ns()
    clock.off_ns = -2 * 3600 * 10**9
    assert stamps.next_ns() == clock.time_ns() < first_ns
