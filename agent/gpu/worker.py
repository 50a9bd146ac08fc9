"""One GPU with its thread and its breakers: what it is asked in a tick, and what came of it.

A thread that hangs is abandoned and another one takes its place, within a bound. When there is a
tick is decided elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from agent.core.raw import CallGroup, RawGpuSample, SampleCursor
from agent.gpu.breaker import Breaker, BreakerLog, Permit
from agent.gpu.nvidia.client import NvmlLostError
from agent.gpu.nvidia.session import Gpu
from agent.gpu.poll import PollCycle, Question
from agent.gpu.threads import Worker
from agent.metrics import BREAKER_OPEN, CALL_GROUPS_FAILED, THREADS_LEAKED
from gpuledger.runtime import Backoff

_log = structlog.get_logger(__name__)

MAX_ABANDONED: Final = 4
"""Threads of one GPU that may hang beside the one that is used."""
_EACH_TICK: Final = (CallGroup.READINGS, CallGroup.PROFILING)


def slow_backoff() -> Backoff:
    """Return the waits between attempts that cost the other GPUs something."""
    return Backoff(first_seconds=5, max_seconds=300)


@dataclass
class LeakedThreads:
    """The threads that hang in the driver, by GPU; they outlive new starts of the library."""

    _questions: dict[str, list[Question]] = field(default_factory=dict)

    def take(self, question: Question, worker: Worker) -> bool:
        """Abandon a thread where the bound allows it; it ends when its call returns."""
        uuid = question.gpu.uuid
        if self.is_full(uuid):
            return False
        worker.end()
        self._questions[uuid].append(question)
        _log.warning("thread_abandoned", gpu=uuid, call_group=question.at and question.at.value)
        self.show()
        return True

    def is_full(self, uuid: str) -> bool:
        """Return whether no other thread of this GPU may be abandoned."""
        return len(self._hanging(uuid)) >= MAX_ABANDONED

    def hangs_in(self, uuid: str, group: CallGroup) -> bool:
        """Return whether a thread hangs in this group of a GPU."""
        return any(question.at is group for question in self._hanging(uuid))

    def show(self) -> None:
        """Set the metric to what still hangs."""
        THREADS_LEAKED.set(self.total())

    def total(self) -> int:
        """Return how many threads hang."""
        return sum(len(self._hanging(uuid)) for uuid in list(self._questions))

    def _hanging(self, uuid: str) -> list[Question]:
        hanging = [one for one in self._questions.get(uuid, ()) if not one.is_done]
        self._questions[uuid] = hanging
        return hanging


@dataclass(frozen=True, kw_only=True)
class HealthTimes:
    """When a GPU's health is asked: at once, and then at times that differ from GPU to GPU."""

    origin_ns: int
    """One of these times."""
    period_ns: int
    """From one to the next."""

    def after(self, now_ns: int) -> int:
        """Return the first one after now."""
        return now_ns + self.period_ns - (now_ns - self.origin_ns) % self.period_ns


class GpuWorker:
    """Asks one GPU; made anew with each start of the library."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        abandoned: LeakedThreads,
        breaker_log: BreakerLog,
        backoff: Callable[[], Backoff],
        health: HealthTimes,
        now_ns: int,
    ) -> None:
        self.gpu = gpu
        self._abandoned = abandoned
        self._worker = Worker(f"gpu-{gpu.index}")
        self._breakers = {group: Breaker(backoff=backoff()) for group in CallGroup}
        self._question: Question | None = None
        self._books_error: str | None = None
        self._health = health
        self._next_health_ns = now_ns
        self._open = {
            group: BREAKER_OPEN.labels(gpu_uuid=gpu.uuid, group=group.value) for group in CallGroup
        }
        self._breaker_log = breaker_log
        for group, breaker in self._breakers.items():
            if abandoned.hangs_in(gpu.uuid, group):
                breaker.trip(now_ns)
            self._show(group)

    @property
    def is_stuck(self) -> bool:
        """Whether its thread is not back yet."""
        return self._question is not None and not self._question.is_done

    @property
    def is_silent(self) -> bool:
        """Whether it is asked by probes only, as even what is booked did not come."""
        return self._breakers[CallGroup.BOOKS].is_open

    @property
    def silence(self) -> str:
        """Why, for people."""
        return self._books_error or "its calls do not return in time"

    @property
    def open_groups(self) -> list[CallGroup]:
        """The groups that are not asked at present."""
        return [group for group, breaker in self._breakers.items() if breaker.is_open]

    def hand(self, do: Callable[[], object]) -> None:
        """Have something done in the thread."""
        self._worker.hand(do)

    def end(self) -> None:
        """Let go of the thread; where it hangs it is abandoned."""
        if self._question and self.is_stuck:
            self._abandoned.take(self._question, self._worker)
        self._worker.end()

    def next_question(
        self, last_seen: SampleCursor, *, last: PollCycle | None, now_ns: int
    ) -> Question | None:
        """Return what to ask now, if anything; `last` is the round before."""
        if self._question and last:
            self._judge_probes(self._question, last, now_ns)
        if self.is_stuck and not self._free(now_ns):
            return None
        self._question = self._ask(last_seen, now_ns)
        return self._question

    def judge(self, ended: PollCycle, now_ns: int) -> RawGpuSample | None:
        """Return what came in time, None without the books; raises NvmlLostError for a lost GPU."""
        question = self._question
        if question is None or not question.awaited:
            return None
        given: dict[str, Any] = {}
        for group in question.awaited:
            given |= question.answers.get(group, {})
            self._count(question, group, ended, now_ns)
        lost = question.errors.get(CallGroup.BOOKS)
        self._books_error = str(lost) if lost else None
        if isinstance(lost, NvmlLostError):
            raise lost
        if CallGroup.BOOKS not in question.answers:
            return None
        return RawGpuSample(uuid=self.gpu.uuid, index=self.gpu.index, **given)

    def _ask(self, last_seen: SampleCursor, now_ns: int) -> Question | None:
        books = self._breakers[CallGroup.BOOKS].turn(now_ns)
        if books is Permit.SKIP:
            return None
        if books is Permit.PROBE:
            return Question.to(self.gpu, last_seen, (), (CallGroup.BOOKS,))
        turns = {group: self._breakers[group].turn(now_ns) for group in self._due(now_ns)}
        awaited = [group for group, turn in turns.items() if turn is Permit.ASK]
        probing = [group for group, turn in turns.items() if turn is Permit.PROBE]
        probing = [one for one in probing if not self._abandoned.hangs_in(self.gpu.uuid, one)]
        return Question.to(self.gpu, last_seen, (CallGroup.BOOKS, *awaited), probing)

    def _due(self, now_ns: int) -> tuple[CallGroup, ...]:
        if now_ns < self._next_health_ns:
            return _EACH_TICK
        self._next_health_ns = self._health.after(now_ns)
        return (*_EACH_TICK, CallGroup.HEALTH)

    def _count(self, question: Question, group: CallGroup, ended: PollCycle, now_ns: int) -> None:
        """Tell the breaker; a group that has not had its time has neither failed nor not."""
        if group in question.errors:
            self._fail(group, "error", now_ns)
        elif group in question.answers:
            self._succeed(group)
        elif group is CallGroup.BOOKS or (question.at is group and ended.is_late(question)):
            self._fail(group, "deadline", now_ns)

    def _judge_probes(self, question: Question, asked: PollCycle, now_ns: int) -> None:
        for group in question.probing:
            if asked.is_in_time(question, group):
                self._succeed(group)
            elif group in question.took_seconds or question.at is group:
                self._fail(group, "probe", now_ns)
        question.probing = ()

    def _free(self, now_ns: int) -> bool:
        """Get a thread although one hangs: at once for the books' sake, else for a probe."""
        at = self._question.at if self._question else None
        if at is None:
            return False
        breaker = self._breakers[at]
        if at is CallGroup.BOOKS:
            if not breaker.is_open:
                self._fail(at, "hangs", now_ns)
            if breaker.turn(now_ns) is not Permit.PROBE:
                return False
        elif breaker.trip(now_ns):
            self._show(at, "hangs")
        return self._replace()

    def _replace(self) -> bool:
        if not self._question or not self._abandoned.take(self._question, self._worker):
            return False
        self._worker = Worker(f"gpu-{self.gpu.index}")
        return True

    def _fail(self, group: CallGroup, reason: str, now_ns: int) -> None:
        CALL_GROUPS_FAILED.labels(gpu_uuid=self.gpu.uuid, group=group.value, reason=reason).inc()
        self._breakers[group].failed(now_ns)
        self._show(group, reason)

    def _succeed(self, group: CallGroup) -> None:
        self._breakers[group].succeeded()
        self._show(group)
        # Here alone: the breakers of a new start are closed before anything has answered.
        self._breaker_log.closed(self.gpu.uuid, group)

    def _show(self, group: CallGroup, reason: str | None = None) -> None:
        is_open = self._breakers[group].is_open
        self._open[group].set(is_open)
        if is_open:
            self._breaker_log.opened(self.gpu.uuid, group, reason=reason)
