"""Podwatch put together: the reflector's steps into the table, what is due in it onto the bus.

With a Lease this begins anew each time that it is won: what was published meanwhile is read back
from the topic, because another podwatch has published and this one's table is of before.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import structlog

from enricher.podwatch import pod_metrics
from enricher.podwatch.api import Api
from enricher.podwatch.decode import PodReader
from enricher.podwatch.election import Elector, LeaseClient, identity_of, namespace_of
from enricher.podwatch.events import (
    Deleted,
    Interrupted,
    Phase,
    Skipped,
    Step,
    UnreadablePods,
    Upserted,
)
from enricher.podwatch.pod_settings import PodwatchSettings
from enricher.podwatch.publish import Fence, PodBus, PodPublisher, let_pass, read_known
from enricher.podwatch.reflector import Reflector
from enricher.podwatch.table import PodTable
from gpuledger.clock import NS_PER_HOUR, Clock
from gpuledger.completeness import name_publisher
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness

_EXPIRY_SECONDS: Final = 5.0
_BRIDGED_NS: Final = NS_PER_HOUR
_log = structlog.get_logger(__name__)


async def run_podwatch(
    *, api: Api, bus: PodBus, settings: PodwatchSettings, readiness: Readiness, clock: Clock
) -> None:
    """Publish the pods of the API server until cancelled; with a Lease, while it is held.

    Brokers, topics and rights that are missing are waited for. Raises `UserError` where the Lease
    has no namespace.
    The checks are `known_pods`, ok once it was read which pods Kafka knows, `api`, ok once the pods
    were listed, `kafka`, with a Lease `lease`, and the warning `pod_objects`; all are ok while
    another one leads.
    """
    podwatch = PodWatch(api=api, bus=bus, settings=settings, readiness=readiness, clock=clock)
    if not settings.lease.enabled:
        pod_metrics.LEADING.set(1)
        await podwatch.publish()
        return
    elector = Elector(
        client=LeaseClient(
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
class PodWatch:
    """What publishes; each time anew, for another one may have published meanwhile."""

    api: Api
    bus: PodBus
    settings: PodwatchSettings
    readiness: Readiness
    clock: Clock

    def stand_by(self) -> None:
        """Report that there is nothing to be done for the moment."""
        # Ready: standing by is all that it has to do.
        for name in ("known_pods", "api", "kafka"):
            self.readiness.check(name).ok("standing by")
        self.readiness.check("pod_objects", severity=CheckSeverity.WARNING).ok("standing by")
        # Another one counts the same pods, and a sum over both would have them twice.
        pod_metrics.PODS.set(0)
        pod_metrics.UNPUBLISHED.set(0)
        pod_metrics.WATERMARK_TIMESTAMP.set(0)

    async def publish(self, *, fence: Fence = let_pass) -> None:
        """Read what is known, then list, watch and publish until cancelled."""
        settings, clock = self.settings, self.clock
        for name in ("api", "kafka"):
            self.readiness.check(name).waits("starting")
        # Before the first list, which says of every known pod that is not in it that it is gone.
        known = await read_known(
            bus=self.bus, check=self.readiness.check("known_pods"), clock=clock
        )
        table = PodTable(
            tombstone_after_seconds=settings.tombstone_after_seconds,
            max_tombstones=settings.max_tombstones,
        )
        table.restore(known.by_uid.values())
        table.repeat(known.overtaken, time_ns=clock.time_ns())
        publisher = PodPublisher(
            bus=self.bus,
            table=table,
            check=self.readiness.check("kafka"),
            clock=clock,
            batch_max=settings.publish_batch,
            topic_id=known.topic_id,
            next_offsets=known.next_offsets,
            publisher=name_publisher(settings.kafka.client_id),
            fence=fence,
        )
        follower = Follower(
            table=table,
            publisher=publisher,
            check=self.readiness.check("api"),
            unreadable=UnreadablePods(
                self.readiness.check("pod_objects", severity=CheckSeverity.WARNING)
            ),
            clock=clock,
            newest_ns=known.newest_ns,
        )
        reader = PodReader(
            labels=settings.labels,
            annotations=settings.annotations,
            gpu_resource_prefixes=settings.gpu_resource_prefixes,
        )
        reflector = Reflector(
            api=self.api, reader=reader, settings=settings.kubernetes, clock=clock
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run(reflector))
            tasks.create_task(publisher.run())
            tasks.create_task(run_expiry(table, publisher, clock))


class Stamps:
    """When changes of pods are seen: a clock that is set back by up to an hour goes on in it.

    The join describes a tick by the versions that were seen by its time. A version whose stamp lies
    before those of ticks that were described without it would describe them otherwise when they are
    joined again. A clock that is set back by more was wrong before, and is followed.
    """

    def __init__(self, clock: Clock, *, newest_ns: int = 0) -> None:
        """Take the clock, and the newest stamp that was written before."""
        self._clock = clock
        self._last_ns = newest_ns
        self._read_ns = clock.monotonic_ns()

    def next_ns(self) -> int:
        """Return the time of what is seen now."""
        time_ns, read_ns = self._clock.time_ns(), self._clock.monotonic_ns()
        expected_ns = self._last_ns + read_ns - self._read_ns
        is_set_back = 0 < expected_ns - time_ns <= _BRIDGED_NS
        self._last_ns, self._read_ns = expected_ns if is_set_back else time_ns, read_ns
        return self._last_ns


class Follower:
    """Applies the reflector's steps to the table, and reports the API server's state as a check."""

    def __init__(
        self,
        *,
        table: PodTable,
        publisher: PodPublisher,
        check: Check,
        unreadable: UnreadablePods,
        clock: Clock,
        newest_ns: int = 0,
    ) -> None:
        """Take the parts; `newest_ns` is the newest stamp that Kafka has from before."""
        self._unreadable = unreadable
        self._table = table
        self._publisher = publisher
        self._check = check
        self._stamps = Stamps(clock, newest_ns=newest_ns)

    async def run(self, reflector: Reflector) -> None:
        """Apply the steps, for ever."""
        async with aclosing(reflector.run()) as steps:
            async for step in steps:
                self.apply(step, version=reflector.version)

    def apply(self, step: Step, *, version: str | None = None) -> None:
        """Apply one step, with the version that the reflector has reached."""
        time_ns = self._stamps.next_ns()
        match step:
            case Upserted(pod):
                self._unreadable.discard(pod.uid)
                self._table.upsert(pod, time_ns=time_ns)
            case Deleted(pod):
                self._unreadable.discard(pod.uid)
                self._table.delete(pod, time_ns=time_ns)
            case Skipped(is_deleted=True):
                self._unreadable.add(step)
                self._table.delete_known(step.uid, version=step.version, time_ns=time_ns)
            case Skipped():
                self._unreadable.add(step)
                # It is there: a list without it would delete it.
                self._table.keep(step.uid)
            case Phase.LISTING:
                self._unreadable.begin_list()
                self._table.begin_list()
            case Phase.LISTED:
                gone = self._table.end_list(time_ns=time_ns, version=version)
                self._check.ok(self.describe_table)
                self._unreadable.end_list()
                self._publisher.measure()
                _log.info("pods_listed", count=len(self._table), gone_count=gone)
            case Phase.WATCHING:
                # After a watch that failed the check recovers here, without a list.
                self._check.ok(self.describe_table)
            case Interrupted(error):
                self._check.failed(str(error))
        self._publisher.watermarks.follow(step)
        self._publisher.wake()

    def describe_table(self) -> str:
        """Return how many pods there are, for the check."""
        return f"{len(self._table)} pods"


async def run_expiry(table: PodTable, publisher: PodPublisher, clock: Clock) -> None:
    """Let tombstones fall due, for ever."""
    while True:
        await clock.sleep(_EXPIRY_SECONDS)
        pod_metrics.EARLY_TOMBSTONES.inc(table.expire(time_ns=clock.time_ns()))
        publisher.wake()
