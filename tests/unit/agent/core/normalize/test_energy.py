"""The energy of ticks, whose sum is the counter's; a GPU's draw without processes."""

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
    """The readings of a GPU at the end of a tick."""

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
            "the counter's difference counts, whatever the draw",
            [Read(5_000, 100_000), Read(5_500, 100_000), Read(5_501, None)],
            [(100_000, POWER), (500, COUNTER), (1, COUNTER)],
        ),
        (
            "without a counter draw times time, with the remainder carried over",
            [Read(None, 1_500, interval_ns=SECOND_NS // 1_000)] * 4,
            [(1, POWER), (2, POWER), (1, POWER), (2, POWER)],
        ),
        ("without readings, none", [Read(None, None), Read(5, None)], [(None, None), (None, None)]),
        (
            "the draw while a counter stands still, then the rest of its step",
            [Read(0, 10), Read(0, 10), Read(30, 10)],
            [(10, POWER), (10, INTERPOLATED), (20, COUNTER)],
        ),
        (
            "an excess of the draw is deducted from the next ticks",
            [Read(0, 10), Read(0, 10), Read(7, 10), Read(9, 10), Read(20, 10)],
            [(10, POWER), (10, INTERPOLATED), (0, COUNTER), (0, COUNTER), (10, COUNTER)],
        ),
        (
            "a counter that was not read later shows the energy in between",
            [Read(0, 10), *[Read(None, 10)] * 3, Read(50, 10), Read(60, None)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (20, COUNTER),
             (10, COUNTER)],
        ),
        (
            "without a draw all of it is in the tick that reads the counter again",
            [Read(0, None), Read(None, None), Read(50, None)],
            [(None, None), (None, None), (50, COUNTER)],
        ),
        (
            "without a draw a counter that stands still shows all of it later",
            [Read(5, None), *[Read(5, None)] * 3, Read(9, None)],
            [(None, None), (0, COUNTER), (0, COUNTER), (None, None), (4, COUNTER)],
        ),
        (
            "a counter that fell was reset",
            [Read(5_000, 10), Read(400, 10), Read(430, 10)],
            [(10, POWER), (10, POWER), (30, COUNTER)],
        ),
        (
            "a counter that had stopped does not deduct the draw",
            [Read(5, 10), *[Read(5, 10)] * 4, Read(8, 10), Read(20, 10)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (10, POWER),
             (10, POWER), (12, COUNTER)],
        ),
        (
            "a counter that shows all of it in one step is counted once",
            [Read(5, 10), *[Read(5, 10)] * 4, Read(60, 10)],
            [(10, POWER), (10, INTERPOLATED), (10, INTERPOLATED), (10, POWER), (10, POWER),
             (15, COUNTER)],
        ),
        (
            "a difference over a longer time counts for the tick's part",
            [Read(0, 10), Read(80, 10, unresponsive_ns=3 * SECOND_NS), Read(95, 10)],
            [(10, POWER), (20, INTERPOLATED), (15, COUNTER)],
        ),
    ],
)  # fmt: skip
def test_a_tick_gets_its_energy_from_the_counter_or_from_the_draw(
    law: str, reads: list[Read], booked: list[tuple[int | None, EnergyMethod | None]]
) -> None:
    assert reported(*reads) == booked, law


def test_a_leap_of_the_counter_is_not_energy_and_is_counted() -> None:
    """The bound is a second more than the tick, because a step may show energy from before it."""
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
def test_energy_is_never_negative_and_missing_without_a_method(read: list[Read]) -> None:
    for booked in book(read):
        assert (booked.millijoules is None) == (booked.method is None)
        assert booked.millijoules is None or booked.millijoules >= 0
        assert booked.meter.ahead >= 0
        assert 0 <= booked.meter.rest < SECOND_NS


@given(reads(with_gaps=False, with_falls=False))
@example([Read(0, 1_000), Read(0, 1_000), Read(1, 0), Read(5_000, 0)])
@example([Read(0, 1_000), *[Read(None, 1_000)] * 9, Read(5_000, 1_000), Read(20_000, 1_000)])
def test_ticks_add_up_to_the_counter_to_the_millijoule(read: list[Read]) -> None:
    """The meter keeps the energy booked beyond the counter; it is zero after a COUNTER tick."""
    first: int | None = None
    total, before = 0, EnergyMeter(covered_ns=0)
    for booked in book(read):
        total += booked.millijoules or 0
        counter, has_stopped = booked.read.counter, before.has_stopped
        drawn = 0 if counter is None or first is None else counter - first
        if counter is not None:
            has_moved = counter != before.counter
            if first is None or (has_moved and has_stopped and total > drawn):
                # The sum restarts here: a counter that had stopped left out the energy from the
                # draw.
                first, total, drawn = counter, 0, 0
            assert total == drawn + booked.meter.ahead
            if booked.method is COUNTER and booked.millijoules:
                assert total == drawn
        before = booked.meter


@given(reads(with_gaps=False), st.integers(0, 40))
def test_without_a_counter_ticks_add_up_to_draw_times_time(read: list[Read], cut: int) -> None:
    lone = [each._replace(counter=None) for each in read]
    booked = [one.millijoules or 0 for one in book(lone)]
    for count in (cut % (len(lone) + 1), len(lone)):
        drawn = sum((each.power or 0) * each.interval_ns for each in lone[:count])
        assert sum(booked[:count]) == drawn // SECOND_NS


@given(reads(with_falls=False))
def test_time_that_no_tick_covers_adds_no_energy(read: list[Read]) -> None:
    """Without a draw, ticks have at most the counter's difference over the whole time."""
    lone = [each._replace(power=None) for each in read]
    counters = [each.counter for each in lone if each.counter is not None]
    total = sum(booked.millijoules or 0 for booked in book(lone))
    risen = counters[-1] - counters[0] if counters else 0
    assert total <= risen
    if not any(each.unresponsive_ns for each in lone):
        assert total == risen


# The draw of a GPU without processes.


class IdleGpu:
    """A GPU that is observed tick by tick."""

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
def gpu() -> IdleGpu:
    """Return a GPU whose last tick ended without a process."""
    made = IdleGpu()
    made.watch(90)
    return made


def test_the_idle_draw_is_the_mean_of_a_long_enough_time_without_a_process(gpu: IdleGpu) -> None:
    assert gpu.watch(60, ticks=5) is None
    assert gpu.watch(80, ticks=4) is None
    assert gpu.watch(80) == 70_000


def test_one_long_tick_is_enough(gpu: IdleGpu) -> None:
    assert gpu.watch(70, seconds=MIN_FREE_NS / SECOND_NS) == 70_000


def test_the_lowest_mean_is_kept(gpu: IdleGpu) -> None:
    assert [gpu.watch(watts, ticks=10) for watts in (70, 65, 71)] == [70_000, 65_000, 65_000]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"is_free": False},
        {"is_unused": False},
        {"watts": None},
        # A GPU always draws power, so 0 means that the reading is missing.
        {"watts": 0},
    ],
)
def test_the_whole_time_must_be_without_work(gpu: IdleGpu, spoilt: dict[str, float | None]) -> None:
    gpu.watch(50, ticks=9)
    gpu.watch(**{"watts": 50, **spoilt})  # type: ignore[arg-type]  # a table of arguments
    assert gpu.watch(50, ticks=9) is None


def test_the_tick_in_which_a_process_ended_does_not_count(gpu: IdleGpu) -> None:
    gpu.watch(400, is_free=False)
    gpu.watch(300)
    assert gpu.watch(70, ticks=10) == 70_000


def test_the_time_does_not_start_while_ticks_are_ahead_of_the_counter(gpu: IdleGpu) -> None:
    """The counter then shows less than the energy drawn."""
    gpu.watch(1, is_settled=False)
    assert gpu.watch(70, ticks=10) == 70_000


def test_a_gpu_that_did_not_answer_starts_over_and_keeps_its_lowest_mean(gpu: IdleGpu) -> None:
    gpu.watch(70, ticks=19)
    gpu.idle = gpu.idle.interrupt()
    # The processes at the beginning of the first tick are not known.
    assert gpu.watch(60, ticks=10) == 70_000
    assert gpu.watch(60) == 60_000
