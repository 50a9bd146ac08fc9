"""The OTLP sink: events in, export requests of metrics out.

Here lives what is its own of the republishing sink's shell. Requests are made in `requests`.
"""

from typing import Final

from gpuledger.bus.protocol import TransactionalBus
from gpuledger.clock import Clock
from gpuledger.runtime import Readiness
from sinks.kafka_sink import Republishing, run_republishing
from sinks.otlp.requests import ExportRequests
from sinks.otlp.settings import OtlpSettings

GROUP: Final = "gpuledger-otlp"
NAME: Final = "otlp"


async def run_otlp(
    *,
    bus: TransactionalBus,
    settings: OtlpSettings,
    readiness: Readiness,
    member: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Write the metrics of every event until cancelled; a missing topic is waited for."""
    requests = ExportRequests(encoding=settings.encoding, attributes=settings.resource_attributes)
    how = Republishing(
        name=NAME,
        group=GROUP,
        topic=settings.topic,
        values_of=requests.of,
        commit_interval_seconds=settings.commit_interval_seconds,
        max_future_seconds=settings.max_future_seconds,
        max_poll_records=settings.max_poll_records,
    )
    await run_republishing(bus=bus, how=how, readiness=readiness, member=member, clock=clock)
