"""The objects of a kind as last seen, and the states that Kafka does not have yet.

Memory is bounded by the objects of the cluster and the deleted objects that wait for their
tombstone. While Kafka is unavailable, a newer state of an object replaces the older one.

`ObjectWatermarks` determines the time through which the kind's topic is complete. A watermark has a
time and an offset: all changes that podwatch had seen by this time are in the topic before this
offset. This is true once a whole list was acknowledged, and as long as the kind is then watched, so
the watermark is renewed every few seconds. While the API server is unavailable, the watermark is
not renewed, and consumers see that it does not advance.

Pure except for the clock that is passed in; no function waits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Final, Generic, NamedTuple

from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.completeness import RENEWED_AFTER_SECONDS
from gpuledger_enricher.podwatch.events import Interrupted, Phase, Step
from gpuledger_enricher.watched_records import (
    RecordT,
    gone_time_ns,
    is_older,
    with_gone_time,
    with_known_version,
)


class PendingMessage(NamedTuple, Generic[RecordT]):
    """A pending message: an object's newest state, or a tombstone if `record` is `None`."""

    identity: str
    node: str
    record: RecordT | None
    seen_time_ns: int


class ObjectTable(Generic[RecordT]):
    """Stores the objects that the reflector observed, and the order of pending messages.

    An object is in one of three maps: it is alive, deleted until its tombstone is due, or a
    tombstone until Kafka has it. A fourth map has the objects whose state Kafka does not have yet,
    in the order of their changes.
    """

    def __init__(
        self,
        *,
        tombstone_after_seconds: float,
        max_tombstones: int,
        node_of: Callable[[RecordT], str],
        identity_of: Callable[[RecordT], str],
        as_known: Callable[[RecordT, RecordT], RecordT] = with_known_version,
    ) -> None:
        """Create an empty table.

        `node_of` returns the node that determines a record's partition, and `identity_of` returns
        the name or UID that identifies an object. `as_known` returns a record with the known values
        of fields that change without being published.
        """
        self._as_known = as_known
        self._identity_of = identity_of
        self._node_of = node_of
        self._tombstone_after_ns = round(tombstone_after_seconds * NS_PER_SECOND)
        self._max_tombstones = max_tombstones
        self._alive: dict[str, RecordT] = {}
        self._deleted: dict[str, RecordT] = {}
        self._tombstones: dict[str, str] = {}
        self._unpublished: dict[str, int] = {}
        self._listed: set[str] | None = None

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[RecordT]:
        """Yield the objects that exist."""
        return iter(self._alive.values())

    @property
    def unpublished(self) -> int:
        """Number of objects whose newest state was not acknowledged."""
        return len(self._unpublished)

    @property
    def newest_unpublished(self) -> str | None:
        """Identity of the object that became pending last, and is therefore sent last."""
        return next(reversed(self._unpublished), None)

    def restore(self, records: Iterable[RecordT]) -> None:
        """Start with the records that Kafka has, which are not pending. The table must be empty.

        Objects may have been deleted from the API server in the meantime; the first list finds
        them.
        """
        deleted = []
        for record in records:
            time_ns = gone_time_ns(record)
            if time_ns is None:
                self._alive[self._identity_of(record)] = record
            else:
                deleted.append((time_ns, record))
        # The topic is ordered by key, but `expire` needs the order of deletion.
        deleted.sort(key=itemgetter(0))
        self._deleted = {self._identity_of(record): record for _, record in deleted}

    def repeat(self, identities: Iterable[str], *, time_ns: int) -> None:
        """Publish restored records again, because older records follow them in the topic."""
        self._unpublished |= dict.fromkeys(identities, time_ns)

    def repeat_all(self, *, time_ns: int) -> None:
        """Publish every object again, because the topic was deleted or recreated."""
        for identity in chain(self._deleted, self._alive):
            self._unpublished.setdefault(identity, time_ns)

    def upsert(self, record: RecordT, *, time_ns: int) -> None:
        """Record an object's state, unless no published field differs from the known state.

        Most changes of an object do not affect its record: conditions, annotations, managed fields.
        """
        if self._listed is not None:
            self._listed.add(self._identity_of(record))
        known = self._alive.get(self._identity_of(record))
        if known is None or self._as_known(record, known) != known:
            deleted = self._deleted.pop(self._identity_of(record), None)
            if deleted and is_older(record, than=deleted):
                # The deletion has the version of a list, which is above the version of this record.
                # Consumers would take the record for older than the deletion, and keep the
                # deletion.
                record = replace(record, resource_version=deleted.resource_version)
            self._tombstones.pop(self._identity_of(record), None)
            self._alive[self._identity_of(record)] = record
            self._unpublished[self._identity_of(record)] = time_ns
        elif self._identity_of(record) not in self._unpublished:
            # A record that was just decoded shares its strings; a record from the topic does not.
            self._alive[self._identity_of(record)] = record

    def delete(self, record: RecordT, *, time_ns: int) -> None:
        """Record that an object was deleted from the API server."""
        self._alive.pop(self._identity_of(record), None)
        self._deleted[self._identity_of(record)] = with_gone_time(record, time_ns)
        self._unpublished[self._identity_of(record)] = time_ns

    def keep(self, identity: str) -> None:
        """Record that an object exists in a state that cannot be read; its known record stays.

        If the identity is empty, the object may be any object, so all known objects count as
        listed.
        """
        if self._listed is not None:
            self._listed.update([identity] if identity else self._alive)

    def delete_known(self, identity: str, *, version: str, time_ns: int) -> None:
        """Record that an object was deleted from the API server; its last state is unreadable."""
        if known := self._alive.get(identity):
            as_of = version or known.resource_version
            self.delete(replace(known, resource_version=as_of), time_ns=time_ns)

    def begin_list(self) -> None:
        """Record that a complete list begins; an interrupted earlier list is dropped."""
        self._listed = set()

    def end_list(self, *, time_ns: int, version: str | None = None) -> int:
        """Mark known objects that were not in the list as deleted; return their number.

        The deletions get the list's version, which is above the versions of all records of the
        objects.
        """
        listed, self._listed = self._listed or set(), None
        gone = [record for identity, record in self._alive.items() if identity not in listed]
        for record in gone:
            as_of = version or record.resource_version
            self.delete(replace(record, resource_version=as_of), time_ns=time_ns)
        return len(gone)

    def expire(self, *, time_ns: int) -> int:
        """Turn expired deletions into tombstones; return the number of early tombstones.

        If there are more than `max_tombstones` deletions, the oldest get their tombstones early.
        """
        early = max(0, len(self._deleted) - self._max_tombstones)
        due = list(islice(self._deleted, early))
        for identity, record in self._deleted.items():
            if (gone_time_ns(record) or 0) + self._tombstone_after_ns > time_ns:
                break
            # Consumers must get the deletion before the tombstone, which only has a key.
            if identity not in self._unpublished:
                due.append(identity)
        for identity in due:
            # The same object may be both early and expired.
            if deleted := self._deleted.pop(identity, None):
                self._tombstones[identity] = self._node_of(deleted)
                self._unpublished[identity] = time_ns
        return early

    def batch(self, max_messages: int) -> list[PendingMessage[RecordT]]:
        """Return pending messages, oldest first; they stay pending until acknowledged."""
        batch = []
        for identity, time_ns in islice(self._unpublished.items(), max_messages):
            record = self._state(identity)
            # A tombstone belongs in the node's partition, after the records that it removes.
            node = self._node_of(record) if record else self._tombstones[identity]
            batch.append(
                PendingMessage(identity=identity, node=node, record=record, seen_time_ns=time_ns)
            )
        return batch

    def acknowledge(self, batch: Iterable[PendingMessage[RecordT]]) -> None:
        """Record that messages were published; objects that changed meanwhile stay pending."""
        for message in batch:
            # Identity, not equality: a state that was replaced and came back is published again.
            if self._state(message.identity) is not message.record:
                continue
            self._unpublished.pop(message.identity, None)
            if message.record is None:
                self._tombstones.pop(message.identity, None)
        if not self._unpublished:
            # Releases the memory that the first list took: 5 MB for 100,000 pods.
            self._unpublished.clear()

    def _state(self, identity: str) -> RecordT | None:
        return self._alive.get(identity) or self._deleted.get(identity)


_RENEWED_AFTER_NS: Final = round(RENEWED_AFTER_SECONDS * NS_PER_SECOND)


class ObjectWatermarks(Generic[RecordT]):
    """Determines the time through which all changes are acknowledged, without a loop over objects.

    The table sends the oldest pending object first, and an object that changes while it waits keeps
    its place. `begin` notes the last object in this order. Once that object is sent, all objects
    that were pending then have been sent, each in its state at that time or a newer one.
    """

    def __init__(self, *, table: ObjectTable[RecordT], clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._follows = False
        self._due_ns = 0
        self._seen_time_ns: int | None = None
        self._last_due: str | None = None

    def follow(self, step: Step[RecordT]) -> None:
        """Apply a step of the reflector, which observes changes only while it lists or watches."""
        match step:
            case Phase.LISTED:
                self._follows, self._due_ns = True, self._clock.monotonic_ns()
            case Phase.WATCHING if not self._follows:
                # The watch resumes where the previous one ended, so changes since then are still to
                # come.
                self._follows = True
                self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS
            case Phase.LISTING | Interrupted():
                self._follows = False
            case _:
                pass

    def begin(self) -> None:
        """If the watermark is due, note the time and the object that became pending last."""
        if (
            self._follows
            and self._seen_time_ns is None
            and self._clock.monotonic_ns() >= self._due_ns
        ):
            self._seen_time_ns = self._clock.time_ns()
            self._last_due = self._table.newest_unpublished

    def acknowledge(self, batch: Sequence[PendingMessage[RecordT]]) -> None:
        """Record that a whole batch was acknowledged."""
        if self._last_due is not None and any(each.identity == self._last_due for each in batch):
            self._last_due = None

    def complete_until_ns(self) -> int | None:
        """Return the time through which all changes are acknowledged.

        Return `None` if no watermark is due, or if changes before that time are still pending. The
        same time is returned until `record_published` or `reset` is called.
        """
        return self._seen_time_ns if self._last_due is None else None

    def record_published(self) -> None:
        """Record that the watermark was published."""
        self.reset()
        self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS

    def reset(self) -> None:
        """Start over: after a failed batch, it is unknown which messages were acknowledged."""
        self._seen_time_ns = self._last_due = None
