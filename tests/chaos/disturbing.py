"""Carries out the plan, and restarts components that ended, as a kubelet would."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from tests.chaos.schedule import BROKER, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.parts import Components, RealParts

_POLL_SECONDS: Final = 0.5
_STANDSTILL_SECONDS: Final = 0.7
"""Longer than a worker gathers events before it sends a request."""
_KINDS_OF_KILLS: Final = frozenset({Kind.KILL_WORKER, Kind.KILL_PODWATCH})


class Disturbance:
    """Takes components away and brings them back, one action per component at a time."""

    def __init__(
        self, *, parts: RealParts, components: Components, print_line: Callable[[str], None]
    ) -> None:
        self._parts = parts
        self._components = components.components
        self._print = print_line
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.ended_by_themselves = 0

    async def follow(self, plan: Sequence[Action]) -> None:
        """Run each action at its time or when its target is back; return when all are back."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.TaskGroup() as group:
            for action in plan:
                await asyncio.sleep(max(0.0, started + action.at_seconds - loop.time()))
                group.create_task(self._act(action))

    async def keep_up(self) -> None:
        """Restart components that ended without being stopped, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for name, each in self._components.items():
                if self._locks[name].locked() or (status := each.exit_status()) is None:
                    continue
                self.ended_by_themselves += 1
                self._print(
                    f"!!! {name} ended unexpectedly with {status}: {_last_line(each.log_tail())}"
                )
                each.start()

    async def _act(self, action: Action) -> None:
        async with self._locks[action.target]:
            self._print(str(action))
            if action.kind is Kind.RESTART_BROKER:
                await self._restart_broker(action)
            elif action.kind is Kind.TAKE_API_SERVER:
                await self._take_api_server(action)
            elif action.kind is Kind.KILL_MIDWAY:
                await self._kill_midway(action)
            elif action.kind in _KINDS_OF_KILLS:
                await self._kill(action)
            else:
                await self._stop(action)

    async def _restart_broker(self, action: Action) -> None:
        await asyncio.to_thread(self._parts.kafka.stop)
        await asyncio.sleep(action.away_seconds)
        await asyncio.to_thread(self._parts.kafka.start)
        self._print("broker is back")

    async def _take_api_server(self, action: Action) -> None:
        await asyncio.to_thread(self._parts.kube_api.stop_server)
        await asyncio.sleep(action.away_seconds)
        await asyncio.to_thread(self._parts.kube_api.start)
        self._print("API server is back")

    async def _kill(self, action: Action) -> None:
        target = self._components[action.target]
        await asyncio.to_thread(target.kill)
        await asyncio.sleep(action.away_seconds)
        target.start()

    async def _kill_midway(self, action: Action) -> None:
        """Kill a worker that waits for a response, so that its request completes without it.

        Otherwise a kill hardly ever falls between two of a worker's steps.
        """
        broker = self._parts.kafka.process
        async with self._locks[BROKER]:
            broker.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(_STANDSTILL_SECONDS)
                await asyncio.to_thread(self._components[action.target].kill)
            finally:
                broker.send(signal.SIGCONT)
        await asyncio.sleep(action.away_seconds)
        self._components[action.target].start()

    async def _stop(self, action: Action) -> None:
        target = self._components[action.target]
        target.pause()
        try:
            await asyncio.sleep(action.away_seconds)
        finally:
            target.resume()


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or ["(no log)"])[-1]
