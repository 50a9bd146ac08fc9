"""Wall clocks that are wrong or set, and how alerts and series treat their nodes' ticks.

The laws hold for a node's clock as the simulator plays it, whatever it is set to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.records import GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.write_requests import AgeLimits, admit
from gpuledger_sinks.timelines import TickOrder, TickRecord, Timelines
from tests.unit.sinks.builders import NODE, SECOND_NS, START_NS, entry, event
from tests.unit.sinks.clocks import CASES, COUNT, HOUR, YEAR, Told, of_one_boot
from tests.unit.sinks.remote_write.interval_samples import samples_of

each_case = pytest.mark.parametrize("case", CASES)


@dataclass
class Receiver:
    """Accepts requests like Prometheus: whole or not at all, in order within its window."""

    window_seconds: int = 0
    newest_ms: int = 0
    stored: list[int] = field(default_factory=list)

    def takes(self, time_ms: int, now_ms: int) -> bool:
        oldest_ms = self.newest_ms - self.window_seconds * 1000
        if time_ms in self.stored or time_ms > now_ms + 600_000:
            return False
        if time_ms <= self.newest_ms and not (self.window_seconds and time_ms >= oldest_ms):
            return False
        self.newest_ms = max(self.newest_ms, time_ms)
        self.stored.append(time_ms)
        return True


def sent(
    ticks: Sequence[Told], receiver: Receiver, *, poll: int = 1, lag_seconds: int = 0
) -> Counter[str]:
    """Return the outcomes of ticks that are polled in groups: reasons and how often."""
    outcome: Counter[str] = Counter()
    series, timelines = ActiveSeries(), Timelines()
    for start in range(0, len(ticks), poll):
        part = ticks[start : start + poll]
        second = part[-1].arrives + lag_seconds
        now_ns = START_NS + second * SECOND_NS
        items = [
            (RECORD, reported.event([entry()], node=NODE, start_ns=START_NS)) for reported in part
        ]
        for _, made, place, refusal in admit(
            items,
            timelines,
            time_ns=now_ns,
            monotonic_ns=second * SECOND_NS,
            limits=AgeLimits(300 * SECOND_NS, None),
        ):
            outcome[refusal or written(series, made, place, receiver, now_ns)] += 1
    return outcome


RECORD = Record("t", 0, 0, 0, None, b"")


def written(
    series: ActiveSeries, made: TickRecord, order: TickOrder, receiver: Receiver, now_ns: int
) -> str:
    assert isinstance(made, GpuEvent)
    try:
        encoded = series.encode(samples_of(made, is_past=order is TickOrder.SUPERSEDED))
    except ValueError:
        return "invalid"
    time_ms = made.time_ns // 1_000_000
    is_behind = time_ms <= receiver.newest_ms
    if receiver.takes(time_ms, now_ns // 1_000_000):
        return "stored"
    # A tick that is rejected for its order was sent separately, so that it took no other down.
    assert encoded.is_behind == is_behind
    return "out_of_order"


WITHOUT_WINDOW = {
    "never set": {},
    "four minutes ahead once": {"future": 1},
    "an hour ahead for five seconds": {"future": 5},
    # A receiver without a window rejects late ticks; they are sent all the same.
    "set back an hour": {"out_of_order": 38},
    "an hour behind until it is set right": {},
    "a year ahead after a reboot until NTP": {"future": 5},
    "in 1970 after a reboot until NTP": {"invalid": 5},
    "an earlier boot's spool among the later boot's ticks": {"out_of_order": 10},
}


@each_case
@pytest.mark.parametrize(("poll", "lag_seconds"), [(1, 0), (100, 0), (100, 2 * HOUR)])
def test_all_ticks_that_a_receiver_without_a_window_can_accept_are_sent(
    case: str, poll: int, lag_seconds: int
) -> None:
    ticks = CASES[case]
    outcome = sent(ticks, Receiver(), poll=poll, lag_seconds=lag_seconds)
    assert outcome.pop("stored") == len(ticks) - outcome.total()
    assert outcome == WITHOUT_WINDOW[case]


@each_case
def test_a_receiver_with_a_window_accepts_late_ticks_too(case: str) -> None:
    ticks = CASES[case]
    lost = {reason: n for reason, n in WITHOUT_WINDOW[case].items() if reason != "out_of_order"}
    assert sent(ticks, Receiver(window_seconds=2 * HOUR)) == {
        "stored": len(ticks) - sum(lost.values()),
        **lost,
    }


@st.composite
def excursions(draw: st.DrawFn) -> tuple[list[tuple[int, int]], set[int]]:
    """Draw clock changes that are reverted within a minute, and the seconds between them."""
    found: list[tuple[int, int]] = []
    wrong: set[int] = set()
    second = 0
    far = st.integers(11, 10 * YEAR) | st.integers(11, 600)
    for _ in range(draw(st.integers(1, 4))):
        second += draw(st.integers(1, 80))
        length = draw(st.integers(1, 59))
        by = draw(far) * draw(st.sampled_from([1, -1]))
        found += [(second, by), (second + length, -by)]
        wrong |= set(range(second, second + length))
        second += length
    return found, wrong


@given(drawn=excursions())
def test_a_clock_that_is_wrong_for_less_than_a_minute_costs_at_most_its_own_ticks(
    drawn: tuple[list[tuple[int, int]], set[int]],
) -> None:
    found, wrong = drawn
    receiver = Receiver()
    ticks = of_one_boot(found, range(found[-1][0] + 30))
    outcome = sent(ticks, receiver)

    right = {(START_NS + second * SECOND_NS) // 10**6 for second in range(len(ticks))}
    right -= {(START_NS + second * SECOND_NS) // 10**6 for second in wrong}
    assert right <= set(receiver.stored)
    assert outcome.total() == len(ticks)


def test_a_clock_that_stays_ahead_is_believed_after_a_minute() -> None:
    receiver = Receiver()
    outcome = sent(of_one_boot([(7, 240)], range(200)), receiver)
    assert outcome == {"stored": 140, "future": 60}
    assert receiver.newest_ms == START_NS // 10**6 + (199 + 240) * 1000


def test_a_node_that_was_always_slightly_ahead_loses_nothing() -> None:
    assert sent(of_one_boot([(-1, 240)]), Receiver()) == {"stored": COUNT}


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 8), st.integers(-5, 5)), max_size=60
    )
)
def test_each_tick_is_new_once_and_only_the_order_within_its_boot_counts(
    arrivals: list[tuple[str, int, int]],
) -> None:
    timelines, furthest = Timelines(), dict[str, int]()
    for number, (boot, seq, shift) in enumerate(arrivals):
        made = event(boot_id=boot, seq=seq, time_ns=START_NS + shift * SECOND_NS)
        order = timelines.observe(made, received_ns=number * SECOND_NS).order
        assert (order is TickOrder.REPEATED) == (seq <= furthest.get(boot, 0))
        furthest[boot] = max(seq, furthest.get(boot, 0))


def test_nodes_are_forgotten_a_day_after_their_last_tick() -> None:
    timelines = Timelines()
    for hour in range(200):
        timelines.observe(event(node=f"node-{hour}"), received_ns=hour * HOUR * SECOND_NS)
        assert len(timelines) <= 2 * 26
