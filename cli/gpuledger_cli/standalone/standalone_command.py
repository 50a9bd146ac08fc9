"""`gpuledger standalone`: connects the components on an in-memory bus, and ends them in order."""

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import NS_PER_US, Clock
from gpuledger.errors import GpuledgerError, UserError
from gpuledger.runtime import (
    CheckSeverity,
    Readiness,
    configure_logs,
    explain_user_errors,
    run_service,
)
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings import Option, load_settings
from gpuledger.settings.secret import mask_address
from gpuledger.topics import Topic
from gpuledger_agent.command import OPTIONS as AGENT_OPTIONS
from gpuledger_agent.context import Host, NodePage, make_page, run_agent
from gpuledger_agent.settings import SpoolSettings, name_node
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_cli.in_process.stages import Stages
from gpuledger_cli.in_process.store_directory import make_directory, mark_finished
from gpuledger_cli.standalone.standalone_settings import StandaloneSettings
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import LeaseSettings, PodwatchSettings
from gpuledger_enricher.podwatch.pod_watch import run_podwatch
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import KINDS
from gpuledger_sinks.store.maintainer import Maintainer, MaintenanceSettings

DESCRIPTION: Final = (
    "Run the whole pipeline in one process, for one machine without Kafka: agent, join and sinks,"
    " and podwatch if an API server is configured. It stores the usage in a directory, maintains"
    " the store, and serves the agent's /metrics."
)
_RECEIVER: Final = "http://prometheus:9090/api/v1/write"
EXAMPLES: Final = (
    "gpuledger standalone --store /var/lib/gpuledger/store",
    "gpuledger standalone --source simulated --store try-store \\\n    --listen 127.0.0.1:9820",
    (
        f"GPULEDGER_REMOTE_WRITE__URL={_RECEIVER} \\\n"
        "    gpuledger standalone --sinks store,remote_write"
    ),
)
COMMON: Final = (
    "store.uri",
    "sinks",
    "source",
    "node_name",
    "cluster",
    "http.listen",
    "remote_write.url",
    "alerts.urls",
    "kubernetes.kubeconfig",
    "log.level",
)
OPTIONS: Final = (
    Option(name="--store", setting="store.uri", help="directory of the store", metavar="DIRECTORY"),
    Option(name="--sinks", setting="sinks", help="sinks to run, separated by commas"),
    *(option for option in AGENT_OPTIONS if option.name in {"--source", "--listen"}),
)
_JOIN: Final = JoinTuning(poll_timeout_seconds=0.2)
_MAINTENANCE_SECONDS: Final = 600.0
_DRAIN_SECONDS: Final = 3.0
_LOCK: Final = ".standalone.lock"
_STORE: Final = "store.uri"
_GATHERING: Final = {"store", "remote_write"}
"""Sinks that gather events: the store writes them at the end, and `remote_write` every interval."""


@explain_user_errors
def main() -> int:
    """Run the pipeline until a signal arrives; return the exit code."""
    settings = load_settings(
        StandaloneSettings,
        prog="gpuledger standalone",
        description=DESCRIPTION,
        options=OPTIONS,
        examples=EXAMPLES,
        common=COMMON,
    )
    settings = name_node(settings, os.environ)
    directory = local_directory(settings.store.uri) if "store" in settings.sinks else None
    with locked_store(directory) if directory else nullcontext():
        return _run(settings)


def local_directory(uri: str) -> Path | None:
    """Return the directory of a store on this machine; `None` for an object store."""
    path = uri.removeprefix("file://")
    return None if "://" in path else Path(path)


@contextmanager
def locked_store(path: Path) -> Iterator[None]:
    """Create the directory, and hold its lock: two processes would store all usage twice.

    Raises `UserError` if the directory cannot be written or another process holds the lock.
    """
    file = make_directory(path, name=_STORE) / _LOCK
    try:
        lock = file.open("w")
    except OSError as error:
        remedy = "run as the user who owns the store, or give another directory"
        shown = mask_address(str(file))
        raise UserError(f"{_STORE} {shown}: {error.strerror}; {remedy}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another `gpuledger standalone` writes to it"
            raise UserError(
                f"{_STORE} {mask_address(str(path))}: {problem}; stop that one, or give another"
            ) from error
        yield


def _run(settings: StandaloneSettings) -> int:
    configure_logs(settings.log)
    host = find_source(settings)
    page = make_page(host, settings)
    return run_service(
        partial(run_standalone, host=host, page=page),
        settings=settings,
        page=page.render,
        about={"node": settings.node_name, "source": settings.source, "store": settings.store.uri},
    )


class UncleanEndError(GpuledgerError):
    """At the end, a component failed, did not stop in time, or had not delivered all records."""


async def run_standalone(
    settings: StandaloneSettings,
    readiness: Readiness,
    *,
    host: Host,
    page: NodePage | None = None,
) -> None:
    """Run all components until cancelled; then end the agent first and deliver its samples.

    Raises the error of a component that fails, and `UncleanEndError` if records were not delivered
    in time.
    """
    bus = MemoryBus()
    has_api_server = settings.kubernetes.is_configured(os.environ)
    # Without an API server there is no podwatch to wait for, and pods have no names.
    podwatch_seconds = _JOIN.podwatch_timeout_seconds if has_api_server else 0.0
    # Offsets begin at 0 with each start, so the store must not compare them with earlier ones.
    kept = replace(settings.store, generation=secrets.token_hex(4))
    views = {name: BusView(bus) for name in ("join", *settings.sinks)}
    stages = Stages()
    async with AsyncExitStack() as stack:
        checked = _checked_end(
            stages,
            settings=settings,
            readiness=readiness,
            bus=bus,
            views=views,
            clock=host.clock,
        )
        await stack.enter_async_context(checked)
        stack.push_async_callback(stages.end)
        stack.push_async_callback(_drain, bus, views)
        stack.push_async_callback(stages.end_agents)
        for name in settings.sinks:
            section: Any = kept if name == "store" else getattr(settings, name)
            sink = run_sink(
                KINDS[name],
                bus=views[name],
                settings=section,
                readiness=readiness,
                clock=host.clock,
            )
            stages.start(f"the sink {name}", sink)
        joined = JoinSettings(join=replace(_JOIN, podwatch_timeout_seconds=podwatch_seconds))
        stages.start("the join", run_join(bus=views["join"], settings=joined, readiness=readiness))
        if "store" in settings.sinks and settings.maintain:
            stages.start("maintenance", _maintain(settings, readiness, clock=host.clock))
        if has_api_server:
            watching = _watch_pods(settings, readiness, bus=bus, clock=host.clock)
            stages.start("podwatch", watching)
        # The bus in memory is always available, so the agent needs no spool.
        sampled = replace(settings, spool=SpoolSettings(directory=""))
        agent = run_agent(host=host, bus=bus, settings=sampled, readiness=readiness, page=page)
        stages.start_agent("the agent", agent)
        await stages.wait(asyncio.Event())


async def _watch_pods(
    settings: StandaloneSettings, readiness: Readiness, *, bus: Bus, clock: Clock
) -> None:
    watched = PodwatchSettings(
        cluster=settings.cluster,
        kubernetes=settings.kubernetes,
        lease=LeaseSettings(enabled=False),
    )
    async with open_api(watched.kubernetes) as api:
        await run_podwatch(api=api, bus=bus, settings=watched, readiness=readiness, clock=clock)


async def _maintain(settings: StandaloneSettings, readiness: Readiness, *, clock: Clock) -> None:
    """Maintain the store every ten minutes until cancelled."""
    check = readiness.check("maintenance", severity=CheckSeverity.WARNING)
    check.ok("not due yet")
    maintainer = Maintainer(
        MaintenanceSettings(uri=settings.store.uri, storage_options=settings.store.storage_options),
        clock=clock,
    )
    try:
        while True:
            await asyncio.sleep(_MAINTENANCE_SECONDS)
            try:
                # In a daemon thread, because a step may take longer than a process may take to end.
                done = await in_daemon_thread(maintainer.run)
            except (ReceiverUnavailableError, UserError) as error:
                check.failed(str(error))
            else:
                check.ok(f"{sum(step.count > 0 for step in done.steps)} steps had something to do")
    finally:
        maintainer.stop()


async def _drain(bus: Bus, views: Mapping[str, BusView]) -> None:
    """Wait at most three seconds until the join and the sinks have processed all records."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while await _count_behind(bus, views, has_ended=False):  # noqa: ASYNC110 - the bus has no event for this
                await asyncio.sleep(0.05)


@asynccontextmanager
async def _checked_end(
    stages: Stages,
    *,
    settings: StandaloneSettings,
    readiness: Readiness,
    bus: Bus,
    views: Mapping[str, BusView],
    clock: Clock,
) -> AsyncIterator[None]:
    """Check the end of a pipeline that runs in the context, and mark its store as finished.

    The store is marked only after a signal, once all stages have ended. Raises `UncleanEndError` if
    a stage failed while it ended, or has not delivered all records.
    """
    try:
        yield
    except asyncio.CancelledError:
        problems = stages.failures()
        behind = await _count_behind(bus, views, has_ended=True)
        if "remote_write.receiver" not in readiness.failed_checks():
            behind.pop("remote_write", None)  # only the interval that is not over
        problems += [f"{name} did not deliver {count} records" for name, count in behind.items()]
        if "store" in settings.sinks and behind.keys().isdisjoint({"join", "store"}):
            store, now_us = settings.store, clock.time_ns() // NS_PER_US
            mark = partial(mark_finished, store.uri, store.storage_options, now_us=now_us)
            # In a daemon thread, because the storage may not respond.
            await in_daemon_thread(mark)
        if problems:
            raise UncleanEndError("; ".join(problems)) from None
        raise


async def _count_behind(
    bus: Bus, views: Mapping[str, BusView], *, has_ended: bool
) -> dict[str, int]:
    """Return how many samples, events and incidents each component still has to process, if any.

    Before the end, the sinks in `_GATHERING` only have to read the events.
    """
    topics = bus.topics
    ends = await _ends_of(bus, topics.samples, topics.events, topics.attributed_incidents)
    behind = {
        name: view.count_until(
            ends, view.polled if name in _GATHERING and not has_ended else view.committed
        )
        for name, view in views.items()
    }
    return {name: count for name, count in behind.items() if count}


async def _ends_of(bus: Bus, *topics: Topic) -> dict[TopicPartition, int]:
    """Return the offset after the last record of each partition of these topics."""
    ends: dict[TopicPartition, int] = {}
    async with bus.reader() as reader:
        for topic in topics:
            spans = await reader.spans(topic.name)
            ends |= {partition: span.end for partition, span in spans.items()}
    return ends
