"""`gpuledger standalone`: connects the components on an in-memory bus, and ends them in order."""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from msgspec.structs import replace

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger.runtime import (
    CheckSeverity,
    Readiness,
    configure_logs,
    explain_user_errors,
    run_service,
)
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings import Option, load_settings
from gpuledger_agent.command import OPTIONS as AGENT_OPTIONS
from gpuledger_agent.command import look_up_pods
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.exposition import PageRenderer
from gpuledger_agent.exposition.node_state import NodeState, make_node_state
from gpuledger_agent.settings import SpoolSettings, name_node
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.demo.plan import find_store
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_cli.in_process.stages import Stages
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

_log = structlog.get_logger(__name__)
DESCRIPTION: Final = (
    "Run the whole pipeline in one process, for one machine without Kafka: agent, join and sinks,"
    " and podwatch if an API server is configured. It stores the usage in a directory, maintains"
    " the store, and serves the agent's /metrics."
)
_RECEIVER: Final = "http://prometheus:9090/api/v1/write"
EXAMPLES: Final = (
    "gpuledger standalone --store /var/lib/gpuledger/store",
    "gpuledger standalone --source simulated --store try-store --listen 127.0.0.1:9820",
    f"GPULEDGER_REMOTE_WRITE__URL={_RECEIVER} gpuledger standalone --sinks store,remote_write",
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
    is_local = "store" in settings.sinks and "://" not in settings.store.uri
    with locked_store(Path(settings.store.uri)) if is_local else nullcontext():
        return _run(settings)


@contextmanager
def locked_store(path: Path) -> Iterator[None]:
    """Create the directory, and hold its lock: two processes would store all usage twice.

    Raises `UserError` if the directory cannot be written or another process holds the lock.
    """
    find_store(path)
    with (path / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another `gpuledger standalone` writes to it; stop it, or use another"
            raise UserError(f"--store: {path}: {problem}") from error
        yield


def _run(settings: StandaloneSettings) -> int:
    configure_logs(settings.log)
    host = find_source(settings)
    node_state = make_node_state(
        settings.exposition,
        clock=host.clock,
        sampling_interval_seconds=settings.sampling_interval_seconds,
        readings_seconds=settings.readings_seconds,
        pods=look_up_pods(host),
    )
    return run_service(
        partial(run_standalone, host=host, node_state=node_state),
        settings=settings,
        page=PageRenderer(node_state, settings=settings.exposition, clock=host.clock),
        about={"node": settings.node_name, "source": settings.source, "store": settings.store.uri},
    )


async def run_standalone(
    settings: StandaloneSettings,
    readiness: Readiness,
    *,
    host: Host,
    node_state: NodeState | None = None,
) -> None:
    """Run all components until cancelled; then end the agent first and deliver its samples.

    Raises the error of a component that fails.
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
        agent = run_agent(
            host=host, bus=bus, settings=sampled, readiness=readiness, node_state=node_state
        )
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


async def _drain(bus: Bus, views: dict[str, BusView]) -> None:
    """Wait at most three seconds until the join and the sinks have processed all records."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while not await _is_drained(bus, views):  # noqa: ASYNC110 - the bus has no event for this
                await asyncio.sleep(0.05)
    except TimeoutError:
        _log.warning("samples_not_delivered", seconds=_DRAIN_SECONDS)


async def _is_drained(bus: Bus, views: dict[str, BusView]) -> bool:
    """Return whether the join has delivered all samples, and the sinks have taken all events.

    For the store, it is sufficient to have read the events: it writes their rows when it ends.
    """
    for name, view in views.items():
        topic = bus.topics.samples if name == "join" else bus.topics.events
        reached = view.taken if name == "store" else view.delivered
        if view.count_behind(reached, await _newest(bus, topic.name)):
            return False
    return True


async def _newest(bus: Bus, topic: str) -> list[tuple[TopicPartition, int]]:
    """Return each partition of a topic that has records, and the offset of its last record."""
    async with bus.reader() as reader:
        spans = await reader.spans(topic)
    return [(partition, span.end - 1) for partition, span in spans.items() if span.end]
