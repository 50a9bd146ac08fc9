"""The tables that are made from other topics than events: pods, nodes, inventory and others.

A `Dimension` defines the topic from which a table is made, and the rows that a record becomes.
`FollowedTopic` reads this topic in the background, from the partitions with the same numbers as the
sink's partitions of events, and appends new rows. The offsets are in the same commit as the rows,
so each record is stored once. If a table has no offsets of the topic, the whole topic is read.
Usage rows are never rewritten. Readers join the tables (`gpuledger.store.query`) and therefore also
find descriptions that arrived late.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
import structlog

from gpuledger.bus.protocol import (
    Bus,
    HistoryReader,
    Record,
    Span,
    TopicPartition,
)
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, UndecodableError, UserError
from gpuledger.keys import key_in, node_key, split_key
from gpuledger.pod_requests import requested_amounts
from gpuledger.records import (
    AttributedIncident,
    Inventory,
    NamespaceRecord,
    NodeRecord,
    PendingPodRecord,
    PodRecord,
)
from gpuledger.runtime import CheckParts, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import PODS, TableSchema
from gpuledger.store.usage_schema import INCIDENTS, INVENTORY, NAMESPACES, NODES, PENDING_PODS
from gpuledger.topics import Topic, Topics, partition_of_node
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.minute_sums import Row
from gpuledger_sinks.store.stored import Streams
from gpuledger_sinks.store.table import StaleTableError, StreamTable

MAX_ROWS: Final = 20_000
"""Maximum number of rows per commit, which bounds memory; a row has about 2 KB."""
_LAST_US: Final = 2**62
"""The latest time that is written, in microseconds since the epoch."""
_IN_FORCE: Final = "in_force_from"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StampBounds:
    """The plausible times at which a version of an object may come into force.

    The limits follow from the sink's own clock. Timestamps come from the clock of a node or of
    podwatch, or from an untrusted writer. They must be plausible: a GPU is billed from the first
    version that lists it, and of two versions the later one applies. All times are in microseconds
    since the epoch.
    """

    now_us: int
    first_us: int
    last_us: int
    is_new: bool
    """Whether the record was written after the sink had read the whole topic."""

    def believed(self, stamp_us: int, *, is_of_node: bool) -> int:
        """Return the timestamp, or a replacement if it is out of range.

        A timestamp that is negative or too far in the future is replaced by the current time. A
        node's timestamp must also not be before `first_us`, because the node's clock may be in 1970
        until NTP sets it. It is then replaced by the current time if the record is new. Otherwise
        the record may be as old as `first_us`, so `first_us` replaces the timestamp.
        """
        if not 0 <= stamp_us <= self.last_us:
            return self.now_us
        if is_of_node and stamp_us < self.first_us:
            return self.now_us if self.is_new else self.first_us
        return stamp_us


def _in_force_us(record: Record) -> int:
    return record.timestamp_ms * NS_PER_MS // NS_PER_US


def _us(time_ns: int | None) -> int | None:
    return None if time_ns is None else time_ns // NS_PER_US


def _as_json(values: Mapping[str, str] | None) -> str | None:
    if values is None:
        return None
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS).decode()


def rows_of_pod(pod: PodRecord, record: Record) -> Iterator[Row]:
    """Yield a row for each container id of a pod, or one row if no container was started yet."""
    ids: dict[str | None, str | None] = {
        container_id: container.name
        for container in pod.containers
        for container_id in (container.previous_container_id, container.container_id)
        if container_id is not None
    }
    about = (
        pod.cluster,
        pod.node,
        pod.uid,
        _in_force_us(record),
        pod.namespace,
        pod.name,
        pod.owner_kind,
        pod.owner_name,
        _as_json(pod.labels),
        _us(pod.created_time_ns),
        _us(pod.deleted_time_ns),
        pod.resource_version,
        pod.config_hash,
    )
    requests = {
        each.name: None if each.requested is None else _as_amounts(each.requested.resources)
        for each in pod.containers
    }
    annotations = _as_json(pod.annotations)
    life = (pod.scheduled_time_ns, pod.started_time_ns, pod.ended_time_ns)
    amounts = (pod.requested_cpu_millicores, pod.requested_memory_bytes)
    scheduling = (*map(_us, life), pod.priority, pod.priority_class, *amounts)
    for container_id, name in (ids or {None: None}).items():
        requested = requests.get(name or "")
        written = (record.partition, record.offset)
        yield (*about, container_id, name, *written, requested, annotations, *scheduling)


def _as_amounts(amounts: Mapping[str, int] | None) -> str | None:
    """Return amounts by resource as JSON, as in the column `requested`."""
    if amounts is None:
        return None
    return _as_json({name: str(amount) for name, amount in amounts.items()})


def rows_of_pending_pod(pod: PendingPodRecord, record: Record) -> Iterator[Row]:
    """Yield the row of one version of a pod that waits for a node."""
    amounts = requested_amounts(pod.containers)
    gates = pod.scheduling_gates
    yield (
        pod.cluster,
        pod.uid,
        _in_force_us(record),
        pod.namespace,
        pod.name,
        pod.owner_kind,
        pod.owner_name,
        _as_json(pod.labels),
        _as_amounts(amounts),
        pod.priority,
        pod.priority_class,
        pod.queue,
        None if gates is None else orjson.dumps(gates).decode(),
        pod.reason,
        pod.message,
        _us(pod.created_time_ns),
        _us(pod.left_time_ns),
        pod.resource_version,
        record.partition,
        record.offset,
        pod.requested_cpu_millicores,
        pod.requested_memory_bytes,
    )


def rows_of_node(node: NodeRecord, record: Record) -> Iterator[Row]:
    """Yield the row of one version of a node."""
    yield (
        node.cluster,
        node.name,
        _in_force_us(record),
        _us(node.deleted_time_ns),
        node.pool,
        node.instance_type,
        node.zone,
        node.region,
        node.capacity_type,
        _as_json(node.labels),
        node.resource_version,
        record.partition,
        record.offset,
        node.allocatable_cpu_millicores,
        node.allocatable_memory_bytes,
        _as_amounts(node.allocatable_resources),
        node.unschedulable,
    )


def rows_of_namespace(namespace: NamespaceRecord, record: Record) -> Iterator[Row]:
    """Yield the row of one version of a namespace."""
    yield (
        namespace.cluster,
        namespace.name,
        _in_force_us(record),
        _us(namespace.deleted_time_ns),
        _as_json(namespace.labels),
        _as_json(namespace.annotations),
        namespace.resource_version,
        record.partition,
        record.offset,
    )


def rows_of_inventory(inventory: Inventory, record: Record) -> Iterator[Row]:
    """Yield a row for each GPU of one version of a node's inventory.

    Yields one row without a GPU if the version lists none.
    """
    about = (inventory.cluster, inventory.node, _us(inventory.time_ns))
    place = (record.partition, record.offset)
    # A version lists all GPUs of the node: a GPU that is missing from it was removed.
    for gpu in inventory.gpus:
        facts = (gpu.uuid, gpu.model, gpu.serial, gpu.index, gpu.memory_total_bytes)
        yield (*about, *facts, *place, gpu.power_limit_milliwatts)
    if not inventory.gpus:
        yield (*about, *[None] * 5, *place, None)


def rows_of_gone_inventory(record: Record) -> Iterator[Row]:
    """Yield the row for a tombstone, which marks a deleted node; none if its key is invalid."""
    cluster, node = split_key((record.key or b"").decode(errors="replace"))
    if node:
        place = (record.partition, record.offset)
        yield (cluster, node, _in_force_us(record), *[None] * 5, *place, None)


def rows_of_incident(attributed: AttributedIncident, record: Record) -> Iterator[Row]:
    """Yield the row of an incident, with the pods on the GPU as a JSON array."""
    incident = attributed.incident
    pods = [
        {"uid": pod.uid, "namespace": pod.namespace, "pod": pod.name} for pod in attributed.pods
    ]
    yield (
        incident.cluster,
        incident.node,
        _us(incident.time_ns),
        incident.boot_id,
        incident.gpu_uuid,
        incident.gpu_index,
        incident.gpu_instance,
        incident.compute_instance,
        incident.kind,
        incident.severity.value,
        incident.source,
        incident.xid,
        incident.mnemonic,
        incident.category,
        incident.action,
        incident.message,
        incident.present_at_start,
        orjson.dumps(pods).decode(),
        record.partition,
        record.offset,
    )


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A table that is made from a topic."""

    schema: TableSchema
    topic_of: Callable[[Topics], Topic]
    """Returns the topic to read."""
    rows_of: Callable[[Any, Record], Iterator[Row]]
    """Makes the rows of a record."""
    key_of: Callable[[Any], str]
    """Returns the key that a record must have; records under another key are ignored."""
    node_key_of: Callable[[Any], str] | None
    """Returns the key of the node that determines a record's partition; `None` if the topic has one
    partition."""
    rows_of_tombstone: Callable[[Record], Iterator[Row]] | None = None
    """Makes the rows of a tombstone; `None` if tombstones are ignored."""
    is_stamped_by_node: bool = False
    """Whether its versions have timestamps from the node's clock."""

    def row_believed(self, row: Row, bounds: StampBounds) -> Row:
        """Return the row with an implausible time in `in_force_from` replaced."""
        names = [column.name for column in self.schema.columns]
        if _IN_FORCE not in names:
            return row
        at = names.index(_IN_FORCE)
        stamp_us = bounds.believed(row[at], is_of_node=self.is_stamped_by_node)
        return row if stamp_us == row[at] else (*row[:at], stamp_us, *row[at + 1 :])


DIMENSIONS: Final = (
    Dimension(
        schema=PODS,
        topic_of=lambda topics: topics.pods,
        rows_of=rows_of_pod,
        key_of=lambda pod: key_in(pod.cluster, pod.uid),
        node_key_of=node_key,
    ),
    Dimension(
        schema=PENDING_PODS,
        topic_of=lambda topics: topics.pending_pods,
        rows_of=rows_of_pending_pod,
        key_of=lambda pod: key_in(pod.cluster, pod.uid),
        node_key_of=None,
    ),
    Dimension(
        schema=NODES,
        topic_of=lambda topics: topics.nodes,
        rows_of=rows_of_node,
        key_of=lambda node: key_in(node.cluster, node.name),
        node_key_of=lambda node: key_in(node.cluster, node.name),
    ),
    Dimension(
        schema=NAMESPACES,
        topic_of=lambda topics: topics.namespaces,
        rows_of=rows_of_namespace,
        key_of=lambda namespace: key_in(namespace.cluster, namespace.name),
        node_key_of=None,
    ),
    Dimension(
        schema=INVENTORY,
        topic_of=lambda topics: topics.inventory,
        rows_of=rows_of_inventory,
        key_of=node_key,
        node_key_of=node_key,
        rows_of_tombstone=rows_of_gone_inventory,
        is_stamped_by_node=True,
    ),
    Dimension(
        schema=INCIDENTS,
        topic_of=lambda topics: topics.attributed_incidents,
        rows_of=rows_of_incident,
        key_of=lambda attributed: node_key(attributed.incident),
        node_key_of=lambda attributed: node_key(attributed.incident),
    ),
)
"""The tables that are made from other topics than the events."""


@asynccontextmanager
async def open_followed(
    tables: Mapping[str, StreamTable],
    *,
    bus: Bus,
    streams: Streams,
    readiness: Readiness,
    clock: Clock,
    settings: StoreSettings,
) -> AsyncIterator[Sequence["FollowedTopic"]]:
    """Open a `FollowedTopic` for each table of `tables` that is made from another topic."""
    check = CheckParts(readiness.check("store.dimensions", severity=CheckSeverity.WARNING))
    async with AsyncExitStack() as stack:
        followed = []
        for dimension in DIMENSIONS:
            name = dimension.schema.name
            if name not in tables:
                continue
            topic = FollowedTopic(
                dimension,
                tables[name],
                topic=dimension.topic_of(bus.topics),
                # A separate reader for each, because they read concurrently and independently.
                reader=await stack.enter_async_context(bus.reader()),
                streams=streams,
                check=check,
                clock=clock,
                settings=settings,
            )
            stack.push_async_callback(topic.end)
            followed.append(topic)
        yield followed


class FollowedTopic:
    """Appends new records of a topic from the partitions assigned to a sink."""

    def __init__(
        self,
        dimension: Dimension,
        table: StreamTable,
        *,
        topic: Topic,
        reader: HistoryReader,
        streams: Streams,
        check: CheckParts,
        clock: Clock,
        settings: StoreSettings,
    ) -> None:
        """Append to `table`; `reader` is for the exclusive use of this object."""
        self._dimension = dimension
        self._table, self._topic, self._reader = table, topic.name, reader
        self._topic_id: str | None = None
        self._streams, self._check, self._clock = streams, check, clock
        self._settings = settings
        self._decoder: Decoder[Any] = Decoder(topic=topic.name, record=topic.record)
        self._positions: dict[int, int | None] = {}
        """The next offset of each assigned partition; `None` until it is looked up in the table."""
        self._ended: dict[int, int] = {}
        """The end of each partition when it was last read completely."""
        self._reported: dict[bytes, tuple[int, int]] = {}
        """Hash and first offset of the newest version of each object that nodes report, by key."""
        self._next_ns: int | None = None
        self._running: asyncio.Task[None] | None = None

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Follow newly assigned partitions.

        A topic with one partition is followed by the owner of the events' first partition.
        """
        self._positions |= {at.partition: None for at in partitions}

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop following revoked partitions."""
        for at in partitions:
            self._positions.pop(at.partition, None)

    def begin_if_due(self) -> None:
        """Read and append new records in the background if it is time."""
        now_ns = self._clock.monotonic_ns()
        is_due = self._next_ns is None or now_ns >= self._next_ns
        if not is_due or not self._positions or (self._running and not self._running.done()):
            return
        self._next_ns = now_ns + round(self._settings.flush_seconds * NS_PER_SECOND)
        self._running = asyncio.create_task(self._update())

    async def update(self) -> None:
        """Wait for a running update, then append the records that are new since then."""
        if self._running:
            await asyncio.wait({self._running})
        await self._update()

    async def end(self) -> None:
        """Cancel a running update; rows that it has written stay in the table."""
        await end_tasks(self._running)

    async def _update(self) -> None:
        """Append new records; failures are retried by the next update."""
        try:
            # The id is read after the spans: an unchanged id proves that they are of this topic.
            spans = await self._reader.spans(self._topic)
            topic_id = await self._reader.topic_id(self._topic)
            if topic_id != self._topic_id:
                # The writer of a recreated topic publishes everything again, so it is read
                # completely.
                self._topic_id = topic_id
                self._positions = dict.fromkeys(self._positions)
                self._ended = {}
                self._reported = {}
                spans = await self._reader.spans(self._topic)
            await self._find_positions(spans)
            await self._append_new(spans)
        except StaleTableError as error:
            # Another sink has written to the table; continue from the table's offsets.
            _log.info("versions_withdrawn", url=shown_url(self._table.uri), error=str(error))
            self._positions = dict.fromkeys(self._positions)
        except (BusError, ReceiverUnavailableError, UserError) as error:
            self._check.failed(self._dimension.schema.name, str(error))
        except Exception as error:  # noqa: BLE001  # the sink works without it
            # No known error reaches this clause; an unknown one must fail the check.
            _log.warning("versions_failed", url=shown_url(self._table.uri), error=repr(error))
            self._check.failed(self._dimension.schema.name, repr(error))
        else:
            self._check.ok(self._dimension.schema.name)

    async def _append_new(self, spans: Mapping[TopicPartition, Span]) -> None:
        rows: list[Row] = []
        offsets: dict[TopicPartition, int] = {}
        for at, span in spans.items():
            position = self._positions.get(at.partition)
            if position is None or position >= span.end:
                continue
            wanted = Span(max(position, span.first), span.end)
            async for records in self._reader.read(at, wanted):
                for record in records:
                    rows.extend(self._believed_rows_of(record, partitions=len(spans)))
                offsets[at] = records[-1].offset
                if len(rows) >= MAX_ROWS:
                    await self._append(rows, offsets)
                    rows, offsets = [], {}
        if rows:
            await self._append(rows, offsets)
        # Records without rows, such as deletions, may be read again after a restart.
        for at, span in spans.items():
            if self._positions.get(at.partition) is not None:
                self._positions[at.partition] = self._ended[at.partition] = span.end

    async def _find_positions(self, spans: Mapping[TopicPartition, Span]) -> None:
        """Look up in the table where to continue reading.

        Raises UserError if the table is ahead of a partition's end. A recreated topic has a stream
        with another name, for which the table has no offsets.
        """
        wanted = [at for at in spans if self._positions.get(at.partition, 0) is None]
        if not wanted:
            return
        streams = list(map(self._stream_of, wanted))
        numbers = await in_daemon_thread(partial(self._table.load, streams))
        for at in wanted:
            last_offset = numbers.get(self._stream_of(at), -1)
            if last_offset + 1 > spans[at].end:
                raise UserError(
                    f"table {self._dimension.schema.name} has {at.topic}[{at.partition}] up to"
                    f" offset {last_offset}, but it ends at {spans[at].end}: Kafka lost records;"
                    " new records are not stored until the partition is as long as before"
                )
            if at.partition in self._positions:
                self._positions[at.partition] = last_offset + 1

    def _stream_of(self, at: TopicPartition) -> str:
        """Return the name of a partition's stream, which includes the current topic's id."""
        stream = self._streams.of(at)
        return stream if self._topic_id is None else f"{stream}|{self._topic_id}"

    def _believed_rows_of(self, record: Record, *, partitions: int) -> Iterator[Row]:
        """Yield the rows of a record, with implausible times replaced and logged."""
        now_us = self._clock.time_ns() // NS_PER_US
        bounds = StampBounds(
            now_us=now_us,
            first_us=max(0, now_us - round(self._settings.max_age_seconds * 1_000_000)),
            last_us=min(_LAST_US, now_us + round(self._settings.max_future_seconds * 1_000_000)),
            is_new=record.offset >= self._ended.get(record.partition, record.offset + 1),
        )
        for row in self._rows_of(record, partitions=partitions):
            believed = self._dimension.row_believed(row, bounds)
            if believed != row:
                _log.warning(
                    "version_time_replaced",
                    table=self._dimension.schema.name,
                    partition=record.partition,
                    offset=record.offset,
                )
            yield believed

    def _rows_of(self, record: Record, *, partitions: int) -> Iterator[Row]:
        dimension = self._dimension
        if record.value is None:
            at_home = partition_of_node(
                (record.key or b"").decode(errors="replace"), partitions=partitions
            )
            if dimension.rows_of_tombstone is not None and record.partition == at_home:
                yield from dimension.rows_of_tombstone(record)
            return
        try:
            decoded = self._decoder.decode(record.value)
        except UndecodableError:
            return  # the join reads the same record and makes the dead letter
        # As in the join: a writer of one partition must not describe nodes of another.
        if record.key != dimension.key_of(decoded).encode():
            return
        if dimension.is_stamped_by_node and not self._note_version(record):
            return
        of_node = None if dimension.node_key_of is None else dimension.node_key_of(decoded)
        if of_node is None or record.partition == partition_of_node(of_node, partitions=partitions):
            yield from dimension.rows_of(decoded, record)

    def _note_version(self, record: Record) -> bool:
        """Note a record; return whether it is a new version. Agents repeat each version hourly."""
        key, version = record.key or b"", hash(record.value)
        before, offset = self._reported.get(key, (None, record.offset))
        # If an update fails, its records are read again; the first one is then not a repetition.
        if version == before and record.offset > offset:
            return False
        self._reported[key] = version, record.offset
        return True

    async def _append(self, rows: list[Row], offsets: Mapping[TopicPartition, int]) -> None:
        numbers: dict[str, Any] = {self._stream_of(at): last for at, last in offsets.items()}
        time_ms = self._clock.time_ns() // NS_PER_MS
        # If this update is cancelled, its thread may start only after a later update has loaded the
        # table, to which another sink may meanwhile have appended the same rows.
        after = self._table.last_offsets(numbers)
        append = partial(self._table.append, rows, numbers, time_ms=time_ms, after=after)
        await in_daemon_thread(append)
        for at, last in offsets.items():
            if at.partition in self._positions:
                self._positions[at.partition] = last + 1
