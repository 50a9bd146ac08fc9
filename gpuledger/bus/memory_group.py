"""One consumer group in memory: its members, who holds which partition, and what was committed.

A rebalance goes as Kafka's eager protocol has it: all members give up everything, each in its own
poll, then all get their share. No record is read here.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from gpuledger.bus.protocol import TopicPartition

Assignment = frozenset[TopicPartition]


@dataclass(kw_only=True, eq=False)
class Member:
    """One member: what it reads, what it is to hold, and how far it is in the rebalance."""

    name: str
    static: bool
    topics: Sequence[str]
    wake: Callable[[], None]
    share: Assignment = frozenset()
    """What the group gave it; it may not have taken it up yet."""
    generation: int = 0
    """The rebalance that the share comes from."""
    ready: bool = False
    """It holds nothing any more and waits for its share."""
    away: bool = False
    """A static member that closed; its share waits for its return."""
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)


class ConsumerGroup:
    """Members that share the partitions of their topics."""

    def __init__(self, *, partitions: Mapping[str, int], session_timeout_seconds: float) -> None:
        self.committed: dict[TopicPartition, int] = {}
        self.topic_ids: dict[str, str] = {}
        """The identities of the topics as the members began to read them."""
        self._committed_ids: dict[TopicPartition, str] = {}
        self._partitions = partitions
        self._session_timeout_seconds = session_timeout_seconds
        self._members: dict[str, Member] = {}
        self._names = count(1)
        self._generation = 0
        self._rebalancing = False

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of the topics that the members read."""
        self.committed.update(offsets)
        for place in offsets:
            if identity := self.topic_ids.get(place.topic):
                self._committed_ids[place] = identity

    def committed_of(self, place: TopicPartition, topic_id: str) -> int | None:
        """Return the committed offset, unless it is one of another topic of that name."""
        if self._committed_ids.get(place, topic_id) != topic_id:
            return None
        return self.committed.get(place)

    def join(self, *, name: str | None, topics: Sequence[str], wake: Callable[[], None]) -> Member:
        """Add a member; a static one that returns takes up its share and moves nobody else's."""
        returning = self._members.get(name) if name else None
        member = Member(
            name=name or f"member-{next(self._names):06d}",
            static=name is not None,
            topics=topics,
            wake=wake,
        )
        self._members[member.name] = member
        if returning is None or set(returning.topics) != set(topics):
            self._start_rebalance()
            return member
        _end_stay_away(returning)
        returning.wake()
        member.share, member.generation = returning.share, returning.generation
        member.ready = True
        self._finish_rebalance()
        return member

    def leave(self, member: Member) -> None:
        """Take a member out; the share of a static one waits for the session timeout."""
        if self.is_replaced(member):
            return
        if not member.static:
            del self._members[member.name]
            self._start_rebalance()
            return
        member.away = True
        loop = asyncio.get_running_loop()
        member.expiry = loop.call_later(self._session_timeout_seconds, self._expire, member)
        self._finish_rebalance()

    def is_replaced(self, member: Member) -> bool:
        """Return whether another consumer came under the same static name."""
        return self._members.get(member.name) is not member

    def must_give_up(self, member: Member) -> bool:
        """Return whether a rebalance waits for this member."""
        return self._rebalancing and not member.ready

    def give_up(self, member: Member) -> None:
        """Mark that a member holds nothing any more; the last one ends the rebalance."""
        member.ready = True
        self._finish_rebalance()

    def _expire(self, member: Member) -> None:
        if not self.is_replaced(member):
            del self._members[member.name]
            self._start_rebalance()

    def _start_rebalance(self) -> None:
        self._rebalancing = True
        for member in self._members.values():
            member.ready = False
            member.wake()
        self._finish_rebalance()

    def _finish_rebalance(self) -> None:
        present = [member for member in self._members.values() if not member.away]
        if not self._rebalancing or not all(member.ready for member in present):
            return
        self._rebalancing = False
        self._generation += 1
        shares = assign_ranges(
            {member.name: member.topics for member in self._members.values()}, self._partitions
        )
        for member in self._members.values():
            member.share, member.generation = shares[member.name], self._generation
            member.wake()


def assign_ranges(
    topics_of: Mapping[str, Iterable[str]], partitions: Mapping[str, int]
) -> dict[str, Assignment]:
    """Return each member a run of each topic's partitions, the same run where counts are equal."""
    shares: dict[str, set[TopicPartition]] = {member: set() for member in topics_of}
    for topic in {topic for topics in topics_of.values() for topic in topics}:
        members = sorted(member for member, topics in topics_of.items() if topic in set(topics))
        each, over = divmod(partitions[topic], len(members))
        start = 0
        for index, member in enumerate(members):
            end = start + each + (index < over)
            shares[member] |= {TopicPartition(topic, number) for number in range(start, end)}
            start = end
    return {member: frozenset(share) for member, share in shares.items()}


def _end_stay_away(member: Member) -> None:
    if member.expiry is not None:
        member.expiry.cancel()
