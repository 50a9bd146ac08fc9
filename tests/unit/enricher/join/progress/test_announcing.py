"""The join's watermarks hold over restarts, rebalances and kills; late ticks are exempt."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.codec import decoder_of
from gpuledger.completeness import RENEWED_AFTER_SECONDS, Completeness
from gpuledger.records import NodeProgress, NodeSample, Watermark
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.progress.passage import (
    UNRESPONSIVE_NS,
    NodeWatermark,
    Reached,
    find_reached,
    is_duplicate,
)
from gpuledger_enricher.join.progress.watermarks import NodeWatermarks
from tests.default_topics import EVENTS, WATERMARKS
from tests.unit.enricher.join.ticks import SECOND_NS, sample

BEGIN_NS = 1_790_000_000 * SECOND_NS
PARTITION = 3
NODES = ("node-a", "node-b", "node-c")


@dataclass
class Partition:
    """A Kafka partition and its current worker, which may be killed."""

    ticks: list[NodeSample] = field(default_factory=list)
    committed: int = 0
    progress: dict[str, NodeProgress | None] = field(default_factory=dict)
    events: list[tuple[int, bool]] = field(default_factory=list)
    """Time of each event, and whether it was counted as late."""
    watermarks: list[Watermark] = field(default_factory=list)
    now: float = 0.0
    seq: int = 1000

    def __post_init__(self) -> None:
        self.take_over()

    def take_over(self) -> None:
        """Start another worker from the committed state, as after a kill or a rebalance."""
        self.announcer = Announcer(topic=EVENTS.name, publisher="test")
        self.announcer.begin(PARTITION, next_offset=len(self.events), now_seconds=self.now)
        self.nodes = NodeWatermarks()
        for written in self.progress.values():
            if written is not None:
                self.nodes.take(written, last_seen_ns=self.now_ns)
        published = max((each.complete_until_ns for each in self.watermarks), default=0)
        self.nodes.call_complete("default", published)
        self.read = self.committed
        self.made: list[tuple[int, bool]] = []

    @property
    def now_ns(self) -> int:
        return BEGIN_NS + round(self.now * SECOND_NS)

    def tick(self, node: str, *, behind_seconds: float) -> None:
        """Let a node write a tick, of now or of the past."""
        self.seq += 1
        time_ns = self.now_ns - round(behind_seconds * SECOND_NS)
        self.ticks.append(sample(node=node, seq=self.seq, time_ns=time_ns))

    def poll(self, count: int) -> None:
        """Let the worker book some ticks."""
        for tick in self.ticks[self.read : self.read + count]:
            self.read += 1
            if is_duplicate(tick, self.nodes.of(tick.node)):
                continue
            late = tick.time_ns <= self.nodes.complete_until_ns("default")
            self.made.append((tick.time_ns, late))
            written_ms = self.now_ns // 10**6
            self.nodes.advance(tick, offset=self.read, written_ms=written_ms, now_ns=self.now_ns)

    def deliver(self, *, is_killed: bool = False) -> None:
        """Let the worker deliver, or be killed before its transaction commits."""
        progress = {
            node: known.progress_of(node) if known else None for node, known in self.nodes.drain()
        }
        watermarks = self.announcer.drain(PARTITION, now_seconds=self.now, time_ns=self.now_ns)
        if self.announcer.is_to_be_drawn(PARTITION, now_seconds=self.now):
            is_at_end = self.read == len(self.ticks) and not self.made
            reached = self.nodes.find_complete(now_ns=self.now_ns, is_at_end=is_at_end)
            self.announcer.draw(PARTITION, reached, now_seconds=self.now)
        if is_killed:
            self.take_over()
            return
        self.events.extend(self.made)
        self.progress.update(progress)
        self.committed = self.read
        self.watermarks.extend(
            decoder_of(WATERMARKS.name, Watermark).decode(each.value or b"") for each in watermarks
        )
        if self.made:
            self.announcer.published(PARTITION, next_offset=len(self.events))
        self.made = []
        self.announcer.committed(PARTITION)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("tick"),
            st.tuples(
                st.sampled_from(NODES), st.sampled_from([0, 0, 0, 1, 3, 20, 60, 130, 400, 4000])
            ),
        ),
        st.tuples(st.just("pass"), st.sampled_from([1, 1, 5, 30, 150, 1000])),
        st.tuples(st.just("poll"), st.integers(1, 9)),
        st.tuples(st.just("deliver"), st.booleans()),
        st.tuples(st.just("takes over"), st.none()),
    ),
    max_size=120,
)


@given(steps=STEPS)
@example(
    steps=[
        *(("tick", ("node-a", 0)), ("poll", 1), ("deliver", False), ("pass", 150)),
        *(("deliver", False), ("deliver", False), ("takes over", None)),
        *(("tick", ("node-a", 149)), ("poll", 1), ("deliver", False)),
    ],
)
def test_a_watermark_is_never_ahead_of_an_event_that_comes_after_it_unless_the_event_is_late(
    steps: list[tuple[str, object]],
) -> None:
    partition = Partition()
    for step, value in steps:
        match step, value:
            case "tick", (str(node), int(behind)):
                partition.tick(node, behind_seconds=behind)
            case "pass", int(seconds):
                partition.now += seconds
            case "poll", int(count):
                partition.poll(count)
            case "deliver", bool(is_killed):
                partition.deliver(is_killed=is_killed)
            case _:
                partition.take_over()
    for published in partition.watermarks:
        for time_ns, is_counted_late in partition.events[published.next_offset :]:
            assert time_ns > published.complete_until_ns or is_counted_late


@given(steps=st.lists(st.sampled_from([0.2, 1, 4]), min_size=60, max_size=60))
def test_while_all_nodes_tick_the_watermark_follows_the_slowest_and_nothing_is_late(
    steps: list[float],
) -> None:
    """Whenever ticks and deliveries come; a watermark is written at most every few seconds."""
    partition, reader = (
        Partition(),
        Completeness(component="join", topic=EVENTS.name),
    )
    for seconds in steps:
        partition.now += seconds
        for number, node in enumerate(NODES):
            partition.tick(node, behind_seconds=number)
        partition.poll(9)
        partition.deliver()
    assert not any(late for _, late in partition.events)
    for published in partition.watermarks:
        reader.take(published)
    reader.read_to(PARTITION, len(partition.events))
    complete_ns = reader.complete_until_ns([PARTITION])
    assert complete_ns is not None
    assert partition.now_ns - complete_ns < (RENEWED_AFTER_SECONDS + 4 * 4) * SECOND_NS
    assert len(partition.watermarks) <= 1 + sum(steps) / RENEWED_AFTER_SECONDS


def test_a_node_that_is_unresponsive_for_two_minutes_is_named_and_no_longer_waited_for() -> None:
    partition = Partition()
    partition.tick("node-b", behind_seconds=0)
    for _ in range(130):
        partition.now += 1
        partition.tick("node-a", behind_seconds=0)
        partition.poll(9)
        partition.deliver()
    first, last = partition.watermarks[0], partition.watermarks[-1]
    assert (first.node_count, first.unresponsive) == (2, None)
    assert last.unresponsive_count == 1
    assert last.unresponsive is not None
    assert [(each.node, each.since_time_ns) for each in last.unresponsive] == [("node-b", BEGIN_NS)]
    assert last.complete_until_ns > BEGIN_NS + UNRESPONSIVE_NS


def test_reading_a_backlog_of_hours_makes_no_node_unresponsive() -> None:
    """A worker starts after a night and reads one node's ticks before another's."""
    partition = Partition()
    for node in NODES:
        partition.tick(node, behind_seconds=0)
    partition.poll(9)
    partition.deliver()
    for _ in range(100):
        partition.now += 1
        for node in NODES:
            partition.tick(node, behind_seconds=0)
    partition.now += 8 * 3600
    partition.take_over()
    while partition.read < len(partition.ticks):
        partition.poll(1)
        partition.now += 1
        partition.deliver()
    assert all(watermark.unresponsive is None for watermark in partition.watermarks)
    assert not any(late for _, late in partition.events)


def test_a_partition_without_nodes_is_complete_except_for_the_last_two_minutes() -> None:
    now_ns = BEGIN_NS
    reached = find_reached({}, now_ns=now_ns, is_at_end=True)
    assert reached is not None
    assert (reached.until_ns, reached.node_count) == (now_ns - UNRESPONSIVE_NS, 0)
    assert find_reached({}, now_ns=now_ns, is_at_end=False) is None


def ticked(ago_seconds: int, *, last_seen_ago_seconds: int = 0) -> NodeWatermark:
    """Return a node by the age of its newest tick and when our own clock last saw it."""
    time_ns, last_seen_ns = (
        BEGIN_NS - ago * SECOND_NS for ago in (ago_seconds, last_seen_ago_seconds)
    )
    return NodeWatermark("boot", 1, time_ns, 0, last_seen_ns, 0, last_seen_ns, last_seen_ns)


@pytest.mark.parametrize(
    ("case", "others", "until_ago", "unresponsive"),
    [
        ("ticks of ten minutes ago are read", {}, 600, []),
        ("a clock runs an hour ahead", {"c": ticked(600 - 3_600)}, 600, []),
        ("another one is days ahead", {"c": ticked(-90_000), "d": ticked(599)}, 600, []),
        ("one is far behind", {"c": ticked(5_000), "d": ticked(590)}, 600, ["c"]),
        ("one is no longer seen", {"c": ticked(610, last_seen_ago_seconds=121)}, 600, ["c"]),
        ("one was seen a minute ago", {"c": ticked(660, last_seen_ago_seconds=60)}, 660, []),
    ],
)
def test_no_node_is_unresponsive_while_its_ticks_are_still_to_be_read(
    case: str, others: dict[str, NodeWatermark], until_ago: int, unresponsive: list[str]
) -> None:
    nodes = {"a": ticked(600), "b": ticked(598)} | others
    reached = find_reached(nodes, now_ns=BEGIN_NS, is_at_end=False)
    assert reached is not None
    assert (BEGIN_NS - reached.until_ns) // SECOND_NS == until_ago, case
    assert [name for name, _ in reached.unresponsive] == unresponsive, case


def test_no_node_is_unresponsive_just_because_a_partition_was_taken_over() -> None:
    """By the restored progress, all were last seen when the previous worker ended."""
    reported = {"last_seen_ago_seconds": 3_600}
    nodes = {"a": ticked(3_600, **reported), "b": ticked(3_599, **reported), "c": ticked(3_598)}
    how = {"now_ns": BEGIN_NS, "since_ns": BEGIN_NS - SECOND_NS}
    reached = find_reached(nodes, is_at_end=False, **how)
    assert reached is not None
    assert (BEGIN_NS - reached.until_ns) // SECOND_NS == 3_600
    assert reached.unresponsive == []


def complete(nodes: NodeWatermarks, now_ns: int, *, is_at_end: bool = True) -> Reached:
    return nodes.find_complete(now_ns=now_ns, is_at_end=is_at_end)["default"]


def reported(*nodes: str, at_ns: int, behind_seconds: int = 0) -> NodeWatermarks:
    """Return the known nodes if each of these has ticked."""
    known = NodeWatermarks()
    for node in nodes:
        report(known, node, at_ns=at_ns, behind_seconds=behind_seconds)
    return known


def report(known: NodeWatermarks, node: str, *, at_ns: int, behind_seconds: int = 0) -> None:
    time_ns = at_ns - behind_seconds * SECOND_NS
    tick = sample(node=node, seq=time_ns // 10**6, time_ns=time_ns)
    known.advance(tick, offset=0, written_ms=at_ns // 10**6, now_ns=at_ns)


def test_a_watermark_of_a_clock_that_ran_ahead_is_not_repeated() -> None:
    now_ns = BEGIN_NS
    known = reported("a", "b", at_ns=now_ns)
    complete(known, now_ns)
    ahead = complete(known, now_ns + 86_400 * SECOND_NS)
    assert ahead.until_ns > now_ns + 86_000 * SECOND_NS
    assert complete(known, now_ns + SECOND_NS).until_ns == now_ns


def test_a_node_that_returns_behind_the_watermark_is_named_until_it_has_caught_up() -> None:
    """The watermark does not cover its ticks, just as while it was unresponsive."""
    now_ns = BEGIN_NS
    known = reported("a", "b", at_ns=now_ns)
    report(known, "c", at_ns=now_ns - 150 * SECOND_NS)
    complete(known, now_ns - 200 * SECOND_NS)
    found = complete(known, now_ns)
    assert (found.until_ns, [name for name, _ in found.unresponsive]) == (now_ns, ["default/c"])
    report(known, "c", at_ns=now_ns, behind_seconds=100)
    found = complete(known, now_ns)
    assert found.until_ns == now_ns
    assert [name for name, _ in found.unresponsive] == ["default/c"]
    report(known, "c", at_ns=now_ns + SECOND_NS)
    assert complete(known, now_ns + SECOND_NS).unresponsive == []


def test_no_node_becomes_unresponsive_while_the_brokers_are_unavailable() -> None:
    """The ticks that nodes keep on disk in the meantime are still to come."""
    now_ns = BEGIN_NS
    known = reported("a", "b", at_ns=now_ns)
    assert complete(known, now_ns).until_ns == now_ns
    later_ns = now_ns + 600 * SECOND_NS
    known.restart_listening(later_ns)
    for seconds in (0, 60, 119):
        found = complete(known, later_ns + seconds * SECOND_NS)
        assert (found.until_ns, found.unresponsive) == (now_ns, [])
    found = complete(known, later_ns + 121 * SECOND_NS)
    assert found.until_ns > now_ns
    assert len(found.unresponsive) == 2
