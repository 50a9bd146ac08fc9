"""Time that two writers cover under one node name is booked once; one writer is always booked."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS
from gpuledger.records import NodeProgress
from gpuledger_enricher.join.progress.passage import MIN_GAP_NS
from tests.default_topics import PROGRESS
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, record, sample

SECOND: Final = 1000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
T_MS: Final = T_NS // NS_PER_MS
UPTIME: Final = 10 * HOUR
BEHIND: Final = st.sampled_from([0, 1, SECOND, 10 * SECOND, 50 * SECOND, HOUR, -10 * SECOND, -HOUR])


@dataclass(frozen=True)
class Written:
    """A tick, and when it reaches the topic; times are in milliseconds after `T_MS`."""

    writer: str
    boot: str
    seq: int
    ends: int
    """When it ends, by the clock of its node."""
    length: int
    sent: int


def book(ticks: list[Written], *, hands_over: int = 0) -> list[Written]:
    """Return the booked ticks; another worker takes over after each `hands_over` ticks."""
    given, booked = Given(), []
    progress: list[Message] = []
    for number, tick in enumerate(sorted(ticks, key=lambda tick: tick.sent), start=1):
        given.now_ns = (T_MS + tick.sent) * NS_PER_MS
        offered = sample(
            boot_id=tick.boot,
            seq=tick.seq,
            time_ns=(T_MS + tick.ends) * NS_PER_MS,
            interval_ns=tick.length * NS_PER_MS,
            gpus=[],
            containers=[],
        )
        read = record(offered, offset=number)._replace(timestamp_ms=T_MS + tick.sent)
        booked += [tick] * len(given.stage.take_samples([read]))
        if hands_over and number % hands_over == 0:
            progress += given.stage.drain_progress(3)
            given.stage.forget(3)
            given.read_watermarks(progress)
    return booked


def seconds_booked(ticks: list[Written]) -> float:
    return sum(tick.length for tick in book(ticks)) / SECOND


def covered(ticks: list[Written]) -> int:
    """Return the length of the union of the ticks' intervals, by the clocks of their nodes."""
    total, until = 0, -(10**15)
    for begin, end in sorted((tick.ends - tick.length, tick.ends) for tick in ticks):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Stretch:
    """A time in which an agent runs with one sampling interval."""

    length: int
    ticks: int
    pause: int
    """How long no agent runs before it."""
    reboots: bool
    behind: int
    """By how much the clock is behind after the boot, or after it is set."""
    is_set: bool
    """Whether the clock is set before the first tick."""
    delay: int
    """How long its ticks stay on the node."""


def ticks_of(
    stretches: list[Stretch], *, writer: str, start: int = 0, boot: str = ""
) -> list[Written]:
    """Return the ticks of one machine, in the order in which it sends them.

    With `boot`, the machine never reboots, because another agent runs on it.
    """
    made: list[Written] = []
    now, begun, sent, behind = start, -UPTIME, 0, 0
    name = boot or f"{writer}-0"
    for number, stretch in enumerate(stretches):
        now += stretch.pause
        if stretch.reboots and not boot:
            now, name = now + stretch.length, f"{writer}-{number + 1}"
            begun = now - 1
        if stretch.is_set or (stretch.reboots and not boot):
            behind = stretch.behind
        for _ in range(stretch.ticks):
            now += stretch.length
            sent = max(sent, now + stretch.delay)
            made.append(Written(writer, name, now - begun, now - behind, stretch.length, sent))
    return made


def stretches(*, is_set: bool) -> st.SearchStrategy[list[Stretch]]:
    return st.lists(
        st.builds(
            Stretch,
            length=st.sampled_from([250, SECOND, 1300, 5 * SECOND, 30 * SECOND]),
            ticks=st.integers(1, 12),
            pause=st.sampled_from([0, 1, 400, 20 * SECOND, 3 * MINUTE, HOUR]),
            reboots=st.booleans(),
            behind=BEHIND,
            is_set=st.booleans() if is_set else st.just(value=False),
            delay=st.sampled_from([0, 0, 700, 5 * SECOND, 3 * MINUTE, HOUR]),
        ),
        min_size=1,
        max_size=8,
    )


@for_any(stretches(is_set=True), st.integers(0, 5), st.integers(1, 3))
def test_each_tick_of_a_single_writer_is_booked(
    running: list[Stretch], hands_over: int, copies: int
) -> None:
    """Whether it reboots, restarts, waits on its node, is sent twice, or its clock is set."""
    ticks = ticks_of(running, writer="a")
    assert book(ticks * copies, hands_over=hands_over) == ticks


@for_any(
    stretches(is_set=False),
    stretches(is_set=False),
    st.integers(-2 * MINUTE, 2 * MINUTE),
    st.sampled_from(["", "one machine"]),
    st.sampled_from([0, 1, 7]),
)
def test_two_writers_are_booked_once_for_the_time_that_both_cover(
    first: list[Stretch], second: list[Stretch], start: int, boot: str, hands_over: int
) -> None:
    """Except for a few ticks when a boot begins, and for a clock that is behind then.

    Late ticks of a second machine are like those of a machine that rebooted with its clock behind
    by as much (ADR 068).
    """
    ticks = ticks_of(first, writer="a", boot=boot) + ticks_of(
        second, writer="b", start=start, boot=boot
    )
    booked = book(ticks, hands_over=hands_over)
    boots = {tick.boot for tick in booked}
    twice = sum(tick.length for tick in booked) - covered(booked)
    clocks = 0 if boot else sum(abs(one.behind) + one.delay for one in (*first, *second))
    switches = sum(one.writer != next_.writer for one, next_ in pairwise(booked))
    longest = max(tick.length for tick in ticks)
    assert twice <= len(boots) * 2 * longest + clocks + switches * MIN_GAP_NS // NS_PER_MS


TWO_AGENTS: Final = [
    # Name, boot of the second agent, its sampling interval and phase, seconds booked twice.
    ("of two releases", "a-0", SECOND, 400, 0),
    ("with another sampling interval", "a-0", 5 * SECOND, 400, 0),
    ("that samples more often", "a-0", 250, 100, 0.1),
    ("on a cloned machine", "b-0", SECOND, 400, 1),
    ("on a cloned machine, with another interval", "b-0", 5 * SECOND, 400, 5),
]


@pytest.mark.parametrize(("case", "boot", "length", "phase", "twice"), TWO_AGENTS)
def test_a_second_agent_adds_at_most_its_first_tick(
    case: str, boot: str, length: int, phase: int, twice: float
) -> None:
    usual = Stretch(SECOND, 60, 0, reboots=False, behind=0, is_set=False, delay=0)
    other = Stretch(length, 60_000 // length, 0, reboots=False, behind=0, is_set=False, delay=0)
    ticks = ticks_of([usual], writer="a") + ticks_of(
        [other], writer="b", start=phase, boot="" if boot == "b-0" else boot
    )
    assert 60 <= seconds_booked(ticks) <= 61 + twice, case


@pytest.mark.parametrize("boot", ["a-0", "b-0"])
def test_if_the_booked_writer_ends_the_other_one_continues_after_at_most_a_tick(boot: str) -> None:
    ends = Stretch(SECOND, 30, 0, reboots=False, behind=0, is_set=False, delay=0)
    lasts = Stretch(SECOND, 90, 0, reboots=False, behind=0, is_set=False, delay=0)
    ticks = ticks_of([ends], writer="a") + ticks_of(
        [lasts], writer="b", start=400, boot="" if boot == "b-0" else boot
    )
    booked = book(ticks)
    assert covered(ticks) - covered(booked) <= SECOND
    assert booked[-50:] == ticks[-50:]


@pytest.mark.parametrize("start", [400 - MINUTE, 30_400])
@pytest.mark.parametrize("ahead", [10 * SECOND, 3 * MINUTE, 10 * MINUTE])
@pytest.mark.parametrize("hands_over", [0, 7])
def test_a_second_machine_continues_although_the_clock_of_the_ended_one_was_ahead(
    start: int, ahead: int, hands_over: int
) -> None:
    """After two minutes at most, whichever of the two began first."""
    ends = Stretch(SECOND, 700, 0, reboots=False, behind=-ahead, is_set=True, delay=0)
    lasts = Stretch(SECOND, 1000, 0, reboots=False, behind=0, is_set=False, delay=0)
    second = ticks_of([lasts], writer="b", start=start)
    booked = book(ticks_of([ends], writer="a") + second, hands_over=hands_over)
    left = [tick for tick in second if tick.sent > 700 * SECOND]
    # The next worker knows only when the progress was written, which is up to 7 ticks later.
    assert len(set(left) - set(booked)) <= 2 * MINUTE // SECOND + 1 + hands_over


def test_late_ticks_of_a_second_machine_are_booked_for_time_that_is_not_covered() -> None:
    """Here from before the first boot began."""
    late = Stretch(SECOND, 60, 0, reboots=False, behind=0, is_set=False, delay=MINUTE)
    now = Stretch(SECOND, 60, 0, reboots=False, behind=0, is_set=False, delay=0)
    ticks = ticks_of([late], writer="b") + ticks_of([now], writer="a", start=30 * SECOND)
    booked = book(ticks)
    assert covered(booked) == covered(ticks)
    assert sum(tick.length for tick in booked) <= covered(ticks) + SECOND


def test_an_agent_that_shortens_its_lag_covers_more_than_has_passed() -> None:
    """The interval begins where the previous one ended, but ends less long before its tick."""
    given = Given()
    given.take(seq=1000, time_ns=T_NS)
    longer_ns = 3 * SECOND_NS // 2
    event = given.take(seq=2000, time_ns=T_NS + longer_ns, interval_ns=longer_ns)
    assert event.interval_ns == longer_ns


def test_a_second_machine_is_recognized_after_an_upgrade_of_the_join() -> None:
    """Progress of older versions does not contain the time that boots cover."""
    given = Given()
    older = NodeProgress(
        cluster="default", node="node-a", boot_id="a", seq=1000, time_ns=T_NS, offset=0
    )
    given.stage.restore_progress([record(older, topic=PROGRESS.name)])
    booked = {"a": 0, "b": 0}
    for second in range(1, 11):
        time_ns = T_NS + second * SECOND_NS
        for boot, later_ms in (("a", 0), ("b", 400)):
            booked[boot] += len(
                given.offer(
                    boot_id=boot,
                    seq=1000 * (second + 1) + later_ms,
                    time_ns=time_ns + later_ms * NS_PER_MS,
                )
            )
    assert booked == {"a": 10, "b": 1}


def test_skipped_samples_are_counted_with_their_time() -> None:
    names = ["gpuledger_join_samples_overlapping_total"]
    names.append("gpuledger_join_samples_overlapping_seconds_total")
    before = [value_of(name) for name in names]
    given = Given()
    for seq in (1000, 1400, 2000, 2400):
        given.offer(seq=seq, time_ns=T_NS + seq * NS_PER_MS)
    after = [value_of(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2.0]
