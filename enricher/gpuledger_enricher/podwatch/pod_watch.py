"""Connects podwatch's parts: the reflector's steps change a table, and the changes are published.

`main` is `gpuledger podwatch`: it creates the settings, the bus and the API server's client, and
runs podwatch with them.

With a Lease, podwatch starts over each time it acquires the Lease: it reads the topics again,
because another podwatch has published in the meantime and the table is out of date.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, Self

import structlog

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_HOUR, Clock, SystemClock
from gpuledger.completeness import name_publisher
from gpuledger.runtime import explain_user_errors, run_service
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness
from gpuledger.settings import load_settings
from gpuledger.settings.secret import shown_url
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.api import Api
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.election import Elector, LeaseClient, identity_of, namespace_of
from gpuledger_enricher.podwatch.events import (
    Deleted,
    Interrupted,
    Phase,
    Skipped,
    Step,
    UnreadableObjects,
    Upserted,
)
from gpuledger_enricher.podwatch.kinds import KINDS, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_enricher.podwatch.publish import Fence, RecordPublisher, let_pass, read_known
from gpuledger_enricher.podwatch.reflector import Reflector
from gpuledger_enricher.podwatch.table import ObjectTable
from gpuledger_enricher.watched_records import RecordT

DESCRIPTION: Final = (
    "Run podwatch, once per cluster: it watches the Kubernetes API server and publishes records of"
    " pods, nodes and namespaces to Kafka."
)
EXAMPLES: Final = (
    "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS=kafka:9092 gpuledger podwatch",
    "GPULEDGER_KUBERNETES__KUBECONFIG=~/.kube/config gpuledger podwatch",
    "gpuledger podwatch --config podwatch.yaml",
)
COMMON: Final = (
    "kafka.bootstrap_servers",
    "cluster",
    "kubernetes.url",
    "kubernetes.kubeconfig",
    "lease.enabled",
    "labels",
    "namespace_labels",
    "node_labels",
    "http.listen",
    "log.level",
)
_EXPIRY_SECONDS: Final = 5.0
_BRIDGED_NS: Final = NS_PER_HOUR
_log = structlog.get_logger(__name__)


async def run_podwatch(
    *, api: Api, bus: Bus, settings: PodwatchSettings, readiness: Readiness, clock: Clock
) -> None:
    """Watch and publish until cancelled; with a Lease, only while holding the Lease.

    Wait for missing brokers, topics and permissions. Raise `UserError` if the Lease has no
    namespace. The checks are those of `KindChecks` for each kind and, with a Lease, `lease`; all
    are ok while another podwatch leads.
    """
    pod_metrics.count_cluster_from_zero(settings.cluster)
    podwatch = PodWatch(api=api, bus=bus, settings=settings, readiness=readiness, clock=clock)
    if not settings.lease.enabled:
        pod_metrics.LEADING.labels(cluster=settings.cluster).set(1)
        await podwatch.publish()
        return
    elector = Elector(
        cluster=settings.cluster,
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
    """Publishes objects; each run starts over, because another podwatch may publish in between."""

    api: Api
    bus: Bus
    settings: PodwatchSettings
    readiness: Readiness
    clock: Clock

    def stand_by(self) -> None:
        """Pass all checks and reset the gauges, because another podwatch leads."""
        for kind in KINDS:
            KindChecks.of(kind, self.readiness).stand_by()
            # The leader counts the same objects, so a sum over both would count them twice.
            pod_metrics.OBJECTS.labels(kind=kind.name).set(0)
            pod_metrics.UNPUBLISHED.labels(kind=kind.name).set(0)
            kind.measure(())
            if kind.watermark_component is not None:
                pod_metrics.WATERMARK_TIMESTAMP.labels(
                    cluster=self.settings.cluster, kind=kind.name
                ).set(0)

    async def publish(self, *, fence: Fence = let_pass) -> None:
        """Read the topics, then list, watch and publish until cancelled.

        `fence` raises an error if another podwatch may publish. Each kind runs separately: if the
        permission for one kind is missing, the other kinds continue.
        """
        async with asyncio.TaskGroup() as tasks:
            for kind in KINDS:
                tasks.create_task(self._publish_kind(kind, fence=fence))

    async def _publish_kind(self, kind: ObjectKind[RecordT], *, fence: Fence) -> None:
        settings, clock = self.settings, self.clock
        checks = KindChecks.of(kind, self.readiness)
        checks.begin()
        # Before the first list: known objects that are missing from the list have been deleted.
        known = await read_known(
            kind=kind, cluster=settings.cluster, bus=self.bus, check=checks.known, clock=clock
        )
        table = ObjectTable(
            tombstone_after_seconds=settings.tombstone_after_seconds,
            max_tombstones=settings.max_tombstones,
            node_of=kind.node_of,
            identity_of=kind.identity_of,
            as_known=kind.as_known,
        )
        table.restore(known.by_identity.values())
        table.repeat(known.overtaken, time_ns=clock.time_ns())
        publisher = RecordPublisher(
            kind=kind,
            cluster=settings.cluster,
            bus=self.bus,
            table=table,
            check=checks.kafka,
            clock=clock,
            batch_max=settings.publish_batch,
            topic_id=known.topic_id,
            next_offsets=known.next_offsets,
            publisher=name_publisher(settings.kafka.client_id),
            fence=fence,
        )
        follower = Follower(
            kind=kind,
            table=table,
            publisher=publisher,
            checks=checks,
            clock=clock,
            newest_ns=known.newest_ns,
        )
        reflector = Reflector(
            kind=kind,
            api=self.api,
            reader=kind.reader(settings),
            settings=settings.kubernetes,
            clock=clock,
        )
        # The records are in the table now; `known` would keep a second reference in memory.
        del known
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run(reflector))
            tasks.create_task(publisher.run())
            tasks.create_task(run_expiry(kind, table, publisher, clock))


@dataclass(frozen=True, kw_only=True)
class KindChecks:
    """The checks of one kind of object."""

    known: Check
    """Whether the records of the topic have been read."""
    api: Check
    """Whether the objects were listed and are watched."""
    kafka: Check
    """Whether Kafka accepts the published records."""
    objects: Check
    """Whether every object can be read; a warning."""

    @classmethod
    def of(cls, kind: ObjectKind[Any], readiness: Readiness) -> Self:
        """Return the checks of a kind; every call returns the same checks."""
        return cls(
            known=readiness.check(f"{kind.plural}.known"),
            api=readiness.check(f"{kind.plural}.api"),
            kafka=readiness.check(f"{kind.plural}.kafka"),
            objects=readiness.check(f"{kind.plural}.objects", severity=CheckSeverity.WARNING),
        )

    def stand_by(self) -> None:
        """Pass all checks, because a standby has no work."""
        for check in (self.known, self.api, self.kafka, self.objects):
            check.ok("standing by")

    def begin(self) -> None:
        """Set the checks to waiting, because the work of this kind begins."""
        for check in (self.known, self.api, self.kafka):
            check.waits("starting")


class Stamps:
    """Returns timestamps for changes; they go back only if the clock is set back by over an hour.

    The join describes a tick by the versions whose timestamps are not after the tick. Suppose a
    tick was described without a new version, and this version then got an earlier timestamp. The
    tick would be described differently when it is joined again. If a clock is set back by more than
    an hour, it was wrong before, so the timestamps go back as well.
    """

    def __init__(self, clock: Clock, *, newest_ns: int = 0) -> None:
        """`newest_ns` is the newest timestamp that was published before; 0 if there is none."""
        self._clock = clock
        self._last_ns = newest_ns
        self._read_ns = clock.monotonic_ns()

    def next_ns(self) -> int:
        """Return the timestamp for a change that is seen now, in nanoseconds since the epoch."""
        time_ns, read_ns = self._clock.time_ns(), self._clock.monotonic_ns()
        expected_ns = self._last_ns + read_ns - self._read_ns
        is_set_back = 0 < expected_ns - time_ns <= _BRIDGED_NS
        self._last_ns, self._read_ns = expected_ns if is_set_back else time_ns, read_ns
        return self._last_ns


class Follower(Generic[RecordT]):
    """Applies the reflector's steps to the table, and reports the API server's state in a check."""

    def __init__(
        self,
        *,
        kind: ObjectKind[RecordT],
        table: ObjectTable[RecordT],
        publisher: RecordPublisher[RecordT],
        checks: KindChecks,
        clock: Clock,
        newest_ns: int = 0,
    ) -> None:
        """`newest_ns` is the newest timestamp that Kafka had at the start."""
        self._kind = kind
        self._unreadable = UnreadableObjects(checks.objects)
        self._table = table
        self._publisher = publisher
        self._check = checks.api
        self._stamps = Stamps(clock, newest_ns=newest_ns)

    async def run(self, reflector: Reflector[RecordT]) -> None:
        """Apply the reflector's steps until cancelled."""
        async with aclosing(reflector.run()) as steps:
            async for step in steps:
                self.apply(step, version=reflector.version)

    def apply(self, step: Step[RecordT], *, version: str | None = None) -> None:
        """Apply one step, given the version that the reflector has reached."""
        time_ns = self._stamps.next_ns()
        match step:
            case Upserted(record):
                self._unreadable.discard(self._kind.identity_of(record))
                self._table.upsert(record, time_ns=time_ns)
            case Deleted(record):
                self._unreadable.discard(self._kind.identity_of(record))
                self._table.delete(record, time_ns=time_ns)
            case Skipped(is_deleted=True):
                self._unreadable.add(self._kind.identity_of(step), step)
                self._table.delete_known(
                    self._kind.identity_of(step), version=step.version, time_ns=time_ns
                )
            case Skipped():
                self._unreadable.add(self._kind.identity_of(step), step)
                # The object exists: without this call, the end of the list would delete it.
                self._table.keep(self._kind.identity_of(step))
            case Phase.LISTING:
                self._unreadable.begin_list()
                self._table.begin_list()
            case Phase.LISTED:
                gone = self._table.end_list(time_ns=time_ns, version=version)
                self._check.ok(self.describe_table)
                self._unreadable.end_list()
                self._publisher.measure()
                _log.info(
                    "objects_listed",
                    kind=self._kind.name,
                    count=len(self._table),
                    gone_count=gone,
                )
            case Phase.WATCHING:
                # After a failed watch, the check recovers here, because a resumed watch has no
                # list.
                self._check.ok(self.describe_table)
            case Interrupted(error):
                self._check.failed(str(error))
        self._publisher.watermarks.follow(step)
        self._publisher.wake()

    def describe_table(self) -> str:
        """Return the number of objects in the table, as text for the check."""
        return f"{len(self._table)} {self._kind.plural}"


async def run_expiry(
    kind: ObjectKind[RecordT],
    table: ObjectTable[RecordT],
    publisher: RecordPublisher[RecordT],
    clock: Clock,
) -> None:
    """Turn expired deletions into tombstones until cancelled."""
    while True:
        await clock.sleep(_EXPIRY_SECONDS)
        pod_metrics.EARLY_TOMBSTONES.labels(kind=kind.name).inc(
            table.expire(time_ns=clock.time_ns())
        )
        publisher.wake()


@explain_user_errors
def main() -> int:
    """Run podwatch until a signal arrives; return the exit code."""
    settings = load_settings(
        PodwatchSettings,
        prog="gpuledger podwatch",
        description=DESCRIPTION,
        examples=EXAMPLES,
        common=COMMON,
    )
    kubernetes = settings.kubernetes
    about = {
        "url": shown_url(kubernetes.url) or None,
        "kubeconfig": kubernetes.kubeconfig or None,
        "lease": settings.lease.name if settings.lease.enabled else None,
        "brokers": settings.kafka.bootstrap_servers,
    }

    async def watch(settings: PodwatchSettings, readiness: Readiness) -> None:
        # Without a critical check, podwatch would be ready as soon as its credentials are read.
        readiness.check("pods.api").waits("starting")
        credentials = readiness.check("credentials", severity=CheckSeverity.WARNING)
        async with open_api(settings.kubernetes, check=credentials) as api:
            await run_podwatch(
                api=api,
                bus=KafkaBus(settings.kafka, readiness=readiness),
                settings=settings,
                readiness=readiness,
                clock=SystemClock(),
            )

    return run_service(watch, settings=settings, about=about)
