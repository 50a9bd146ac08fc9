"""The clocks of one instant."""

from dataclasses import dataclass, field

from gpuledger_agent.core.raw import ClockReading

MS = 1_000_000
BEGIN = 1_000 * MS


@dataclass
class Preempted:
    """Clocks that all show one time, of a process that is suspended before some of its reads."""

    pauses_ns: list[int]
    now_ns: int = field(default=BEGIN)

    def _read(self) -> int:
        self.now_ns += self.pauses_ns.pop(0) if self.pauses_ns else 0
        return self.now_ns

    time_ns = monotonic_ns = boottime_ns = _read


def test_a_pause_between_two_clock_reads_does_not_separate_their_times() -> None:
    reading = ClockReading.read(Preempted(pauses_ns=[0, 0, 200 * MS]))
    assert reading.time_ns == reading.monotonic_ns == reading.boottime_ns == BEGIN + 200 * MS


def test_the_clocks_are_read_three_times_at_most() -> None:
    reading = ClockReading.read(Preempted(pauses_ns=[2 * MS] * 100))
    assert reading.monotonic_ns == BEGIN + 3 * 4 * 2 * MS
