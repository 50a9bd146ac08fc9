"""`gpuledger demo`: options in, a live table or one JSON object out."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from cli.demo.alerts import as_line
from cli.demo.buses import open_bus
from cli.demo.pipeline import Run, drain, running
from cli.demo.plan import DemoPlan, Source, check_url, find_scenario, find_store, parse_bus
from cli.demo.screen import ScreenHeader, ScreenLine, draw, standstill
from cli.demo.sending import problem
from cli.demo.source import find_machine
from cli.demo.stage_tasks import INTERRUPTED, unless_stopped
from cli.demo.summary import (
    StoreLine,
    Summary,
    draw_summary,
    exit_code,
    incident_lines,
    pod_lines,
    truth_error_ratio,
)
from cli.demo.view import Draw, can_be_live, leave_out_of_logs, live, show, width_of
from gpuledger.codec import encode
from gpuledger.early import end_process
from gpuledger.errors import BusError, UserError
from gpuledger.runtime import configure_logs
from gpuledger.settings import LogSettings
from sinks.store.query import count_rows


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
    reuse_topics: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run the whole pipeline in one process and show who uses each GPU.

    Agents, podwatch, join and all sinks run on a bus in memory, or on a real Kafka. GPUs are this
    machine's own where NVML answers, else those of a scenario. Ends on Ctrl-C.

    Parameters
    ----------
    for_
        How many seconds to run; without it, until Ctrl-C.
    scenario
        The scenario to play, a YAML file; by default 2 nodes, 7 GPUs, 7 pods, and what goes wrong.
    source
        `nvml` for this machine's GPUs, `simulated` for the scenario's, `auto` for the first that
        is there.
    bus
        `memory`, or `kafka://host:port[,host:port…]`; topics that are missing are created, topics
        that hold records are refused.
    store
        Folder of the store; by default a new one, which is named at the end.
    format
        A live table, or one JSON object at the end.
    remote_write_url
        A Prometheus to write to; by default a receiver built in, which counts.
    alertmanager_url
        An Alertmanager to alert; by default a receiver built in. Alerts are shown either way.
    reuse_topics
        Write into topics that hold an earlier demo's records, of which this run reads and counts
        none; topics that hold records of anybody else, or that anybody else reads, are refused all
        the same.

    """
    began_seconds = _process_start_seconds()
    configure_logs(LogSettings(level="error", format="text"))
    leave_out_of_logs("incident_seen")
    plan = DemoPlan(
        scenario=find_scenario(scenario),
        source=source,
        kafka=parse_bus(bus),
        reuse_topics=reuse_topics,
        store=find_store(store),
        seconds=for_,
        remote_write_url=check_url("--remote-write-url", remote_write_url),
        alertmanager_url=check_url("--alertmanager-url", alertmanager_url),
    )
    return asyncio.run(_show(plan, as_json=format == "json", began_seconds=began_seconds))


async def _show(plan: DemoPlan, *, as_json: bool, began_seconds: float) -> int:
    console = Console(highlight=False)
    is_live = not as_json and can_be_live(console)
    stop = _stop_on_signals()
    async with AsyncExitStack() as stack:
        run = await unless_stopped(_start(plan, stack), stop)
        if run is None:
            end_process(INTERRUPTED)
        if plan.seconds is not None:
            asyncio.get_running_loop().call_later(plan.seconds, stop.set)
        frames = live(console, _frames(run, plan), stop=stop) if is_live else nullcontext()
        async with frames:
            await run.stages.wait(stop)
        await drain(run)
    summary = _summarise(run, plan, began_seconds=began_seconds)
    if as_json:
        sys.stdout.write(encode(summary).decode() + "\n")
    else:
        width = width_of(console)
        if not is_live:
            last = _header(run, plan, is_over=True)
            show(console, [*draw(run.tally, last, width=width), ScreenLine("")])
        show(console, draw_summary(summary, width=width))
    if not run.ending.is_closed:
        # What is left waits for who does not answer: the event loop would wait for it.
        end_process(exit_code(summary))
    return exit_code(summary)


async def _start(plan: DemoPlan, stack: AsyncExitStack) -> Run:
    """Return the run once it is at work; the stack ends it."""
    machine = await find_machine(plan)
    try:
        bus = await open_bus(plan)
        return await stack.enter_async_context(running(plan, bus=bus, machine=machine))
    except BusError as error:
        if plan.kafka is None:
            raise
        raise UserError(f"--bus kafka://{plan.kafka.bootstrap_servers}: {error}") from error


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _frames(run: Run, plan: DemoPlan) -> Draw:
    def frame(width: int, height: int, seconds: float) -> Sequence[ScreenLine]:
        header = _header(run, plan)
        return draw(run.tally, header, width=width, height=height, seconds=seconds)

    return frame


def _header(run: Run, plan: DemoPlan, *, is_over: bool = False) -> ScreenHeader:
    bus = f"bus: {plan.kafka.bootstrap_servers}" if plan.kafka else ""
    writes = "" if plan.remote_write_url else f"{run.received.writes} remote writes"
    now_ns = run.machine.clock.time_ns()
    problems = [
        None if is_over else standstill(run.tally, now_ns=now_ns),
        *(problem(sink.line(), events=0) for sink in run.sinks),
    ]
    counts = (f"{run.tally.events} events", writes)
    facts = ("gpuledger demo", run.machine.headline, bus, *counts, "" if is_over else "Ctrl-C ends")
    return ScreenHeader(
        facts=[fact for fact in facts if fact],
        problems=[said for said in problems if said],
        alerts=[as_line(alert) for alert in run.alerts.firing()],
    )


def _summarise(run: Run, plan: DemoPlan, *, began_seconds: float) -> Summary:
    tally, ending = run.tally, run.ending
    is_cut_off = ending.is_bus_away or bool(ending.missing_topics)
    truth = run.machine.truth(tally)
    return Summary(
        ticks=ending.ticks,
        events=tally.events,
        entries=tally.entries,
        pods=pod_lines(tally.pods, truth, tally.unused_gpu_seconds),
        without_pod_gpu_seconds=tally.without_pod_gpu_seconds,
        incidents=incident_lines(tally.presence.incidents),
        conservation_error_max_ratio=tally.conservation_error_max_ratio,
        truth_error_ratio=None if truth is None else truth_error_ratio(tally.pods, truth),
        store=StoreLine(path=str(plan.store), rows=count_rows(str(plan.store))),
        dead_letters=run.reader.dead_letters,
        remote_write_requests=None if plan.remote_write_url else run.received.writes,
        alerts=run.alerts.fired(),
        sinks=[sink.line([] if is_cut_off else run.reader.newest) for sink in run.sinks],
        bus_away=_servers(plan) if ending.is_bus_away else None,
        missing_topics=tuple(ending.missing_topics),
        failures=tuple(run.stages.failures(known=BusError if is_cut_off else None)),
        first_attributed_seconds=_since(began_seconds, tally.first_named_seconds),
    )


def _servers(plan: DemoPlan) -> str:
    return plan.kafka.bootstrap_servers if plan.kafka else "memory"


def _since(began_seconds: float, at_seconds: float | None) -> float | None:
    return None if at_seconds is None else round(at_seconds - began_seconds, 3)


def _process_start_seconds() -> float:
    """Return when this process started, on the clock of `time.clock_gettime(CLOCK_BOOTTIME)`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
