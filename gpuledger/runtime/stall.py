"""Ends a process whose work has stopped going round, as one that is started afresh may go on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from gpuledger.errors import FreshStartError

STALL_SECONDS: Final = 600.0
_LOOKS: Final = 60


async def end_where_stalled(
    rounds: Callable[[], int],
    *,
    what: str,
    stall_seconds: float = STALL_SECONDS,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Raise `FreshStartError` once `rounds()` has given the same number for so long.

    The time is counted in looks of this very loop: a process that was stopped, or a machine that
    slept, has not stalled.
    """
    last, looks = rounds(), 0
    while looks < _LOOKS:
        await sleep(stall_seconds / _LOOKS)
        now = rounds()
        last, looks = now, looks + 1 if now == last else 0
    raise FreshStartError(f"{what} has not gone round for {stall_seconds:.0f} s")
