"""Starts the tasks of a pipeline, watches them, and ends them in order."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from gpuledger.errors import GpuledgerError
from gpuledger.runtime.tasks import end_tasks

_STOP_SECONDS: Final = 8.0


class Stages:
    """The tasks of a pipeline; agents are separate because they end first."""

    def __init__(self) -> None:
        self._agents: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    def start_agent(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that makes ticks; `name` appears in messages."""
        self._agents.append(asyncio.create_task(work, name=name))

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends after the agents; `name` appears in messages."""
        self._others.append(asyncio.create_task(work, name=name))

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait for `stop`, or until a stage ends; raise the error of a stage that failed."""
        stopped = asyncio.create_task(stop.wait())
        everything = {stopped, *self._agents, *self._others}
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(stopped)
        _raise_first(done - {stopped})

    def must_run(self) -> None:
        """Raise the error of a stage that has failed, if any."""
        _raise_first(task for task in self._agents + self._others if task.done())

    def failures(self, *, known: type[Exception] | None = None) -> list[str]:
        """Return a line for each stage that failed or did not end in time; call it after `end`.

        If `known` is given, errors of that type and stages that did not end are left out, because
        the caller reports them.
        """
        lines = []
        for task in self._agents + self._others:
            if not task.done():
                if known is None:
                    lines.append(f"{task.get_name()} did not end within {_STOP_SECONDS:g} s")
            elif not task.cancelled() and (error := task.exception()):
                for leaf in _leaves(error):
                    # gpuledger's errors are written for users; for others, the type is useful, too.
                    why = str(leaf) if isinstance(leaf, GpuledgerError) else repr(leaf)
                    if known is None or not isinstance(leaf, known):
                        lines.append(f"{task.get_name()} failed: {why}")
        return lines

    async def end_agents(self) -> None:
        """End the tasks that make ticks."""
        await end_tasks(*self._agents, seconds=_STOP_SECONDS)

    async def end(self) -> None:
        """End all tasks; `failures` then has their errors."""
        await end_tasks(*self._agents, *self._others, seconds=_STOP_SECONDS)


def _raise_first(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.result()


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
