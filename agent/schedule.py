"""When a tick is due. Pure arithmetic on the monotonic clock."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Schedule:
    """A grid of ticks; one that was missed is left out, not made up for."""

    tick_ns: int
    """Length of a tick."""
    due_ns: int
    """When the next tick is due."""

    def is_late(self, now_ns: int) -> bool:
        """Return whether the tick that begins now begins more than half a tick after its time."""
        return now_ns - self.due_ns > self.tick_ns // 2

    def advance(self, now_ns: int) -> float:
        """Go on to the first tick that is still to come; return the seconds until then."""
        missed = max(0, now_ns - self.due_ns) // self.tick_ns
        self.due_ns += (missed + 1) * self.tick_ns
        return (self.due_ns - now_ns) / 1e9

    def restart(self, now_ns: int, first_ns: int) -> float:
        """Begin a new grid whose first tick is `first_ns` away; return the seconds until then."""
        self.due_ns = now_ns + first_ns
        return first_ns / 1e9
