"""The table `pods`: who each pod is, for the rows that were written before that was known.

`rows_of_pod` says what a row has of a pod's record. `PodNames` reads `gpuledger.pods.v1`, of the
partitions whose events this sink stores, and appends what is new, beside the sink's own work: the
offsets are in the same commit as the rows, so that each record is there once. Rows of `entries` are
never rewritten for it: whoever reads joins the two (`gpuledger.store.query`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import orjson
import structlog

from gpuledger.bus.protocol import (
    HistoryReader,
    Record,
    Span,
    TopicPartition,
    WholeBus,
)
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, UndecodableError, UserError
from gpuledger.keys import key_in, node_key
from gpuledger.records import ContainerRequest, PodRecord
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.topics import partition_of_node
from sinks.errors import ReceiverUnavailableError
from sinks.store.minute_sums import Row
from sinks.store.stored import Streams
from sinks.store.table import PodsTable, StaleTableError

MAX_ROWS: Final = 20_000
"""Rows of a commit: what is held at once of however many pods, at some 2 KB each."""
_log = structlog.get_logger(__name__)


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
        record.timestamp_ms * NS_PER_MS // NS_PER_US,
        pod.namespace,
        pod.name,
        pod.owner_kind,
        pod.owner_name,
        orjson.dumps(pod.labels, option=orjson.OPT_SORT_KEYS).decode(),
        pod.created_time_ns // NS_PER_US,
        None if pod.deleted_time_ns is None else pod.deleted_time_ns // NS_PER_US,
        pod.resource_version,
        pod.config_hash,
    )
    asked = {each.name: _as_text(each.requested) for each in pod.containers}
    for container_id, name in (ids or {None: None}).items():
        requested = asked.get(name or "")
        yield (*about, container_id, name, record.partition, record.offset, requested)


def _as_text(requested: ContainerRequest | None) -> str | None:
    """Return what a container asks for as the column `requested` of the rows has it."""
    if requested is None:
        return None
    amounts = {name: str(amount) for name, amount in requested.resources.items()}
    return orjson.dumps(amounts, option=orjson.OPT_SORT_KEYS).decode()


@asynccontextmanager
async def open_pod_names(
    table: PodsTable,
    *,
    bus: WholeBus,
    streams: Streams,
    readiness: Readiness,
    clock: Clock,
    interval_seconds: float,
) -> AsyncIterator["PodNames"]:
    """Open what keeps the table `pods` of the store, looking for news every so often."""
    check = readiness.check("store.pods", severity=CheckSeverity.WARNING)
    async with bus.reader() as reader:
        names = PodNames(
            table,
            topic=bus.topics.pods.name,
            reader=reader,
            streams=streams,
            check=check,
            clock=clock,
            interval_seconds=interval_seconds,
        )
        try:
            yield names
        finally:
            await names.end()


class PodNames:
    """Appends what is new of the pods of the partitions that a sink holds."""

    def __init__(
        self,
        table: PodsTable,
        *,
        topic: str,
        reader: HistoryReader,
        streams: Streams,
        check: Check,
        clock: Clock,
        interval_seconds: float,
    ) -> None:
        """Take the table and what nobody else reads by."""
        self._table, self._topic, self._reader = table, topic, reader
        self._topic_id: str | None = None
        self._streams, self._check, self._clock = streams, check, clock
        self._interval_seconds = interval_seconds
        self._decoder = Decoder(topic=topic, record=PodRecord)
        self._positions: dict[int, int | None] = {}
        """Where to read on in each partition that is held; `None` until the table has said it."""
        self._next_ns: int | None = None
        self._running: asyncio.Task[None] | None = None

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Follow the pods of the nodes of these partitions, which were taken over."""
        self._positions |= {at.partition: None for at in partitions}

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Leave the pods of these partitions to who has them now."""
        for at in partitions:
            self._positions.pop(at.partition, None)

    def begin_if_due(self) -> None:
        """Look for news where it is time, beside the sink's own work."""
        now_ns = self._clock.monotonic_ns()
        is_due = self._next_ns is None or now_ns >= self._next_ns
        if not is_due or not self._positions or (self._running and not self._running.done()):
            return
        self._next_ns = now_ns + round(self._interval_seconds * NS_PER_SECOND)
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
                # Made anew, it holds what podwatch knows by now: all of it is read.
                self._topic_id = topic_id
                self._positions = dict.fromkeys(self._positions)
                spans = await self._reader.spans(self._topic)
            await self._find_positions(spans)
            await self._append_new(spans)
        except StaleTableError as error:
            # Another sink has the partition, or has had it: what the table says counts.
            _log.info("pods_withdrawn", error=str(error))
            self._positions = dict.fromkeys(self._positions)
        except (BusError, ReceiverUnavailableError, UserError) as error:
            self._check.failed(str(error))
        else:
            self._check.ok()

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
                    rows.extend(self._rows_of(record, partitions=len(spans)))
                offsets[at] = records[-1].offset
                if len(rows) >= MAX_ROWS:
                    await self._append(rows, offsets)
                    rows, offsets = [], {}
        if rows:
            await self._append(rows, offsets)
        # Where there were deletions alone, which have no rows, it is read again in another life.
        for at, span in spans.items():
            if self._positions.get(at.partition) is not None:
                self._positions[at.partition] = span.end

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
                    f"the table pods has {at.topic}[{at.partition}] up to offset {last_offset}, but"
                    f" it ends at {spans[at].end}: Kafka lost records of it; pods that came since"
                    " get no late names until it is as long as before"
                )
            if at.partition in self._positions:
                self._positions[at.partition] = last_offset + 1

    def _stream_of(self, at: TopicPartition) -> str:
        """Return the stream of the offsets of a partition, of the topic that is there now."""
        stream = self._streams.of(at)
        return stream if self._topic_id is None else f"{stream}|{self._topic_id}"

    def _rows_of(self, record: Record, *, partitions: int) -> Iterator[Row]:
        if record.value is None:
            return  # a deleted pod keeps its name
        try:
            pod = self._decoder.decode(record.value)
        except UndecodableError:
            return  # the join, which reads the same, puts it aside
        # As the join does: whoever may write to one partition speaks for no node of another.
        is_at_home = record.key == key_in(pod.cluster, pod.uid).encode()
        if is_at_home and record.partition == partition_of_node(
            node_key(pod), partitions=partitions
        ):
            yield from rows_of_pod(pod, record)

    async def _append(self, rows: list[Row], offsets: Mapping[TopicPartition, int]) -> None:
        numbers: dict[str, Any] = {self._stream_of(at): last for at, last in offsets.items()}
        time_ms = self._clock.time_ns() // NS_PER_MS
        await in_daemon_thread(partial(self._table.append, rows, numbers, time_ms=time_ms))
        for at, last in offsets.items():
            if at.partition in self._positions:
                self._positions[at.partition] = last + 1
