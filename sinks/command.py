"""`gpuledger-sink remote_write|alerts|store|rows|otlp`: the wiring of the sinks.

Here settings, bus and service meet. No decision about any record.
"""

from collections.abc import Awaitable
from typing import Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings
from sinks.metrics import count_sink_from_zero
from sinks.settings import KINDS, SinkSettings

_DESCRIPTION: Final = """Hand the booked events on to a receiver. KIND is one of

  remote_write  samples, to Prometheus, Mimir, VictoriaMetrics, … (remote-write 1.0)
  alerts        alerts, to every Alertmanager of a cluster
  store         one row an entry, to the Delta Lake table `entries`
  rows          one flat JSON row an entry, to the topic gpuledger.rows.v1, for SQL engines
  otlp          metrics, to the topic otlp_metrics, for the Kafka receiver of
                OpenTelemetry's collector (make that topic with Kafka's own tools)

Each kind is a consumer group of its own; run several of one kind to share its partitions."""
_KIND: Final = Option(name="kind", setting="kind", help="which sink to run", choices=KINDS)


@explain_user_errors
def main() -> int:
    """Run the sink that the command line names; return the exit code."""
    settings = load_settings(
        SinkSettings, prog="gpuledger-sink", description=_DESCRIPTION, options=[_KIND]
    )
    about = {
        "sink": settings.kind,
        "member": settings.kafka.group_instance_id or None,
        "brokers": settings.kafka.bootstrap_servers,
    }
    return run_service(run_sink, settings=settings, about=about)


async def run_sink(settings: SinkSettings, readiness: Readiness) -> None:
    """Run the sink that the settings name over Kafka, until cancelled."""
    count_sink_from_zero(settings.kind)
    await _work(settings, readiness)


def _work(settings: SinkSettings, readiness: Readiness) -> Awaitable[None]:
    # Imported here, so that a remote-write sink needs no Arrow and a store sink no protobuf.
    bus = KafkaBus(settings.kafka, readiness=readiness)
    member = settings.kafka.group_instance_id or None
    if settings.kind == "remote_write":
        from sinks.remote_write.service import run_remote_write  # noqa: PLC0415  # see above

        section = settings.remote_write
        return run_remote_write(bus=bus, settings=section, readiness=readiness, member=member)
    if settings.kind == "alerts":
        from sinks.alerts.service import run_alerts  # noqa: PLC0415  # see above

        return run_alerts(bus=bus, settings=settings.alerts, readiness=readiness, member=member)
    if settings.kind == "store":
        from sinks.store.service import run_store  # noqa: PLC0415  # see above

        return run_store(bus=bus, settings=settings.store, readiness=readiness, member=member)
    if settings.kind == "rows":
        from sinks.rows.service import run_rows  # noqa: PLC0415  # see above

        return run_rows(bus=bus, settings=settings.rows, readiness=readiness, member=member)
    from sinks.otlp.service import run_otlp  # noqa: PLC0415  # see above

    return run_otlp(bus=bus, settings=settings.otlp, readiness=readiness, member=member)
