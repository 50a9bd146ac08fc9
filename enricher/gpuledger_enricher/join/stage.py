"""Turns records into messages: the processing of the records of each topic, without I/O.

The stage has a worker's pods, nodes, namespaces and watermarks. With them, it transforms samples
and incidents. It uses neither asyncio nor a bus client; `worker` does the I/O.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Message, Record, TopicPartition
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import Decoder, encode
from gpuledger.completeness import JOIN, PODWATCH, Completeness, key_of
from gpuledger.completeness import MAX_AHEAD_NS as COMPLETE_AHEAD_NS
from gpuledger.dead_letter_queue import DeadLetterQueue, show_key
from gpuledger.keys import key_in, node_key
from gpuledger.ledger.allocated_parts import TooManyEntriesError
from gpuledger.placement import IsPlaced, reject_misplaced
from gpuledger.records import (
    GpuBooks,
    GpuEvent,
    Incident,
    LateAdjustment,
    NamespaceRecord,
    NodeProgress,
    NodeRecord,
    NodeSample,
    PodRecord,
    ProcessRecord,
    Watermark,
)
from gpuledger.records.bounds import MAX_DESCRIPTION_BYTES
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.topics import Topics
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.observer import JoinObserver
from gpuledger_enricher.join.pods.describe import (
    DescriptionCache,
    PodDescriptions,
    attribute_incident,
    find_foreign_pods,
    identity_of,
)
from gpuledger_enricher.join.pods.pods import ClusterObjects, ClusterPods
from gpuledger_enricher.join.progress.overlaps import overlap_ns
from gpuledger_enricher.join.progress.passage import (
    MAX_AHEAD_NS,
    Reached,
    clock_step_seconds,
    gap_before_ns,
    is_duplicate,
    is_late,
    seq_ahead_seconds,
)
from gpuledger_enricher.join.progress.watermarks import NodeWatermarks
from gpuledger_enricher.join.validation import (
    InvalidTickError,
    adjust_valid_ends,
    book_valid_tick,
)
from gpuledger_enricher.watched_records import PodSharing

SPEAKING_NS: Final = NS_PER_MINUTE
"""A podwatch counts as running if its last report is not older than this. It reports every five
seconds."""
PlaceT = TypeVar("PlaceT", NodeRecord, NamespaceRecord)
NOWHERE: Final[Mapping[int, int]] = MappingProxyType({})


class JoinStage:
    """A worker's state and its transforms of records; memory is bounded by its partitions."""

    def __init__(
        self,
        *,
        dead_letters: DeadLetterQueue,
        is_placed: IsPlaced,
        topics: Topics,
        time_ns: Callable[[], int] = time.time_ns,
        watermarks_from: Mapping[int, int] = NOWHERE,
        pending_pod_timeout_seconds: float = 120.0,
        namespace_dead_letters: DeadLetterQueue | None = None,
    ) -> None:
        """Create a stage without any state.

        `watermarks_from` has an offset for each partition; podwatch's watermarks count from there.
        `namespace_dead_letters` receives rejected namespace records, because the partitions of
        namespaces are not assigned to workers. The default is `dead_letters`.
        """
        self.pods = ClusterPods()
        self.cluster_objects = ClusterObjects()
        self._namespace_dead_letters = namespace_dead_letters or dead_letters
        self._node_decoder = Decoder(topic=topics.nodes.name, record=NodeRecord)
        self._namespace_decoder = Decoder(topic=topics.namespaces.name, record=NamespaceRecord)
        self.pods_completeness = Completeness(component=PODWATCH, topic=topics.pods.name)
        self._watermarks_from = watermarks_from
        self._watermark_decoder = Decoder(topic=topics.watermarks.name, record=Watermark)
        self._reject_misplaced = partial(
            reject_misplaced, is_placed=is_placed, dead_letters=dead_letters
        )
        self._sample_decoder = Decoder(topic=topics.samples.name, record=NodeSample)
        self._pod_decoder = Decoder(topic=topics.pods.name, record=PodRecord)
        self._progress_decoder = Decoder(topic=topics.progress.name, record=NodeProgress)
        self._process_decoder = Decoder(topic=topics.processes.name, record=ProcessRecord)
        self._incident_decoder = Decoder(topic=topics.incidents.name, record=Incident)
        self._time_ns = time_ns
        self._observer = JoinObserver(pending_pod_timeout_seconds=pending_pod_timeout_seconds)
        self._sharing = PodSharing()
        self._dead_letters = dead_letters
        self._watermarks: defaultdict[int, NodeWatermarks] = defaultdict(NodeWatermarks)
        self._descriptions = DescriptionCache(self.pods, self.cluster_objects)

    def take_pods(self, records: Sequence[Record]) -> None:
        """Apply pod records; a tombstone removes a pod, unless ticks still name it."""
        now_ns = self._time_ns()
        for record in records:
            if record.value is None and record.key is not None:
                # Only from the pod's own partition; otherwise any writer could remove any pod.
                key = record.key.decode(errors="replace")
                deleted_ns = record.timestamp_ms * NS_PER_MS
                self.pods.remove(key, partition=record.partition, time_ns=deleted_ns)
                continue
            for _, decoded in self._dead_letters.decode(self._pod_decoder, [record]):
                if self._reject_misplaced(
                    record, node=node_key(decoded), key=key_in(decoded.cluster, decoded.uid)
                ):
                    continue
                pod = self._sharing.share(decoded)
                seen_time_ns = record.timestamp_ms * NS_PER_MS
                self.pods.put(pod, partition=record.partition, seen_time_ns=seen_time_ns)
                # Descriptions with the pod as pending are out of date. `version_of` changes only
                # for the pod's own node, but another node may have named the pod.
                for node in self._observer.observe_pod(pod, now_ns=now_ns):
                    self._descriptions.forget(node)

    def take_nodes(self, records: Sequence[Record]) -> None:
        """Apply node records; a tombstone removes a node."""
        for record in records:
            if record.value is None and record.key is not None:
                key = record.key.decode(errors="replace")
                self.cluster_objects.nodes.remove(key, partition=record.partition)
                continue
            for _, node in self._dead_letters.decode(self._node_decoder, [record]):
                if not self._reject_misplaced(record, node=key_in(node.cluster, node.name)):
                    self.cluster_objects.nodes.put(
                        _bounded(node, what="node", lists=({"labels": {}},)),
                        partition=record.partition,
                        seen_time_ns=record.timestamp_ms * NS_PER_MS,
                    )

    def take_namespaces(self, records: Sequence[Record]) -> None:
        """Apply namespace records from any partition; a tombstone removes a namespace."""
        for record in records:
            if record.value is None and record.key is not None:
                key = record.key.decode(errors="replace")
                self.cluster_objects.namespaces.remove(key, partition=record.partition)
                continue
            for _, found in self._namespace_dead_letters.decode(self._namespace_decoder, [record]):
                if record.key != (key := key_in(found.cluster, found.name)).encode():
                    detail = f"{record.topic}: the record of {key} has the wrong key:"
                    detail += f" {show_key(record.key)}"
                    self._namespace_dead_letters.reject(record, reason="misplaced", detail=detail)
                    continue
                self.cluster_objects.namespaces.put(
                    _bounded(
                        found, what="namespace", lists=({"annotations": None}, {"labels": {}})
                    ),
                    partition=record.partition,
                    seen_time_ns=record.timestamp_ms * NS_PER_MS,
                )

    def take_watermarks(self, records: Sequence[Record]) -> None:
        """Apply the watermarks of podwatch and the join in this worker's partitions."""
        for record in records:
            if record.value is None and record.unreadable is None:
                # The cluster was removed.
                self.pods_completeness.take_back(record.key or b"", record.partition)
                continue
            for _, found in self._dead_letters.decode(self._watermark_decoder, [record]):
                if (record.key, record.partition) != (key_of(found), found.partition):
                    detail = f"{record.topic}: a watermark of partition {found.partition} has"
                    detail += f" key {show_key(record.key)} and is in partition {record.partition}"
                    self._dead_letters.reject(record, reason="misplaced", detail=detail)
                    continue
                if found.complete_until_ns > self._time_ns() + COMPLETE_AHEAD_NS:
                    detail = f"{record.topic}: complete_until_ns {found.complete_until_ns} is ahead"
                    detail += " of this machine's clock"
                    self._dead_letters.reject(record, reason="invalid", detail=detail)
                    continue
                if found.component == JOIN:
                    known = self._watermarks[record.partition]
                    known.call_complete(found.cluster, found.complete_until_ns)
                    continue
                # The cluster exists even if none of its nodes is in this partition.
                self._watermarks[record.partition].add_cluster(found.cluster)
                if record.offset >= self._watermarks_from.get(record.partition, 0):
                    self.pods_completeness.take(found)
                elif self._time_ns() - found.complete_until_ns < SPEAKING_NS:
                    # The worker waits for every cluster with a running podwatch, not only for one.
                    self.pods_completeness.expect(found)

    def skip_dead_letters(self, partition: TopicPartition, *, before: int) -> None:
        """Write no dead letters for records before an offset; these records already have them."""
        self._dead_letters.skip_before(partition, before)

    def restart_listening(self) -> None:
        """Count time without ticks only from now on, because the brokers were unavailable."""
        for known in self._watermarks.values():
            known.restart_listening(self._time_ns())

    def find_complete(self, partition: int, *, is_at_end: bool) -> dict[str, Reached]:
        """Return, by cluster, the event time through which the booked ticks are complete."""
        now_ns = self._time_ns()
        found = self._watermarks[partition].find_complete(now_ns=now_ns, is_at_end=is_at_end)
        missing = (
            (node, since_ns)
            for reached in found.values()
            for node, since_ns in reached.unresponsive
            if not self.cluster_objects.is_removed(node, now_ns)
        )
        self._observer.observe_unresponsive(partition, missing)
        return found

    def restore_progress(self, records: Sequence[Record]) -> None:
        """Restore the progress of nodes before their first tick; a tombstone removes a node."""
        for record in records:
            watermarks = self._watermarks[record.partition]
            if record.value is None and record.key is not None:
                watermarks.remove(record.key.decode(errors="replace"))
                continue
            for _, watermark in self._dead_letters.decode(self._progress_decoder, [record]):
                if self._reject_misplaced(record, node=node_key(watermark)):
                    continue
                watermarks.take(watermark, last_seen_ns=record.timestamp_ms * NS_PER_MS)

    def set_topic_id(self, partition: int, topic_id: str | None) -> None:
        """Set the id of the samples topic that this partition is read from."""
        self._watermarks[partition].topic_id = topic_id

    def read_before(self, partition: int) -> int | None:
        """Return the offset after the last read tick; `None` if no booked tick is known."""
        return self._watermarks[partition].read_before()

    def earlier_topic(self, partition: int) -> tuple[str, int] | None:
        """Return the id of the samples topic before it was recreated, and the offset read before.

        Returns `None` if the topic was not recreated.
        """
        return self._watermarks[partition].earlier_topic()

    def drain_progress(self, partition: int) -> list[Message]:
        """Return the progress of the nodes that were read or forgotten since the last call.

        A message has the time at which a tick of the node was booked last, by the worker's clock. A
        broker might reject the time of the tick.
        """
        now_ms = self._time_ns() // NS_PER_MS
        drained = self._watermarks[partition].drain()
        for key in [key for key, watermark in drained if watermark is None]:
            self._descriptions.forget(key)
            self.pods.forget_node(key)
        return [
            Message(
                key=key.encode(),
                value=encode(watermark.progress_of(key)) if watermark else None,
                timestamp_ms=watermark.last_seen_ns // NS_PER_MS if watermark else now_ms,
            )
            for key, watermark in drained
        ]

    def take_samples(self, records: Sequence[Record]) -> list[Message]:
        """Book ticks; return one event per new and valid tick, in the order of the ticks."""
        events: list[Message] = []
        now_ns = self._time_ns()
        for record, sample in self._dead_letters.decode(self._sample_decoder, records):
            node = node_key(sample)
            if self._reject_misplaced(record, node=node):
                continue
            made: tuple[Message, ...] = ()
            try:
                made = self._take_sample(record, sample, node=node, now_ns=now_ns)
            except InvalidTickError as error:
                detail = f"{record.topic}: {error}"
                self._dead_letters.reject(record, reason="invalid", detail=detail)
            except TooManyEntriesError as error:
                detail = f"{record.topic}: its event would be too large: {error}"
                self._dead_letters.reject(record, reason="too_large", detail=detail)
            if not made:
                self._watermarks[record.partition].skip(node, offset=record.offset)
            events += made
        metrics.TICKS_TOTAL.inc(len(records))
        self._observer.report(now_ns)
        return events

    def take_processes(self, records: Sequence[Record]) -> None:
        """Count process records; they are not booked, because ticks contain all booked values."""
        for record, process in self._dead_letters.decode(self._process_decoder, records):
            if self._reject_misplaced(record, node=node_key(process)):
                continue
            metrics.PROCESS_RECORDS_TOTAL.labels(change=process.change).inc()

    def take_incidents(self, records: Sequence[Record]) -> list[Message]:
        """Return the messages of attributed incidents.

        Each has the pods that used the GPU, and those to which the GPU was allocated.
        """
        found: list[Message] = []
        for record, incident in self._dead_letters.decode(self._incident_decoder, records):
            if self._reject_misplaced(record, node=node_key(incident)):
                continue
            kind = incident.kind if incident.kind in INCIDENT_KINDS else metrics.OTHER_KIND
            metrics.INCIDENTS_TOTAL.labels(kind=kind).inc()
            identities = map(identity_of, incident.processes)
            known = self.pods.of(incident.cluster)
            foreign = find_foreign_pods(identities, known, node=incident.node)
            self._observer.observe_foreign(node_key(incident), foreign.values())
            attributed = attribute_incident(incident, known)
            found += self._publishable(record, attributed, what="attributed incident")
        return found

    def forget(self, partition: int) -> None:
        """Forget the state of a partition that is no longer assigned."""
        self.pods.remove_partition(partition)
        self.cluster_objects.nodes.remove_partition(partition)
        self.pods_completeness.forget(partition)
        self._watermarks.pop(partition, None)
        self._observer.forget(partition)
        # Descriptions are not kept by partition; the next ticks of other partitions restore theirs.
        self._descriptions.clear()

    def _take_sample(
        self, record: Record, sample: NodeSample, *, node: str, now_ns: int
    ) -> tuple[Message, ...]:
        """Book a tick if it is new; the time of a tick that cannot be booked becomes a gap."""
        watermarks = self._watermarks[record.partition]
        watermark = watermarks.of(node)
        if watermark and is_duplicate(sample, watermark):
            self._observer.observe_duplicate(record, sample, watermark, now_ns=now_ns)
            return ()
        ahead_seconds = seq_ahead_seconds(
            sample, watermark, written_ms=record.timestamp_ms, now_ns=now_ns
        )
        if ahead_seconds is not None:
            # A clock error of up to two days is possible: the tick is booked and reported. Beyond
            # two days, a clock error is excluded: if this tick were booked, the node's ticks up to
            # its `seq` would be lost.
            self._observer.observe_seq_ahead(node, ahead_seconds)
            if ahead_seconds * NS_PER_SECOND > MAX_AHEAD_NS:
                self._observer.observe_unbooked(record, sample, now_ns=now_ns)
                return self._refuse_seq(record, sample, ahead_seconds)
        if watermark and (booked_ns := overlap_ns(sample, watermark, now_ns=now_ns)) is not None:
            self._observer.observe_overlap(record, sample, watermark, booked_ns, now_ns=now_ns)
            return ()
        descriptions = self._descriptions.describe(sample)
        reached_ns = watermarks.reached_ns(now_ns)
        event = make_event(
            sample,
            book_valid_tick(sample),
            descriptions,
            late=sample.late or is_late(sample.time_ns, reached_ns),
            gap_ns=gap_before_ns(sample, watermark),
            late_adjustments=adjust_valid_ends(sample) if sample.ended_processes else None,
        )
        events = self._publishable(record, event, what="event")
        # A rejected tick is not booked; the gap of the next tick contains its time.
        if events:
            if watermark is None:
                self._report_new_cluster(sample, watermarks)
            if (step_seconds := clock_step_seconds(sample, watermark)) is not None:
                self._observer.observe_clock_step(node, step_seconds)
            watermarks.advance(
                sample, offset=record.offset, written_ms=record.timestamp_ms, now_ns=now_ns
            )
            self.pods.keep_named(
                descriptions.users,
                cluster=sample.cluster,
                node=sample.node,
                time_ns=sample.time_ns,
            )
            if descriptions.namespaces_left_out:
                metrics.PLACES_CUT_TOTAL.labels(what="namespaces").inc()
            self._observer.observe_event(
                event, sample, descriptions, partition=record.partition, now_ns=now_ns
            )
            if sample.time_ns <= watermarks.complete_until_ns(sample.cluster):
                metrics.BEHIND_WATERMARK_TOTAL.inc()
        return events

    def _report_new_cluster(self, sample: NodeSample, watermarks: NodeWatermarks) -> None:
        """Report the cluster of a new node if no watermark names it; then count it as known.

        podwatch publishes a watermark of its cluster in each partition, and so does the join once
        it knows the cluster.
        """
        cluster = sample.cluster
        if not any(known.knows_cluster(cluster) for known in self._watermarks.values()):
            self._observer.observe_new_cluster(node_key(sample))
        watermarks.add_cluster(cluster)

    def _publishable(self, record: Record, made: object, *, what: str) -> tuple[Message, ...]:
        """Return the message for a result; reject the record if the message is too large.

        The message has the record's timestamp, which the broker has accepted before. A timestamp
        that is too far ahead of the broker's clock would be rejected on every attempt and block the
        partition.
        """
        value = encode(made)
        size = size_bytes(record.key, value)
        if size > MAX_MESSAGE_BYTES and isinstance(made, GpuEvent):
            # Entries must be published even if the descriptions are too large.
            metrics.PLACES_CUT_TOTAL.labels(what="event").inc()
            value = encode(replace(made, namespaces=None, node_description=None))
            size = size_bytes(record.key, value)
        if size <= MAX_MESSAGE_BYTES:
            return (Message(record.key, value, record.timestamp_ms),)
        detail = (
            f"{record.topic}: the {what} of {show_key(record.key)} is too large: {size} bytes,"
            f" maximum {MAX_MESSAGE_BYTES}"
        )
        self._dead_letters.reject(record, reason="too_large", detail=detail)
        return ()

    def _refuse_seq(self, record: Record, sample: NodeSample, ahead_seconds: float) -> tuple[()]:
        """Reject a tick, because booking it would make later ticks of the node duplicates."""
        detail = (
            f"{record.topic}: field seq: {sample.seq} of node {node_key(sample)} is"
            f" {ahead_seconds:.0f} s ahead of the time since its boot, by its earlier samples"
        )
        self._dead_letters.reject(record, reason="seq_ahead", detail=detail)
        return ()


def _bounded(record: PlaceT, *, what: str, lists: Sequence[Mapping[str, Any]]) -> PlaceT:
    """Return a record that is small enough for an event.

    If the record is too large, the fields in `lists` are replaced one after the other until it
    fits. Without a limit, a person who may label a namespace could inflate the events of its pods.
    """
    for emptied in lists:
        if len(encode(record)) <= MAX_DESCRIPTION_BYTES:
            break
        metrics.PLACES_CUT_TOTAL.labels(what=what).inc()
        record = replace(record, **emptied)
    return record


def make_event(
    sample: NodeSample,
    books: list[GpuBooks],
    descriptions: PodDescriptions,
    *,
    late: bool = False,
    gap_ns: int | None = None,
    late_adjustments: list[LateAdjustment] | None = None,
) -> GpuEvent:
    """Return the event of a tick, to be encoded; the descriptions in it are already encoded."""
    # The fields are declared as lists, but contain raw bytes, which msgspec encodes unchanged.
    encoded: Any = descriptions.encoded
    return GpuEvent(
        cluster=sample.cluster,
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        late=True if late else None,
        gap_ns=gap_ns,
        gpus=books,
        pods=encoded.pods,
        containers=encoded.containers,
        allocations=encoded.allocations,
        namespaces=encoded.namespaces,
        node_description=encoded.node_description,
        late_adjustments=late_adjustments,
    )
