"""`gpuledger sink remote_write|alerts|store|rows|scaler`: the wiring of the sinks.

Connects settings, bus and sink, and processes no records.
"""

from typing import Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.metrics import count_sink_from_zero
from gpuledger_sinks.registry import KINDS, SCALER
from gpuledger_sinks.settings import SinkSettings

_KINDS_SHOWN: Final = "\n".join(f"  {kind.name:<14}{kind.summary}" for kind in KINDS.values())
_SCALER_SHOWN: Final = f"  {SCALER:<14}GPU use of workloads, to KEDA (external scaler)"
DESCRIPTION: Final = f"""Run a sink, which delivers events to one receiver.

{_KINDS_SHOWN}
{_SCALER_SHOWN}

Each sink except `scaler` is a consumer group of its own. Run several of one sink to share its
partitions. Each `scaler` reads all partitions."""
EXAMPLES: Final = (
    (
        "GPULEDGER_REMOTE_WRITE__URL=http://prometheus:9090/api/v1/write \\\n"
        "    gpuledger sink remote_write"
    ),
    "GPULEDGER_STORE__URI=s3://ledger/gpuledger gpuledger sink store",
    "gpuledger sink alerts --config sinks.yaml",
)
# `--help` shows the first ten that apply to the chosen sink.
COMMON: Final = (
    "kafka.bootstrap_servers",
    "http.listen",
    "log.level",
    "group",
    "remote_write.url",
    "alerts.urls",
    "store.uri",
    "store.storage_options",
    "rows.topic",
    "scaler.cluster",
    "scaler.listen",
    "kafka.security_protocol",
    "remote_write.bearer_token",
    "remote_write.external_labels",
    "remote_write.interval_seconds",
    "remote_write.pod_labels",
    "alerts.external_labels",
    "alerts.pod_labels",
    "alerts.runbook_url",
    "alerts.generator_url",
    "store.entries",
    "store.flush_seconds",
    "rows.commit_interval_seconds",
    "kafka.sasl_mechanism",
    "kafka.sasl_username",
    "kafka.sasl_password",
)
_KIND: Final = Option(
    name="kind",
    setting="kind",
    help="sink to run; put it before --help to see its settings",
    choices=(*KINDS, SCALER),
    chooses_section=True,
)
OPTIONS: Final = (_KIND,)


@explain_user_errors
def main() -> int:
    """Run the sink named on the command line; return the exit code."""
    settings = load_settings(
        SinkSettings,
        prog="gpuledger sink",
        description=DESCRIPTION,
        options=OPTIONS,
        examples=EXAMPLES,
        common=COMMON,
    )
    about = {
        "sink": settings.kind,
        "group_instance_id": settings.kafka.group_instance_id or None,
        "brokers": settings.kafka.bootstrap_servers,
    }
    return run_service(run_kind, settings=settings, about=about)


async def run_kind(settings: SinkSettings, readiness: Readiness) -> None:
    """Run the sink named by the settings until cancelled."""
    bus = KafkaBus(settings.kafka, readiness=readiness)
    if settings.kind == SCALER:
        from gpuledger_sinks.scaler.scaler_command import run_scaler  # noqa: PLC0415  # needs gRPC

        await run_scaler(bus=bus, settings=settings.scaler, readiness=readiness)
        return
    kind = KINDS[settings.kind]
    count_sink_from_zero(kind, bus.topics)
    await run_sink(
        kind,
        bus=bus,
        settings=getattr(settings, kind.name),
        readiness=readiness,
        group_instance_id=settings.kafka.group_instance_id or None,
        group=settings.group or None,
    )
