"""The whole pipeline in one process: agents, podwatch, join and all sinks on one bus.

This module starts, watches and ends the stages in order; the caller shows the results.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gpuledger.bus.protocol import Bus
from gpuledger.errors import BusError, TopicsError
from gpuledger.runtime import Readiness
from gpuledger.settings.secret import shown_url
from gpuledger_cli.demo.bus import hold_all
from gpuledger_cli.demo.event_reader import EventReader, subscription
from gpuledger_cli.demo.plan import DemoPlan
from gpuledger_cli.demo.sending import Received, SinkWatch, serve_receivers
from gpuledger_cli.demo.source import DemoSource
from gpuledger_cli.demo.totals import RunAlerts, Tally
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_cli.in_process.stages import Stages
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE, STORE, SinkKind
from gpuledger_sinks.settings import (
    AlertsSettings,
    RemoteWriteSettings,
    StoreSettings,
)

_ANSWER_SECONDS: Final = 2.0
_DRAIN_SECONDS: Final = 10.0
_CLOSING_SECONDS: Final = 15.0
_CLOSING_WITHOUT_BUS_SECONDS: Final = 3.0
_STORE_FLUSH_SECONDS: Final = 10.0
_SEND_TIMEOUT_SECONDS: Final = 5.0


@dataclass
class Ending:
    """The state at the end of a run."""

    ticks: int | None = None
    """Number of ticks that the nodes published; `None` if the bus did not respond."""
    is_bus_away: bool = False
    """Whether the bus no longer responds."""
    missing_topics: list[str] = field(default_factory=list)
    """Topics that no longer exist."""
    is_closed: bool = True
    """Whether every stage has ended; a stage may keep waiting for a bus that is unavailable."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A running pipeline."""

    bus: BusView
    """The bus, as its agents use it."""
    machine: DemoSource
    """The source of GPU data."""
    tally: Tally
    """Sums of the events so far."""
    alerts: RunAlerts
    """Alerts that fire or have fired."""
    reader: EventReader
    """Fills `tally` and `alerts`."""
    received: Received
    """Requests to the built-in receivers."""
    stages: Stages
    """Its tasks."""
    sinks: list[SinkWatch]
    """Its sinks, with their deliveries."""
    ending: Ending
    """The state at its end."""


@asynccontextmanager
async def running(plan: DemoPlan, *, bus: Bus, machine: DemoSource) -> AsyncIterator[Run]:
    """Run the pipeline while the context is open; leaving it ends every stage cleanly.

    Stages that do not end in time are left running, see `Ending.is_closed`. Raises `BusError` if
    the brokers do not respond.
    """
    ending = Ending()
    async with _closed_in_time(ending) as stack:
        received = await stack.enter_async_context(serve_receivers())
        tally = Tally()
        alerting = AlertsSettings(
            urls=[plan.alertmanager_url or received.url],
            timeout_seconds=_SEND_TIMEOUT_SECONDS,
        )
        alerts = RunAlerts(settings=alerting, clock=machine.clock)
        read_bus = BusView(bus)
        reader = EventReader(
            consumer=await stack.enter_async_context(read_bus.consumer(subscription(bus.topics))),
            tally=tally,
            alerts=alerts,
            topics=bus.topics,
        )
        stages = Stages()
        stack.push_async_callback(stages.end)
        stages.start("the reader of events", reader.follow())
        sinks = _watch_sinks(plan, alerting, bus=bus, received=received)
        for sink in sinks:
            stages.start(sink.sink, sink.run(machine.clock))
        join_bus = BusView(bus)
        stages.start("join", run_join(bus=join_bus, settings=_JOIN, readiness=Readiness()))
        # All consumers hold their partitions before the first tick.
        await hold_all(bus, stages, [read_bus, join_bus, *(sink.bus for sink in sinks)])
        agent_bus = BusView(bus)
        await machine.start(stages, bus=agent_bus, stack=stack)
        yield Run(
            bus=agent_bus,
            machine=machine,
            tally=tally,
            alerts=alerts,
            reader=reader,
            received=received,
            stages=stages,
            sinks=sinks,
            ending=ending,
        )


@asynccontextmanager
async def _closed_in_time(ending: Ending) -> AsyncIterator[AsyncExitStack]:
    stack = AsyncExitStack()
    try:
        yield stack
    except BusError:
        ending.is_bus_away = True
        raise
    finally:
        # In a task, so that a stage that waits for brokers does not delay the summary.
        closing = asyncio.create_task(stack.aclose())
        seconds = _CLOSING_WITHOUT_BUS_SECONDS if ending.is_bus_away else _CLOSING_SECONDS
        await asyncio.wait({closing}, timeout=seconds)
        ending.is_closed = closing.done()
        if ending.is_closed:
            try:
                closing.result()
            except BusError:
                ending.is_bus_away |= not ending.missing_topics


async def drain(run: Run) -> None:
    """End the agents, then wait until the last events have reached the sinks.

    It does not wait for a bus that does not respond.
    """
    ending = run.ending
    with suppress(BusError, TimeoutError):
        # Checked before the agents end, because they would wait for unavailable brokers.
        await _count_ticks(run)
        await run.stages.end_agents()
        ending.ticks = await _count_ticks(run)
        # The summary reports records that are missing afterwards.
        async with asyncio.timeout(_DRAIN_SECONDS):
            while not await _is_drained(run, ticks=ending.ticks):  # noqa: ASYNC110 - the bus has no event for this
                await asyncio.sleep(0.05)
    if ending.ticks is None or run.tally.events < ending.ticks:
        await _find_reason(run)


async def _is_drained(run: Run, *, ticks: int) -> bool:
    """Return whether the reader has read all records, and every sink has them or cannot deliver."""
    if run.tally.events < ticks or not await run.reader.has_read_all():
        return False
    return all(sink.may_end(run.reader.newest) for sink in run.sinks)


async def _count_ticks(run: Run) -> int:
    """Return how many ticks the nodes published; raises `BusError` if the bus does not respond."""
    samples = run.bus.topics.samples.name
    async with asyncio.timeout(_ANSWER_SECONDS):
        async with run.bus.reader() as reader:
            await reader.spans(samples)
    # Not the number of records, because an agent may publish a tick again.
    return run.bus.published[samples]


async def _find_reason(run: Run) -> None:
    """Record whether the brokers are unavailable or topics are missing."""
    ending = run.ending
    try:
        for topic in run.bus.topics:
            async with asyncio.timeout(_ANSWER_SECONDS):
                try:
                    await run.bus.partitions(topic.name)
                except TopicsError:
                    ending.missing_topics.append(topic.name)
    except (BusError, TimeoutError):
        ending.is_bus_away = True
    if ending.ticks is None and not ending.missing_topics:
        ending.is_bus_away = True


_JOIN: Final = JoinSettings(join=JoinTuning(poll_timeout_seconds=0.2))


def _watch_sinks(
    plan: DemoPlan,
    alerting: AlertsSettings,
    *,
    bus: Bus,
    received: Received,
) -> list[SinkWatch]:
    write = RemoteWriteSettings(
        url=plan.remote_write_url or f"{received.url}/api/v1/write",
        # The built-in receiver only counts requests, and 1.0 needs no other response.
        protocol="auto" if plan.remote_write_url else "1.0",
        timeout_seconds=_SEND_TIMEOUT_SECONDS,
        interval_seconds=0,  # users watch a run of half a minute while it lasts
    )
    store = StoreSettings(
        uri=str(plan.store),
        entries=True,
        flush_seconds=_STORE_FLUSH_SECONDS,
        generation=secrets.token_hex(4),  # earlier runs wrote the store from other topics
    )
    sinks: tuple[tuple[SinkKind, str, Any], ...] = (
        (REMOTE_WRITE, write.url, write),
        (ALERTS, alerting.urls[0], alerting),
        (STORE, store.uri, store),
    )
    return [
        SinkWatch(
            sink=kind.name,
            receiver=shown_url(receiver),
            bus=BusView(bus),
            work=partial(run_sink, kind, settings=settings),
            gathers=kind is STORE,  # it writes its buffered rows when it ends
        )
        for kind, receiver, settings in sinks
    ]
