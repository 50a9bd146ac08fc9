"""The tasks of a pipeline: started, watched, ended in their order. What they do is theirs."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from gpuledger.errors import GpuledgerError
from gpuledger.runtime.tasks import end_tasks

_STOP_SECONDS: Final = 8.0


class Stages:
    """The tasks of a pipeline: agents apart, because they end first."""

    def __init__(self) -> None:
        self._agents: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start_agent(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start what makes ticks; it is told of under this name."""
        self._agents.append(asyncio.create_task(work, name=name))

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start what works on ticks; it is told of under this name."""
        self._others.append(asyncio.create_task(work, name=name))

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until told to stop; raises what a stage raises, for none should end by itself."""
        stopped = asyncio.create_task(stop.wait())
        everything = {stopped, *self._agents, *self._others}
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(stopped)
        _raise_first(done - {stopped})

    def must_run(self) -> None:
        """Raise what a stage has raised, where one has."""
        _raise_first(task for task in self._agents + self._others if task.done())

    def failures(self, *, known: type[Exception] | None = None) -> list[str]:
        """Return a line for each stage that failed, or has not ended although it was told to.

        Errors of the kind that is `known` are said elsewhere, and so is why a stage has not ended.
        """
        lines = []
        for task in self._agents + self._others:
            if not task.done():
                if known is None:
                    lines.append(f"{task.get_name()} has not ended within {_STOP_SECONDS:g} s")
            elif not task.cancelled() and (error := task.exception()):
                for leaf in _leaves(error):
                    # Our own errors are sentences for people; of others the type says most.
                    why = str(leaf) if isinstance(leaf, GpuledgerError) else repr(leaf)
                    if known is None or not isinstance(leaf, known):
                        lines.append(f"{task.get_name()} has failed: {why}")
        return lines

    async def end_agents(self) -> None:
        """End what makes ticks."""
        await end_tasks(*self._agents, seconds=_STOP_SECONDS)

    async def end(self) -> None:
        """End everything; what failed with it is in `failures`."""
        await end_tasks(*self._agents, *self._others, seconds=_STOP_SECONDS)


def _raise_first(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.result()


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, or the one that is none."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


T = TypeVar("T")

INTERRUPTED: Final = 130
"""The exit code of a start that was ended."""
_CLEANING_UP_SECONDS: Final = 0.5


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return what the work returns; `None` where `stop` was set first.

    The work is cancelled then, and left to itself where it does not end in half a second: it may
    wait for somebody who does not answer.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks(stopped, working, seconds=_CLEANING_UP_SECONDS)
