"""Fast polls: queries to GPUs between two ticks, in a thread that ticks do not use.

`gpuledger_agent.core.gpu_sampler` decides which GPUs need fast polls, and
`gpuledger_agent.core.fast_polls` decides when.
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
# Half of the usual pause between two fast polls, so that a late poll does not delay the next poll.
_MAX_WAIT_SECONDS: Final = 0.05
# Longer than a tick waits for a GPU: a call that takes longer counts as hanging, not slow.
_HANGS_SECONDS: Final = 2.0


class FastPoller:
    """Polls GPUs between two ticks.

    One thread queries all GPUs, so a call that hangs does not delay ticks. A GPU whose call hangs
    is not polled until the call returns, and a new thread polls the other GPUs. At most one thread
    per GPU thus hangs at a time.
    """

    def __init__(self) -> None:
        self._worker: CallThread | None = None  # started with the first fast poll
        self._under_way: _FastPollCall | None = None
        self._hanging: dict[str, _FastPollCall] = {}

    def end(self) -> None:
        """Stop querying because the source is being closed; do not wait for a call that hangs."""
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
        """Whether a fast poll has not finished yet, so that one of its calls may hang."""
        calls = [*self._hanging.values(), self._under_way]
        return any(one is not None and not one.future.done() for one in calls)

    async def poll(
        self, requested: Sequence[tuple[Gpu, SampleCursor | None]], clocks: Clocks
    ) -> Sequence[FastPoll]:
        """Query the GPUs, and return the answers that arrive within 50 ms.

        `requested` are the GPUs, each with its position in the ring buffers; `None` requests only
        the energy. If answers are late, nothing is returned, and a later call or `take` returns
        them.
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
        """Return the answers to the last fast poll if it is finished; otherwise return nothing."""
        if self._under_way is None or not self._under_way.future.done():
            return ()
        done, self._under_way = self._under_way, None
        return done.future.result()


class _FastPollCall:
    """One fast poll of one or more GPUs, in a thread."""

    def __init__(
        self,
        requested: Sequence[tuple[Gpu, SampleCursor | None]],
        clocks: Clocks,
        worker: CallThread,
    ) -> None:
        self._requested, self._clocks = requested, clocks
        self._began_ns = clocks.monotonic_ns()
        self.querying = ""
        """The UUID of the GPU that is queried now; set by the thread."""
        self.is_over = False
        """Whether the thread must stop before it queries the next GPU; read by the thread."""
        self.future = worker.start(self._query)

    def hangs(self, now_ns: int) -> bool:
        """Return whether a call has taken so long that other GPUs must no longer wait for it."""
        is_late = now_ns - self._began_ns > _HANGS_SECONDS * NS_PER_SECOND
        return is_late and bool(self.querying) and not self.future.done()

    def _query(self) -> Sequence[FastPoll]:
        """Query the GPUs one after the other, in the thread; return their answers.

        GPUs that do not answer are left out. If the query of a GPU raises an internal error, its
        answer is marked as failed.
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
                # The next tick finds out why the GPU does not answer.
                continue
            except Exception as error:  # noqa: BLE001  # the other GPUs must still be polled
                FAST_POLLS_FAILED.inc()
                if count := _repeats.count(f"{gpu.uuid} {type(error).__name__}"):
                    _log.exception("fast_poll_failed", gpu=gpu.uuid, count=count)
                found.append(FastPoll(uuid=gpu.uuid, at=at, failed=True))
        return found
