"""`gpuledger-sink remote_write|alerts|store|rows|otlp`: the wiring of the sinks.

Here settings, bus and sink meet. No decision about any record.
"""

from typing import Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.metrics import count_sink_from_zero
from gpuledger_sinks.registry import KINDS, REMOTE_WRITE
from gpuledger_sinks.settings import SinkSettings

_KINDS_SHOWN: Final = "\n".join(f"  {kind.name:<14}{kind.summary}" for kind in KINDS.values())
_DESCRIPTION: Final = f"""Hand the booked events on to a receiver. KIND is one of

{_KINDS_SHOWN}

Each kind is a consumer group of its own; run several of one kind to share its partitions.

To try a receiver without Kafka, have remote_write scrape a page each second and send what it says:

  GPULEDGER_REMOTE_WRITE__URL=http://localhost:9090/api/v1/write \\
  gpuledger-sink remote_write --from-openmetrics http://localhost:9100/metrics

Then ask the receiver for up{{job="openmetrics"}}: 1 while the page is read. Ctrl-C ends it."""
_KIND: Final = Option(
    name="kind",
    setting="kind",
    help="which sink to run; before --help, whose settings are listed",
    choices=tuple(KINDS),
    chooses_section=True,
)
_FROM_OPENMETRICS: Final = Option(
    name="--from-openmetrics",
    setting="remote_write.openmetrics.url",
    metavar="URL",
    help="scrape this page in place of Kafka (remote_write alone), in OpenMetrics or Prometheus'"
    " text format",
)


@explain_user_errors
def main() -> int:
    """Run the sink that the command line names; return the exit code."""
    settings = load_settings(
        SinkSettings,
        prog="gpuledger-sink",
        description=_DESCRIPTION,
        options=[_KIND, _FROM_OPENMETRICS],
    )
    about: dict[str, str | None] = {
        "sink": settings.kind,
        "group_instance_id": settings.kafka.group_instance_id or None,
        "brokers": settings.kafka.bootstrap_servers,
    }
    if url := settings.remote_write.openmetrics.url:
        about = {"sink": settings.kind, "target": shown_url(url)}
    return run_service(run_kind, settings=settings, about=about)


async def run_kind(settings: SinkSettings, readiness: Readiness) -> None:
    """Run the sink that the settings name, over Kafka or what is scraped, until cancelled."""
    kind = KINDS[settings.kind]
    if kind is REMOTE_WRITE and settings.remote_write.openmetrics.url:
        from gpuledger_sinks.remote_write.openmetrics.scraping import (  # noqa: PLC0415  # no other kind needs its parsers
            run_scraping,
        )

        await run_scraping(settings.remote_write, readiness)
        return
    bus = KafkaBus(settings.kafka, readiness=readiness)
    count_sink_from_zero(kind, bus.topics)
    await run_sink(
        kind,
        bus=bus,
        settings=getattr(settings, kind.name),
        readiness=readiness,
        group_instance_id=settings.kafka.group_instance_id or None,
        group=settings.group or None,
    )
