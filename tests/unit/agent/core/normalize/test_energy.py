"""Energy of ticks adds up to the counter, whatever the readings are; idle draw."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.records import EnergyMethod
from gpuledger.records.bounds import MAX_MILLIWATTS
from gpuledger_agent.core.normalize.energy import MIN_FREE_NS, EnergyMeter, IdleDraw, TickEnergy
from gpuledger_agent.core.readings import Validator

SECOND_NS = 1_000_000_000
COUNTER, INTERPOLATED, POWER = EnergyMethod


class Read(NamedTuple):
    """A board's readings at the end of a tick."""

    counter: int | None
    power: int | None
    interval_ns: int = SECOND_NS
    unresponsive_ns: int = 0
    """Time before the tick that no tick covers."""


class Booked(NamedTuple):
    """A tick, and the meter after it."""

    read: Read
    millijoules: int | None
    method: EnergyMethod | None
    meter: EnergyMeter


def book(reads: list[Read]) -> Iterator[Booked]:
    now_ns = 7 * SECOND_NS
    meter, validator = EnergyMeter(covered_ns=now_ns), Validator()
    for read in reads:
        now_ns += read.unresponsive_ns + read.interval_ns
        meter, energy = meter.measure(
            read.counter,
            read.power,
            interval_ns=read.interval_ns,
            now_ns=now_ns,
            validator=validator,
        )
        yield Booked(read, *energy, meter)


def reported(*reads: Read) -> list[tuple[int | None, EnergyMethod | None]]:
    return [(booked.millijoules, booked.method) for booked in book(list(reads))]


@pytest.mark.parametrize(
    ("law", "reads", "booked"),
    [
        (
            "the counter's difference, however much the draw says",
            [Read(5_000, 100_000), Read(5_500, 100_000), Read(5_501, None)],
            [(100_000, POWER), (500, COUNTER), (1, COUNTER)],
        ),
        (
            "without a counter the draw times the time, and the rest of a millijoule the next time",
            [Read(None, 1_500, interval_ns=SECOND_NS // 1_000)] * 4,
            [(1, POWER), (2, POWER), (1, POWER), (2, POWER)],
        ),
        ("nothing of nothing", [Read(None, None), Read(5, None)], [(None, None), (None, None)]),
        (
            "while a counter stands still the draw, and of its step what is left",
            [Read(0, 10), Read(0, 10), Read(30, 10)],
            [(10, POWER), (10, INTERPOLATED), (20, COUNTER)],
        ),
        (
            "what the draw said too much is taken from the ticks that follow",
            [Read(0, 10), Read(0, 10), Read(7, 10), Read(9, 10), Read(20, 10)],
            [(10, POWER), (10, INTERPOLATED), (0, COUNTER), (0, COUNTER), (10, COUNTER)],
        ),
        (
            "a counter that was not read shows later what was drawn meanwhile",
            [Read(0, 10), *[Read(None, 10)] * 3, Read(50, 10), Read(60, None)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (20, COUNTER),
             (10, COUNTER)],
        ),
        (
            "without a draw all of it stands in the tick in which the counter is read again",
            [Read(0, None), Read(None, None), Read(50, None)],
            [(None, None), (None, None), (50, COUNTER)],
        ),
        (
            "a counter that stands still without a draw shows nothing, and later all of it",
            [Read(5, None), *[Read(5, None)] * 3, Read(9, None)],
            [(None, None), (0, COUNTER), (0, COUNTER), (None, None), (4, COUNTER)],
        ),
        (
            "a counter that fell has begun again",
            [Read(5_000, 10), Read(400, 10), Read(430, 10)],
            [(10, POWER), (10, POWER), (30, COUNTER)],
        ),
        (
            "one that had stopped does not owe what the draw said",
            [Read(5, 10), *[Read(5, 10)] * 4, Read(8, 10), Read(20, 10)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (10, POWER),
             (10, POWER), (12, COUNTER)],
        ),
        (
            "one that shows with one step what was drawn all along has all of it, and not twice",
            [Read(5, 10), *[Read(5, 10)] * 4, Read(60, 10)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (10, POWER),
             (15, COUNTER)],
        ),
        (
            "of a difference over time that no tick covers the tick's part",
            [Read(0, 10), Read(80, 10, unresponsive_ns=3 * SECOND_NS), Read(95, 10)],
            [(10, POWER), (20, INTERPOLATED), (15, COUNTER)],
        ),
    ],
)  # fmt: skip
def test_what_a_tick_drew(
    law: str, reads: list[Read], booked: list[tuple[int | None, EnergyMethod | None]]
) -> None:
    assert reported(*reads) == booked, law


def test_a_leap_of_the_counter_is_no_energy_and_is_counted() -> None:
    """A second longer than the tick, because one step may contain energy from before the tick."""
    validator = Validator()
    meter = EnergyMeter(covered_ns=0, counter=0)
    most = 2 * MAX_MILLIWATTS
    for counter, booked in ((most, (most, COUNTER)), (most + 1, (9, POWER))):
        after, energy = meter.measure(
            counter, 9, interval_ns=SECOND_NS, now_ns=SECOND_NS, validator=validator
        )
        assert energy == booked
        assert (after.counter, after.ahead) == (counter, 0)
    assert dict(validator.dropped) == {("energy_millijoules", "out_of_range"): 1}


# For any sequence of readings.

_STEP = st.integers(0, 2_000)
_POWERS = st.none() | st.integers(0, 3_000)
_INTERVALS = st.integers(SECOND_NS // 4, 3 * SECOND_NS)


@st.composite
def reads(draw: st.DrawFn, *, with_gaps: bool = True, with_falls: bool = True) -> list[Read]:
    counter, made = draw(st.integers(0, 10**6)), []
    for _ in range(draw(st.integers(1, 30))):
        counter += draw(_STEP) * draw(st.booleans())
        if with_falls and draw(st.integers(0, 9)) == 0:
            counter = draw(st.integers(0, 100))
        unresponsive_ns = draw(st.integers(1, 5 * SECOND_NS)) if draw(st.integers(0, 9)) == 0 else 0
        made.append(
            Read(
                counter if draw(st.integers(0, 4)) else None,
                draw(_POWERS),
                draw(_INTERVALS),
                unresponsive_ns if with_gaps else 0,
            )
        )
    return made


@given(reads())
def test_no_tick_is_below_nothing_and_one_without_a_method_has_no_energy(read: list[Read]) -> None:
    for booked in book(read):
        assert (booked.millijoules is None) == (booked.method is None)
        assert booked.millijoules is None or booked.millijoules >= 0
        assert booked.meter.ahead >= 0
        assert 0 <= booked.meter.rest < SECOND_NS


@given(reads(with_gaps=False, with_falls=False))
@example([Read(0, 1_000), Read(0, 1_000), Read(1, 0), Read(5_000, 0)])
@example([Read(0, 1_000), *[Read(None, 1_000)] * 9, Read(5_000, 1_000), Read(20_000, 1_000)])
def test_ticks_add_up_to_the_counter_to_the_millijoule(read: list[Read]) -> None:
    """The excess over the counter is known, and is zero once a tick is booked by the counter."""
    first: int | None = None
    total, before = 0, EnergyMeter(covered_ns=0)
    for booked in book(read):
        total += booked.millijoules or 0
        counter, has_stopped = booked.read.counter, before.has_stopped
        drawn = 0 if counter is None or first is None else counter - first
        if counter is not None:
            has_moved = counter != before.counter
            if first is None or (has_moved and has_stopped and total > drawn):
                # A new account begins here: a counter that had stopped missed energy.
                first, total, drawn = counter, 0, 0
            assert total == drawn + booked.meter.ahead
            if booked.method is COUNTER and booked.millijoules:
                assert total == drawn
        before = booked.meter


@given(reads(with_gaps=False), st.integers(0, 40))
def test_by_the_draw_alone_ticks_add_up_to_the_draw_times_the_time(
    read: list[Read], cut: int
) -> None:
    lone = [each._replace(counter=None) for each in read]
    booked = [one.millijoules or 0 for one in book(lone)]
    for count in (cut % (len(lone) + 1), len(lone)):
        drawn = sum((each.power or 0) * each.interval_ns for each in lone[:count])
        assert sum(booked[:count]) == drawn // SECOND_NS


@given(reads(with_falls=False))
def test_time_that_no_tick_covers_adds_nothing(read: list[Read]) -> None:
    """Without power readings, ticks have at most the counter's difference over all of the time."""
    lone = [each._replace(power=None) for each in read]
    counters = [each.counter for each in lone if each.counter is not None]
    total = sum(booked.millijoules or 0 for booked in book(lone))
    risen = counters[-1] - counters[0] if counters else 0
    assert total <= risen
    if not any(each.unresponsive_ns for each in lone):
        assert total == risen


# Idle draw.


class Board:
    """A board that is watched tick by tick."""

    def __init__(self) -> None:
        self.idle = IdleDraw()

    def watch(
        self,
        watts: float | None,
        *,
        ticks: int = 1,
        seconds: float = 1.0,
        is_free: bool = True,
        is_unused: bool = True,
        is_settled: bool = True,
    ) -> int | None:
        for _ in range(ticks):
            drawn = None if watts is None else round(watts * seconds * 1_000)
            self.idle = self.idle.watch(
                TickEnergy(drawn, COUNTER),
                is_free=is_free,
                is_unused=is_unused,
                is_settled=is_settled,
                interval_ns=round(seconds * SECOND_NS),
            )
        return self.idle.lowest_milliwatts


@pytest.fixture
def board() -> Board:
    """Return a board whose last tick ended without a process."""
    made = Board()
    made.watch(90)
    return made


def test_the_idle_draw_is_the_mean_of_long_enough_without_a_process(board: Board) -> None:
    assert board.watch(60, ticks=5) is None
    assert board.watch(80, ticks=4) is None
    assert board.watch(80) == 70_000


def test_a_tick_that_is_long_enough_is_enough(board: Board) -> None:
    assert board.watch(70, seconds=MIN_FREE_NS / SECOND_NS) == 70_000


def test_the_lowest_stands(board: Board) -> None:
    assert [board.watch(watts, ticks=10) for watts in (70, 65, 71)] == [70_000, 65_000, 65_000]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"is_free": False},
        {"is_unused": False},
        {"watts": None},
        # Energy of zero means that the board does not report its power.
        {"watts": 0},
    ],
)
def test_all_of_the_time_must_be_without_work(
    board: Board, spoilt: dict[str, float | None]
) -> None:
    board.watch(50, ticks=9)
    board.watch(**{"watts": 50, **spoilt})  # type: ignore[arg-type]  # a table of arguments
    assert board.watch(50, ticks=9) is None


def test_the_tick_in_which_a_process_ended_does_not_count(board: Board) -> None:
    board.watch(400, is_free=False)
    board.watch(300)
    assert board.watch(70, ticks=10) == 70_000


def test_it_is_not_begun_while_ticks_are_ahead_of_the_counter(board: Board) -> None:
    """The counter then shows less than the energy used."""
    board.watch(1, is_settled=False)
    assert board.watch(70, ticks=10) == 70_000


def test_a_board_that_did_not_answer_is_watched_anew_and_keeps_its_lowest(board: Board) -> None:
    board.watch(70, ticks=19)
    board.idle = board.idle.interrupt()
    # It is unknown whether there was a process before the first tick.
    assert board.watch(60, ticks=10) == 70_000
    assert board.watch(60) == 60_000
