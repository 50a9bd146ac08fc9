"""The bus of a run: in memory, or on Kafka with separate topics.

On Kafka, each run has its own prefix for topics, groups and transactional ids, so that its data is
separate from other data. The topics are deleted at the end.
"""

import asyncio
import secrets
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from gpuledger.bus.administration import check_topics, create_topics, delete_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus
from gpuledger.errors import BusUnavailableError, GpuledgerError
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings import KafkaSettings
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_cli.in_process.stages import Stages

_PREFIX: Final = "gpuledger-demo"
_DELETING_SECONDS: Final = 5.0
_JOINING_SECONDS: Final = 30.0
_BROKERS_POLL_SECONDS: Final = 1.0


class RunTopics:
    """Creates the topics of a run when it starts, and deletes them at the end."""

    def __init__(self, kafka: KafkaSettings | None) -> None:
        """Take the settings of Kafka; `None` selects the in-memory bus."""
        self._settings = kafka and msgspec.structs.replace(
            kafka, topic_prefix=f"{_PREFIX}-{secrets.token_hex(4)}"
        )
        self._are_made = False

    async def open_bus(self) -> Bus:
        """Return the bus of the run; raises `BusError` if its topics cannot be created."""
        settings = self._settings
        if settings is None:
            return MemoryBus()
        bus = KafkaBus(settings)
        # Raises an error if the brokers do not respond; then there is nothing to delete later.
        await check_topics(settings)
        # Reported in advance, because a broker may take seconds.
        sys.stderr.write(
            f"creating {len(bus.topics)} topics {settings.topic_prefix}.… on"
            f" {settings.bootstrap_servers}\n"
        )
        self._are_made = True
        await create_topics(settings)
        return bus

    async def delete(self) -> None:
        """Delete the topics if any were created; report their prefix if that fails."""
        settings = self._settings
        if settings is None or not self._are_made:
            return
        self._are_made = False
        try:
            async with asyncio.timeout(_DELETING_SECONDS):
                await delete_topics(settings)
        except (GpuledgerError, TimeoutError) as error:
            sys.stderr.write(
                f"gpuledger: cannot delete the topics {settings.topic_prefix}.… on"
                f" {settings.bootstrap_servers}: {str(error) or 'no response'};"
                " delete them with Kafka's tools\n"
            )


async def hold_all(bus: Bus, stages: Stages, views: Sequence[BusView]) -> None:
    """Wait until each consumer group of a run has its partitions.

    Raises `BusError` if the brokers stop responding, and the error of a stage that fails.
    """
    querying = asyncio.create_task(_query_until_silent(bus))
    try:
        async with asyncio.timeout(_JOINING_SECONDS):
            while not all(view.has_all_partitions() for view in views):
                stages.must_run()
                # Consumers wait for brokers forever; only the query fails if they do not respond.
                if querying.done():
                    await querying
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise BusUnavailableError(
            f"the brokers did not assign partitions to the demo's consumer groups"
            f" ({bus.topics.prefix}-…) within {_JOINING_SECONDS:g} s"
        ) from error
    finally:
        await end_tasks(querying)


async def _query_until_silent(bus: Bus) -> None:
    """Query the brokers repeatedly; raise `BusError` once they do not respond.

    The stages of the pipeline would wait for the brokers forever, without an error.
    """
    while True:
        await bus.partitions(bus.topics.samples.name)
        await asyncio.sleep(_BROKERS_POLL_SECONDS)
