"""Whatever is lost, repeated or handed over: each tick is booked once, and all time is covered."""

from dataclasses import dataclass

import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.records import GpuEvent, NodeSample
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import DEAD_LETTERS, EVENTS, PROGRESS, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.builders import T_NS
from tests.unit.enricher.join.ticks import SECOND_NS, anywhere, record, sample

EVENT = Decoder(topic=EVENTS.name, record=GpuEvent)
PARTITION = 3


@dataclass(frozen=True)
class Step:
    """The fate of one tick, and of the worker after it."""

    is_lost: bool
    copies: int
    hands_over: bool
    reads_again: int
    """How many records are repeated: for the next worker, or by the agent."""
    reboots: bool
    """Whether the node boots before it."""


STEPS = st.lists(
    st.builds(
        Step,
        is_lost=st.booleans(),
        copies=st.integers(1, 3),
        hands_over=st.booleans(),
        reads_again=st.integers(0, 5),
        reboots=st.booleans(),
    ),
    max_size=30,
)


def worker(watermarks: list[Record]) -> JoinStage:
    """Return a worker that continues from these watermarks."""
    dead_letters = DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )
    stage = JoinStage(
        dead_letters=dead_letters, is_placed=anywhere, time_ns=lambda: T_NS, topics=TOPICS
    )
    stage.restore_progress(watermarks)
    return stage


def ticks_of(steps: list[Step], *, clock_runs: int = 1) -> list[NodeSample]:
    """Return the node's ticks of one second; `seq` restarts at each boot."""
    made, boot = [], 0
    for number, step in enumerate(steps, start=1):
        boot = number if step.reboots else boot
        seq = (number - boot + 1) * 1000
        time_ns = T_NS + clock_runs * number * SECOND_NS
        made.append(sample(boot_id=f"boot-{boot}", seq=seq, time_ns=time_ns))
    return made


def live_through(steps: list[Step], ticks: list[NodeSample]) -> list[GpuEvent]:
    """Return the events that all workers together wrote for the ticks."""
    log: list[Record] = []
    watermarks: list[Record] = []
    events: list[GpuEvent] = []
    stage = worker(watermarks)
    for tick, step in zip(ticks, steps, strict=True):
        if not step.is_lost:
            log += [record(tick, offset=len(log) + copy) for copy in range(step.copies)]
            events += _book(stage, log[-step.copies :])
        if step.hands_over:
            reported = stage.drain_progress(PARTITION)
            watermarks += [record(one.value, topic=PROGRESS.name) for one in reported]
            stage = worker(watermarks)
        events += _book(stage, log[len(log) - step.reads_again :] if step.reads_again else [])
    return events


def _book(stage: JoinStage, records: list[Record]) -> list[GpuEvent]:
    return [EVENT.decode(message.value) for message in stage.take_samples(records)]


@for_any(STEPS, st.sampled_from([1, -1]))
def test_each_tick_is_booked_once_in_its_order(steps: list[Step], clock_runs: int) -> None:
    """However often it comes, to whichever worker, and whatever boot and clock it has."""
    ticks = ticks_of(steps, clock_runs=clock_runs)
    arrived = [tick for tick, step in zip(ticks, steps, strict=True) if not step.is_lost]
    booked = live_through(steps, ticks)
    assert [(one.boot_id, one.seq) for one in booked] == [(one.boot_id, one.seq) for one in arrived]


@for_any(STEPS)
def test_covered_time_and_gaps_sum_to_the_whole_time(steps: list[Step]) -> None:
    """From the beginning of the first tick to the end of the last."""
    events = live_through(steps, ticks_of(steps))
    if events:
        covered = sum(event.interval_ns for event in events) / 1e9
        uncovered = sum(event.gap_ns or 0 for event in events) / 1e9
        lived = (events[-1].time_ns - events[0].time_ns + events[0].interval_ns) / 1e9
        assert covered + uncovered == pytest.approx(lived)
