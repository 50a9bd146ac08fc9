"""Looks at the GPUs of an open source between two ticks, in a thread beside those of the ticks.

Which GPUs need it, and when, is decided in `gpuledger_agent.core.node_looks`.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UnavailableError
from gpuledger.runtime.logs import Repeats
from gpuledger_agent.core.raw import ClockReading, Clocks, GpuLook, SampleCursor
from gpuledger_agent.gpu.protocol import Gpu
from gpuledger_agent.gpu.threads import CallThread, wait_at_most
from gpuledger_agent.metrics import LOOKS_FAILED, LOOKS_LATE

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
# Half of the usual pause between two looks: one that takes longer puts off none that follow.
_MAX_WAIT_SECONDS: Final = 0.05
# Longer than a tick waits for a GPU: what comes later than that is not slow, it hangs.
_HANGS_SECONDS: Final = 2.0


class GpuLooker:
    """Looks at GPUs between two ticks.

    All GPUs are queried in one thread, so that a call that hangs costs no tick. The GPU in which it
    hangs is looked at no more until the call returns, and the others by another thread: at most one
    for each GPU hangs at a time.
    """

    def __init__(self) -> None:
        self._worker: CallThread | None = None  # started where there is something to look at
        self._look: _Look | None = None
        self._hanging: dict[str, _Look] = {}

    def end(self) -> None:
        """Ask no GPU any more, as the source is closed; a call that hangs is left to itself."""
        if self._look:
            self._look.is_over = True
            self._hanging |= {self._look.asking: self._look} if self._look.asking else {}
        if self._worker:
            self._worker.end()
        self._worker = self._look = None

    @property
    def is_stuck(self) -> bool:
        """Whether a call is not back yet."""
        looks = [*self._hanging.values(), self._look]
        return any(look is not None and not look.is_done for look in looks)

    async def look(
        self, asked: Sequence[tuple[Gpu, SampleCursor | None]], clocks: Clocks
    ) -> Sequence[GpuLook]:
        """Return what the GPUs answer, each after the samples of its cursor.

        What does not come at once comes with a later look, or by `take`.
        """
        self._hanging = {uuid: look for uuid, look in self._hanging.items() if not look.is_done}
        if self._look and self._look.hangs(clocks.monotonic_ns()) and self._worker:
            self._hanging[self._look.asking] = self._look
            self._worker.end()
            self._worker = self._look = None
        if self._look is None:
            self._worker = self._worker or CallThread("look")
            there = [(gpu, cursor) for gpu, cursor in asked if gpu.uuid not in self._hanging]
            self._look = _Look(there, clocks, self._worker)
        await wait_at_most(self._look.future, _MAX_WAIT_SECONDS)
        LOOKS_LATE.inc(not self._look.is_done)
        return self.take()

    def take(self) -> Sequence[GpuLook]:
        """Return what has come of a look that was late, without waiting for more of it."""
        if self._look is None or not self._look.is_done:
            return ()
        look, self._look = self._look, None
        return look.future.result()


class _Look:
    """One look at some GPUs, in a thread."""

    def __init__(
        self, asked: Sequence[tuple[Gpu, SampleCursor | None]], clocks: Clocks, worker: CallThread
    ) -> None:
        self._asked, self._clocks = asked, clocks
        self._began_ns = clocks.monotonic_ns()
        self.asking = ""
        """The GPU that is asked now, by UUID; written by the thread."""
        self.is_over = False
        """Whether no further GPU is to be asked; read by the thread."""
        self.future = worker.start(self._ask)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def hangs(self, now_ns: int) -> bool:
        """Return whether a call has not returned for so long that others shall not wait for it."""
        is_late = now_ns - self._began_ns > _HANGS_SECONDS * NS_PER_SECOND
        return is_late and bool(self.asking) and not self.is_done

    def _ask(self) -> Sequence[GpuLook]:
        """Return the answers of the GPUs; those that did not answer are left out.

        Where one's answers could not be read, its look has failed.
        """
        found = []
        for gpu, cursor in self._asked:
            if self.is_over:
                break
            self.asking = gpu.uuid
            at = ClockReading.read(self._clocks)
            try:
                found.append(gpu.look(cursor, at=at))
            except UnavailableError:
                # The next tick finds out what is wrong with a GPU that does not answer.
                continue
            except Exception as error:  # noqa: BLE001  # one GPU's answers are less than those of all
                LOOKS_FAILED.inc()
                if count := _repeats.count(f"{gpu.uuid} {type(error).__name__}"):
                    _log.exception("look_failed", gpu=gpu.uuid, count=count)
                found.append(GpuLook(uuid=gpu.uuid, at=at, failed=True))
        return found
