"""The objects of a kind as last seen, which of them Kafka does not know yet, and since when not.

Memory is bounded by the objects of the cluster and the deleted ones that wait for their tombstone;
while Kafka is away, an object's newer state replaces its older one.

`ObjectWatermarks` tells from it up to when the topic of the kind is complete. Said is: whatever
podwatch had seen by a time is in the topic, before an offset. That holds once a whole list was
acknowledged, and from then on while the kind is watched, so it is renewed every few seconds. While
the API server is away it is not: a watermark that stands still tells of it.

Pure but for the clock that is given; no waiting.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Final, Generic, NamedTuple

from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.completeness import RENEWED_AFTER_SECONDS
from gpuledger_enricher.podwatch.events import Interrupted, Phase, Step
from gpuledger_enricher.watched_records import RecordT, is_older


class PendingMessage(NamedTuple, Generic[RecordT]):
    """One message that is due: an object's newest state, or a tombstone where it has none."""

    identity: str
    node: str
    record: RecordT | None
    seen_time_ns: int


class ObjectTable(Generic[RecordT]):
    """Records what the reflector observed, and holds what is to be published.

    An object is in one of three maps: alive, deleted until its tombstone is due, or a tombstone
    until Kafka has that. Which of them Kafka does not have yet stands beside, in the order of
    change.
    """

    def __init__(
        self,
        *,
        tombstone_after_seconds: float,
        max_tombstones: int,
        node_of: Callable[[RecordT], str],
        identity_of: Callable[[RecordT], str],
    ) -> None:
        """`node_of` gives the node by which a record is placed, `identity_of` its own identity."""
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

    @property
    def unpublished(self) -> int:
        """How many objects have a state that was not acknowledged."""
        return len(self._unpublished)

    @property
    def newest_unpublished(self) -> str | None:
        """The object that became due last: once it was sent, all that is due now was."""
        return next(reversed(self._unpublished), None)

    def restore(self, records: Iterable[RecordT]) -> None:
        """Begin with what Kafka has from before: nothing of it is due. The table is empty before.

        Those alive may be gone from the API server meanwhile: the first list finds that.
        """
        deleted = []
        for record in records:
            if record.deleted_time_ns is None:
                self._alive[self._identity_of(record)] = record
            else:
                deleted.append((record.deleted_time_ns, record))
        # The topic has them by key; `expire` goes by the order of their deletion.
        deleted.sort(key=itemgetter(0))
        self._deleted = {self._identity_of(record): record for _, record in deleted}

    def repeat(self, identities: Iterable[str], *, time_ns: int) -> None:
        """Have what was restored published again: something older stands behind it."""
        self._unpublished |= dict.fromkeys(identities, time_ns)

    def repeat_all(self, *, time_ns: int) -> None:
        """Have every object published again: the topic that knew them is gone."""
        for identity in chain(self._deleted, self._alive):
            self._unpublished.setdefault(identity, time_ns)

    def upsert(self, record: RecordT, *, time_ns: int) -> None:
        """Record an object's state; one that only differs in its version is the same.

        Most changes of an object are none of its record: conditions, annotations, managed fields.
        """
        if self._listed is not None:
            self._listed.add(self._identity_of(record))
        known = self._alive.get(self._identity_of(record))
        if known is None or replace(record, resource_version=known.resource_version) != known:
            deleted = self._deleted.pop(self._identity_of(record), None)
            if deleted and is_older(record, than=deleted):
                # It was deleted as of a list's version, above its own. A reader would take it for
                # older than its deletion, and stay with that.
                record = replace(record, resource_version=deleted.resource_version)
            self._tombstones.pop(self._identity_of(record), None)
            self._alive[self._identity_of(record)] = record
            self._unpublished[self._identity_of(record)] = time_ns
        elif self._identity_of(record) not in self._unpublished:
            # A record just read shares its strings with others; one from the topic has its own.
            self._alive[self._identity_of(record)] = record

    def delete(self, record: RecordT, *, time_ns: int) -> None:
        """Record that an object left the API server."""
        self._alive.pop(self._identity_of(record), None)
        self._deleted[self._identity_of(record)] = replace(record, deleted_time_ns=time_ns)
        self._unpublished[self._identity_of(record)] = time_ns

    def keep(self, identity: str) -> None:
        """Record that an object is there in a state that cannot be read: what is known of it stays.

        Without an identity it may be any, so that none is missing from the list that it is in.
        """
        if self._listed is not None:
            self._listed.update([identity] if identity else self._alive)

    def delete_known(self, identity: str, *, version: str, time_ns: int) -> None:
        """Record that an object left the API server, of which only the identity can be read."""
        if known := self._alive.get(identity):
            as_of = version or known.resource_version
            self.delete(replace(known, resource_version=as_of), time_ns=time_ns)

    def begin_list(self) -> None:
        """Record that a complete list begins; one that broke off before is forgotten."""
        self._listed = set()

    def end_list(self, *, time_ns: int, version: str | None = None) -> int:
        """Delete what the list did not have; return how many.

        They are deleted as of the list's version, which is above that of every record of them.
        """
        listed, self._listed = self._listed or set(), None
        gone = [record for identity, record in self._alive.items() if identity not in listed]
        for record in gone:
            as_of = version or record.resource_version
            self.delete(replace(record, resource_version=as_of), time_ns=time_ns)
        return len(gone)

    def expire(self, *, time_ns: int) -> int:
        """Make tombstones of the deleted objects whose time is over; return how many came early."""
        early = max(0, len(self._deleted) - self._max_tombstones)
        due = list(islice(self._deleted, early))
        for identity, record in self._deleted.items():
            if (record.deleted_time_ns or 0) + self._tombstone_after_ns > time_ns:
                break
            # Readers must have the deletion before the tombstone, which says nothing of the object.
            if identity not in self._unpublished:
                due.append(identity)
        for identity in due:
            # One of the first may be due by its time as well.
            if deleted := self._deleted.pop(identity, None):
                self._tombstones[identity] = self._node_of(deleted)
                self._unpublished[identity] = time_ns
        return early

    def batch(self, max_messages: int) -> list[PendingMessage[RecordT]]:
        """Return what is to be published, oldest first; it stays due until acknowledged."""
        batch = []
        for identity, time_ns in islice(self._unpublished.items(), max_messages):
            record = self._state(identity)
            # A tombstone goes to the partition of the node, behind the records that it ends.
            node = self._node_of(record) if record else self._tombstones[identity]
            batch.append(
                PendingMessage(identity=identity, node=node, record=record, seen_time_ns=time_ns)
            )
        return batch

    def acknowledge(self, batch: Iterable[PendingMessage[RecordT]]) -> None:
        """Record that these were published; what changed meanwhile stays due."""
        for message in batch:
            # The same object and not an equal one: a state that came back is published again.
            if self._state(message.identity) is not message.record:
                continue
            self._unpublished.pop(message.identity, None)
            if message.record is None:
                self._tombstones.pop(message.identity, None)
        if not self._unpublished:
            # Empty, it would still hold the room that the first list took: 5 MB for 100,000 pods.
            self._unpublished.clear()

    def _state(self, identity: str) -> RecordT | None:
        return self._alive.get(identity) or self._deleted.get(identity)


_RENEWED_AFTER_NS: Final = round(RENEWED_AFTER_SECONDS * NS_PER_SECOND)


class ObjectWatermarks(Generic[RecordT]):
    """Up to which time all that was seen is acknowledged, found without looking at each object.

    The table sends what became due first, and keeps the place of what changes while it waits. So
    all that is due at a time was sent, in that state or a newer one, once the last of it was.
    """

    def __init__(self, *, table: ObjectTable[RecordT], clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._follows = False
        self._due_ns = 0
        self._seen_time_ns: int | None = None
        self._last_due: str | None = None

    def follow(self, step: Step[RecordT]) -> None:
        """Follow the reflector: what it does not say, nobody has seen."""
        match step:
            case Phase.LISTED:
                self._follows, self._due_ns = True, self._clock.monotonic_ns()
            case Phase.WATCHING if not self._follows:
                # The watch goes on where it broke off: what changed meanwhile is on its way.
                self._follows = True
                self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS
            case Phase.LISTING | Interrupted():
                self._follows = False
            case _:
                pass

    def begin(self) -> None:
        """Take note of what is due now, where the watermark is to be renewed."""
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
        """Return the time up to which all that was seen is acknowledged, where that is to be said.

        It is to be said until `record_published`, or until `reset`.
        """
        return self._seen_time_ns if self._last_due is None else None

    def record_published(self) -> None:
        """Record that it was said."""
        self.reset()
        self._due_ns = self._clock.monotonic_ns() + _RENEWED_AFTER_NS

    def reset(self) -> None:
        """Begin anew: of a batch that failed it is not known which parts were acknowledged."""
        self._seen_time_ns = self._last_due = None
