"""Threads that may hang: work is submitted to them, and the process never waits for them.

A call that hangs in the driver cannot be ended, so neither can its thread: it is leaked, and ends
by itself if the call ever returns. A `CallThread` does one call after the other, whatever it is.

A `PollCycle` is one tick's requests to the GPUs, each in the thread of its GPU, and one wake-up
when all answered. The event loop submits the requests and waits for one future. A thread queries
its GPU group by group and writes into the request what came, what failed and which group it is in;
so the event loop sees at any time, without a lock, whose time is up. The GPUs are queried in turn:
each thread submits the next request when it is done with its own. One that takes longer than
`_MAX_TURN_SECONDS` is left to itself, and the event loop submits the next one, so that a GPU that
hangs holds up the others by that alone. A group has a share of the tick's deadline that begins when
the thread begins with it: a group that is late costs the groups behind it in the same GPU, and
nothing else. The last thread to finish wakes the event loop; what comes later stays in the request,
where the next cycle looks for the answers to probes.

Which GPU is queried for what, and what a missing answer means, is decided in `worker`.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import structlog

from gpuledger.errors import UnavailableError
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.protocol import Gpu

_log = structlog.get_logger(__name__)
T = TypeVar("T")

# Enough for ctypes and the driver's own frames, and too small for the kernel to back a stack
# with a huge page of 2 MiB.
_STACK_BYTES: Final = 512 * 1024
_stack_size_lock = threading.Lock()


class CallThread:
    """A thread that does one call after the other; it ends with the process, hanging or not."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        start_thread(self._run, name=name)

    def submit(self, do: Callable[[], object]) -> None:
        """Have `do` done after what was submitted before; it must not raise."""
        self._work.put(do)

    def start(self, do: Callable[[], T]) -> "Future[T]":
        """Have `do` done after what was submitted before; return the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  # whoever waits for the result gets it
                future.set_exception(error)

        self.submit(run)
        return future

    def end(self) -> None:
        """Let the thread end once it is done."""
        self._work.put(None)

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            do()


def start_thread(run: Callable[[], None], *, name: str) -> threading.Thread:
    """Start a thread with a small stack, for which the process's end does not wait."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    # The size is the process's, so nobody else may set it until the thread has started.
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


async def wait_at_most(future: "Future[Any]", seconds: float) -> None:
    """Wait until it is done, or for `seconds` of the host's time; what is late goes on."""
    waiting = asyncio.wrap_future(future)
    # An error is retrieved here, as asyncio reports one of a call that nobody waits for any more.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait((waiting,), timeout=seconds)


# For so long a GPU waits for the one before it. In turn they cost half the processor's time: all at
# once, each call gives up Python's lock and the threads wake one another for it.
_MAX_TURN_SECONDS: Final = 0.02
# Shares of a tick's deadline, so that what is not booked cannot use it up.
_SHARES: Final = {
    CallGroup.BOOKS: 1.0,
    CallGroup.SENSORS: 0.5,
    CallGroup.READINGS: 0.5,
    CallGroup.PROFILING: 0.5,
    CallGroup.HEALTH: 0.5,
}


@dataclass(eq=False, slots=True, kw_only=True)
class PollRequest:
    """What one GPU is queried for in one cycle; its thread fills in the answers."""

    gpu: Gpu
    """The GPU."""
    cursor: SampleCursor
    """What of its ring buffers is known already."""
    awaited: Sequence[CallGroup]
    """What the cycle waits for, in this order."""
    probing: Sequence[CallGroup] = ()
    """What is queried after that, and nothing waits for."""
    answers: dict[CallGroup, dict[str, Any]]
    """What came."""
    errors: dict[CallGroup, Exception]
    """What failed."""
    took_seconds: dict[CallGroup, float]
    """How long each group took, failed or not."""
    current_group: CallGroup | None = None
    """Which group is being queried."""
    since_seconds: float = 0.0
    """Since when, by the host's monotonic clock."""
    has_awaited: bool = False
    """Whether all that the cycle waits for is there."""
    is_done: bool = False
    """Whether the thread is free again."""

    @classmethod
    def to(
        cls,
        gpu: Gpu,
        cursor: SampleCursor,
        awaited: Sequence[CallGroup],
        probing: Sequence[CallGroup] = (),
    ) -> "PollRequest":
        """Return a request without an answer yet."""
        return cls(
            gpu=gpu,
            cursor=cursor,
            awaited=awaited,
            probing=probing,
            answers={},
            errors={},
            took_seconds={},
        )

    def run(self, *, pass_on: Callable[[], None], done: Callable[[], None]) -> None:
        """Query all groups, in the GPU's thread.

        `done` is called when the awaited ones are there, `pass_on` once others may be queried.
        """
        probing = self.probing
        try:
            for group in self.awaited:
                if not self._query(group) and group is CallGroup.BOOKS:
                    # Without it the GPU is not in the tick, and the others would fail alike.
                    probing = ()
                    break
            self.has_awaited = True
        finally:
            pass_on()
        if probing and self.awaited:
            done()
        for group in probing:
            self._query(group)
        # In this order: who sees that it is done must not find a group that is being queried.
        self.current_group = None
        self.is_done = True
        # Only now where nothing is probed: the next tick must find the thread free.
        if self.awaited and not probing:
            done()

    def _query(self, group: CallGroup) -> bool:
        # The time first: the event loop must not take the time of the group before for its own.
        self.since_seconds = time.monotonic()
        self.current_group = group
        try:
            self.answers[group] = self.gpu.query(group, self.cursor)
        except Exception as error:  # noqa: BLE001  # no error of one group may cost another one
            self.errors[group] = error
            if not isinstance(error, UnavailableError):
                _log.exception("call_group_failed", gpu=self.gpu.uuid, call_group=group.value)
        self.took_seconds[group] = time.monotonic() - self.since_seconds
        return group in self.answers


Submit = Callable[[Callable[[], object]], None]
"""Has something done in the thread of a GPU."""


class PollCycle:
    """The requests of one tick."""

    def __init__(self, *, deadline_seconds: float) -> None:
        self._seconds = {group: share * deadline_seconds for group, share in _SHARES.items()}
        self._end_seconds = time.monotonic() + deadline_seconds
        self._requests: list[PollRequest] = []
        self._to_come: deque[tuple[PollRequest, Submit]] = deque()
        self._turn: PollRequest | None = None
        self._turn_seconds = 0.0
        self._finished = count(1)
        self._loop = asyncio.get_running_loop()
        self._all_there: asyncio.Future[None] = self._loop.create_future()

    def start(self, requests: Sequence[tuple[PollRequest, Submit]]) -> None:
        """Have the requests done in their threads, one after the other; call it once."""
        self._requests = [request for request, _ in requests if request.awaited]
        self._to_come.extend(requests)
        self._submit_next()

    async def wait(self) -> None:
        """Wait until each awaited group is there or late; what is late goes on by itself."""
        while self._requests and not self._all_there.done():
            # How long an answer can still come in time: a group that begins late has its share.
            now = time.monotonic()
            waiting = [request for request in self._requests if not request.has_awaited]
            ends = [min(self._end_seconds, self._group_end(request)) for request in waiting]
            seconds = max(ends, default=now) - now
            if seconds <= 0:
                break
            if self._to_come:
                seconds = min(seconds, max(0, self._turn_seconds + _MAX_TURN_SECONDS - now))
            await asyncio.wait((self._all_there,), timeout=seconds)
            if time.monotonic() >= self._turn_seconds + _MAX_TURN_SECONDS:
                self._submit_next()
        # Late or not, each thread gets its request: one that has none would never be free again.
        while self._to_come:
            self._submit_next()

    def _submit_next(self) -> None:
        """Submit the request whose turn is next, if any; from the event loop or a GPU's thread."""
        # Where the event loop and a thread do so at once, two GPUs are queried beside each other.
        with contextlib.suppress(IndexError):
            request, submit = self._to_come.popleft()
            self._turn, self._turn_seconds = request, time.monotonic()
            submit(partial(request.run, pass_on=partial(self._pass_on, request), done=self._count))

    def _pass_on(self, request: PollRequest) -> None:
        # Where it took too long, others had their turn meanwhile, and one of them has it now.
        if self._turn is request:
            self._submit_next()

    def _count(self) -> None:
        """Count a request as answered, in its GPU's thread; the last one wakes the event loop."""
        # `next` is atomic under Python's lock: one thread alone is the last.
        if next(self._finished) == len(self._requests):
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._all_there.set_result, None)

    def is_late(self, request: PollRequest) -> bool:
        """Return whether the group that is being queried has had its time."""
        group = request.current_group
        return (
            group is not None and time.monotonic() >= request.since_seconds + self._seconds[group]
        )

    def is_in_time(self, request: PollRequest, group: CallGroup) -> bool:
        """Return whether a group was answered, and within its time."""
        took_seconds = request.took_seconds.get(group)
        return group in request.answers and (took_seconds or 0) <= self._seconds[group]

    def _group_end(self, request: PollRequest) -> float:
        # Read once: its thread goes on meanwhile, and may be done with the group.
        group = request.current_group
        return self._end_seconds if group is None else request.since_seconds + self._seconds[group]
