"""Scans between two ticks: which pids are new on the GPUs whose driver keeps accounts.

A process may open a GPU, use it and be gone between two ticks, and the driver's accounts do not say
whose it was. All GPUs are asked in one thread, so that a call that hangs costs no tick; while it
hangs, there is no scan. Whose a pid is, is found out elsewhere.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from agent.gpu.source import Gpu
from agent.gpu.threads import Worker, wait_for
from agent.metrics import GLANCES_LATE
from gpuledger.errors import UnavailableError

_NOBODY: Final[Collection[int]] = ()
_MAX_WAIT_SECONDS: Final = 0.05
_Running = Mapping[str, frozenset[int]]


class ProcessScanner:
    """Finds new processes; it remembers who was there at the last scan."""

    def __init__(self) -> None:
        self._worker: Worker | None = None  # started where there is something to scan
        self._scanning: Future[_Running] | None = None
        self._known: dict[str, frozenset[int]] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a call is not back yet."""
        return self._scanning is not None and not self._scanning.done()

    async def scan(self, gpus: Sequence[Gpu]) -> Collection[int]:
        """Return the pids that are new since the last scan; none at the first scan of a GPU.

        What does not come at once comes with a later scan.
        """
        if self._scanning is None:
            self._worker = self._worker or Worker("glance")
            self._scanning = self._worker.start(partial(_running_on, list(gpus)))
        await wait_for(self._scanning, _MAX_WAIT_SECONDS)
        if not self._scanning.done():
            GLANCES_LATE.inc()
            return _NOBODY
        found, self._scanning = self._scanning.result(), None
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
