"""`gpuledger demo`: takes options, shows a live table and a summary, or prints one JSON object."""

import asyncio
import dataclasses
import io
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from gpuledger.clock import NS_PER_US
from gpuledger.codec import encode
from gpuledger.errors import BusError, UserError
from gpuledger.programs import end_process
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.runtime import configure_logs
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings import LogSettings
from gpuledger.store.query import count_rows
from gpuledger.time_ranges import DAYS
from gpuledger_cli.demo.bus import RunTopics
from gpuledger_cli.demo.interruption import INTERRUPTED, unless_stopped
from gpuledger_cli.demo.pipeline import Run, drain, running
from gpuledger_cli.demo.plan import (
    DemoPlan,
    Source,
    check_cluster,
    check_url,
    find_scenario,
    find_store,
    parse_bus,
)
from gpuledger_cli.demo.play_command import MAX_DAYS, Played, check_play, draw_played, play_days
from gpuledger_cli.demo.run_bill import bill_run
from gpuledger_cli.demo.screen import ScreenHeader, ScreenLine, draw, draw_last, standstill
from gpuledger_cli.demo.sending import problem
from gpuledger_cli.demo.source import find_machine
from gpuledger_cli.demo.summary import (
    StoreLine,
    Summary,
    draw_summary,
    exit_code,
    incident_lines,
    next_commands,
    pod_lines,
    truth_error_ratio,
)
from gpuledger_cli.demo.tables import as_help
from gpuledger_cli.demo.totals import as_line
from gpuledger_cli.in_process.store_directory import mark_finished
from gpuledger_cli.option_help import (
    duration_option,
    epilogue,
    limits,
    parse_seconds,
    time_option,
)

WIDTH_IN_FILES: Final = 160
_REDRAW_SECONDS: Final = 0.25
_MAX_LOG_LINES: Final = 100
_MIN_SECONDS: Final = 0.1

Draw = Callable[[int, int, float], Sequence[ScreenLine]]
"""Returns the lines of a frame for a width, a height and the seconds since the first frame."""


app = App(
    name="demo",
    help_format="plaintext",
    help_epilogue=epilogue(
        as_help(),
        examples={
            "Until Ctrl-C, on this machine's GPUs or simulated ones": "gpuledger demo",
            "Twenty seconds, then a summary and a bill": "gpuledger demo --for 20s",
            "Into your Prometheus": (
                "gpuledger demo --remote-write-url http://localhost:9090/api/v1/write"
            ),
            "Bill its store by owner": (
                "gpuledger demo --for 20s --store demo-store\n"
                "  gpuledger bill --store demo-store --by owner"
            ),
            "A past month of a fleet with 45 GPUs, to try bills and capacity reports on": (
                "gpuledger demo --play 31d --until 2026-11-01 --store month-store"
            ),
        },
        codes={
            1: "something was not delivered or is missing; the summary names it",
            130: "interrupted before the first sample; later, Ctrl-C ends the run with its summary",
        },
    ),
)


@app.default
def demo(
    *,
    for_: Annotated[
        str | None,
        duration_option(
            "How long to run; by default until Ctrl-C", name="--for", forms=limits(_MIN_SECONDS)
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        Parameter(
            help="Scenario to play (YAML); by default 2 nodes, 7 GPUs, 7 pods and faults. With"
            " --play, a fleet (YAML)."
        ),
    ] = None,
    play: Annotated[
        str | None,
        duration_option(
            "Write so many past days of a fleet into --store, which must be empty, and exit",
            forms=f"{DAYS.forms}, at most {MAX_DAYS}d",
        ),
    ] = None,
    until: Annotated[
        str | None,
        time_option("With --play: end of the last day; by default the start of today"),
    ] = None,
    source: Annotated[
        Source,
        Parameter(
            help="GPU data source: nvml for this machine's GPUs, simulated for the scenario's, auto"
            " for NVML if available."
        ),
    ] = "auto",
    cluster: Annotated[
        str,
        Parameter(help="Cluster name of nodes and pods, a DNS label; a second demo needs another."),
    ] = DEFAULT_CLUSTER,
    bus: Annotated[
        str,
        Parameter(
            help="memory, or kafka://host:port[,host:port…]; the demo creates topics of its own"
            " there and deletes them at the end."
        ),
    ] = "memory",
    store: Annotated[
        Path | None,
        Parameter(
            help="Directory of the store; by default a new one. Rows of earlier runs stay in it."
        ),
    ] = None,
    format: Annotated[  # noqa: A002  # the option's name
        Literal["table", "json"], Parameter(help="A live table, or one JSON object at the end.")
    ] = "table",
    remote_write_url: Annotated[
        str | None,
        Parameter(help="Prometheus to write to; by default a built-in receiver that counts."),
    ] = None,
    alertmanager_url: Annotated[
        str | None,
        Parameter(help="Alertmanager to send alerts to; by default they are only shown."),
    ] = None,
) -> int:
    """Run the whole pipeline in one process and show who uses each GPU.

    Agents, podwatch, join and all sinks run on an in-memory bus, or on Kafka.
    """
    began_seconds = _process_start_seconds()
    configure_logs(LogSettings(level="error", format="text"))
    if play is not None:
        unused = {
            "--for": for_,
            "--source": None if source == "auto" else source,
            "--cluster": None if cluster == DEFAULT_CLUSTER else cluster,
            "--bus": None if bus == "memory" else bus,
            "--remote-write-url": remote_write_url,
            "--alertmanager-url": alertmanager_url,
        }
        for option, given in unused.items():
            if given is not None:
                raise UserError(f"{option}: invalid with --play; remove one of them")
        playing = check_play(
            play=play, until=until, scenario=scenario, store=store, now_ns=time.time_ns()
        )
        return _show_played(play_days(playing), as_json=format == "json")
    if until is not None:
        raise UserError("--until: invalid without --play; add --play, such as --play 30d")
    leave_out_of_logs("incident_seen")  # the screen shows the agent's warning as an alert
    plan = DemoPlan(
        scenario=find_scenario(scenario),
        source=source,
        cluster=check_cluster(cluster),
        kafka=parse_bus(bus),
        store=find_store(store),
        seconds=None if for_ is None else parse_seconds(for_, option="--for", minimum=_MIN_SECONDS),
        remote_write_url=check_url("--remote-write-url", remote_write_url),
        alertmanager_url=check_url("--alertmanager-url", alertmanager_url),
    )
    return asyncio.run(_show(plan, as_json=format == "json", began_seconds=began_seconds))


def _show_played(played: Played, *, as_json: bool) -> int:
    console = Console(highlight=False)
    if as_json:
        sys.stdout.write(encode(played).decode() + "\n")
    else:
        show(console, draw_played(played, width=width_of(console), program=_program()))
    return 0


async def _show(plan: DemoPlan, *, as_json: bool, began_seconds: float) -> int:
    console = Console(highlight=False)
    is_live = not as_json and can_be_live(console)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    topics = RunTopics(plan.kafka)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(topics.delete)
        run = await unless_stopped(_start(plan, topics, stack), stop)
        if run is None:
            await topics.delete()
            # Closing the stack could wait for the same brokers as the start.
            end_process(INTERRUPTED)
        began_ns = run.machine.clock.time_ns()
        if plan.seconds is not None:
            asyncio.get_running_loop().call_later(plan.seconds, stop.set)

        def frame(width: int, height: int, seconds: float) -> Sequence[ScreenLine]:
            header = _live_header(run, plan)
            return draw(run.tally, header, width=width, height=height, seconds=seconds)

        async with live(console, frame, stop=stop) if is_live else nullcontext():
            await run.stages.wait(stop)
        await drain(run)
    summary = _summarise(run, plan, began_seconds=began_seconds)
    # On Kafka, others may write later; and a run that lost something is not complete.
    if plan.kafka is None and run.ending.is_closed and exit_code(summary) == 0:
        mark_finished(str(plan.store), now_us=run.machine.clock.time_ns() // NS_PER_US)
    summary = replace(
        summary,
        bill=bill_run(plan.store, began_ns=began_ns, ended_ns=run.machine.clock.time_ns()),
    )
    if as_json:
        sys.stdout.write(encode(summary).decode() + "\n")
    else:
        width = width_of(console)
        show(console, [*draw_last(run.tally, _header(run, plan), width=width), ScreenLine("")])
        commands = next_commands(_program(), summary, is_simulated=run.machine.is_simulated)
        show(console, draw_summary(summary, width=width, commands=commands))
    if not run.ending.is_closed:
        # Tasks still wait for something that does not respond; the event loop would wait for them.
        end_process(exit_code(summary))
    return exit_code(summary)


async def _start(plan: DemoPlan, topics: RunTopics, stack: AsyncExitStack) -> Run:
    """Return the running pipeline; closing the stack ends it."""
    machine = await find_machine(plan)
    try:
        bus = await topics.open_bus()
        return await stack.enter_async_context(running(plan, bus=bus, machine=machine))
    except BusError as error:
        if plan.kafka is None:
            raise
        raise UserError(f"--bus kafka://{plan.kafka.bootstrap_servers}: {error}") from error


def _header(run: Run, plan: DemoPlan) -> ScreenHeader:
    """Return the header after the run: facts and all alerts. The summary reports the problems."""
    bus = f"bus: {plan.kafka.bootstrap_servers}" if plan.kafka else ""
    writes = "" if plan.remote_write_url else f"{run.received.writes} remote writes"
    facts = ("gpuledger demo", run.machine.headline, bus, f"{run.tally.events} events", writes)
    return ScreenHeader(
        facts=[fact for fact in facts if fact],
        alerts=[as_line(alert) for alert in run.alerts.fired()],
    )


def _live_header(run: Run, plan: DemoPlan) -> ScreenHeader:
    """Return the header during the run: facts, and the current problems and alerts."""
    header = _header(run, plan)
    problems = [
        standstill(run.tally, now_ns=run.machine.clock.time_ns()),
        *(problem(sink.line(), events=0) for sink in run.sinks),
    ]
    return dataclasses.replace(
        header,
        facts=[*header.facts, "Ctrl-C ends"],
        problems=[problem for problem in problems if problem],
        alerts=[as_line(alert) for alert in run.alerts.firing()],
    )


def _program() -> str:
    """Return how to start `gpuledger` in the user's shell."""
    started = Path(sys.argv[0])
    is_command = started.name == "gpuledger" and shutil.which("gpuledger") is None
    return shlex.quote(str(started)) if is_command else "gpuledger"


def _summarise(run: Run, plan: DemoPlan, *, began_seconds: float) -> Summary:
    tally, ending = run.tally, run.ending
    servers, named = plan.kafka and plan.kafka.bootstrap_servers, tally.first_named_seconds
    # If the bus is unavailable, no sink could deliver the rest: that is not the sinks' failure.
    is_cut_off = ending.is_bus_away or bool(ending.missing_topics)
    truth = run.machine.truth(tally)
    return Summary(
        samples=ending.ticks,
        events=tally.events,
        entries=tally.entries,
        pods=pod_lines(tally.pods, truth, tally.allocations),
        without_pod_gpu_seconds=tally.without_pod_ns / 10**9,
        idle_gpu_seconds=tally.free_ns / 10**9,
        gap_gpu_seconds=tally.gap_ns / 10**9,
        other_gpu_seconds={name: ns / 10**9 for name, ns in tally.other_ns.items()},
        incidents=incident_lines(tally.gpu_tracker.incidents),
        conservation_error_max_ratio=tally.conservation_error_max_ratio,
        truth_error_ratio=None if truth is None else truth_error_ratio(tally.pods, truth),
        store=StoreLine(path=str(plan.store), rows=count_rows(str(plan.store))),
        dead_letters=run.reader.dead_letters,
        remote_write_requests=None if plan.remote_write_url else run.received.writes,
        alerts=run.alerts.fired(),
        sinks=[sink.line([] if is_cut_off else run.reader.newest) for sink in run.sinks],
        bus_away=(servers or "memory") if ending.is_bus_away else None,
        missing_topics=tuple(ending.missing_topics),
        failures=tuple(run.stages.failures(known=BusError if is_cut_off else None)),
        first_attributed_seconds=None if named is None else round(named - began_seconds, 3),
    )


def _process_start_seconds() -> float:
    """Return when this process started, on the clock of `time.clock_gettime(CLOCK_BOOTTIME)`."""
    # After the last bracket, because a program's name may contain spaces and brackets.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def can_be_live(console: Console) -> bool:
    """Return whether the console can replace one frame by the next."""
    return console.is_terminal and not console.is_dumb_terminal


def width_of(console: Console) -> int:
    """Return the maximum width of lines: the terminal's, or a fixed one for files."""
    return console.width if console.is_terminal else WIDTH_IN_FILES


def show(console: Console, lines: Sequence[ScreenLine]) -> None:
    """Print lines without folding them."""
    for text, style in lines:
        console.print(Text(text, style=style), soft_wrap=True)


@asynccontextmanager
async def live(console: Console, draw: Draw, *, stop: asyncio.Event) -> AsyncIterator[None]:
    """Show frames while the context is open.

    An error while drawing sets `stop`, and is raised when the context is closed.
    """
    with logs_held_back(), Live(console=console, auto_refresh=False, screen=True) as screen:
        task = asyncio.create_task(_redraw(screen, console, draw))
        task.add_done_callback(lambda _: stop.set())
        try:
            yield
        finally:
            await end_tasks(task)
            if not task.cancelled():
                task.result()


async def _redraw(screen: Live, console: Console, draw: Draw) -> None:
    began_seconds = time.monotonic()
    while True:
        lines = draw(console.width, console.height, time.monotonic() - began_seconds)
        texts = (Text(text, style=style, no_wrap=True, overflow="crop") for text, style in lines)
        screen.update(Group(*texts), refresh=True)
        await asyncio.sleep(_REDRAW_SECONDS)


@contextmanager
def logs_held_back() -> Iterator[None]:
    """Keep log lines off the screen while the context is open, then write the last of them."""
    held = _LastLines()
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    streams = [handler.setStream(held) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)
        sys.stderr.write("".join(held.lines))


def leave_out_of_logs(event: str) -> None:
    """Drop the log lines of an event that the screen shows in another form."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(
            lambda record: not (isinstance(record.msg, dict) and record.msg.get("event") == event)
        )


class _LastLines(io.TextIOBase):
    """A stream that keeps the last lines written to it."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)

    @override
    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)
