"""The command `gpuledger agent`: reads options, selects the GPU source and serves `/metrics`.

`gpuledger_agent.context` builds and runs everything else.
"""

import os
import sys
from functools import partial
from typing import Final

import structlog

from gpuledger.bus.protocol import Bus
from gpuledger.programs import freeze_collector
from gpuledger.runtime import Readiness, configure_logs, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings
from gpuledger_agent.context import Host, NodePage, make_page, run_agent
from gpuledger_agent.dcgm_exporter import read_swap
from gpuledger_agent.gpu.watchdog import STALLED_EXIT_CODE
from gpuledger_agent.settings import AgentSettings, name_node
from gpuledger_agent.source_selection import find_source

_log = structlog.get_logger(__name__)
# Thresholds of `gc.set_threshold`. A tick makes thousands of objects but hardly any cycles. With
# the default thresholds, the search for cycles takes a tenth of the agent's CPU time.
_COLLECT_AFTER: Final = (10_000, 20, 20)
DESCRIPTION: Final = (
    "Run the agent on a GPU node: it samples the GPUs and their processes, publishes the samples to"
    " Kafka and serves them on /metrics. It accepts the flags and the DCGM_EXPORTER_ variables of"
    " dcgm-exporter too."
)
EXAMPLES: Final = (
    "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS=kafka:9092 gpuledger agent",
    "gpuledger agent --no-kafka --listen 127.0.0.1:9400",
    "gpuledger agent --no-kafka --source simulated",
)
COMMON: Final = (
    "kafka.bootstrap_servers",
    "cluster",
    "node_name",
    "source",
    "no_kafka",
    "sampling_interval_seconds",
    "http.listen",
    "exposition.profile",
    "spool.directory",
    "log.level",
)
OPTIONS = (
    Option(
        name="--source",
        setting="source",
        help="GPU data source",
        choices=("auto", "nvml", "simulated[:FILE]", "recorded:FILE"),
    ),
    Option(
        name="--no-kafka",
        setting="no_kafka",
        help="serve /metrics only; do not publish to Kafka",
        is_flag=True,
    ),
    Option(
        name="--listen",
        setting="http.listen",
        help="address that serves /metrics and the health endpoints",
        choices=("HOST:PORT",),
    ),
    Option(
        name="--process-series",
        setting="exposition.process_series",
        help="include single processes on /metrics",
        is_flag=True,
    ),
)


@explain_user_errors
def main() -> int:
    """Run the agent until a signal arrives; return the exit code."""
    swap = read_swap(sys.argv[1:], os.environ)
    settings = load_settings(
        AgentSettings,
        prog="gpuledger agent",
        description=DESCRIPTION,
        options=OPTIONS,
        examples=EXAMPLES,
        common=COMMON,
        codes={STALLED_EXIT_CODE: "hung; its watchdog ended it, to be restarted"},
        argv=swap.argv,
        complete=swap.complete,
    )
    settings = name_node(settings, os.environ)
    configure_logs(settings.log)
    if swap.is_requested:
        publishes = not settings.no_kafka
        _log.info("dcgm_exporter_replaced", http=settings.http.listen, publishes=publishes)
    if swap.without_effect:
        _log.warning("dcgm_settings_ignored", settings=swap.without_effect)
    host = find_source(settings)
    page = make_page(host, settings)
    return run_service(
        partial(_run, host=host, page=page),
        settings=settings,
        page=page.render,
        about={
            "cluster": settings.cluster,
            "node": settings.node_name,
            "source": settings.source,
            "brokers": None if settings.no_kafka else settings.kafka.bootstrap_servers,
        },
    )


async def _run(
    settings: AgentSettings,
    readiness: Readiness,
    *,
    host: Host,
    page: NodePage,
) -> None:
    bus: Bus | None = None
    if not settings.no_kafka:
        from gpuledger.bus.kafka import KafkaBus  # noqa: PLC0415  # saves 6 MiB with --no-kafka

        bus = KafkaBus(settings.kafka, readiness=readiness)
    freeze_collector(*_COLLECT_AFTER)
    await run_agent(
        host=host,
        bus=bus,
        settings=settings,
        readiness=readiness,
        page=page,
    )
