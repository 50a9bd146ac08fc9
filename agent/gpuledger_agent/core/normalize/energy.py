"""Computes a board's energy per tick, and its power while no process uses it.

The energies of ticks are whole millijoules and add up to the board's energy counter.

Energy is read at ticks and at fast polls between them. `EnergyMeter` turns the readings into a
total that never falls. If the counter is readable and moves, the total follows the counter. While
the counter stands still or is unreadable, the total grows by power times time and runs ahead of the
counter; fractions of a millijoule are carried over. Once the counter has moved, the total grows
only by the amount by which the counter exceeds the total. Between two readings at which the counter
adds energy, the total thus grows by exactly the counter's difference, whatever the power was in
between.

Three events end this comparison with the counter and start a new one:

- The counter fell because the driver was reloaded, or the counter jumped.
- The counter stood still for longer than its steps, as on virtual GPUs, and then shows less than
  power times time.
- The board was missing from at least one tick.

A tick's energy is the amount by which the total grew over the time that the tick covers
(`DrawnEnergy`), so energy and busy time describe the same time. Between two readings, the total is
interpolated by time.
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
"""A counter that stands still for longer than this has stopped; most move every 100 ms."""
# One step of a counter may contain energy from some time before.
_SLACK_NS: Final = 1_000_000_000
_OPENING_NS: Final = 1_000_000
# The length of a counter's step; shorter parts of a tick do not affect the tick's energy method.
_MIN_PART_NS: Final = 100_000_000
# If a tick's covered time begins at most this long after the end of the previous covered time, it
# is extended back to that end, because these ends are only known to within a window.
_MAX_JOINT_NS: Final = 500_000_000
# From most to least reliable; a tick has the least reliable method of its parts.
_BY_TRUST: Final = (EnergyMethod.COUNTER, EnergyMethod.INTERPOLATED, EnergyMethod.POWER)
MIN_FREE_NS: Final = 10_000_000_000
"""Minimum time without a process over which a mean power is computed. It is 100 steps of the energy
counter, so that the mean is exact to 1 %."""
FREE_BYTES: Final = 64 * 1024 * 1024
"""Maximum memory in use on a board that no process uses; a process's context takes 100 MiB."""


class TickEnergy(NamedTuple):
    """The energy that a board used in a tick."""

    millijoules: int | None = None
    """The energy; `None` if neither the counter nor the power is known."""
    method: EnergyMethod | None = None
    """How the energy was determined."""


class EnergyMeter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Computes a board's energy between two readings, from the energy counter and the power.

    It is the state after a reading; `measure` returns the state after the next reading.
    """

    covered_ns: int
    """Monotonic time of the last reading."""
    counter: int | None = None
    """The counter's last value, in millijoules; `None` if it was never read."""
    read_ns: int = 0
    """When the counter was last read, by the monotonic clock."""
    moved_ns: int = 0
    """When the counter was first read with its last value, by the monotonic clock."""
    ahead: int = 0
    """Energy reported since the counter last moved that the counter does not contain yet, in
    millijoules. It is subtracted once the counter moves."""
    rest: int = 0
    """Fraction of a millijoule carried over to the next power reading, in milliwatts times
    nanoseconds."""

    @property
    def has_stopped(self) -> bool:
        """Whether the counter's last reading showed no change for longer than a step takes."""
        return self.read_ns - self.moved_ns > MAX_STEP_NS

    @property
    def is_settled(self) -> bool:
        """Whether no energy will be subtracted from that of the next readings.

        Energy that was reported ahead of the counter is subtracted later.
        """
        return self.ahead == 0 or self.has_stopped

    def may_show(self, counter: int | None, now_ns: int) -> bool:
        """Return whether `counter` is plausible as the counter's next value, read at `now_ns`."""
        if counter is None or self.counter is None:
            return True
        return 0 <= counter - self.counter <= self._max_drawn(now_ns)

    def _max_drawn(self, now_ns: int) -> int:
        """Return the maximum energy that a board can use since the last reading, in millijoules."""
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
        """Return the meter after a reading at `now_ns`, and the energy since the previous reading.

        `counter` and `power_milliwatts` are the reading's values; `None` means unknown.
        `interval_ns` is the time since the previous reading.
        """
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
        """Return the meter and the energy after a reading without a new value of the counter.

        The energy is power times time (`by_draw`). The counter's next movement corrects it.
        """
        # If the counter was not read now, it may have moved since its last reading.
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
        """Return the energy to report after the counter has risen by `drawn`, and the new `ahead`.

        The energy that was reported ahead of the counter is subtracted.
        """
        energy = TickEnergy(max(0, drawn - self.ahead), EnergyMethod.COUNTER)
        since_ns = now_ns - self.covered_ns
        if since_ns > interval_ns:
            part = max(0, drawn - self.ahead) * interval_ns // since_ns
            energy = TickEnergy(part, EnergyMethod.INTERPOLATED)
        if not self.has_stopped:
            return energy, max(0, self.ahead - drawn)
        # The counter had stopped. If it missed energy, report power times time.
        if by_draw is not None and by_draw > (energy.millijoules or 0):
            energy = TickEnergy(by_draw, EnergyMethod.POWER)
        return energy, 0


class EnergyPoint(NamedTuple):
    """A board's total energy at one reading."""

    at_ns: int
    """Time of the reading, by the monotonic clock."""
    millijoules: int
    """Energy used until the reading, counted from an arbitrary start."""
    method: EnergyMethod | None
    """How the energy since the previous reading was determined; `None` if it is unknown."""


class DrawnEnergy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Divides a board's energy among ticks, by the time that each tick covers.

    It keeps the total energy at each reading, as far back as the next tick needs. The time that a
    tick covers ends some sampling windows before the tick. The tick's energy covers exactly that
    time, interpolated between readings. The energies of all ticks add up to the total, to the
    millijoule.
    """

    meter: EnergyMeter
    """Turns readings into the energy between them."""
    points: tuple[EnergyPoint, ...] = ()
    """The readings, oldest first."""
    covered_ns: int | None = None
    """End of the time that the last tick covered; `None` before the first tick with energy."""
    covered_millijoules: int = 0
    """The total energy at `covered_ns`."""

    def measure(
        self,
        readings: Sequence[EnergyReading],
        *,
        interval_ns: int,
        cover_end_ns: int,
        validator: Validator,
    ) -> "tuple[DrawnEnergy, TickEnergy]":
        """Return the state after a tick, and the energy in the time that the tick covers.

        `readings` are those since the previous tick, oldest first; the last is the tick's own. The
        covered time ends at `cover_end_ns` and is `interval_ns` long.
        """
        meter, points = self._read(readings, interval_ns, validator)
        begin_ns = cover_end_ns - interval_ns
        begin = _total_at(points, begin_ns)
        if self.covered_ns is not None and self.covered_ns >= begin_ns - _MAX_JOINT_NS:
            # Continue where the last tick ended, so that no energy is counted twice or lost.
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
            # The energy before the first reading is unknown until there is a second one.
            covered_ns=cover_end_ns if len(points) > 1 else None,
            covered_millijoules=end,
        )
        return after, tick

    def _read(
        self, readings: Sequence[EnergyReading], interval_ns: int, validator: Validator
    ) -> tuple[EnergyMeter, list[EnergyPoint]]:
        """Return the meter and all points, including those of the new readings."""
        meter, points = self.meter, [*self.points]
        for reading in readings:
            if points and reading.at_ns <= points[-1].at_ns:
                continue
            length_ns = reading.at_ns - points[-1].at_ns if points else interval_ns
            counter = reading.counter
            # Only a tick may decide that a counter that jumped is a new one, because it covers
            # more time than a fast poll.
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
                # The first reading only opens an interval.
                points.append(EnergyPoint(reading.at_ns - length_ns, 0, None))
                if length_ns < _OPENING_NS:
                    points = [EnergyPoint(reading.at_ns, 0, None)]
                    continue
            total = points[-1].millijoules + (drawn.millijoules or 0)
            points.append(EnergyPoint(reading.at_ns, total, drawn.method))
        return meter, points


def _total_at(points: Sequence[EnergyPoint], time_ns: int) -> int:
    """Return the total energy at a time; times before the first reading are extrapolated."""
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
    """Return how the energy between two times was determined; ignore very short parts."""
    lengths: Counter[EnergyMethod | None] = Counter()
    for before, after in pairwise(points):
        length_ns = min(after.at_ns, end_ns) - max(before.at_ns, begin_ns)
        lengths[after.method] += max(0, length_ns)
    if len(points) > 1 and begin_ns < points[0].at_ns:
        # Before the first reading, the same power as after it is assumed.
        lengths[points[1].method and EnergyMethod.INTERPOLATED] += points[0].at_ns - begin_ns
    return [method for method, length_ns in lengths.items() if length_ns > _MIN_PART_NS]


class IdleDraw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The lowest mean power of a board that no process uses.

    Each mean is computed from the board's energy over at least `MIN_FREE_NS`, which is more
    reliable than power readings, because these may describe an instant. A shorter low-power state
    lowers the mean only in proportion to its length.
    """

    lowest_milliwatts: int | None = None
    """The lowest mean so far; `None` until the board was unused for long enough."""
    was_free: bool = False
    """Whether no process used the board at the end of the last tick."""
    free_ns: int = 0
    """Length of the time without a process over which the current mean is computed."""
    free_millijoules: int = 0
    """The board's energy in `free_ns`."""

    def watch(
        self,
        energy: TickEnergy,
        *,
        is_free: bool,
        is_unused: bool,
        is_settled: bool,
        interval_ns: int,
    ) -> "IdleDraw":
        """Return the state after a tick.

        `energy` is the board's energy in the tick. `is_free` is whether no process used the board
        at the end of the tick, and `is_unused` whether no kernel ran in the tick. `is_settled` is
        false if the tick's energy may be too low, because earlier ticks have already reported a
        part of that energy.
        """
        if not is_free and not self.was_free:
            return self
        # An energy of zero means that the board does not report its power.
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
        """Return the state after a tick in which the board did not answer."""
        return IdleDraw(lowest_milliwatts=self.lowest_milliwatts)
