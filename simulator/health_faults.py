"""What befalls a GPU over time: counts that stay, states that end.

Here the scenario's ailments are asked at an instant. How NVML tells of them is `nvml`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator.scenario.fault_schema import HealthFault

_NS: Final = 1_000_000_000


@dataclass(frozen=True)
class HealthFaults:
    """The ailments of one GPU; times are nanoseconds since the scenario's start."""

    all: Sequence[HealthFault] = ()

    def count(self, name: str, time_ns: int, *, since_ns: int = -_NS) -> int:
        """Return how often something has happened by now, and after `since_ns`."""
        return sum(getattr(one, name) for one in self.all if since_ns < _start_ns(one) <= time_ns)

    def has(self, name: str, time_ns: int) -> bool:
        """Return whether a state lasts now."""
        return any(getattr(one, name) for one in self._lasting(time_ns))

    def throttles(self, time_ns: int) -> set[str]:
        """Return why the clocks are held down now."""
        return {one.throttle for one in self._lasting(time_ns) if one.throttle}

    def throttled_ns(self, throttles: Sequence[str], until_ns: int) -> int:
        """Return for how long they have been for these reasons, by now."""
        spans = [
            min(until_ns, _end_ns(one, until_ns)) - _start_ns(one)
            for one in self.all
            if one.throttle in throttles
        ]
        return sum(max(0, span) for span in spans)

    def recovery(self, time_ns: int) -> str:
        """Return what the driver asks for now: the last of what it asks for."""
        asked = [one.recovery for one in self._lasting(time_ns) if one.recovery != "none"]
        return asked[-1] if asked else "none"

    def _lasting(self, time_ns: int) -> list[HealthFault]:
        return [one for one in self.all if _start_ns(one) <= time_ns < _end_ns(one, time_ns + 1)]


def _start_ns(one: HealthFault) -> int:
    return round(one.start_seconds * _NS)


def _end_ns(one: HealthFault, otherwise_ns: int) -> int:
    return otherwise_ns if one.end_seconds is None else round(one.end_seconds * _NS)
