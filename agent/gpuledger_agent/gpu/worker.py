"""One GPU with its thread and its breakers: what it is queried for in a tick, and what came of it.

A call that hangs cannot be ended, so what is done about it is a matter of who would wait:

- Each group has a breaker. It opens after some failures in a row, or at once where a thread hangs
  in the group; then the group is probed, ever more rarely, and nothing waits for a probe.
- Where the thread hangs in a group that is not booked, the GPU would be out of the tick without
  any fault of its books. So the thread is leaked at once and a new one takes its place.
- Where it hangs in the books, another thread would hang as well. So a new one is started only when
  a probe is due, and nothing else is queried until one has answered.
- At most `MAX_LEAKED` threads of a GPU hang at a time; beyond that it waits for one to return.

When there is a tick, and when the source is opened again, is decided elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from gpuledger.runtime import Backoff
from gpuledger_agent.core.raw import CallGroup, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.breaker import BreakerLog, GroupBreaker, Permit
from gpuledger_agent.gpu.protocol import Gpu, SourceLostError
from gpuledger_agent.gpu.threads import CallThread, PollCycle, PollRequest
from gpuledger_agent.metrics import THREADS_LEAKED

_log = structlog.get_logger(__name__)

MAX_LEAKED: Final = 4
"""Threads of one GPU that may hang beside the one that is used."""
_SLACK_PART: Final = 8


@dataclass
class LeakedThreads:
    """The threads that hang in the driver, by GPU; they outlive the source's being opened again."""

    _requests: dict[str, list[PollRequest]] = field(default_factory=dict)

    def add(self, request: PollRequest, worker: CallThread) -> bool:
        """Leak a thread where the bound allows it; it ends when its call returns."""
        uuid = request.gpu.uuid
        if self.is_full(uuid):
            return False
        worker.end()
        self._requests[uuid].append(request)
        group = request.current_group
        _log.warning("thread_leaked", gpu=uuid, call_group=group and group.value)
        self.update_metric()
        return True

    def is_full(self, uuid: str) -> bool:
        """Return whether no other thread of this GPU may be leaked."""
        return len(self._hanging(uuid)) >= MAX_LEAKED

    def hangs_in(self, uuid: str, group: CallGroup) -> bool:
        """Return whether a thread hangs in this group of a GPU."""
        return any(request.current_group is group for request in self._hanging(uuid))

    def update_metric(self) -> None:
        """Set the metric to what still hangs."""
        THREADS_LEAKED.set(self.total())

    def total(self) -> int:
        """Return how many threads hang."""
        return sum(len(self._hanging(uuid)) for uuid in list(self._requests))

    def _hanging(self, uuid: str) -> list[PollRequest]:
        # A call may return after minutes: its thread has ended by then, and makes room for another.
        hanging = [request for request in self._requests.get(uuid, ()) if not request.is_done]
        self._requests[uuid] = hanging
        return hanging


@dataclass(kw_only=True)
class Pace:
    """When a GPU is queried for what is not in each tick.

    That is at once, and then at times that differ from GPU to GPU: no tick shall have that of all.
    """

    origin_ns: int
    """One of these times."""
    period_ns: int
    """From one to the next."""
    _next_ns: int | None = None

    def take(self, now_ns: int) -> bool:
        """Return whether it is time, and wait for the next time from now on."""
        if self._next_ns is not None and now_ns < self._next_ns:
            return False
        # Ticks are never quite on time: one that is a little early is not left out for that, else
        # a pace that is as long as a tick would be one of two.
        slack_ns = self.period_ns // _SLACK_PART
        reached_ns = now_ns + slack_ns
        to_come_ns = self.period_ns - (reached_ns - self.origin_ns) % self.period_ns
        self._next_ns = now_ns + to_come_ns
        return True


class GpuWorker:
    """Queries one GPU; made anew each time the source is opened."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        leaked: LeakedThreads,
        breaker_log: BreakerLog,
        backoff: Callable[[], Backoff],
        readings: Pace,
        health: Pace,
        now_ns: int,
    ) -> None:
        self.gpu = gpu
        self._leaked = leaked
        self.thread = CallThread(f"gpu-{gpu.index}")
        """Its thread; another one after that one hung."""
        self._request: PollRequest | None = None
        self._core_error: str | None = None
        self._readings, self._health = readings, health
        self._breakers = {
            group: GroupBreaker(gpu.uuid, group, log=breaker_log, backoff=backoff())
            for group in CallGroup
        }
        for group, breaker in self._breakers.items():
            # A new handle of the GPU does not help a call that hangs: the next would hang alike.
            if leaked.hangs_in(gpu.uuid, group):
                breaker.trip(now_ns)

    @property
    def is_stuck(self) -> bool:
        """Whether its thread is not back yet."""
        return self._request is not None and not self._request.is_done

    @property
    def is_unresponsive(self) -> bool:
        """Whether it is queried by probes only, as even what is booked did not come."""
        return self._breakers[CallGroup.BOOKS].is_open

    @property
    def silence(self) -> str:
        """Why, for people."""
        return self._core_error or "its calls do not return in time"

    @property
    def open_groups(self) -> list[CallGroup]:
        """The groups whose breaker is open: they are queried by single probes alone."""
        return [group for group, breaker in self._breakers.items() if breaker.is_open]

    def end(self) -> None:
        """Let go of the thread; where it hangs in a call it is leaked."""
        # One whose turn is yet to come, or that is just done, ends by itself.
        if self._request and self.is_stuck and self._request.current_group is not None:
            self._leaked.add(self._request, self.thread)
        self.thread.end()

    def next_request(
        self, cursor: SampleCursor, *, last: PollCycle | None, now_ns: int
    ) -> PollRequest | None:
        """Return what to query now, if anything; `last` is the cycle before."""
        if self._request and last:
            self._evaluate_probes(self._request, last, now_ns)
        if self.is_stuck and not self._free_thread(now_ns):
            return None
        self._request = None
        core = self._breakers[CallGroup.BOOKS].permit(now_ns)
        if core is Permit.PROBE:
            # Nothing else: without the books the GPU would not be in the tick.
            self._request = PollRequest.to(self.gpu, cursor, (), (CallGroup.BOOKS,))
        elif core is Permit.QUERY:
            due = [CallGroup.SENSORS]
            if self._readings.take(now_ns):
                due += [CallGroup.READINGS, CallGroup.PROFILING]
            if self._health.take(now_ns):
                due.append(CallGroup.HEALTH)
            permits = {group: self._breakers[group].permit(now_ns) for group in due}
            awaited = [group for group, permit in permits.items() if permit is Permit.QUERY]
            # A group in which a thread hangs already would cost one more for each probe.
            probing = [
                group
                for group, permit in permits.items()
                if permit is Permit.PROBE and not self._leaked.hangs_in(self.gpu.uuid, group)
            ]
            groups = (CallGroup.BOOKS, *awaited)
            self._request = PollRequest.to(self.gpu, cursor, groups, probing)
        return self._request

    def evaluate(self, cycle: PollCycle, now_ns: int) -> RawGpuSample | None:
        """Return what came in time, `None` without the books.

        Raises `GpuLostError` where this GPU is lost, `LibraryLostError` where the source is.
        """
        request = self._request
        if request is None or not request.awaited:
            return None
        values: dict[str, Any] = {}
        for group in request.awaited:
            values |= request.answers.get(group, {})
            # A group that has not had its time, as one before it was late, has not failed.
            is_late = request.current_group is group and cycle.is_late(request)
            if group in request.errors:
                self._breakers[group].failed(now_ns, reason="error")
            elif group in request.answers:
                self._breakers[group].succeeded()
            elif group is CallGroup.BOOKS or is_late:
                self._breakers[group].failed(now_ns, reason="deadline")
        error = request.errors.get(CallGroup.BOOKS)
        self._core_error = str(error) if error else None
        if isinstance(error, SourceLostError):
            raise error
        if CallGroup.BOOKS not in request.answers:
            return None
        return RawGpuSample(uuid=self.gpu.uuid, index=self.gpu.index, **values)

    def _evaluate_probes(self, request: PollRequest, cycle: PollCycle, now_ns: int) -> None:
        """Count what became of the probes of the cycle before, for which nothing waited."""
        for group in request.probing:
            if cycle.is_in_time(request, group):
                self._breakers[group].succeeded()
            # One whose turn has not come, as another hangs before it, has neither failed nor not.
            elif group in request.took_seconds or request.current_group is group:
                self._breakers[group].failed(now_ns, reason="probe")
        request.probing = ()

    def _free_thread(self, now_ns: int) -> bool:
        """Return whether there is a thread to query with, although one hangs."""
        group = self._request.current_group if self._request else None
        # Its turn is yet to come, or it is just done: its thread is free soon.
        if not self._request or group is None:
            return False
        breaker = self._breakers[group]
        if group is CallGroup.BOOKS:
            # A new thread would hang alike: one is spent only where a probe is due.
            if not breaker.is_open:
                breaker.failed(now_ns, reason="hangs")
            if breaker.permit(now_ns) is not Permit.PROBE:
                return False
        else:
            # Not after some failures as else: each of them would cost the books of a tick.
            breaker.trip(now_ns, reason="hangs")
        if not self._leaked.add(self._request, self.thread):
            return False
        self.thread = CallThread(f"gpu-{self.gpu.index}")
        return True
