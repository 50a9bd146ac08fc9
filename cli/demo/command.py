"""`gpuledger demo`: options in, a live table or one JSON object out."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.live import Live

from cli.demo.machine import DemoBus, find_machine
from cli.demo.pipeline import Run, drain, running
from cli.demo.plan import DemoPlan, Source, find_scenario, find_store, parse_bus
from cli.demo.screen import draw
from cli.demo.summary import StoreLine, Summary, draw_summary, pod_lines, truth_error_ratio
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.memory import MemoryBus
from gpuledger.codec import encode
from gpuledger.errors import UnavailableError, UserError
from gpuledger.service import configure_logs
from gpuledger.settings import LogSettings
from sinks.store.reading import count_rows

_REDRAW_SECONDS: Final = 0.25


def demo(  # one parameter an option
    *,
    for_: Annotated[
        float | None,
        Parameter(name="--for", validator=Number(gt=0)),
    ] = None,
    scenario: Path | None = None,
    source: Source = "auto",
    bus: str = "memory",
    store: Path | None = None,
    format: Literal["table", "json"] = "table",  # noqa: A002  # the option's name
    remote_write_url: str | None = None,
    alertmanager_url: str | None = None,
) -> None:
    """Run the whole pipeline in one process and show who uses each GPU.

    Agents, podwatch, join and all sinks run on a bus in memory, or on a real Kafka. GPUs are this
    machine's own where NVML answers, else those of a scenario. Ends on Ctrl-C.

    Parameters
    ----------
    for_
        How many seconds to run; without it, until Ctrl-C.
    scenario
        The scenario to play, a YAML file; by default the quick start (2 nodes, 4 GPUs, 6 pods).
    source
        `nvml` for this machine's GPUs, `simulated` for the scenario's, `auto` for the first that
        is there.
    bus
        `memory`, or `kafka://host:port[,host:port…]`; topics that are missing are created.
    store
        Folder of the store; by default a new one, which is named at the end.
    format
        A live table, or one JSON object at the end.
    remote_write_url
        A Prometheus to write to; by default a receiver built in, which counts.
    alertmanager_url
        An Alertmanager to alert; by default a receiver built in, which counts.

    """
    began_seconds = _process_start_seconds()
    configure_logs(LogSettings(level="error", format="text"))
    plan = DemoPlan(
        scenario=find_scenario(scenario),
        source=source,
        kafka=parse_bus(bus),
        store=find_store(store),
        seconds=for_,
        remote_write_url=remote_write_url,
        alertmanager_url=alertmanager_url,
    )
    asyncio.run(_show(plan, as_json=format == "json", began_seconds=began_seconds))


async def _show(plan: DemoPlan, *, as_json: bool, began_seconds: float) -> None:
    console = Console(stderr=as_json)
    stop = _stop_on_signals()
    machine = await find_machine(plan)
    bus = await _open_bus(plan)
    async with running(plan, bus=bus, machine=machine) as run:
        if plan.seconds is not None:
            asyncio.get_running_loop().call_later(plan.seconds, stop.set)
        drawing = nullcontext() if as_json else _drawing(run, console, plan)
        async with drawing:
            await run.stages.wait(stop)
        await drain(run)
        ticks = await run.reader.count_ticks()
    summary = _summarise(run, plan, ticks=ticks, began_seconds=began_seconds)
    if as_json:
        sys.stdout.write(encode(summary).decode() + "\n")
    else:
        console.print(draw_summary(summary))


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _open_bus(plan: DemoPlan) -> DemoBus:
    if plan.kafka is None:
        return MemoryBus()
    try:
        await create_topics(plan.kafka)
    except UnavailableError as error:
        raise UserError(f"--bus kafka://{plan.kafka.bootstrap_servers}: {error}") from error
    return KafkaBus(plan.kafka)


@asynccontextmanager
async def _drawing(run: Run, console: Console, plan: DemoPlan) -> AsyncIterator[None]:
    """Draw the table until the context is left."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        task = asyncio.create_task(_redraw(run, live, plan))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _redraw(run: Run, live: Live, plan: DemoPlan) -> None:
    while True:
        live.update(draw(run.tally, headline=_headline(run, plan)), refresh=True)
        await asyncio.sleep(_REDRAW_SECONDS)


def _headline(run: Run, plan: DemoPlan) -> str:
    bus = plan.kafka.bootstrap_servers if plan.kafka else "memory"
    alerts = ", ".join(sorted(run.received.alerts)) or "none"
    return (
        f"gpuledger demo   {run.machine.headline}   bus: {bus}   {run.tally.events} events"
        f"   {run.received.writes} remote writes   alerts: {alerts}   Ctrl-C ends"
    )


def _summarise(run: Run, plan: DemoPlan, *, ticks: int, began_seconds: float) -> Summary:
    tally = run.tally
    truth = run.machine.truth(tally)
    own_writes, own_alerts = plan.remote_write_url is None, plan.alertmanager_url is None
    return Summary(
        ticks=ticks,
        events=tally.events,
        entries=tally.entries,
        pods=pod_lines(tally.pods, truth),
        conservation_error_max_ratio=tally.conservation_error_max_ratio,
        truth_error_ratio=None if truth is None else truth_error_ratio(tally.pods, truth),
        store=StoreLine(path=str(plan.store), rows=count_rows(str(plan.store))),
        dead_letters=run.reader.dead_letters,
        remote_write_requests=run.received.writes if own_writes else None,
        alerts=sorted(run.received.alerts) if own_alerts else None,
        first_attributed_seconds=_since(began_seconds, tally.first_named_seconds),
    )


def _since(began_seconds: float, at_seconds: float | None) -> float | None:
    return None if at_seconds is None else round(at_seconds - began_seconds, 3)


def _process_start_seconds() -> float:
    """Give when this process was started, on the clock of `time.clock_gettime(CLOCK_BOOTTIME)`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
