"""The tasks of a pipeline: started, watched, ended in their order. What they do is theirs."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from gpuledger.tasks import end_tasks

_STOP_SECONDS: Final = 8.0


class Stages:
    """The tasks of a pipeline: agents apart, because they end first."""

    def __init__(self) -> None:
        self._agents: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start_agent(self, work: Coroutine[Any, Any, None]) -> None:
        """Start what makes ticks."""
        self._agents.append(asyncio.create_task(work))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start what works on ticks."""
        self._others.append(asyncio.create_task(work))

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until told to stop; raises what a stage raises, for none should end by itself."""
        stopped = asyncio.create_task(stop.wait())
        everything = {stopped, *self._agents, *self._others}
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(stopped)
        for task in done - {stopped}:
            task.result()

    async def end_agents(self) -> None:
        """End what makes ticks."""
        await end_tasks(*self._agents, seconds=_STOP_SECONDS)

    async def end(self) -> None:
        """End everything."""
        await end_tasks(*self._agents, *self._others, seconds=_STOP_SECONDS)
