"""How far a node is booked: told by one worker, known to the next."""

import pytest

from enricher.join.stage import JoinStage
from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import Decoder
from gpuledger.dead_letters import DeadLetterOffice
from gpuledger.records import NodeMark, NodeSample
from gpuledger.topics import MARKS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.ticks import SECOND_NS, process, record, sample

PARTITION = 3
USED = sample(processes=[process(container=0, sm_utilization_ratio=0.5)])
MARK = Decoder(topic=MARKS.name, record=NodeMark)


@pytest.fixture
def office() -> DeadLetterOffice:
    """Give an office whose letters can be counted."""
    return DeadLetterOffice(consumer="test", producer=KeepingProducer(), partitions=1)


@pytest.fixture
def stage(office: DeadLetterOffice) -> JoinStage:
    """Give a worker's stage."""
    return JoinStage(office=office)


def written(messages: list[Message]) -> list[Record]:
    """Give marks as the next worker reads them."""
    return [
        record(each.value, topic=MARKS.name, offset=place, key=(each.key or b"").decode())
        for place, each in enumerate(messages)
    ]


def test_the_next_worker_books_nothing_that_the_one_before_booked(
    stage: JoinStage, office: DeadLetterOffice
) -> None:
    """The marks are all that it needs; what came after them is booked."""
    stage.take_samples([record(USED, offset=4)])
    heir = JoinStage(office=office)
    heir.take_marks(written(stage.drain_marks(PARTITION)))
    assert heir.take_samples([record(USED, offset=4)]) == []
    assert len(heir.take_samples([record(sample(seq=2000), offset=5)])) == 1


def test_a_mark_says_which_tick_was_booked_last(stage: JoinStage) -> None:
    """One mark a node, the newest, keyed by it."""
    stage.take_samples([record(USED, offset=4), record(sample(seq=2000), offset=5)])
    (message,) = stage.drain_marks(PARTITION)
    assert message.key == b"node-a"
    assert MARK.decode(message.value) == NodeMark(
        node="node-a", boot_id="boot", seq=2000, time_ns=USED.time_ns, offset=5
    )


def test_a_mark_is_given_once_and_only_where_something_was_booked(stage: JoinStage) -> None:
    """Neither a mark that was read, nor a duplicate, nor another partition has anything to tell."""
    stage.take_samples([record(USED)])
    assert stage.drain_marks(PARTITION + 1) == []
    marks = stage.drain_marks(PARTITION)
    stage.take_marks(written(marks))
    stage.take_samples([record(USED, offset=1)])
    assert stage.drain_marks(PARTITION) == []


def test_a_tick_that_could_not_be_booked_leaves_no_mark(stage: JoinStage) -> None:
    """It was put aside; that its time is not covered must show in the next."""
    stage.take_samples([record(sample(interval_ns=0))])
    assert stage.drain_marks(PARTITION) == []


BEFORE, AFTER = USED.time_ns - SECOND_NS, USED.time_ns + SECOND_NS
OF_ANOTHER_BOOT = [
    ("the boot before, read again", 3, BEFORE, 0),
    ("the boot after", 5, AFTER, 1),
    ("the boot after, its clock set back", 5, BEFORE, 1),
    ("the boot after, in a topic made anew", 0, AFTER, 1),
]


@pytest.mark.parametrize(("case", "offset", "time_ns", "booked"), OF_ANOTHER_BOOT)
def test_a_tick_of_another_boot_is_old_where_both_place_and_time_are(
    stage: JoinStage, case: str, offset: int, time_ns: int, booked: int
) -> None:
    """`seq` cannot tell: it begins again with each boot."""
    stage.take_samples([record(USED, offset=4)])
    other = sample(boot_id="other", seq=1, time_ns=time_ns)
    assert len(stage.take_samples([record(other, offset=offset)])) == booked, case


def test_a_mark_that_is_read_late_does_not_put_a_node_back(stage: JoinStage) -> None:
    """What this worker has booked since stays booked."""
    stage.take_samples([record(USED, offset=4)])
    old = written(stage.drain_marks(PARTITION))
    newer: NodeSample = sample(seq=2000)
    stage.take_samples([record(newer, offset=5)])
    stage.take_marks(old)
    assert stage.take_samples([record(newer, offset=5)]) == []


def test_a_node_whose_mark_was_taken_back_begins_anew(stage: JoinStage) -> None:
    """A tombstone forgets it."""
    stage.take_samples([record(USED)])
    stage.take_marks([record(None, topic=MARKS.name, key="node-a")])
    assert len(stage.take_samples([record(USED)])) == 1


def test_a_mark_that_cannot_be_read_is_put_aside(
    stage: JoinStage, office: DeadLetterOffice
) -> None:
    """As any record."""
    stage.take_marks([record(b"{", topic=MARKS.name)])
    assert office.buried == 1
