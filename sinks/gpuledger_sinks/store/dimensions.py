"""The tables that are joined with the rows: what is said of pods, nodes, namespaces and GPUs.

A `Dimension` says which topic a table is made of, and what rows a record comes to. `FollowedTopic`
reads the topic, of the partitions whose events this sink stores, and appends what is new, beside
the sink's own work: the offsets are in the same commit as the rows, so that each record is there
once, and a table that has none of a topic gets all that the topic has. Rows of usage are never
rewritten for it: whoever reads joins the two (`gpuledger.store.query`), so that what is learnt late
is not lost.
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
from gpuledger.keys import key_in, node_key
from gpuledger.records import (
    AttributedIncident,
    ContainerRequest,
    Inventory,
    NamespaceRecord,
    NodeRecord,
    PodRecord,
)
from gpuledger.runtime import CheckParts, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import PODS, TableSchema
from gpuledger.store.usage_schema import INCIDENTS, INVENTORY, NAMESPACES, NODES
from gpuledger.topics import Topic, Topics, partition_of_node
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.minute_sums import Row
from gpuledger_sinks.store.stored import Streams
from gpuledger_sinks.store.table import StaleTableError, StreamTable

MAX_ROWS: Final = 20_000
"""Rows of a commit: what is held at once of however many records, at some 2 KB each."""
_LAST_US: Final = 2**62
"""Beyond the time that any table can hold."""
_IN_FORCE: Final = "in_force_from"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StampBounds:
    """From when and until when a version may say that it is in force, by the sink's own clock.

    Stamps are what the clock of a node or of podwatch shows, or what somebody wrote there. A GPU
    costs money from the first version on that has it, and of two versions the later one counts.
    """

    now_us: int
    first_us: int
    last_us: int
    is_new: bool
    """Whether the record came since the sink has read all that there was before."""

    def believed(self, stamp_us: int, *, is_of_node: bool) -> int:
        """Return the stamp, or what is taken for it where it is beyond the bounds.

        What is ahead counts from now on. Of a node's clock, which may be in 1970 until NTP sets it,
        the same holds for what is far behind in a record that came just now; a record that was
        there before may be old indeed, and counts from the first day that is stored.
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
    """Yield a row for each container id of a pod, or one where none was started yet."""
    ids: dict[str | None, str | None] = {
        container_id: container.name
        for container in pod.containers
        # The newer one last: what two containers claim is the running one's.
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
    requests = {each.name: _as_text(each.requested) for each in pod.containers}
    annotations = _as_json(pod.annotations)
    for container_id, name in (ids or {None: None}).items():
        requested = requests.get(name or "")
        written = (record.partition, record.offset)
        yield (*about, container_id, name, *written, requested, annotations)


def _as_text(requested: ContainerRequest | None) -> str | None:
    """Return what a container asks for as the column `requested` of the rows has it."""
    if requested is None:
        return None
    return _as_json({name: str(amount) for name, amount in requested.resources.items()})


def rows_of_node(node: NodeRecord, record: Record) -> Iterator[Row]:
    """Yield the row of a version of a node."""
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
    )


def rows_of_namespace(namespace: NamespaceRecord, record: Record) -> Iterator[Row]:
    """Yield the row of a version of a namespace."""
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
    """Yield a row for each GPU of a version of a node's inventory, or one where it has none."""
    about = (inventory.cluster, inventory.node, _us(inventory.time_ns))
    place = (record.partition, record.offset)
    # A version says of all GPUs of the node: one that it does not name is not there any more.
    for gpu in inventory.gpus:
        facts = (gpu.uuid, gpu.model, gpu.serial, gpu.index, gpu.memory_total_bytes)
        yield (*about, *facts, *place)
    if not inventory.gpus:
        yield (*about, *[None] * 5, *place)


def rows_of_gone_inventory(record: Record) -> Iterator[Row]:
    """Yield the row that says that a node is gone, of a tombstone."""
    cluster, slash, node = (record.key or b"").decode(errors="replace").partition("/")
    if slash and node:
        place = (record.partition, record.offset)
        yield (cluster, node, _in_force_us(record), *[None] * 5, *place)


def rows_of_incident(attributed: AttributedIncident, record: Record) -> Iterator[Row]:
    """Yield the row of an incident, with the pods that were on the GPU as a JSON array."""
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
    """A table that is made of a topic, and how."""

    schema: TableSchema
    topic_of: Callable[[Topics], Topic]
    """The topic."""
    rows_of: Callable[[Any, Record], Iterator[Row]]
    """What a record comes to."""
    key_of: Callable[[Any], str]
    """The key that a record has; what stands under another one is not believed."""
    node_key_of: Callable[[Any], str] | None
    """The node in whose partition it belongs; absent where the topic has one partition."""
    rows_of_tombstone: Callable[[Record], Iterator[Row]] | None = None
    """What a deletion comes to; absent where what was said stays so."""
    is_stamped_by_node: bool = False
    """Whether its versions are in force from a time that the node's clock tells."""

    def row_believed(self, row: Row, bounds: StampBounds) -> Row:
        """Return the row, in force from a time that can be believed."""
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
"""The tables that are made of topics of their own, beside the events."""


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
    """Open what keeps these tables of the store, looking for news every so often."""
    check = CheckParts(readiness.check("store.dimensions", severity=CheckSeverity.WARNING))
    async with AsyncExitStack() as stack:
        followed = []
        for dimension in DIMENSIONS:
            name = dimension.schema.name
            # A reader each: they read side by side, at a pace of their own.
            if name not in tables:
                continue
            topic = FollowedTopic(
                dimension,
                tables[name],
                topic=dimension.topic_of(bus.topics),
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
    """Appends what is new of a topic, in the partitions that a sink holds."""

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
        """Take the table and what nobody else reads by."""
        self._dimension = dimension
        self._table, self._topic, self._reader = table, topic.name, reader
        self._topic_id: str | None = None
        self._streams, self._check, self._clock = streams, check, clock
        self._settings = settings
        self._decoder: Decoder[Any] = Decoder(topic=topic.name, record=topic.record)
        self._positions: dict[int, int | None] = {}
        """Where to read on in each partition that is held; `None` until the table has said it."""
        self._ended: dict[int, int] = {}
        """Where each partition ended when all of it had been read."""
        self._next_ns: int | None = None
        self._running: asyncio.Task[None] | None = None

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Follow what is said in these partitions, which were taken over.

        A topic of one partition is followed by who has the first one of the events.
        """
        self._positions |= {at.partition: None for at in partitions}

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave these partitions to who has them now."""
        for at in partitions:
            self._positions.pop(at.partition, None)

    def begin_if_due(self) -> None:
        """Look for news where it is time, beside the sink's own work."""
        now_ns = self._clock.monotonic_ns()
        is_due = self._next_ns is None or now_ns >= self._next_ns
        if not is_due or not self._positions or (self._running and not self._running.done()):
            return
        self._next_ns = now_ns + round(self._settings.flush_seconds * NS_PER_SECOND)
        self._running = asyncio.create_task(self._update())

    async def end(self) -> None:
        """End what is under way; a write that has begun is found in the table by the next one."""
        await end_tasks(self._running)

    async def _update(self) -> None:
        """Append what is new; what cannot be done now is done next time."""
        try:
            spans = await self._reader.spans(self._topic)
            topic_id = await self._reader.topic_id(self._topic)
            if topic_id != self._topic_id:
                # Made anew, it holds what its writer knows by now: all of it is read.
                self._topic_id = topic_id
                self._positions = dict.fromkeys(self._positions)
                self._ended = {}
                spans = await self._reader.spans(self._topic)
            await self._find_positions(spans)
            await self._append_new(spans)
        except StaleTableError as error:
            # Another sink has the partition, or has had it: what the table says counts.
            _log.info("versions_withdrawn", url=shown_url(self._table.uri), error=str(error))
            self._positions = dict.fromkeys(self._positions)
        except (BusError, ReceiverUnavailableError, UserError) as error:
            self._check.failed(self._dimension.schema.name, str(error))
        except Exception as error:  # noqa: BLE001  # the sink does its own work without it
            # Nothing is known that comes here; whoever looks at the check shall see it.
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
        # Where there were deletions alone, which have no rows, it is read again in another life.
        for at, span in spans.items():
            if self._positions.get(at.partition) is not None:
                self._positions[at.partition] = self._ended[at.partition] = span.end

    async def _find_positions(self, spans: Mapping[TopicPartition, Span]) -> None:
        """Look up in the table where to read on.

        Raises UserError where the table has more of a partition than there is. Of a topic that was
        made anew it has nothing: each has a stream of its own.
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
                    f"the table {self._dimension.schema.name} has {at.topic}[{at.partition}] up to"
                    f" offset {last_offset}, but it ends at {spans[at].end}: Kafka lost records of"
                    " it; what came since is not stored until it is as long as before"
                )
            if at.partition in self._positions:
                self._positions[at.partition] = last_offset + 1

    def _stream_of(self, at: TopicPartition) -> str:
        """Return the stream of the offsets of a partition, of the topic that is there now."""
        stream = self._streams.of(at)
        return stream if self._topic_id is None else f"{stream}|{self._topic_id}"

    def _believed_rows_of(self, record: Record, *, partitions: int) -> Iterator[Row]:
        """Yield the rows of a record, in force from a time that can be believed."""
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
                    "version_stamp_refused",
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
            return  # the join, which reads the same, puts it aside
        # As the join does: whoever may write to one partition speaks for no node of another.
        if record.key != dimension.key_of(decoded).encode():
            return
        of_node = None if dimension.node_key_of is None else dimension.node_key_of(decoded)
        if of_node is None or record.partition == partition_of_node(of_node, partitions=partitions):
            yield from dimension.rows_of(decoded, record)

    async def _append(self, rows: list[Row], offsets: Mapping[TopicPartition, int]) -> None:
        numbers: dict[str, Any] = {self._stream_of(at): last for at, last in offsets.items()}
        time_ms = self._clock.time_ns() // NS_PER_MS
        await in_daemon_thread(partial(self._table.append, rows, numbers, time_ms=time_ms))
        for at, last in offsets.items():
            if at.partition in self._positions:
                self._positions[at.partition] = last + 1
