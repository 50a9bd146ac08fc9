"""Nodes whose wall clocks are wrong or set: their ticks, second by second, as they arrive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuledger.records import Entry, GpuEvent
from gpuledger_simulator.clock import ManualClock, NodeClock, SetClock
from tests.unit.sinks.builders import SECOND_NS, event

HOUR = 3600
YEAR = 365 * 86_400
TO_1970, FROM_1970 = "to 1970", "from 1970"
UP_SECONDS = 100_000
"""The uptime of the first boot at second 0."""
COUNT = 45

Steps = Sequence[tuple[int, int | str]]
"""The second at which the wall clock is set, and by how many seconds."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A tick that arrives in a second; a tick from a spool was sampled earlier."""

    arrives: int
    second: int
    boot: str = "a"
    up_seconds: int
    steps: Steps = ()

    def event(self, entries: Sequence[Entry], *, node: str, start_ns: int) -> GpuEvent:
        """Return the tick, of a node whose second 0 is at `start_ns`."""
        played = ManualClock(start_ns=start_ns + self.second * SECOND_NS)
        booted_ns = played.time_ns() - self.up_seconds * SECOND_NS
        by_name = {TO_1970: -start_ns, FROM_1970: start_ns}
        steps = [
            SetClock(
                start_ns + at * SECOND_NS, by * SECOND_NS if isinstance(by, int) else by_name[by]
            )
            for at, by in self.steps
        ]
        clock = NodeClock(played, boot_time_ns=booted_ns, steps=steps)
        return event(
            node=node,
            boot_id=f"boot-{self.boot}",
            seq=clock.boottime_ns() // 1_000_000,
            time_ns=clock.time_ns(),
            entries=list(entries),
        )


def of_one_boot(steps: Steps, seconds: range = range(COUNT)) -> list[Told]:
    """Return the ticks of a node that does not reboot."""
    return [
        Told(arrives=second, second=second, up_seconds=UP_SECONDS + second, steps=steps)
        for second in seconds
    ]


def rebooted(at: int, steps: Steps, count: int = COUNT) -> list[Told]:
    """Return the ticks of a node that has rebooted at a second, with a wrong clock until then."""
    return [
        *of_one_boot((), range(at - 5)),
        *(
            Told(arrives=second, second=second, boot="b", up_seconds=20 + second - at, steps=steps)
            for second in range(at, count)
        ),
    ]


def _with_late_spool(steps: Steps) -> Iterator[Told]:
    """Yield a reboot after which the spool of the earlier boot arrives between the new ticks."""
    spooled = iter(of_one_boot((), range(8, 18)))
    for reported in (*of_one_boot((), range(8)), *rebooted(23, steps)[18:]):
        yield reported
        if reported.boot == "b" and (late := next(spooled, None)):
            yield Told(arrives=reported.arrives, second=late.second, up_seconds=late.up_seconds)


CASES: dict[str, list[Told]] = {
    "never set": of_one_boot(()),
    "four minutes ahead once": of_one_boot([(7, 240), (8, -240)]),
    "an hour ahead for five seconds": of_one_boot([(7, HOUR), (12, -HOUR)]),
    "set back an hour": of_one_boot([(7, -HOUR)]),
    "an hour behind until it is set right": of_one_boot([(-1, -HOUR), (7, HOUR)]),
    "a year ahead after a reboot until NTP": rebooted(15, [(-1, YEAR), (20, -YEAR)]),
    "in 1970 after a reboot until NTP": rebooted(15, [(-1, TO_1970), (20, FROM_1970)]),
    "an earlier boot's spool among the later boot's ticks": list(_with_late_spool(())),
}
