"""Polls the GPUs of an open source between two ticks, in a thread beside those of the ticks.

`gpuledger_agent.core.gpu_sampler` decides which GPUs need it, and `gpuledger_agent.core.fast_polls`
when.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UnavailableError
from gpuledger.runtime.logs import Repeats
from gpuledger_agent.core.raw import ClockReading, Clocks, FastPoll, SampleCursor
from gpuledger_agent.gpu.protocol import Gpu
from gpuledger_agent.gpu.threads import CallThread, wait_at_most
from gpuledger_agent.metrics import FAST_POLLS_FAILED, FAST_POLLS_LATE

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
# Half of the usual pause between two fast polls: a longer one puts off none that follow.
_MAX_WAIT_SECONDS: Final = 0.05
# Longer than a tick waits for a GPU: what comes later than that is not slow, it hangs.
_HANGS_SECONDS: Final = 2.0


class FastPoller:
    """Polls GPUs between two ticks.

    All GPUs are queried in one thread, so that a call that hangs costs no tick. The GPU in which it
    hangs is not polled until the call returns, and the others by another thread: at most one thread
    for each GPU hangs at a time.
    """

    def __init__(self) -> None:
        self._worker: CallThread | None = None  # started with the first fast poll
        self._under_way: _FastPollCall | None = None
        self._hanging: dict[str, _FastPollCall] = {}

    def end(self) -> None:
        """Query no GPU any more, as the source is closed; a call that hangs is left to itself."""
        if self._under_way:
            self._under_way.is_over = True
            self._hanging |= (
                {self._under_way.querying: self._under_way} if self._under_way.querying else {}
            )
        if self._worker:
            self._worker.end()
        self._worker = self._under_way = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call is not back yet."""
        calls = [*self._hanging.values(), self._under_way]
        return any(one is not None and not one.future.done() for one in calls)

    async def poll(
        self, requested: Sequence[tuple[Gpu, SampleCursor | None]], clocks: Clocks
    ) -> Sequence[FastPoll]:
        """Return what the GPUs answer, each after the samples of its cursor.

        What does not come at once comes with a later fast poll, or by `take`.
        """
        self._hanging = {uuid: one for uuid, one in self._hanging.items() if not one.future.done()}
        if self._under_way and self._under_way.hangs(clocks.monotonic_ns()) and self._worker:
            self._hanging[self._under_way.querying] = self._under_way
            self._worker.end()
            self._worker = self._under_way = None
        if self._under_way is None:
            self._worker = self._worker or CallThread("fast-poll")
            there = [(gpu, cursor) for gpu, cursor in requested if gpu.uuid not in self._hanging]
            self._under_way = _FastPollCall(there, clocks, self._worker)
        await wait_at_most(self._under_way.future, _MAX_WAIT_SECONDS)
        FAST_POLLS_LATE.inc(not self._under_way.future.done())
        return self.take()

    def take(self) -> Sequence[FastPoll]:
        """Return what has come of a fast poll that was late, without waiting for more of it."""
        if self._under_way is None or not self._under_way.future.done():
            return ()
        done, self._under_way = self._under_way, None
        return done.future.result()


class _FastPollCall:
    """One fast poll of some GPUs, in a thread."""

    def __init__(
        self,
        requested: Sequence[tuple[Gpu, SampleCursor | None]],
        clocks: Clocks,
        worker: CallThread,
    ) -> None:
        self._requested, self._clocks = requested, clocks
        self._began_ns = clocks.monotonic_ns()
        self.querying = ""
        """The GPU that is queried now, by UUID; written by the thread."""
        self.is_over = False
        """Whether no further GPU is to be queried; read by the thread."""
        self.future = worker.start(self._query)

    def hangs(self, now_ns: int) -> bool:
        """Return whether a call has not returned for so long that others shall not wait for it."""
        is_late = now_ns - self._began_ns > _HANGS_SECONDS * NS_PER_SECOND
        return is_late and bool(self.querying) and not self.future.done()

    def _query(self) -> Sequence[FastPoll]:
        """Return the answers of the GPUs; those that did not answer are left out.

        A GPU whose answers could not be read has a poll that failed.
        """
        found = []
        for gpu, cursor in self._requested:
            if self.is_over:
                break
            self.querying = gpu.uuid
            at = ClockReading.read(self._clocks)
            try:
                found.append(gpu.fast_poll(cursor, at=at))
            except UnavailableError:
                # The next tick finds out what is wrong with a GPU that does not answer.
                continue
            except Exception as error:  # noqa: BLE001  # one GPU's answers are less than those of all
                FAST_POLLS_FAILED.inc()
                if count := _repeats.count(f"{gpu.uuid} {type(error).__name__}"):
                    _log.exception("fast_poll_failed", gpu=gpu.uuid, count=count)
                found.append(FastPoll(uuid=gpu.uuid, at=at, failed=True))
        return found
