"""How far a node is booked: told by one worker, known to the next."""

from itertools import product

import pytest

from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.records import BootProgress, GpuEvent, NodeProgress, NodeSample
from gpuledger_enricher.join.progress.watermarks import MAX_NODES, NodeWatermarks
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import DEAD_LETTERS, EVENTS, PROGRESS, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.ticks import SECOND_NS, anywhere, process, record, sample

PARTITION = 3
NOW_NS = 1_795_000_000 * SECOND_NS
USED = sample(processes=[process(container=0, sm_utilization_ratio=0.5)])
WATERMARK = Decoder(topic=PROGRESS.name, record=NodeProgress)
EVENT = Decoder(topic=EVENTS.name, record=GpuEvent)


@pytest.fixture
def dead_letters() -> DeadLetterQueue:
    """Return dead letters that can be counted."""
    return DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )


@pytest.fixture
def stage(dead_letters: DeadLetterQueue) -> JoinStage:
    """Return a worker's stage."""
    return JoinStage(
        dead_letters=dead_letters, is_placed=anywhere, time_ns=lambda: NOW_NS, topics=TOPICS
    )


def written(messages: list[Message]) -> list[Record]:
    """Return watermarks as the next worker reads them."""
    return [
        record(each.value, topic=PROGRESS.name, offset=partition, key=(each.key or b"").decode())
        for partition, each in enumerate(messages)
    ]


def test_the_next_worker_books_nothing_that_the_one_before_booked(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """The watermarks are all that it needs; what came after them is booked."""
    stage.take_samples([record(USED, offset=4)])
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    successor.restore_progress(written(stage.drain_progress(PARTITION)))
    assert successor.take_samples([record(USED, offset=4)]) == []
    assert len(successor.take_samples([record(sample(seq=2000), offset=5)])) == 1


def test_a_watermark_says_which_tick_was_booked_last(stage: JoinStage) -> None:
    """One watermark a node, the newest, keyed by it."""
    stage.take_samples([record(USED, offset=4), record(sample(seq=2000), offset=5)])
    (message,) = stage.drain_progress(PARTITION)
    assert message.key == b"default/node-a"
    assert WATERMARK.decode(message.value) == NodeProgress(
        cluster="default",
        node="node-a",
        boot_id="boot",
        seq=2000,
        time_ns=USED.time_ns,
        offset=5,
        begun_time_ns=USED.time_ns - SECOND_NS,
        first_booked_time_ns=NOW_NS,
    )


def test_a_watermark_is_given_once_and_only_where_something_was_booked(stage: JoinStage) -> None:
    """Neither what was read, nor a duplicate, nor another partition has any."""
    stage.take_samples([record(USED)])
    assert stage.drain_progress(PARTITION + 1) == []
    watermarks = stage.drain_progress(PARTITION)
    stage.restore_progress(written(watermarks))
    stage.take_samples([record(USED, offset=1)])
    assert stage.drain_progress(PARTITION) == []


def test_a_tick_that_could_not_be_booked_leaves_no_watermark(stage: JoinStage) -> None:
    """It was put aside; that its time is not covered must show in the next."""
    stage.take_samples([record(sample(interval_ns=0))])
    assert stage.drain_progress(PARTITION) == []


OF_A_NEW_BOOT = [
    ("its clock goes on", 5, 1),
    ("its clock was set back", 5, -1),
    ("in a topic made anew", 0, 1),
    ("in a topic made anew, its clock set back", 0, -1),
]


@pytest.mark.parametrize(("case", "offset", "later_seconds"), OF_A_NEW_BOOT)
def test_a_tick_of_a_boot_that_was_never_booked_is_new(
    stage: JoinStage, case: str, offset: int, later_seconds: int
) -> None:
    """Wherever it lies, and whatever its clock says; then it is booked as any other."""
    stage.take_samples([record(USED, offset=4)])
    time_ns = USED.time_ns + later_seconds * SECOND_NS
    of_new_boot = record(sample(boot_id="new", seq=1, time_ns=time_ns), offset=offset)
    assert len(stage.take_samples([of_new_boot])) == 1, case
    assert stage.take_samples([of_new_boot]) == [], case


def boots(*names: str, clock_runs: int = 1) -> list[Record]:
    """Return two ticks of each boot, in their order."""
    return [
        record(
            sample(
                boot_id=name, seq=seq, time_ns=USED.time_ns + clock_runs * partition * SECOND_NS
            ),
            offset=partition,
        )
        for partition, (name, seq) in enumerate(product(names, (1000, 2000)))
    ]


def test_ticks_of_earlier_boots_that_come_again_are_not_booked_again(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """As in a batch that is sent twice, in which a node rebooted; by the next worker neither."""
    ticks = boots("one", "two", "three")
    assert len(stage.take_samples(ticks)) == 6
    assert stage.take_samples(ticks) == []
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    successor.restore_progress(written(stage.drain_progress(PARTITION)))
    assert successor.take_samples(ticks) == []


def test_a_tick_of_an_earlier_boot_that_comes_late_is_booked_once(stage: JoinStage) -> None:
    """Its boot goes on from where it was; the newest stays the newest."""
    stage.take_samples(boots("one", "two"))
    late = record(sample(boot_id="one", seq=4000), offset=4)
    (event,) = stage.take_samples([late])
    assert EVENT.decode(event.value).gap_ns == 1_000_000_000
    assert stage.take_samples([late, *boots("one", "two")]) == []
    (watermark,) = stage.drain_progress(PARTITION)
    assert WATERMARK.decode(watermark.value).boot_id == "two"


def test_of_the_boots_before_only_a_few_are_kept(stage: JoinStage) -> None:
    """Or a node that boots for ever would need ever more: the newest, and those booked longest."""
    stage.take_samples(boots(*(f"boot-{number}" for number in range(13))))
    (message,) = stage.drain_progress(PARTITION)
    watermark = WATERMARK.decode(message.value)
    assert watermark.boot_id == "boot-12"
    assert watermark.boots_before == [
        BootProgress(
            boot_id=f"boot-{number}",
            seq=2000,
            begun_time_ns=USED.time_ns - SECOND_NS,
            first_booked_time_ns=NOW_NS,
            last_booked_time_ns=NOW_NS,
        )
        for number in (11, 10, 9, 8, 3, 2, 1, 0)
    ]


def test_watermarks_that_are_read_twice_say_what_they_say_once(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """As where reading is begun anew half-way, and the clock went back at each boot."""
    watermarks: list[Record] = []
    for tick in boots("one", "two", "three", clock_runs=-1):
        stage.take_samples([tick])
        watermarks += written(stage.drain_progress(PARTITION))
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    for read in (watermarks[:5], watermarks):
        successor.restore_progress(read)
    assert successor.take_samples(boots("one", "two", "three")) == []


def test_a_watermark_that_is_read_late_does_not_put_a_node_back(stage: JoinStage) -> None:
    """What this worker has booked since stays booked."""
    stage.take_samples([record(USED, offset=4)])
    old = written(stage.drain_progress(PARTITION))
    newer: NodeSample = sample(seq=2000)
    stage.take_samples([record(newer, offset=5)])
    stage.restore_progress(old)
    assert stage.take_samples([record(newer, offset=5)]) == []


def test_a_node_whose_watermark_was_taken_back_begins_anew(stage: JoinStage) -> None:
    """A tombstone forgets it."""
    stage.take_samples([record(USED)])
    stage.restore_progress([record(None, topic=PROGRESS.name, key="default/node-a")])
    assert len(stage.take_samples([record(USED)])) == 1


def test_a_watermark_that_cannot_be_read_is_put_aside(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """As any record."""
    stage.restore_progress([record(b"{", topic=PROGRESS.name)])
    assert dead_letters.rejected == 1


def advance(watermarks: NodeWatermarks, node: str, *, at_seconds: float, boot: str = "b") -> None:
    """Have a tick of the node booked at that time."""
    now_ns = round(at_seconds * SECOND_NS)
    tick = sample(node=node, boot_id=boot, seq=round(at_seconds * 1000))
    watermarks.advance(tick, offset=0, written_ms=0, now_ns=now_ns)


def make_up_nodes(
    watermarks: NodeWatermarks, *, at_seconds: float, count: int = MAX_NODES + 1
) -> None:
    for number in range(count):
        advance(watermarks, f"made-up-{at_seconds}-{number}", at_seconds=at_seconds)


def test_names_that_are_made_up_push_out_no_node_that_was_booked_before_they_came() -> None:
    """However many come at once, between two of its ticks: they are the ones that are forgotten."""
    watermarks = NodeWatermarks()
    for at_seconds in range(3):
        advance(watermarks, "honest", at_seconds=at_seconds)
    for flood_seconds in (2.5, 2.6, 9.9):
        make_up_nodes(watermarks, at_seconds=flood_seconds)
        assert len(watermarks) <= MAX_NODES
        assert watermarks.of("default/honest") is not None
    forgotten = [node for node, watermark in watermarks.drain() if watermark is None]
    assert len(forgotten) >= 2 * MAX_NODES


def test_names_that_are_made_up_again_and_again_push_out_no_node_that_is_older() -> None:
    watermarks = NodeWatermarks()
    advance(watermarks, "honest", at_seconds=0)
    for at_seconds in (1, 60, 120):
        advance(watermarks, "honest", at_seconds=at_seconds)
        for number in range(MAX_NODES):
            advance(watermarks, f"kept-alive-{number}", at_seconds=at_seconds + 0.5)
    make_up_nodes(watermarks, at_seconds=121)
    assert watermarks.of("default/honest") is not None


def test_a_node_that_has_just_booted_has_been_there_for_as_long_as_before() -> None:
    watermarks = NodeWatermarks()
    advance(watermarks, "honest", at_seconds=0)
    for number in range(MAX_NODES - 1):
        advance(watermarks, f"younger-{number}", at_seconds=50)
        advance(watermarks, f"younger-{number}", at_seconds=90)
    advance(watermarks, "honest", at_seconds=100, boot="the next")
    make_up_nodes(watermarks, at_seconds=100.5)
    assert watermarks.of("default/honest") is not None


def test_the_next_worker_knows_for_how_long_nodes_were_booked() -> None:
    """So that neither a restart nor a take-over is the moment to push them out."""
    first = NodeWatermarks()
    for at_seconds in (10, 1000):
        advance(first, "honest", at_seconds=at_seconds)
    successor = NodeWatermarks()
    for _, watermark in first.drain():
        assert watermark is not None
        successor.take(watermark, last_seen_ns=1000 * SECOND_NS)
    make_up_nodes(successor, at_seconds=1000.5)
    assert successor.of("default/honest") is not None


def test_of_nodes_that_were_booked_once_those_heard_longest_ago_are_forgotten_first() -> None:
    watermarks = NodeWatermarks()
    for number in range(MAX_NODES + 1):
        advance(watermarks, f"once-{number}", at_seconds=number)
    assert watermarks.of("default/once-0") is None
    assert watermarks.of(f"default/once-{MAX_NODES - 1}") is not None
