"""Podwatch put together: the reflector's steps into the table, the table's dues onto the bus."""

import asyncio
from contextlib import aclosing
from typing import Final

import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import Api
from enricher.podwatch.decode import PodReader
from enricher.podwatch.known import PodBus, read_known
from enricher.podwatch.publish import Publisher
from enricher.podwatch.reflector import Reflector
from enricher.podwatch.settings import PodwatchSettings
from enricher.podwatch.steps import Deleted, Interrupted, Mark, Seen, Step
from enricher.podwatch.table import PodTable
from gpuledger.clock import Clock
from gpuledger.service.readiness import Check, Readiness

_BURIAL_SECONDS: Final = 5.0
_log = structlog.get_logger(__name__)


async def run_podwatch(
    *, api: Api, bus: PodBus, settings: PodwatchSettings, readiness: Readiness, clock: Clock
) -> None:
    """Publish the pods of the API server until cancelled; `TopicsError` where the topic is missing.

    The checks are `known`, ok once it was read which pods Kafka knows, `api`, ok once the pods were
    listed, and `kafka`.
    """
    known = await read_known(bus=bus, check=readiness.check("known"), clock=clock)
    table = PodTable(
        tombstone_after_seconds=settings.tombstone_after_seconds,
        tombstones_most=settings.tombstones_most,
    )
    table.restore(known.by_uid.values())
    del known
    publisher = Publisher(
        bus=bus,
        table=table,
        check=readiness.check("kafka"),
        clock=clock,
        batch_most=settings.publish_batch,
    )
    reader = PodReader(
        labels=settings.labels,
        annotations=settings.annotations,
        gpu_resource_prefixes=settings.gpu_resource_prefixes,
    )
    reflector = Reflector(api=api, reader=reader, settings=settings.kubernetes, clock=clock)
    follower = Follower(table=table, publisher=publisher, check=readiness.check("api"), clock=clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.follow(reflector))
        tasks.create_task(publisher.forever())
        tasks.create_task(_bury(table, publisher, clock))


class Follower:
    """Takes the reflector's steps into the table and says how it stands with the API server."""

    def __init__(
        self, *, table: PodTable, publisher: Publisher, check: Check, clock: Clock
    ) -> None:
        self._table = table
        self._publisher = publisher
        self._check = check
        self._clock = clock

    async def follow(self, reflector: Reflector) -> None:
        """Take the steps, for ever."""
        async with aclosing(reflector.forever()) as steps:
            async for step in steps:
                self.take(step)

    def take(self, step: Step) -> None:
        """Take one step."""
        now = self._clock.time_ns()
        match step:
            case Seen(pod):
                self._table.see(pod, time_ns=now)
            case Deleted(pod):
                self._table.delete(pod, time_ns=now)
            case Mark.LISTING:
                self._table.begin_list()
            case Mark.LISTED:
                self._listed(gone=self._table.end_list(time_ns=now))
            case Mark.WATCHING:
                self._check.ok(f"{len(self._table)} pods")
            case Interrupted(error):
                self._check.failed(str(error))
                _log.warning("api_interrupted", error=str(error), status=error.status)
        self._publisher.wake()

    def _listed(self, *, gone: int) -> None:
        self._check.ok(f"{len(self._table)} pods")
        self._publisher.measure()
        _log.info("pods_listed", pods=len(self._table), gone=gone)


async def _bury(table: PodTable, publisher: Publisher, clock: Clock) -> None:
    """Let tombstones fall due, for ever."""
    while True:
        await clock.sleep(_BURIAL_SECONDS)
        metrics.EARLY_TOMBSTONES.inc(table.bury(time_ns=clock.time_ns()))
        publisher.wake()
