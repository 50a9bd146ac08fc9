"""Probes lost GPUs, to find out whether they answer again.

A lost GPU comes back only when the source is reopened, which disturbs the other GPUs. A probe does
not: it requests the GPU by its PCI address, in its own thread. `driver` reopens the source.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import RetryTimer
from gpuledger_agent.gpu.breaker import slow_backoff
from gpuledger_agent.gpu.protocol import GpuSource
from gpuledger_agent.gpu.threads import CallThread

_log = structlog.get_logger(__name__)
_PAUSE_NS: Final = 10 * NS_PER_SECOND


class LostGpuProbe:
    """Probes the lost GPUs every 10 seconds, one after another."""

    def __init__(self, source: GpuSource) -> None:
        self._source = source
        self.thread: CallThread | None = None
        """The thread of the probes; started with the first probe."""
        self._probing: Future[Sequence[str]] | None = None
        self._due_ns: int | None = None
        self._reopenings: dict[str, RetryTimer] = {}
        """For each lost GPU: when the source may be reopened if it answers a probe."""

    @property
    def is_stuck(self) -> bool:
        """Whether a probe has not returned, so that reopening the source may hang too."""
        return self._probing is not None and not self._probing.done()

    def end(self) -> None:
        """Forget the last probe and end the thread, because the source is being closed.

        If a probe hangs, the thread ends when the probe returns.
        """
        if self.thread:
            self.thread.end()
            self.thread = None
        if not self.is_stuck:
            self._probing = None
        # Opening the source looks for all GPUs, so the next probe can wait.
        self._due_ns = None

    def find_answering(self, lost: Collection[str], now_ns: int) -> Sequence[str]:
        """Return the lost GPUs that answered the last probe; call it in each tick.

        For these GPUs the source may be reopened now. Also start the next probe if it is due,
        without waiting. A GPU that is lost again after a reopening is returned at increasing
        intervals. `lost` are the names of the lost GPUs.
        """
        if not lost or self._due_ns is None:
            self._due_ns = now_ns + _PAUSE_NS
        self._reopenings = {
            name: self._reopenings.get(name) or RetryTimer(slow_backoff()) for name in lost
        }
        if self.is_stuck:
            return ()
        answering = self._probing.result() if self._probing else ()
        if lost and now_ns >= self._due_ns:
            self._due_ns = now_ns + _PAUSE_NS
            self.thread = self.thread or CallThread("lost-gpus")
            self._probing = self.thread.start(partial(self._probe, sorted(lost)))
        return [
            name for name in answering if name in lost and self._reopenings[name].is_due(now_ns)
        ]

    def record_reopening(self, answering: Collection[str], now_ns: int) -> None:
        """Record that the source is being reopened for these GPUs."""
        for name in answering:
            self._reopenings[name].record_attempt(now_ns)

    def _probe(self, lost: Sequence[str]) -> Sequence[str]:
        try:
            return [name for name in lost if self._source.is_answering(name)]
        except Exception:  # noqa: BLE001  # it must not fail each tick
            _log.exception("gpu_search_failed")
            return ()
