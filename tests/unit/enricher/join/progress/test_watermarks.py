"""How far a node is booked: written by one worker, read by the next."""

from itertools import product

import pytest
from msgspec.structs import replace

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
    return DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )


@pytest.fixture
def stage(dead_letters: DeadLetterQueue) -> JoinStage:
    return JoinStage(
        dead_letters=dead_letters, is_placed=anywhere, time_ns=lambda: NOW_NS, topics=TOPICS
    )


def written(messages: list[Message]) -> list[Record]:
    """Return watermarks as the next worker reads them."""
    return [
        record(each.value, topic=PROGRESS.name, offset=partition, key=(each.key or b"").decode())
        for partition, each in enumerate(messages)
    ]


def test_the_next_worker_does_not_book_again_what_the_previous_one_booked(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """The watermarks are all that it needs; later ticks are booked."""
    stage.take_samples([record(USED, offset=4)])
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    successor.restore_progress(written(stage.drain_progress(PARTITION)))
    assert successor.take_samples([record(USED, offset=4)]) == []
    assert len(successor.take_samples([record(sample(seq=2000), offset=5)])) == 1


def test_a_watermark_names_the_last_booked_tick(stage: JoinStage) -> None:
    """One watermark for each node, the newest, keyed by the node."""
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
        covered_from_time_ns=USED.time_ns - USED.interval_ns,
    )


def test_a_watermark_is_written_once_and_only_if_something_new_was_read(stage: JoinStage) -> None:
    """Restored progress, a record that is read again and another partition produce none."""
    stage.take_samples([record(USED)])
    assert stage.drain_progress(PARTITION + 1) == []
    watermarks = stage.drain_progress(PARTITION)
    stage.restore_progress(written(watermarks))
    stage.take_samples([record(USED)])
    assert stage.drain_progress(PARTITION) == []


REBOOTED = sample(boot_id="boot-2", seq=10, time_ns=USED.time_ns + SECOND_NS)
NOT_BOOKED_AS_NEWEST = [
    ("a duplicate", USED, {}),
    ("an overlap", sample(seq=1200, time_ns=USED.time_ns + SECOND_NS // 5), {}),
    ("an invalid tick", sample(seq=9000, interval_ns=0), {}),
    ("a seq that runs ahead", sample(seq=6 * 10**9), {}),
    ("the first tick of another boot", REBOOTED, {"single_time_ns": REBOOTED.time_ns}),
]


@pytest.mark.parametrize(("case", "tick", "changes"), NOT_BOOKED_AS_NEWEST)
def test_the_offset_of_a_watermark_is_that_of_the_last_tick_even_if_another_one_was_booked_last(
    stage: JoinStage, case: str, tick: NodeSample, changes: dict[str, int]
) -> None:
    """Other fields, and the time of the record, are as if the tick had not been read."""
    stage.take_samples([record(USED, offset=4)])
    (before,) = stage.drain_progress(PARTITION)
    stage.take_samples([record(tick, offset=7)])
    stage.take_samples([record(USED, offset=5)])  # as after an offset that was moved back
    (after,) = stage.drain_progress(PARTITION)
    found = replace(WATERMARK.decode(after.value), boots_before=None)
    expected = replace(WATERMARK.decode(before.value), offset=7, **changes)
    assert (found, after.timestamp_ms) == (expected, before.timestamp_ms), case
    assert stage.read_before(PARTITION) == 8


def test_a_tick_that_could_not_be_booked_leaves_no_watermark(stage: JoinStage) -> None:
    """It became a dead letter, and the next tick must show that its time is not covered."""
    stage.take_samples([record(sample(interval_ns=0))])
    assert stage.drain_progress(PARTITION) == []


OF_A_NEW_BOOT = [
    ("its clock continues", 5, 1),
    ("its clock was set back", 5, -1),
    ("in a recreated topic", 0, 1),
    ("in a recreated topic, its clock set back", 0, -1),
]


@pytest.mark.parametrize(("case", "offset", "later_seconds"), OF_A_NEW_BOOT)
def test_a_tick_of_a_boot_that_was_never_booked_is_new(
    stage: JoinStage, case: str, offset: int, later_seconds: int
) -> None:
    """Whatever its offset and its clock; from then on the boot is like any other."""
    stage.take_samples([record(USED, offset=4)])
    time_ns = USED.time_ns + later_seconds * SECOND_NS
    of_new_boot = record(sample(boot_id="new", seq=1, time_ns=time_ns), offset=offset)
    assert len(stage.take_samples([of_new_boot])) == 1, case
    assert stage.take_samples([of_new_boot]) == [], case


def boots(*names: str, clock_runs: int = 1) -> list[Record]:
    """Return two ticks of each boot, in order."""
    return [
        record(
            sample(
                boot_id=name, seq=seq, time_ns=USED.time_ns + clock_runs * partition * SECOND_NS
            ),
            offset=partition,
        )
        for partition, (name, seq) in enumerate(product(names, (1000, 2000)))
    ]


def test_repeated_ticks_of_earlier_boots_are_not_booked_again(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """As in a batch that is sent twice and contains a reboot; neither by the next worker."""
    ticks = boots("one", "two", "three")
    assert len(stage.take_samples(ticks)) == 6
    assert stage.take_samples(ticks) == []
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    successor.restore_progress(written(stage.drain_progress(PARTITION)))
    assert successor.take_samples(ticks) == []


def test_a_late_tick_of_an_earlier_boot_is_booked_once(stage: JoinStage) -> None:
    """Its boot continues from where it was, and the newest boot stays the newest."""
    stage.take_samples(boots("one", "two"))
    late = record(sample(boot_id="one", seq=4000), offset=4)
    (event,) = stage.take_samples([late])
    assert EVENT.decode(event.value).gap_ns == 1_000_000_000
    assert stage.take_samples([late, *boots("one", "two")]) == []
    (watermark,) = stage.drain_progress(PARTITION)
    assert WATERMARK.decode(watermark.value).boot_id == "two"


def test_only_a_few_earlier_boots_are_kept(stage: JoinStage) -> None:
    """The newest and those booked for longest, so that a boot loop does not fill the memory."""
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
            time_ns=USED.time_ns + (2 * number + 1) * SECOND_NS,
        )
        for number in (11, 10, 9, 8, 3, 2, 1, 0)
    ]


def test_watermarks_that_are_read_twice_have_the_same_effect_as_once(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    """For example if reading restarts half-way, and the clock was set back at each boot."""
    watermarks: list[Record] = []
    for tick in boots("one", "two", "three", clock_runs=-1):
        stage.take_samples([tick])
        watermarks += written(stage.drain_progress(PARTITION))
    successor = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    for read in (watermarks[:5], watermarks):
        successor.restore_progress(read)
    assert successor.take_samples(boots("one", "two", "three")) == []


def test_a_watermark_that_is_read_late_does_not_set_a_node_back(stage: JoinStage) -> None:
    """Ticks that this worker has booked since stay booked."""
    stage.take_samples([record(USED, offset=4)])
    old = written(stage.drain_progress(PARTITION))
    newer: NodeSample = sample(seq=2000)
    stage.take_samples([record(newer, offset=5)])
    stage.restore_progress(old)
    assert stage.take_samples([record(newer, offset=5)]) == []


def test_a_node_whose_watermark_was_deleted_starts_over(stage: JoinStage) -> None:
    stage.take_samples([record(USED)])
    stage.restore_progress([record(None, topic=PROGRESS.name, key="default/node-a")])
    assert len(stage.take_samples([record(USED)])) == 1


def test_a_watermark_that_cannot_be_read_is_rejected(
    stage: JoinStage, dead_letters: DeadLetterQueue
) -> None:
    stage.restore_progress([record(b"{", topic=PROGRESS.name)])
    assert dead_letters.rejected == 1


def advance(watermarks: NodeWatermarks, node: str, *, at_seconds: float, boot: str = "b") -> None:
    """Let a tick of the node be booked at that time."""
    now_ns = round(at_seconds * SECOND_NS)
    tick = sample(node=node, boot_id=boot, seq=round(at_seconds * 1000))
    watermarks.advance(tick, offset=0, written_ms=0, now_ns=now_ns)


def make_up_nodes(
    watermarks: NodeWatermarks, *, at_seconds: float, count: int = MAX_NODES + 1
) -> None:
    for number in range(count):
        advance(watermarks, f"made-up-{at_seconds}-{number}", at_seconds=at_seconds)


def test_made_up_names_do_not_displace_a_node_that_was_booked_before_they_came() -> None:
    """However many come at once between two of its ticks: the made-up ones are forgotten."""
    watermarks = NodeWatermarks()
    for at_seconds in range(3):
        advance(watermarks, "honest", at_seconds=at_seconds)
    for flood_seconds in (2.5, 2.6, 9.9):
        make_up_nodes(watermarks, at_seconds=flood_seconds)
        assert len(watermarks) <= MAX_NODES
        assert watermarks.of("default/honest") is not None
    forgotten = [node for node, watermark in watermarks.drain() if watermark is None]
    assert len(forgotten) >= 2 * MAX_NODES


def test_made_up_names_that_are_kept_alive_do_not_displace_an_older_node() -> None:
    watermarks = NodeWatermarks()
    advance(watermarks, "honest", at_seconds=0)
    for at_seconds in (1, 60, 120):
        advance(watermarks, "honest", at_seconds=at_seconds)
        for number in range(MAX_NODES):
            advance(watermarks, f"kept-alive-{number}", at_seconds=at_seconds + 0.5)
    make_up_nodes(watermarks, at_seconds=121)
    assert watermarks.of("default/honest") is not None


def test_a_node_keeps_its_age_when_it_reboots() -> None:
    watermarks = NodeWatermarks()
    advance(watermarks, "honest", at_seconds=0)
    for number in range(MAX_NODES - 1):
        advance(watermarks, f"younger-{number}", at_seconds=50)
        advance(watermarks, f"younger-{number}", at_seconds=90)
    advance(watermarks, "honest", at_seconds=100, boot="the next")
    make_up_nodes(watermarks, at_seconds=100.5)
    assert watermarks.of("default/honest") is not None


def test_the_next_worker_reads_how_long_nodes_have_been_booked() -> None:
    """So that neither a restart nor a take-over is an opportunity to displace them."""
    first = NodeWatermarks()
    for at_seconds in (10, 1000):
        advance(first, "honest", at_seconds=at_seconds)
    successor = NodeWatermarks()
    for node, watermark in first.drain():
        assert watermark is not None
        successor.take(watermark.progress_of(node), last_seen_ns=1000 * SECOND_NS)
    make_up_nodes(successor, at_seconds=1000.5)
    assert successor.of("default/honest") is not None


def test_nodes_booked_only_once_are_forgotten_least_recently_seen_first() -> None:
    watermarks = NodeWatermarks()
    for number in range(MAX_NODES + 1):
        advance(watermarks, f"once-{number}", at_seconds=number)
    assert watermarks.of("default/once-0") is None
    assert watermarks.of(f"default/once-{MAX_NODES - 1}") is not None
