"""What is asked of a node's GPUs between two ticks, of which, and when.

How it works. A tick asks every GPU once. That is enough where one container is on a GPU, and where
the driver gives a sample for each of its windows and processes. It is not enough

- where a driver gives one sample a process for all the time since the last question. Whether that
  is the mean, the newest window or the mean of the windows of use, no driver says. Asked in each of
  its windows, all of them say the same: so a GPU that several containers share is asked as often;
- for energy, which is a counter of this instant, while a tick covers the driver's time up to some
  windows ago: so it is read when that time comes;
- in ticks that are longer than the driver keeps samples of an idle GPU: so each second is asked;
- for processes that come and go within a tick: so where some did of late, or several containers
  are, the lists are read in between, too.

`LookPlan` has the times, `NodeLooks` the GPUs; what one of them told is kept by `gpuledger_agent.core.looks`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND, NS_PER_US
from gpuledger.records import GpuProcess
from gpuledger_agent.core.looks import GpuLooks, Looked
from gpuledger_agent.core.normalize.gpu import GpuState, GpuTick
from gpuledger_agent.core.normalize.set_back import SetBack
from gpuledger_agent.core.raw import ClockReading, GpuLook, RawGpuSample, SampleCursor

MAX_PAUSE_NS: Final = NS_PER_SECOND
"""A tick that is longer is asked for samples in between: no driver is known to lose those of the
last second."""
_APART_NS: Final = 20_000_000
"""A look that is nearer to a tick would show nothing else."""


class OthersScope(Enum):
    """What is asked of GPUs that are not watched closely. Those that are get everything."""

    NOTHING = "nothing"
    """They are left out."""
    ENERGY = "energy"
    """What the board has drawn by now."""
    ALL = "all"
    """Samples, energy and who is there."""


class LookTime(NamedTuple):
    """When to look."""

    at_ns: int
    """By the monotonic clock."""
    others: OthersScope
    """What of those that are not watched closely."""


@dataclass(frozen=True, kw_only=True)
class LookPlan:
    """When to look between two ticks; times are of the monotonic clock."""

    begin_ns: int
    """When the first of the two was."""
    end_ns: int
    """When the other one will be."""
    lag_ns: int
    """How long before its end a tick's cover ends: energy is read then. Of a lag of several ticks
    it is the cover of a tick to come."""
    pause_ns: int
    """The time from one look to the next at what is watched closely."""

    def next(self, now_ns: int, *, is_close: bool) -> LookTime | None:
        """Return when to look next, `None` where not before the tick.

        `is_close` says whether anything is watched closely, as far as is known by now.
        """
        after_ns, last_ns = max(now_ns, self.begin_ns) + _APART_NS, self.end_ns - _APART_NS
        length_ns = self.end_ns - self.begin_ns
        cover_ns = self.end_ns - self.lag_ns % max(1, length_ns)
        # The widest scope comes last: it is taken where times are the same.
        times: dict[int, OthersScope] = {}
        if is_close:
            times[self._next_of(self.pause_ns, after_ns)] = OthersScope.NOTHING
        if cover_ns > after_ns:
            times[cover_ns] = OthersScope.ENERGY
        times[self._next_of(MAX_PAUSE_NS, after_ns)] = OthersScope.ALL
        at_ns = min(times)
        return LookTime(at_ns, times[at_ns]) if at_ns < last_ns else None

    def _next_of(self, period_ns: int, after_ns: int) -> int:
        """Return the first time after another one that is some periods behind the beginning."""
        return after_ns + period_ns - (after_ns - self.begin_ns) % period_ns


class NodeLooks:
    """The looks at one node's GPUs."""

    def __init__(self, *, state_of: Callable[[str], GpuState | None], set_back: SetBack) -> None:
        """Take what the last tick knew of a GPU, by its UUID, and whether a clock was set back."""
        self._state_of = state_of
        self._set_back = set_back
        self._looks: dict[str, GpuLooks] = {}
        """By UUID, what a GPU told since the time that ticks have covered."""
        self._asked: Mapping[str, SampleCursor] = {}
        """By UUID, after which samples the last tick's query began."""
        self._is_asking = False
        """Whether a tick's query has begun, and its answers are not there yet."""
        self._shared: frozenset[str] = frozenset()
        """The GPUs on which processes of several containers, or of one and the host, are."""

    def watched_closely(self, now_ns: int) -> frozenset[str]:
        """Return the GPUs on which processes come and go, or that are shared and need it."""
        return frozenset(
            uuid
            for uuid, looks in self._looks.items()
            if looks.has_recent_changes(now_ns) or (looks.one_sample_each and uuid in self._shared)
        )

    def begin_tick(self, uuids: Iterable[str]) -> Mapping[str, SampleCursor]:
        """Return after which samples a tick's query of these GPUs begins, by UUID."""
        self._asked = {
            uuid: self._cursor(uuid, state) for uuid in uuids if (state := self._state_of(uuid))
        }
        self._is_asking = True
        return self._asked

    def cursors(
        self, others: OthersScope, *, now_ns: int, accounting_gpus: frozenset[str] = frozenset()
    ) -> Mapping[str, SampleCursor | None]:
        """Return what to look at now, by UUID, each with its cursor; `None` for its energy alone.

        `accounting_gpus` are those whose driver keeps accounts of processes: what these say of one
        has no owner unless the process was seen.
        """
        states = {uuid: state for uuid in self._looks if (state := self._state_of(uuid))}
        if self._set_back.is_recent:
            # Nobody knows of which of its clocks the driver's stamps are: the ticks find that out.
            # Energy bears no stamp.
            return {} if others is OthersScope.NOTHING else dict.fromkeys(states)
        closely = self.watched_closely(now_ns) | accounting_gpus
        cursors: dict[str, SampleCursor | None] = {}
        for uuid, state in states.items():
            if others is OthersScope.ALL or uuid in closely:
                cursors[uuid] = self._cursor(uuid, state)
            elif others is OthersScope.ENERGY:
                cursors[uuid] = None
        return cursors

    def record(self, looks: Sequence[GpuLook]) -> Sequence[GpuLook]:
        """Take in what GPUs answered between two ticks, or while a tick asked them itself.

        Of what comes so late that a tick has asked for the same, energy alone is wanted. Return the
        others: their lists say who is there now.
        """
        in_time = []
        for look in looks:
            state, of_gpu = self._state_of(look.uuid), self._looks.get(look.uuid)
            if state is None or of_gpu is None:
                continue
            if look.failed:
                of_gpu.forget()
                continue
            if self._is_asking or of_gpu.is_late(look):
                of_gpu.add_energy(look)
                continue
            of_gpu.add(
                look, window_us=state.gpu_window.length_us, closed_us=_closed_us(state, look.at)
            )
            in_time.append(look)
        return in_time

    def join(self, raw: Sequence[RawGpuSample], at: ClockReading) -> Mapping[str, Looked]:
        """Return, by UUID, what was told between the ticks put together with what is told now."""
        self._is_asking = False
        answered = {gpu.uuid for gpu in raw}
        # What a silent GPU told is of a time of which its state is forgotten.
        for uuid in self._looks.keys() - answered:
            if self._state_of(uuid):
                self._looks[uuid].forget()
            else:
                del self._looks[uuid]
        joined = {}
        for gpu in raw:
            state = self._state_of(gpu.uuid)
            if state is None:
                # What it was asked before is of a time that no tick covers.
                self._looks[gpu.uuid] = GpuLooks()
            joined[gpu.uuid] = self._looks.setdefault(gpu.uuid, GpuLooks()).join(
                gpu,
                at=at,
                since_us=self._asked.get(gpu.uuid, SampleCursor()).process_us,
                window_us=state.gpu_window.length_us if state else None,
                closed_us=_closed_us(state, at) if state else None,
            )
        return joined

    def drop_covered(self, ticks: Iterable[GpuTick]) -> None:
        """Forget the samples that no later tick needs; watch GPUs of which a time is unknown."""
        for tick in ticks:
            looks, clock = self._looks.get(tick.reading.uuid), tick.state.clock
            if looks is None:
                continue
            if tick.has_gap:
                # Closely watched, the driver shows whether it leaves out what was idle.
                looks.watch_for_a_while(tick.state.read_ns)
            if clock is None:
                looks.forget()
            else:
                looks.drop_covered(tick.state.last_seen, covered_us=clock.covered_us)

    def follow_sharing(self, ticks: Sequence[GpuTick], processes: Iterable[GpuProcess]) -> None:
        """Take over on which GPUs several are: containers, or one and the host."""
        on: dict[int, set[int | None]] = {}
        for process in processes:
            on.setdefault(process.gpu, set()).add(process.container)
        self._shared = frozenset(
            ticks[gpu].reading.uuid for gpu, whose in on.items() if len(whose) > 1
        )

    def forget(self) -> None:
        """Forget what looks told, after answers that could not be used: ticks ask for it again."""
        self._is_asking = False
        for looks in self._looks.values():
            looks.forget()

    def _cursor(self, uuid: str, state: GpuState) -> SampleCursor:
        looks = self._looks.get(uuid)
        if self._set_back.is_recent or looks is None:
            return state.last_seen
        return looks.cursor(state.last_seen)


def _closed_us(state: GpuState, at: ClockReading) -> float | None:
    """Return up to where the driver's windows have closed for certain, by its own clock."""
    if state.clock is None:
        return None
    return state.clock.closed_us((at.monotonic_ns - state.read_ns) / NS_PER_US)
