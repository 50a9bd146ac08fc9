"""One round of questions to the GPUs, each in its own thread, and one wake-up when all answered.

Here live the hand-off between the event loop and the threads, and the deadlines. Whom to ask what,
and what a missing answer means, is decided elsewhere.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import structlog

from agent.core.raw import CallGroup, SampleCursor
from agent.gpu.nvidia.session import Gpu
from gpuledger.errors import UnavailableError

_log = structlog.get_logger(__name__)

# For so long a GPU waits for the one before it. One at a time they cost half the processor's time:
# all at once, each call gives up Python's lock and the threads wake one another for it.
_TURN_SECONDS: Final = 0.02
# Shares of a tick's deadline, so that what is not booked cannot use it up.
_SHARES: Final = {
    CallGroup.BOOKS: 1.0,
    CallGroup.READINGS: 0.5,
    CallGroup.PROFILING: 0.5,
    CallGroup.HEALTH: 0.5,
}


@dataclass(eq=False, slots=True, kw_only=True)
class Question:
    """What one GPU is asked in one round; its thread fills in the answers."""

    gpu: Gpu
    """Whom."""
    last_seen: SampleCursor
    """Since when."""
    awaited: Sequence[CallGroup]
    """What the round waits for, in this order."""
    probing: Sequence[CallGroup] = ()
    """What is asked after that, and nothing waits for."""
    answers: dict[CallGroup, dict[str, Any]]
    """What came."""
    errors: dict[CallGroup, Exception]
    """What failed."""
    took_seconds: dict[CallGroup, float]
    """How long each group took, failed or not."""
    at: CallGroup | None = None
    """Which group is being asked."""
    since: float = 0.0
    """Since when, by the machine's monotonic clock in seconds."""
    has_awaited: bool = False
    """Whether all that the round waits for is there."""
    is_done: bool = False
    """Whether the thread is free again."""

    @classmethod
    def to(
        cls,
        gpu: Gpu,
        last_seen: SampleCursor,
        awaited: Sequence[CallGroup],
        probing: Sequence[CallGroup] = (),
    ) -> "Question":
        """Make a question without an answer yet."""
        return cls(
            gpu=gpu,
            last_seen=last_seen,
            awaited=awaited,
            probing=probing,
            answers={},
            errors={},
            took_seconds={},
        )

    def ask(self, done: Callable[[], None], turn: threading.Lock) -> None:
        """Ask all groups, in the GPU's thread; `done` is called when the awaited ones are there.

        It begins when it has its turn, or when the one before it takes too long.
        """
        has_turn = turn.acquire(timeout=_TURN_SECONDS)
        try:
            probing = self._ask_awaited()
        finally:
            if has_turn:
                turn.release()
        if probing and self.awaited:
            done()
        for group in probing:
            self._ask(group)
        self.at = None
        self.is_done = True
        if self.awaited and not probing:
            done()

    def _ask_awaited(self) -> Sequence[CallGroup]:
        """Ask what the round waits for; gives what is left to be probed."""
        probing = self.probing
        for group in self.awaited:
            if not self._ask(group) and group is CallGroup.BOOKS:
                probing = ()  # without it the GPU is not in the tick, and others would fail alike
                break
        self.has_awaited = True
        return probing

    def _ask(self, group: CallGroup) -> bool:
        self.since = time.monotonic()
        self.at = group
        try:
            self.answers[group] = self.gpu.answers_of(group, self.last_seen)
        except Exception as error:  # noqa: BLE001  # no error of one group may cost another one
            self.errors[group] = error
            if not isinstance(error, UnavailableError):
                _log.exception("call_group_failed", gpu=self.gpu.uuid, call_group=group.value)
        self.took_seconds[group] = time.monotonic() - self.since
        return group in self.answers


class PollCycle:
    """The questions of one tick."""

    def __init__(self, *, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._end = time.monotonic() + deadline_seconds
        self._questions: list[Question] = []
        self._finished = count(1)
        self._turn = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._all_there: asyncio.Future[None] = self._loop.create_future()

    def ask(self, asked: Sequence[tuple[Question, Callable[[Callable[[], object]], None]]]) -> None:
        """Hand the questions over, each to the thread that is named beside it; call it once."""
        self._questions = [question for question, _ in asked if question.awaited]
        for question, hand in asked:
            hand(partial(question.ask, self._note, self._turn))

    async def wait(self) -> None:
        """Wait until each awaited group is there or late; what is late goes on by itself."""
        while self._questions and not self._all_there.done():
            seconds = self._patience_seconds()
            if seconds <= 0:
                return
            await asyncio.wait((self._all_there,), timeout=seconds)

    def is_late(self, question: Question) -> bool:
        """Return whether the group that is being asked has had its time."""
        at = question.at
        return at is not None and time.monotonic() >= question.since + self._seconds(at)

    def is_in_time(self, question: Question, group: CallGroup) -> bool:
        """Return whether a group was answered, and within its time."""
        took_seconds = question.took_seconds.get(group)
        return group in question.answers and (took_seconds or 0) <= self._seconds(group)

    def _seconds(self, group: CallGroup) -> float:
        return _SHARES[group] * self._deadline_seconds

    def _patience_seconds(self) -> float:
        """Return how long an answer can still come in time."""
        now = time.monotonic()
        waiting = [question for question in self._questions if not question.has_awaited]
        ends = [min(self._end, self._group_end(question)) for question in waiting]
        return max(ends, default=now) - now

    def _group_end(self, question: Question) -> float:
        at = question.at
        return self._end if at is None else question.since + self._seconds(at)

    def _note(self) -> None:
        """Count an answer, in a GPU's thread; the last one wakes the event loop."""
        if next(self._finished) == len(self._questions):
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._all_there.done():
            self._all_there.set_result(None)


async def wait_for(future: "Future[Any]", seconds: float) -> None:
    """Wait until it is done, or for `seconds` of the machine's time; what is late goes on."""
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(_look_at_error)
    await asyncio.wait((waiting,), timeout=seconds)


def _look_at_error(done: "asyncio.Future[Any]") -> None:
    """Keep asyncio from reporting the error of a call that nobody waits for any more."""
    if not done.cancelled():
        done.exception()
