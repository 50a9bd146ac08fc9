"""One GPU with its thread and breakers: chooses what a tick queries and evaluates the answers.

A call that hangs cannot be ended, so the worker limits what has to wait for such a call:

- Each call group has a breaker. The breaker opens after several failures in a row, or at once if a
  thread hangs in the group. The group is then probed at increasing intervals, and ticks do not wait
  for a probe.
- If the thread hangs in a group other than USAGE, the GPU would miss the tick although USAGE could
  still be queried. The thread is therefore left running (leaked) at once, and a new thread replaces
  it.
- If the thread hangs in USAGE, another thread would hang as well. A new thread is therefore started
  only when a probe is due, and nothing else is queried until a probe has been answered.
- At most `MAX_LEAKED` threads of a GPU hang at a time, in addition to the thread in use. At that
  limit, the GPU is not queried until a call returns.

Other modules decide when a tick happens and when the source is reopened.
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
"""Maximum number of hanging threads per GPU, not counting the thread in use."""
_SLACK_PART: Final = 8


@dataclass
class LeakedThreads:
    """The threads that hang in the driver, by GPU; the list is kept if the source is reopened."""

    _requests: dict[str, list[PollRequest]] = field(default_factory=dict)

    def add(self, request: PollRequest, worker: CallThread) -> bool:
        """Add a hanging thread, which is left running and ends when its call returns.

        Return `False` if the GPU already has the maximum number of hanging threads.
        """
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
        """Return whether the GPU has the maximum number of hanging threads."""
        return len(self._hanging(uuid)) >= MAX_LEAKED

    def hangs_in(self, uuid: str, group: CallGroup) -> bool:
        """Return whether one of these threads hangs in this call group of this GPU."""
        return any(request.current_group is group for request in self._hanging(uuid))

    def update_metric(self) -> None:
        """Set the metric to the number of threads that still hang."""
        THREADS_LEAKED.set(self.total())

    def total(self) -> int:
        """Return the number of threads that hang."""
        return sum(len(self._hanging(uuid)) for uuid in list(self._requests))

    def _hanging(self, uuid: str) -> list[PollRequest]:
        # A call may return after minutes. Its thread then ends and makes room for another one.
        hanging = [request for request in self._requests.get(uuid, ()) if not request.is_done]
        self._requests[uuid] = hanging
        return hanging


@dataclass(kw_only=True)
class Pace:
    """The schedule for call groups that are not queried in every tick.

    The first query is immediate. Later queries follow a schedule with a different offset for each
    GPU, so that the queries of all GPUs do not fall into the same tick.
    """

    origin_ns: int
    """One of the scheduled times; the others follow from `period_ns`."""
    period_ns: int
    """Time from one scheduled time to the next."""
    _next_ns: int | None = None

    def take(self, now_ns: int) -> bool:
        """Return whether a query is due; if it is, schedule the next query."""
        if self._next_ns is not None and now_ns < self._next_ns:
            return False
        # Ticks are not exactly on time. Without this slack, a period as long as a tick would skip
        # each tick that is slightly early.
        slack_ns = self.period_ns // _SLACK_PART
        reached_ns = now_ns + slack_ns
        to_come_ns = self.period_ns - (reached_ns - self.origin_ns) % self.period_ns
        self._next_ns = now_ns + to_come_ns
        return True


class GpuWorker:
    """Queries one GPU in its own thread; a new worker is created each time the source is opened."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        leaked: LeakedThreads,
        breaker_log: BreakerLog,
        backoff: Callable[[CallGroup], Backoff],
        readings: Pace,
        health: Pace,
        now_ns: int,
    ) -> None:
        self.gpu = gpu
        self._leaked = leaked
        self.thread = CallThread(f"gpu-{gpu.index}")
        """The thread in use; replaced if it hangs."""
        self._request: PollRequest | None = None
        self._core_error: str | None = None
        self._readings, self._health = readings, health
        self._breakers = {
            group: GroupBreaker(gpu.uuid, group, log=breaker_log, backoff=backoff(group))
            for group in CallGroup
        }
        for group, breaker in self._breakers.items():
            # If a call hangs in this group, the next call would hang too, even with a new handle.
            if leaked.hangs_in(gpu.uuid, group):
                breaker.trip(now_ns)

    @property
    def is_stuck(self) -> bool:
        """Whether the thread is still busy with the last request."""
        return self._request is not None and not self._request.is_done

    @property
    def is_unresponsive(self) -> bool:
        """Whether the GPU is only probed, because it has failed to answer the group USAGE."""
        return self._breakers[CallGroup.USAGE].is_open

    @property
    def silence(self) -> str:
        """Why the GPU is unresponsive, as text for people."""
        return self._core_error or "its calls do not return in time"

    @property
    def open_groups(self) -> list[CallGroup]:
        """The call groups whose breaker is open, so that they are only probed."""
        return [group for group, breaker in self._breakers.items() if breaker.is_open]

    def end(self) -> None:
        """End the thread; if it hangs in a call, leave it running until the call returns."""
        # If the request has not started or has just finished, the thread ends without help.
        if self._request and self.is_stuck and self._request.current_group is not None:
            self._leaked.add(self._request, self.thread)
        self.thread.end()

    def next_request(
        self, cursor: SampleCursor, *, last: PollCycle | None, now_ns: int
    ) -> PollRequest | None:
        """Return the request for this tick; `None` if no thread is free or no query is permitted.

        `cursor` is the position in the GPU's ring buffers. The probes of `last`, the previous
        cycle, are evaluated first.
        """
        if self._request and last:
            self._evaluate_probes(self._request, last, now_ns)
        if self.is_stuck and not self._free_thread(now_ns):
            return None
        self._request = None
        core = self._breakers[CallGroup.USAGE].permit(now_ns)
        if core is Permit.PROBE:
            # Do not query other groups, because the GPU has no sample in this tick without USAGE.
            self._request = PollRequest.to(self.gpu, cursor, (), (CallGroup.USAGE,))
        elif core is Permit.QUERY:
            due = [CallGroup.SENSORS]
            if self._readings.take(now_ns):
                due += [CallGroup.READINGS, CallGroup.PROFILING]
            if self._health.take(now_ns):
                due.append(CallGroup.HEALTH)
            permits = {group: self._breakers[group].permit(now_ns) for group in due}
            awaited = [group for group, permit in permits.items() if permit is Permit.QUERY]
            # If a thread already hangs in a group, each probe of the group could leak another one.
            probing = [
                group
                for group, permit in permits.items()
                if permit is Permit.PROBE and not self._leaked.hangs_in(self.gpu.uuid, group)
            ]
            groups = (CallGroup.USAGE, *awaited)
            self._request = PollRequest.to(self.gpu, cursor, groups, probing)
        return self._request

    def evaluate(self, cycle: PollCycle, now_ns: int) -> RawGpuSample | None:
        """Return the GPU's answers that arrived in time; `None` if USAGE was not answered.

        Also update the breakers. Raise `GpuLostError` if this GPU is lost, and `LibraryLostError`
        if the source is lost.
        """
        request = self._request
        if request is None or not request.awaited:
            return None
        values: dict[str, Any] = {}
        for group in request.awaited:
            values |= request.answers.get(group, {})
            # A group that was not queried because an earlier group was late has not failed. Neither
            # has a group whose query the thread could not start or continue on a busy node.
            is_late = group is CallGroup.USAGE or cycle.is_late(request)
            if group in request.errors:
                self._breakers[group].failed(now_ns, reason="error")
            elif group in request.answers:
                self._breakers[group].succeeded()
            elif is_late and request.is_silent(group):
                self._breakers[group].failed(now_ns, reason="deadline")
        error = request.errors.get(CallGroup.USAGE)
        self._core_error = str(error) if error else None
        if isinstance(error, SourceLostError):
            raise error
        if CallGroup.USAGE not in request.answers:
            return None
        return RawGpuSample(uuid=self.gpu.uuid, index=self.gpu.index, **values)

    def _evaluate_probes(self, request: PollRequest, cycle: PollCycle, now_ns: int) -> None:
        """Record in the breakers whether the previous cycle's probes were answered in time."""
        for group in request.probing:
            if cycle.is_in_time(request, group):
                self._breakers[group].succeeded()
            # A probe that has not started, because an earlier probe hangs, has no outcome.
            elif group in request.took_seconds or request.current_group is group:
                self._breakers[group].failed(now_ns, reason="probe")
        request.probing = ()

    def _free_thread(self, now_ns: int) -> bool:
        """Replace the thread if it hangs in a call; return whether a thread is free now.

        If it hangs in USAGE, it is replaced only when a probe is due. It is not replaced if the GPU
        has the maximum number of hanging threads.
        """
        group = self._request.current_group if self._request else None
        # Without a current group, the request has not started or has just finished.
        if not self._request or group is None:
            return False
        breaker = self._breakers[group]
        if group is CallGroup.USAGE:
            # A starved thread does not hang. A new thread would probably hang too, so it is started
            # only for a probe.
            if self._request.is_starved:
                return False
            if not breaker.is_open:
                breaker.failed(now_ns, reason="hangs")
            if breaker.permit(now_ns) is not Permit.PROBE:
                return False
        else:
            # Trip at once, because each further failure would cost a tick its USAGE.
            breaker.trip(now_ns, reason="hangs")
        if not self._leaked.add(self._request, self.thread):
            return False
        self.thread = CallThread(f"gpu-{self.gpu.index}")
        return True
