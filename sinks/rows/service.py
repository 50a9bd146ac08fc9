"""The rows sink: events in, one flat row an entry out.

Here lives what is its own of the republishing sink's shell. Rows are made in `rows`.
"""

from typing import Final

from gpuledger.bus.protocol import TransactionalBus
from gpuledger.clock import Clock
from gpuledger.runtime import Readiness
from sinks.kafka_sink import Republishing, run_republishing
from sinks.rows.rows import encoded_rows_of
from sinks.rows.settings import RowsSettings

GROUP: Final = "gpuledger-rows"
NAME: Final = "rows"


async def run_rows(
    *,
    bus: TransactionalBus,
    settings: RowsSettings,
    readiness: Readiness,
    member: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Write the flat rows of every event until cancelled; a missing topic is waited for."""
    how = Republishing(
        name=NAME,
        group=GROUP,
        topic=settings.topic,
        values_of=encoded_rows_of,
        commit_interval_seconds=settings.commit_interval_seconds,
        max_future_seconds=settings.max_future_seconds,
        max_poll_records=settings.max_poll_records,
    )
    await run_republishing(bus=bus, how=how, readiness=readiness, member=member, clock=clock)
