"""What a board drew in each tick, in whole millijoules that add up to its counter; its idle draw.

Ticks book the differences of a total that never falls. Where the counter can be read and moves, the
total is the counter's. While it stands still or cannot be read, the draw times the time takes the
total ahead of it, and what makes no whole millijoule is carried from tick to tick; once the counter
has moved on, ticks book what it shows beyond the total, and no more. So by the end of each tick
that is booked by the counter, and is more than nothing, ticks have added up to the counter's
difference since the last such tick, to the millijoule, whatever the draw said in between.

Three things end that account, and another one begins: a counter that fell, as its driver was loaded
anew, or that leapt; a counter that stood still for longer than its steps, as on virtual GPUs, and
in all that time shows less than the draw; and time that no tick covers. Of a difference over more
than the tick, the tick's part is by time.
"""

from typing import Final, NamedTuple

import msgspec

from agent.core.readings import Validator
from gpuledger.records import EnergyMethod, bounds

_NS_PER_SECOND: Final = 1_000_000_000
MAX_STEP_NS: Final = 2_000_000_000
"""Counters move about every 100 ms; one that stands still for longer than this has stopped."""
# A counter may show with one step what was drawn some time before.
_SLACK_NS: Final = 1_000_000_000
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
            by_draw, rest = divmod(rest + power_milliwatts * interval_ns, _NS_PER_SECOND)
        if counter is None:
            return self._go_ahead(by_draw, rest, read_ns=self.read_ns, now_ns=now_ns)
        drawn = -1 if self.counter is None else counter - self.counter
        if drawn == 0:
            return self._go_ahead(by_draw, rest, read_ns=now_ns, now_ns=now_ns)
        max_drawn = bounds.MAX_MILLIWATTS * (now_ns - self.read_ns + _SLACK_NS) // _NS_PER_SECOND
        if drawn > min(max_drawn, bounds.MAX_TICK_MILLIJOULES):
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


class IdleDraw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The least that a board has drawn without a process, by its energy over ticks in a row.

    Energy over a while tells more than looks at the draw, which may be of an instant. A state of
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
            mean = millijoules * _NS_PER_SECOND // free_ns
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
