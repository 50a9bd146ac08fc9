"""What a node says of one tick, and the clocks by which it is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuledger.records import NodeReadings, NodeSample, ProcessRecord


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """What a node says of one tick."""

    sample: NodeSample
    """The readings from which it is booked, and what runs."""
    readings: NodeReadings
    """All other readings."""
    processes: list[ProcessRecord]
    """What happened to the processes."""
    relayouted: Sequence[str] = ()
    """The GPUs whose MIG instances are not those of the tick before, by UUID."""


class Clocks(Protocol):
    """The clocks of a machine; one that can also wait is no part of the core."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that is never set."""

    def boottime_ns(self) -> int:
        """Nanoseconds since boot."""


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """The clocks at one instant."""

    time_ns: int
    """Since the epoch."""
    monotonic_ns: int
    """Of the clock that is never set."""
    boottime_ns: int
    """Since boot."""

    @classmethod
    def read(cls, clock: Clocks) -> "ClockReading":
        """Read all clocks."""
        return cls(
            time_ns=clock.time_ns(),
            monotonic_ns=clock.monotonic_ns(),
            boottime_ns=clock.boottime_ns(),
        )
