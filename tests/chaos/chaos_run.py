"""One run: start everything, disturb it, let it calm down, read to the end and compare."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.ticks import Fleet, node_name
from gpuledger.bus.kafka import KafkaBus
from tests.chaos.agents import Publishing, make_agents
from tests.chaos.alerting import find_fired
from tests.chaos.beside import beside
from tests.chaos.disturbing import Disturbance
from tests.chaos.parts import SESSION_SECONDS, Components, RealParts
from tests.chaos.pods import Pods
from tests.chaos.published_pods import await_published_pods
from tests.chaos.reader import EventsReader
from tests.chaos.schedule import killed_more_than, plan_actions
from tests.chaos.scrapes import SCRAPE_SECONDS, Scrapes
from tests.chaos.scraping import keep_scraping, new_scrapes
from tests.chaos.tally import Tally, Verdict
from tests.default_topics import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuledger.bus.protocol import Bus
    from tests.chaos.agents import Agent

_STATUS_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2
_SETTLE_SECONDS: Final = 15.0
"""How long to wait for late events: longer than a session and a transaction."""
_PODS_SECONDS: Final = 60.0
# The first ticks of a new node wait for its first connection, while other nodes have advanced.
_OF_NEW_NODES: Final = "GpuledgerSamplesBehindWatermark"
# Right for a component that the plan kills more often than the rule allows.
_RESTARTING: Final = "GpuledgerComponentRestarting"
_RESTARTS_ALLOWED: Final = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a run."""

    seconds: float
    rate: int
    """Ticks per second; also the number of nodes, because each ticks once per second."""
    workers: int
    seed: int
    drain_seconds: float


class ChaosRun:
    """A run; components and processes end with `run`, even if it fails."""

    def __init__(
        self, plan: Plan, *, promtool: Path, folder: Path, print_line: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._promtool = promtool
        self._folder = folder
        self._write = print_line
        self._started = time.monotonic()
        self._parts = RealParts(folder)
        self._actions = plan_actions(
            seed=plan.seed,
            seconds=plan.seconds,
            workers=[f"join-{number}" for number in range(plan.workers)],
            session_timeout_seconds=SESSION_SECONDS,
        )

    async def run(self) -> Verdict:
        """Run, and return the verdict."""
        try:
            await self._parts.start()
            pods = Pods(self._parts.kube_api)
            agents = await asyncio.to_thread(self._make_agents, pods)
            components = await asyncio.to_thread(self._make_components)
            try:
                await asyncio.to_thread(components.start)
                return await self._disturb(agents, pods, components)
            finally:
                components.kill()
        finally:
            self._parts.discard()

    def _make_agents(self, pods: Pods) -> list[Agent]:
        fleet = Fleet(nodes=self._plan.rate)
        nodes = [node_name(number) for number in range(self._plan.rate)]
        containers = [
            [each.container_id or "" for each in fleet.tick(number, 0).containers]
            for number in range(self._plan.rate)
        ]
        self._print(f"creating {len(nodes)} pods at the API server")
        uids = pods.create(nodes, containers)
        return make_agents(fleet, uids=uids, partitions=SAMPLES.partitions)

    def _make_components(self) -> Components:
        return Components(parts=self._parts, folder=self._folder, workers=self._plan.workers)

    async def _disturb(self, agents: list[Agent], pods: Pods, components: Components) -> Verdict:
        tally = Tally({agent.node: agent.boot_id for agent in agents})
        bus = KafkaBus(self._parts.settings)
        servers = self._parts.kafka.bootstrap_servers
        reader = EventsReader(bootstrap_servers=servers, tally=tally)
        disturbance = Disturbance(parts=self._parts, components=components, print_line=self._print)
        self._started = time.monotonic()
        scrapes = new_scrapes(components.components)
        scraping = keep_scraping(components.components, scrapes)
        async with beside(reader.run(), disturbance.keep_up(), self._show(tally), scraping):
            async with beside(pods.keep_changing()):
                await self._publish_disturbed(agents, bus, tally, disturbance)
            per_second = tally.published / (time.monotonic() - self._started)
            self._print(f"calm: all published, {per_second:,.0f} ticks/s; all parts are back")
            await self._drain(tally, reader)
            reported = await await_published_pods(bus=bus, pods=pods, seconds=_PODS_SECONDS)
        self._print(reported.as_line())
        self._report_end(await asyncio.to_thread(components.end), disturbance)
        return replace(tally.judge(), alerts=await asyncio.to_thread(self._fired, scrapes))

    def _fired(self, scrapes: Scrapes) -> list[str]:
        fired = find_fired(
            scrapes,
            first=scrapes.count,
            promtool=self._promtool,
            folder=self._folder,
            # Without the agents, which have ended, watermarks rightly stand.
            extended_seconds=SCRAPE_SECONDS,
        )
        return [
            f"{alert} ({', '.join(where)})"
            for alert, where in sorted(fired.items())
            if not self._is_right(alert, where)
        ]

    def _is_right(self, alert: str, where: list[str]) -> bool:
        if alert == _RESTARTING:
            return set(where) <= killed_more_than(_RESTARTS_ALLOWED, self._actions)
        return alert == _OF_NEW_NODES

    async def _publish_disturbed(
        self, agents: list[Agent], bus: Bus, tally: Tally, disturbance: Disturbance
    ) -> None:
        seconds = self._plan.seconds
        publishing = Publishing(bus=bus, agents=agents, tally=tally, seconds=seconds)
        async with asyncio.TaskGroup() as group:
            group.create_task(publishing.run())
            group.create_task(disturbance.follow(self._actions))

    async def _drain(self, tally: Tally, reader: EventsReader) -> None:
        """Wait until every tick has its event or the deadline is over, then for late events."""
        deadline = time.monotonic() + self._plan.drain_seconds
        while tally.seen < tally.published and time.monotonic() < deadline:  # noqa: ASYNC110 - it looks at no event but a count
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(_SETTLE_SECONDS)
        while not await reader.is_at_end() and time.monotonic() < deadline + _SETTLE_SECONDS:  # noqa: ASYNC110 - it polls the broker
            await asyncio.sleep(_POLL_SECONDS)

    async def _show(self, tally: Tally) -> None:
        while True:
            self._print(
                f"{tally.published:,} ticks published, {tally.seen:,} events read, "
                f"lag {tally.published - tally.seen:,}, duplicated {tally.duplicated:,}"
            )
            await asyncio.sleep(_STATUS_SECONDS)

    def _report_end(self, statuses: dict[str, int | None], disturbance: Disturbance) -> None:
        if disturbance.ended_by_themselves:
            self._print(f"!!! ended by themselves: {disturbance.ended_by_themselves}")
        for name, status in statuses.items():
            if status != 0:
                self._print(f"!!! {name} did not end cleanly: {status}")

    def _print(self, text: str) -> None:
        self._write(f"{time.monotonic() - self._started:6.1f} s  {text}")
