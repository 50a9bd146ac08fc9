"""Threads that may hang: they run calls to the driver, and the process never waits for them to end.

A call that hangs in the driver cannot be ended, and its thread cannot be ended either. The thread
is left running (leaked) and ends if the call ever returns. A `CallThread` runs any calls, one after
another.

A `PollCycle` contains one tick's requests, one per GPU. The event loop submits the requests and
waits for one future, which is done when all requests have been answered. A thread queries its GPU
group by group and writes answers, errors and the current group into the request, so the event loop
can see at any time, without a lock, which groups are late.

The GPUs are queried in turn: a thread that has finished its request submits the next request. If a
request takes longer than `_MAX_TURN_SECONDS`, the event loop submits the next one meanwhile, so a
GPU that hangs delays the others by at most that time. Each group has a share of the tick's
deadline. A group's time starts when the thread starts to query the group. A late group only delays
later groups of the same GPU. The last thread to finish wakes the event loop. Answers that arrive
after the deadline stay in the request, where the next cycle looks for the answers to probes.

On a node with busy CPUs, an answer may be late because the kernel runs other processes instead of
the agent. Such a request is starved, and its GPU is not silent. The kernel counts the time for
which each thread waits for a CPU; the event loop notices how late it was woken.

`worker` decides which groups are queried and what a missing answer means.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import structlog

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UnavailableError
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.protocol import Gpu

_log = structlog.get_logger(__name__)
T = TypeVar("T")

# Enough for the frames of ctypes and the driver, but too small for the kernel to use a huge page
# of 2 MiB for the stack.
_STACK_BYTES: Final = 512 * 1024
_stack_size_lock = threading.Lock()


class CallThread:
    """A daemon thread that runs one call after another.

    The process can exit even if a call hangs.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        start_thread(self._run, name=name)

    def submit(self, do: Callable[[], object]) -> None:
        """Queue the call `do`, which must not raise."""
        self._work.put(do)

    def start(self, do: Callable[[], T]) -> "Future[T]":
        """Queue the call `do` and return a future for its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  # the future passes it to the caller
                future.set_exception(error)

        self.submit(run)
        return future

    def end(self) -> None:
        """End the thread after the calls that are queued now."""
        self._work.put(None)

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            do()


def start_thread(run: Callable[[], None], *, name: str) -> threading.Thread:
    """Start and return a daemon thread with a small stack."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    # The stack size is a setting of the whole process, so the lock is held until the thread starts.
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


async def wait_at_most(future: "Future[Any]", seconds: float) -> None:
    """Wait for at most `seconds` until the future is done; a late call is not cancelled."""
    waiting = asyncio.wrap_future(future)
    # Retrieve the error, because asyncio reports each error that was never retrieved.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait((waiting,), timeout=seconds)


CpuWait = Callable[[int], float]
"""Takes the kernel's id of a thread, and returns for how many seconds the thread has been ready to
run but has waited for a CPU since it started."""


def read_cpu_wait(thread_id: int) -> float:
    """Return how long a thread has waited for a CPU, in seconds; 0 if the kernel does not count."""
    try:
        # Called for each call group of each GPU, so without the overhead of pathlib and io.
        file = os.open(f"/proc/self/task/{thread_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 64).split()[1]) / NS_PER_SECOND
    except (OSError, ValueError, IndexError):
        return 0.0
    finally:
        os.close(file)


# How long a GPU waits for the previous GPU. Queries in turn take half the CPU time of concurrent
# queries, in which each call releases the GIL and the threads wake one another.
_MAX_TURN_SECONDS: Final = 0.02
# The time of each group as a fraction of a tick's deadline: only USAGE can use the whole deadline.
_SHARES: Final = {
    CallGroup.USAGE: 1.0,
    CallGroup.SENSORS: 0.5,
    CallGroup.READINGS: 0.5,
    CallGroup.PROFILING: 0.5,
    CallGroup.HEALTH: 0.5,
}


@dataclass(eq=False, slots=True, kw_only=True)
class PollRequest:
    """One GPU's request in one tick; the GPU's thread fills in the answers."""

    gpu: Gpu
    """The GPU to query."""
    cursor: SampleCursor
    """Position in the ring buffers: the entries up to it were already read."""
    awaited: Sequence[CallGroup]
    """The groups whose answers the tick waits for, in the order in which they are queried."""
    probing: Sequence[CallGroup] = ()
    """The groups that are probed after the awaited groups; the tick does not wait for their
    answers."""
    answers: dict[CallGroup, dict[str, Any]]
    """The answer to each group that succeeded, keyed by field of `RawGpuSample`."""
    errors: dict[CallGroup, Exception]
    """The error of each group that failed."""
    took_seconds: dict[CallGroup, float]
    """How long each group took, whether it succeeded or failed."""
    timeouts: Mapping[CallGroup, float]
    """How long each group may take, in seconds."""
    cpu_wait: CpuWait = read_cpu_wait
    """Returns how long the thread has waited for a CPU."""
    current_group: CallGroup | None = None
    """The group that is being queried now; `None` if there is none."""
    since_seconds: float = 0.0
    """When the query of the current group started, on the host's monotonic clock."""
    has_awaited: bool = False
    """Whether the queries of the awaited groups are finished."""
    is_done: bool = False
    """Whether all queries are finished, so that the thread is free again."""
    overslept_seconds: float = 0.0
    """How much later than requested the event loop woke up while it waited for this request."""
    _thread_id: int = 0
    _cpu_wait_at_start: float = 0.0
    """How long the thread had waited for a CPU when the current group's query started."""
    _overslept_at_start: float = 0.0
    """`overslept_seconds` at that time."""

    @classmethod
    def to(
        cls,
        gpu: Gpu,
        cursor: SampleCursor,
        awaited: Sequence[CallGroup],
        probing: Sequence[CallGroup] = (),
    ) -> "PollRequest":
        """Return a new request without answers."""
        return cls(
            gpu=gpu,
            cursor=cursor,
            awaited=awaited,
            probing=probing,
            answers={},
            errors={},
            took_seconds={},
            timeouts={},
        )

    def run(self, *, pass_on: Callable[[], None], done: Callable[[], None]) -> None:
        """Query all groups, in the GPU's thread.

        `pass_on` is called when the next GPU may be queried. `done` is called when the tick no
        longer has to wait for this request: if there are probes, after the awaited groups,
        otherwise once the thread is free. Without awaited groups, `done` is not called.
        """
        self._thread_id = threading.get_native_id()
        probing = self.probing
        try:
            for group in self.awaited:
                if not self._query(group) and group is CallGroup.USAGE:
                    # Without USAGE the GPU has no sample, and the other groups would fail too.
                    probing = ()
                    break
            self.has_awaited = True
        finally:
            pass_on()
        if probing and self.awaited:
            done()
        for group in probing:
            self._query(group)
        # This order ensures that a finished request never has a current group.
        self.current_group = None
        self.is_done = True
        # Without probes, call `done` only now: the next tick must find the thread free.
        if self.awaited and not probing:
            done()

    @property
    def is_starved(self) -> bool:
        """Whether the thread has waited for a CPU longer than it has run in the current group.

        A call that has run for twice the group's timeout is never starved.
        """
        waited_seconds = max(
            self.overslept_seconds - self._overslept_at_start,
            self.cpu_wait(self._thread_id) - self._cpu_wait_at_start,
        )
        ran_seconds = time.monotonic() - self.since_seconds - waited_seconds
        enough_seconds = 2 * self.timeouts.get(self.current_group or CallGroup.USAGE, 0.0)
        return ran_seconds < min(waited_seconds, enough_seconds)

    def is_silent(self, group: CallGroup) -> bool:
        """Return whether the query of this group has started, but the GPU does not answer it.

        A query that has just started or is starved may still be answered.
        """
        took_seconds = time.monotonic() - self.since_seconds
        has_time = took_seconds >= self.timeouts.get(group, 0.0) / 2
        return self.current_group is group and has_time and not self.is_starved

    def _query(self, group: CallGroup) -> bool:
        # Set the times first, so that the event loop never pairs the new group with old times.
        self._cpu_wait_at_start = self.cpu_wait(self._thread_id)
        self._overslept_at_start = self.overslept_seconds
        self.since_seconds = time.monotonic()
        self.current_group = group
        try:
            self.answers[group] = self.gpu.query(group, self.cursor)
        except Exception as error:  # noqa: BLE001  # the other groups must still be queried
            self.errors[group] = error
            if not isinstance(error, UnavailableError):
                _log.exception("call_group_failed", gpu=self.gpu.uuid, call_group=group.value)
        self.took_seconds[group] = time.monotonic() - self.since_seconds
        return group in self.answers


Submit = Callable[[Callable[[], object]], None]
"""Queues a function in a GPU's thread."""


class PollCycle:
    """Submits the requests of one tick to the GPUs' threads, and waits for the answers."""

    def __init__(self, *, deadline_seconds: float, cpu_wait: CpuWait = read_cpu_wait) -> None:
        self._cpu_wait = cpu_wait
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
        """Submit the requests to their threads, one after another; call this only once."""
        for request, _ in requests:
            request.cpu_wait, request.timeouts = self._cpu_wait, self._seconds
        self._requests = [request for request, _ in requests if request.awaited]
        self._to_come.extend(requests)
        self._submit_next()

    async def wait(self) -> None:
        """Wait until each awaited group has been answered or is late.

        Late queries are not cancelled.
        """
        while self._requests and not self._all_there.done():
            # How long answers can still be in time: each group has its share, but none has time
            # beyond the tick's deadline.
            now = time.monotonic()
            waiting = [request for request in self._requests if not request.has_awaited]
            ends = [min(self._end_seconds, self._group_end(request)) for request in waiting]
            seconds = max(ends, default=now) - now
            if seconds <= 0:
                break
            if self._to_come:
                seconds = min(seconds, max(0, self._turn_seconds + _MAX_TURN_SECONDS - now))
            await asyncio.wait((self._all_there,), timeout=seconds)
            late_seconds = max(0.0, time.monotonic() - now - seconds)
            for request in waiting:
                request.overslept_seconds += late_seconds
            if time.monotonic() >= self._turn_seconds + _MAX_TURN_SECONDS:
                self._submit_next()
        # Submit the remaining requests, because a request that never runs would never be done.
        while self._to_come:
            self._submit_next()

    def _submit_next(self) -> None:
        """Submit the next request if one is left; call it in the event loop or a GPU's thread."""
        # If the event loop and a thread call this at the same time, two GPUs are queried at once.
        with contextlib.suppress(IndexError):
            request, submit = self._to_come.popleft()
            self._turn, self._turn_seconds = request, time.monotonic()
            submit(partial(request.run, pass_on=partial(self._pass_on, request), done=self._count))

    def _pass_on(self, request: PollRequest) -> None:
        # If the request took too long, the event loop has already submitted another request.
        if self._turn is request:
            self._submit_next()

    def _count(self) -> None:
        """Count a finished request, in its GPU's thread; the last one wakes the event loop."""
        # `next` is atomic under the GIL, so exactly one thread is the last.
        if next(self._finished) == len(self._requests):
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._all_there.set_result, None)

    def is_late(self, request: PollRequest) -> bool:
        """Return whether the query of the request's current group has exceeded its time."""
        group = request.current_group
        return (
            group is not None and time.monotonic() >= request.since_seconds + self._seconds[group]
        )

    def is_in_time(self, request: PollRequest, group: CallGroup) -> bool:
        """Return whether the request's query of a group was answered within its time."""
        took_seconds = request.took_seconds.get(group)
        return group in request.answers and (took_seconds or 0) <= self._seconds[group]

    def _group_end(self, request: PollRequest) -> float:
        # Read the group only once, because the thread may change it meanwhile.
        group = request.current_group
        return self._end_seconds if group is None else request.since_seconds + self._seconds[group]
