"""Podwatch put together: the reflector's steps into the table, the table's dues onto the bus."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import Api
from enricher.podwatch.decode import PodReader
from enricher.podwatch.election import Elector
from enricher.podwatch.events import UnreadablePods
from enricher.podwatch.lease import LeaseClient, identity_of, namespace_of
from enricher.podwatch.publish import Fence, PodPublisher, let_pass
from enricher.podwatch.published_pods import KnownPods, PodBus, read_known
from enricher.podwatch.reflector import Reflector
from enricher.podwatch.settings import PodwatchSettings
from enricher.podwatch.table import PodTable
from enricher.podwatch.watch_events import Deleted, Interrupted, Phase, Skipped, Step, Upserted
from gpuledger.clock import Clock
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness

_EXPIRY_SECONDS: Final = 5.0
_log = structlog.get_logger(__name__)


async def run_podwatch(
    *, api: Api, bus: PodBus, settings: PodwatchSettings, readiness: Readiness, clock: Clock
) -> None:
    """Publish the pods of the API server until cancelled; with a Lease, while it is held.

    Brokers, topics and rights that are missing are waited for. Raises `UserError` where the Lease
    has no namespace.
    The checks are `known`, ok once it was read which pods Kafka knows, `api`, ok once the pods were
    listed, `kafka`, with a Lease `lease`, and the warning `readable`; all are ok while another one
    leads.
    """
    podwatch = _Podwatch(api=api, bus=bus, settings=settings, readiness=readiness, clock=clock)
    if not settings.lease.enabled:
        metrics.LEADING.set(1)
        await podwatch.publish()
        return
    elector = Elector(
        keeper=LeaseClient(
            api=api, namespace=namespace_of(settings.lease), name=settings.lease.name
        ),
        settings=settings.lease,
        identity=identity_of(settings.lease),
        check=readiness.check("lease"),
        clock=clock,
    )
    while True:
        podwatch.stand_by()
        await elector.acquire()
        await elector.lead(podwatch.publish(fence=elector.must_hold))


@dataclass(frozen=True, kw_only=True)
class _Podwatch:
    """What publishes; each time anew, for another one may have published meanwhile."""

    api: Api
    bus: PodBus
    settings: PodwatchSettings
    readiness: Readiness
    clock: Clock

    def stand_by(self) -> None:
        """Report that there is nothing to be done for the moment."""
        for name in ("known", "api", "kafka"):
            self.readiness.check(name).ok("standing by")
        self._readable_check().ok("standing by")
        metrics.PODS.set(0)
        metrics.UNPUBLISHED.set(0)

    async def publish(self, *, fence: Fence = let_pass) -> None:
        """Read what is known, then list, watch and publish until cancelled."""
        for name in ("api", "kafka"):
            self.readiness.check(name).waits("starting")
        known = await self._known_pods()
        table = self._table_of(known)
        publisher = PodPublisher(
            bus=self.bus,
            table=table,
            check=self.readiness.check("kafka"),
            clock=self.clock,
            batch_max=self.settings.publish_batch,
            topic_id=known.topic_id,
            fence=fence,
        )
        follower = Follower(
            table=table,
            publisher=publisher,
            check=self.readiness.check("api"),
            unreadable=UnreadablePods(self._readable_check()),
            clock=self.clock,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.follow(self._reflector()))
            tasks.create_task(publisher.forever())
            tasks.create_task(_expire(table, publisher, self.clock))

    def _readable_check(self) -> Check:
        return self.readiness.check("readable", severity=CheckSeverity.WARNING)

    async def _known_pods(self) -> KnownPods:
        check = self.readiness.check("known")
        return await read_known(bus=self.bus, check=check, clock=self.clock)

    def _table_of(self, known: KnownPods) -> PodTable:
        table = PodTable(
            tombstone_after_seconds=self.settings.tombstone_after_seconds,
            max_tombstones=self.settings.max_tombstones,
        )
        table.restore(known.by_uid.values())
        table.repeat(known.overtaken, time_ns=self.clock.time_ns())
        return table

    def _reflector(self) -> Reflector:
        settings = self.settings
        reader = PodReader(
            labels=settings.labels,
            annotations=settings.annotations,
            gpu_resource_prefixes=settings.gpu_resource_prefixes,
        )
        return Reflector(
            api=self.api, reader=reader, settings=settings.kubernetes, clock=self.clock
        )


class Follower:
    """Takes the reflector's steps into the table and says how it stands with the API server."""

    def __init__(
        self,
        *,
        table: PodTable,
        publisher: PodPublisher,
        check: Check,
        unreadable: UnreadablePods,
        clock: Clock,
    ) -> None:
        self._unreadable = unreadable
        self._table = table
        self._publisher = publisher
        self._check = check
        self._clock = clock

    async def follow(self, reflector: Reflector) -> None:
        """Take the steps, for ever."""
        async with aclosing(reflector.forever()) as steps:
            async for step in steps:
                self.take(step, version=reflector.version)

    def take(self, step: Step, *, version: str | None = None) -> None:
        """Take one step, with the version that the reflector has reached."""
        now = self._clock.time_ns()
        match step:
            case Upserted(pod):
                self._unreadable.discard(pod.uid)
                self._table.see(pod, time_ns=now)
            case Deleted(pod):
                self._unreadable.discard(pod.uid)
                self._table.delete(pod, time_ns=now)
            case Skipped():
                self._skip(step, time_ns=now)
            case Phase.LISTING:
                self._unreadable.begin_list()
                self._table.begin_list()
            case Phase.LISTED:
                self._listed(gone=self._table.end_list(time_ns=now, version=version))
            case Phase.WATCHING:
                self._check.ok(self._pods)
            case Interrupted(error):
                self._check.failed(str(error))
        self._publisher.wake()

    def _skip(self, pod: Skipped, *, time_ns: int) -> None:
        self._unreadable.add(pod)
        if pod.is_deleted:
            self._table.delete_known(pod.uid, version=pod.version, time_ns=time_ns)
        else:
            self._table.keep(pod.uid)

    def _pods(self) -> str:
        return f"{len(self._table)} pods"

    def _listed(self, *, gone: int) -> None:
        self._check.ok(self._pods)
        self._unreadable.tell()
        self._publisher.measure()
        _log.info("pods_listed", count=len(self._table), gone_count=gone)


async def _expire(table: PodTable, publisher: PodPublisher, clock: Clock) -> None:
    """Let tombstones fall due, for ever."""
    while True:
        await clock.sleep(_EXPIRY_SECONDS)
        metrics.EARLY_TOMBSTONES.inc(table.expire(time_ns=clock.time_ns()))
        publisher.wake()
