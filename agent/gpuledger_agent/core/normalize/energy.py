"""What a board drew in each tick, in whole millijoules that add up to its counter; its idle draw.

A board is read at ticks and at fast polls between them. `EnergyMeter` makes of the readings a total
that never falls: if the counter can be read and moves, the total is the counter's. While it stands
still or cannot be read, the draw times the time takes the total ahead of it, and what makes no
whole millijoule is carried on; once the counter has moved, the total goes on by what it shows
beyond, and no more. So at each reading by the counter, of more than nothing, the total has gone on
by the counter's difference since the last such reading, to the millijoule, whatever the draw said
in between.

Three things end that account, and another one begins: a counter that fell, as its driver was loaded
anew, or that leapt; a counter that stood still for longer than its steps, as on virtual GPUs, and
in all that time shows less than the draw; and time in which the board is in no tick.

Ticks book differences of that total between the ends of what they cover (`DrawnEnergy`), which is
the time in which busy time was sampled; between two readings the total goes on by time.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import EnergyMethod, bounds
from gpuledger_agent.core.raw import EnergyReading
from gpuledger_agent.core.readings import Validator

MAX_STEP_NS: Final = 2_000_000_000
"""Counters move about every 100 ms; one that stands still for longer than this has stopped."""
# A counter may show with one step what was drawn some time before.
_SLACK_NS: Final = 1_000_000_000
_OPENING_NS: Final = 1_000_000
# As long as a counter stands between its steps: what is read within one says nothing of its own.
_MIN_PART_NS: Final = 100_000_000
# Where a tick's cover ends is known by the driver's stamps, to less than a window.
_MAX_JOINT_NS: Final = 500_000_000
# The last of them that is in a tick is the tick's.
_BY_TRUST: Final = (EnergyMethod.COUNTER, EnergyMethod.INTERPOLATED, EnergyMethod.POWER)
MIN_FREE_NS: Final = 10_000_000_000
"""For how long a board is watched without a process: a step of 100 ms is a hundredth of that."""
FREE_BYTES: Final = 64 * 1024 * 1024
"""What may be in use on a board without a process: a process's context alone takes 100 MiB."""


class TickEnergy(NamedTuple):
    """What a board drew in a tick."""

    millijoules: int | None = None
    """The energy; `None` where neither the counter nor the draw says it."""
    method: EnergyMethod | None = None
    """How it was found."""


class EnergyMeter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the next tick must know of a board's energy."""

    covered_ns: int
    """Until when ticks cover the board, by the monotonic clock."""
    counter: int | None = None
    """The counter as it was read last, in millijoules; `None` where it never was."""
    read_ns: int = 0
    """When it was read."""
    moved_ns: int = 0
    """When it was first read as it is."""
    ahead: int = 0
    """What ticks have booked beyond the counter, in millijoules."""
    rest: int = 0
    """Of the draw times the time: what makes no millijoule yet, in milliwatts times nanoseconds."""

    @property
    def has_stopped(self) -> bool:
        """Whether the counter stood still for longer than its steps when it was read last."""
        return self.read_ns - self.moved_ns > MAX_STEP_NS

    @property
    def is_settled(self) -> bool:
        """Whether the next ticks will not be booked less than what is drawn in them."""
        return self.ahead == 0 or self.has_stopped

    def may_show(self, counter: int | None, now_ns: int) -> bool:
        """Return whether a counter can be the one that was read last."""
        if counter is None or self.counter is None:
            return True
        return 0 <= counter - self.counter <= self._max_drawn(now_ns)

    def _max_drawn(self, now_ns: int) -> int:
        """Return the most millijoules that can have been drawn since the counter was read."""
        length_ns = now_ns - self.read_ns + _SLACK_NS
        return min(bounds.MAX_MILLIWATTS * length_ns // NS_PER_SECOND, bounds.MAX_TICK_MILLIJOULES)

    def measure(
        self,
        counter: int | None,
        power_milliwatts: int | None,
        *,
        interval_ns: int,
        now_ns: int,
        validator: Validator,
    ) -> "tuple[EnergyMeter, TickEnergy]":
        """Return the meter after a tick that ends at `now_ns`, and what was drawn in the tick."""
        by_draw, rest = None, self.rest
        if power_milliwatts is not None:
            by_draw, rest = divmod(rest + power_milliwatts * interval_ns, NS_PER_SECOND)
        if counter is None:
            return self._go_ahead(by_draw, rest, read_ns=self.read_ns, now_ns=now_ns)
        drawn = -1 if self.counter is None else counter - self.counter
        if drawn == 0:
            return self._go_ahead(by_draw, rest, read_ns=now_ns, now_ns=now_ns)
        if drawn > self._max_drawn(now_ns):
            validator.drop("energy_millijoules", "out_of_range")
            drawn = -1
        energy, ahead = TickEnergy(by_draw, None if by_draw is None else EnergyMethod.POWER), 0
        if drawn > 0:
            energy, ahead = self._catch_up(drawn, by_draw, interval_ns, now_ns)
        after = EnergyMeter(
            covered_ns=now_ns,
            counter=counter,
            read_ns=now_ns,
            moved_ns=now_ns,
            ahead=ahead,
            rest=rest if energy.method is EnergyMethod.POWER else self.rest,
        )
        return after, energy

    def _go_ahead(
        self, by_draw: int | None, rest: int, *, read_ns: int, now_ns: int
    ) -> "tuple[EnergyMeter, TickEnergy]":
        """Book the draw while the counter shows nothing new; it will say how much was true."""
        # One that was not read now may have moved; for how long it has not is known up to then.
        since_ns = self.moved_ns if read_ns == now_ns else self.read_ns
        is_between_steps = self.counter is not None and now_ns - since_ns <= MAX_STEP_NS
        energy = TickEnergy()
        if by_draw is not None:
            method = EnergyMethod.INTERPOLATED if is_between_steps else EnergyMethod.POWER
            energy = TickEnergy(by_draw, method)
        elif is_between_steps and read_ns == now_ns:
            energy = TickEnergy(0, EnergyMethod.COUNTER)
        after = EnergyMeter(
            covered_ns=now_ns,
            counter=self.counter,
            read_ns=read_ns,
            moved_ns=self.moved_ns,
            ahead=0 if self.counter is None else self.ahead + (by_draw or 0),
            rest=rest,
        )
        return after, energy

    def _catch_up(
        self, drawn: int, by_draw: int | None, interval_ns: int, now_ns: int
    ) -> tuple[TickEnergy, int]:
        """Return what the counter shows beyond what is booked, and what is booked beyond it."""
        energy = TickEnergy(max(0, drawn - self.ahead), EnergyMethod.COUNTER)
        since_ns = now_ns - self.covered_ns
        if since_ns > interval_ns:
            part = max(0, drawn - self.ahead) * interval_ns // since_ns
            energy = TickEnergy(part, EnergyMethod.INTERPOLATED)
        if not self.has_stopped:
            return energy, max(0, self.ahead - drawn)
        # It had stopped, and what it left out meanwhile was drawn all the same.
        if by_draw is not None and by_draw > (energy.millijoules or 0):
            energy = TickEnergy(by_draw, EnergyMethod.POWER)
        return energy, 0


class EnergyPoint(NamedTuple):
    """The energy by one of the readings."""

    at_ns: int
    """When it was read, by the monotonic clock."""
    millijoules: int
    """What the board has drawn by then, from a beginning of our own."""
    method: EnergyMethod | None
    """How what was drawn since the reading before was found; `None` where it was not."""


class DrawnEnergy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a board has drawn, by all its readings, as far back as the next tick covers it.

    A tick covers the driver's time up to some windows ago, in which busy time was sampled. Its
    energy is of the same time: between two readings, by time. Ticks add up to the last millijoule.
    """

    meter: EnergyMeter
    """Turns readings into what was drawn between them."""
    points: tuple[EnergyPoint, ...] = ()
    """The readings, oldest first."""
    covered_ns: int | None = None
    """Where the last tick's cover ended; `None` before the first."""
    covered_millijoules: int = 0
    """What was drawn by then."""

    def measure(
        self,
        readings: Sequence[EnergyReading],
        *,
        interval_ns: int,
        cover_end_ns: int,
        validator: Validator,
    ) -> "tuple[DrawnEnergy, TickEnergy]":
        """Return it after a tick, and what was drawn in the tick's cover."""
        meter, points = self._read(readings, interval_ns, validator)
        begin_ns = cover_end_ns - interval_ns
        begin = _total_at(points, begin_ns)
        if self.covered_ns is not None and self.covered_ns >= begin_ns - _MAX_JOINT_NS:
            # What was booked is booked, wherever the cover's end has moved to since.
            begin_ns, begin = self.covered_ns, self.covered_millijoules
        end = max(begin, _total_at(points, cover_end_ns))
        methods = _methods_within(points, begin_ns, cover_end_ns)
        tick = TickEnergy()
        if methods and None not in methods:
            tick = TickEnergy(end - begin, max(methods, key=_BY_TRUST.index))
        kept = [*(point for point in points[:-1] if point.at_ns <= cover_end_ns)][-1:]
        kept += [point for point in points if point.at_ns > cover_end_ns or point is points[-1]]
        after = DrawnEnergy(
            meter=meter,
            points=tuple(kept),
            # Of what came before the first reading nothing is known until there is a second one.
            covered_ns=cover_end_ns if len(points) > 1 else None,
            covered_millijoules=end,
        )
        return after, tick

    def _read(
        self, readings: Sequence[EnergyReading], interval_ns: int, validator: Validator
    ) -> tuple[EnergyMeter, list[EnergyPoint]]:
        """Return the meter after further readings, and all points by then."""
        meter, points = self.meter, [*self.points]
        for reading in readings:
            if points and reading.at_ns <= points[-1].at_ns:
                continue
            length_ns = reading.at_ns - points[-1].at_ns if points else interval_ns
            counter = reading.counter
            # Whether a counter that leaps is another one only a tick may decide: it has more to
            # show for it than one fast poll.
            if reading is not readings[-1] and not meter.may_show(counter, reading.at_ns):
                counter = None
            meter, drawn = meter.measure(
                counter,
                reading.power_milliwatts,
                interval_ns=length_ns,
                now_ns=reading.at_ns,
                validator=validator,
            )
            if not points:
                # The very first one opens an interval, and has none behind it.
                points.append(EnergyPoint(reading.at_ns - length_ns, 0, None))
                if length_ns < _OPENING_NS:
                    points = [EnergyPoint(reading.at_ns, 0, None)]
                    continue
            total = points[-1].millijoules + (drawn.millijoules or 0)
            points.append(EnergyPoint(reading.at_ns, total, drawn.method))
        return meter, points


def _total_at(points: Sequence[EnergyPoint], time_ns: int) -> int:
    """Return what was drawn by a time; before the first reading as between the first two."""
    if time_ns >= points[-1].at_ns or len(points) == 1:
        return points[-1].millijoules
    place = max(1, bisect_right(points, time_ns, key=attrgetter("at_ns")))
    before, after = points[place - 1], points[place]
    length_ns = after.at_ns - before.at_ns
    drawn = after.millijoules - before.millijoules
    return before.millijoules + drawn * (time_ns - before.at_ns) // length_ns


def _methods_within(
    points: Sequence[EnergyPoint], begin_ns: int, end_ns: int
) -> list[EnergyMethod | None]:
    """Return how the parts were found that a time is of, but for those that make no difference."""
    lengths: Counter[EnergyMethod | None] = Counter()
    for before, after in pairwise(points):
        length_ns = min(after.at_ns, end_ns) - max(before.at_ns, begin_ns)
        lengths[after.method] += max(0, length_ns)
    if len(points) > 1 and begin_ns < points[0].at_ns:
        # Before the first reading it is taken to have drawn as after it.
        lengths[points[1].method and EnergyMethod.INTERPOLATED] += points[0].at_ns - begin_ns
    return [method for method, length_ns in lengths.items() if length_ns > _MIN_PART_NS]


class IdleDraw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The least that a board has drawn without a process, by its energy over ticks in a row.

    Energy over a while tells more than readings of the draw, which may be of an instant. A state of
    low power that is shorter than that while lowers the mean by its part alone.
    """

    lowest_milliwatts: int | None = None
    """The lowest so far; `None` until the board was seen for long enough."""
    was_free: bool = False
    """Whether the last tick ended without a process."""
    free_ns: int = 0
    """For how long it is watched without one by now."""
    free_millijoules: int = 0
    """What it has drawn since."""

    def watch(
        self,
        energy: TickEnergy,
        *,
        is_free: bool,
        is_unused: bool,
        is_settled: bool,
        interval_ns: int,
    ) -> "IdleDraw":
        """Return what is known after a tick.

        `is_free` says that it ended without a process, `is_unused` that no kernel ran in it, and
        `is_settled` that it is not booked less, as ticks before it were booked more than was drawn.
        """
        if not is_free and not self.was_free:
            return self
        # Where a board is said to draw nothing, it does not say what it draws.
        is_known = is_free and self.was_free and is_unused and bool(energy.millijoules)
        if not is_known or not (self.free_ns or is_settled):
            return IdleDraw(lowest_milliwatts=self.lowest_milliwatts, was_free=is_free)
        lowest = self.lowest_milliwatts
        free_ns = self.free_ns + interval_ns
        millijoules = self.free_millijoules + (energy.millijoules or 0)
        if free_ns >= MIN_FREE_NS:
            mean = millijoules * NS_PER_SECOND // free_ns
            lowest = mean if lowest is None else min(lowest, mean)
            free_ns = millijoules = 0
        return IdleDraw(
            lowest_milliwatts=lowest,
            was_free=True,
            free_ns=free_ns,
            free_millijoules=millijoules,
        )

    def interrupt(self) -> "IdleDraw":
        """Return what is left of it after a tick in which the board did not answer."""
        return IdleDraw(lowest_milliwatts=self.lowest_milliwatts)
