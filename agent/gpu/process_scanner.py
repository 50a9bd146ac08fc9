"""Looks between two ticks: which pids are new on the GPUs whose driver keeps accounts.

A process may open a GPU, use it and be gone between two ticks, and the driver's accounts do not say
whose it was. Asked is in one thread of its own, so that a call that hangs costs no tick; while it
hangs, nobody looks. Whose a pid is, is found out elsewhere.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from agent.gpu.nvidia.session import Gpu
from agent.gpu.poll import wait_for
from agent.gpu.threads import Worker
from agent.metrics import GLANCES_LATE
from gpuledger.errors import UnavailableError

_NOBODY: Final[Collection[int]] = ()
_PATIENCE_SECONDS: Final = 0.05
_Running = Mapping[str, frozenset[int]]


class ProcessScanner:
    """Knows who was there at the last look."""

    def __init__(self) -> None:
        self._worker: Worker | None = None  # started where there is something to look at
        self._looking: Future[_Running] | None = None
        self._known: dict[str, frozenset[int]] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a call is not back yet."""
        return self._looking is not None and not self._looking.done()

    async def look(self, gpus: Sequence[Gpu]) -> Collection[int]:
        """Return the pids that are new since the last look; none at the first look at a GPU.

        What does not come at once comes with a later look.
        """
        if self._looking is None:
            self._worker = self._worker or Worker("glance")
            self._looking = self._worker.start(partial(_running_on, list(gpus)))
        await wait_for(self._looking, _PATIENCE_SECONDS)
        if not self._looking.done():
            GLANCES_LATE.inc()
            return _NOBODY
        found, self._looking = self._looking.result(), None
        new = [pids - self._known[uuid] for uuid, pids in found.items() if uuid in self._known]
        self._known.update(found)
        return frozenset[int]().union(*new)


def _running_on(gpus: Sequence[Gpu]) -> _Running:
    found = {}
    for gpu in gpus:
        # The next tick finds out what is wrong with one that does not answer.
        with suppress(UnavailableError):
            pids = gpu.running_pids()
            if pids is not None:
                found[gpu.uuid] = pids
    return found
