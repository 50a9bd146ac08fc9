"""A replay produces the first run's events again, and reports differences."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec import structs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus, MemoryReader
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError, TopicsError, UserError
from gpuledger.keys import key_in
from gpuledger.records import PodState
from gpuledger_cli.replay.replay_command import print_comparison, show_difference, verdict
from tests.default_topics import EVENTS, NAMESPACES, PODS, SAMPLES, TOPICS
from tests.errors import has_words
from tests.unit.cli.replay.builders import (
    AGAIN,
    BEGIN_MS,
    NODES,
    Again,
    decoded,
    join,
    names_in,
    new_bus,
    place_of,
    publish_pod,
    publish_ticks,
    read_lines,
    read_topic,
    tick,
)
from tests.unit.enricher.join.pods.test_places import namespace, node
from tests.unit.enricher.join.ticks import UIDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from pathlib import Path

    from gpuledger.bus.protocol import HistoryReader, Record, Span


@pytest.fixture
async def bus() -> MemoryBus:
    """Twenty ticks of two nodes with two pods each, joined when only one pod's record existed."""
    bus = new_bus()
    await publish_pod(bus, 0)
    await publish_ticks(bus, [tick(second, node) for second in range(20) for node in NODES])
    await join(bus, events=40)
    await publish_pod(bus, 1)
    return bus


async def test_the_ticks_of_a_range_are_replayed(bus: MemoryBus, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    outcome = await Again(bus=bus, begin_second=5, end_second=9, output=path).run()

    events = decoded(read_lines(path))
    assert outcome.events == 8
    assert sorted((event.node, event.seq) for event in events) == [
        (node, 1000 * second) for node in NODES for second in (5, 6, 7, 8)
    ]
    assert names_in(tmp_path) == ["events.jsonl"]


async def test_the_books_equal_those_of_the_first_run_and_late_pods_are_known(
    bus: MemoryBus,
) -> None:
    again = Again(bus=bus, compare=True)
    await again.run()

    assert again.comparison is not None
    counts = again.comparison.counts
    # The second pod, whose record was late, runs in two ticks of three, on one node.
    assert (counts.equal, counts.more_complete, counts.compared) == (27, 13, 40)
    assert counts.is_agreed


async def test_nodes_and_namespaces_that_arrived_late_or_were_deleted_are_described(
    bus: MemoryBus,
) -> None:
    """Namespaces are in any partition, a node in its own; tombstones are ignored."""
    async with bus.producer() as producer:
        for key, at, reported in (
            ("default/node-a", place_of("node-a", TOPICS.nodes), node()),
            ("default/research", TopicPartition(NAMESPACES.name, 0), namespace()),
        ):
            messages = [Message(key.encode(), data, BEGIN_MS) for data in (encode(reported), None)]
            await producer.publish(*at, messages)
    again = Again(bus=bus, topic=AGAIN.name, compare=True)
    await again.run()

    assert again.comparison is not None
    assert again.comparison.counts.is_agreed
    replayed = decoded(await read_topic(bus, AGAIN))
    assert {(one.node, one.node_description is not None) for one in replayed} == {
        ("node-a", True),
        ("node-b", False),
    }
    assert {
        each.name for event in replayed if event.node == "node-a" for each in event.namespaces or ()
    } == {"research"}


async def test_a_compressed_file_has_the_same_lines_and_is_reproducible(
    bus: MemoryBus, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.gz")]
    for path in paths:
        await Again(bus=bus, output=path).run()

    assert read_lines(paths[0]) == read_lines(paths[1])
    assert paths[1].read_bytes() == paths[2].read_bytes()


async def test_events_are_written_to_the_same_partition_of_another_topic(bus: MemoryBus) -> None:
    await Again(bus=bus, topic=AGAIN.name).run()

    first = decoded(await read_topic(bus, EVENTS))
    replayed = decoded(await read_topic(bus, AGAIN))
    assert [event.gpus for event in first] == [event.gpus for event in replayed]
    assert {pod.state for event in replayed for pod in event.pods if pod.uid in UIDS[:2]} == {
        PodState.KNOWN
    }


async def test_a_pod_that_was_deleted_later_is_known(bus: MemoryBus) -> None:
    async with bus.producer() as producer:
        gone = [Message(key_in("default", uid).encode(), None, BEGIN_MS) for uid in UIDS[:2]]
        await producer.publish(*place_of("node-a", PODS), gone)
    again = Again(bus=bus, compare=True)
    await again.run()

    assert again.comparison is not None
    assert again.comparison.counts.is_agreed


async def test_ticks_before_the_range_determine_the_gap_of_its_first_tick(tmp_path: Path) -> None:
    bus, path = new_bus(), tmp_path / "events.jsonl"
    await publish_ticks(bus, [tick(0), tick(10)])
    await Again(bus=bus, begin_second=5, output=path).run()
    await Again(bus=bus, begin_second=5, lead_in_seconds=1, output=tmp_path / "short").run()

    assert [event.gap_ns for event in decoded(read_lines(path))] == [9_000_000_000]
    assert [e.gap_ns for e in decoded(read_lines(tmp_path / "short"))] == [None]


async def test_a_tick_that_arrived_late_belongs_to_its_own_time(tmp_path: Path) -> None:
    bus, path = new_bus(), tmp_path / "events.jsonl"
    late = structs.replace(tick(5, "node-b"), node="node-a", boot_id="another")
    await publish_ticks(bus, [tick(2), tick(300), late])
    await Again(bus=bus, end_second=100, output=path).run()

    assert [event.seq for event in decoded(read_lines(path))] == [2000, 5000]


async def test_differences_are_listed_and_end_with_a_summary_line(
    bus: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    first = decoded(await read_topic(bus, EVENTS))[0]
    wrong = encode(first).replace(b'"interval_ns":1000000000', b'"interval_ns":7')
    lost = encode(first).replace(b'"boot_id":"boot"', b'"boot_id":"never"')
    other = new_bus()
    await publish_pod(other, 0)
    await publish_pod(other, 1)
    await publish_ticks(other, [tick(second, first.node) for second in range(3)])
    async with other.producer() as producer:
        messages = [Message(b"k", value, BEGIN_MS) for value in (wrong, lost, wrong)]
        await producer.publish(*place_of(first.node, EVENTS), messages)
    again = Again(bus=other, compare=True)
    await again.run()

    assert again.comparison is not None
    assert print_comparison(again.comparison) == 1
    shown = capsys.readouterr().out.splitlines()
    assert f"node {first.node} boot boot seq 0 interval_ns: first 7, replayed 1000000000" in shown
    assert f"node {first.node} boot never seq 0 (event): first there, replayed absent" in shown
    assert "the first run has 1 events more than once" in shown
    assert shown[-1] == (
        "compared 4 events: 0 equal, 0 more complete, 1 differ, 1 missing, 2 extra"
    )


async def test_agreement_is_exit_code_0(bus: MemoryBus, capsys: pytest.CaptureFixture[str]) -> None:
    again = Again(bus=bus, compare=True)
    await again.run()
    capsys.readouterr()

    assert again.comparison is not None
    assert print_comparison(again.comparison) == 0
    assert capsys.readouterr().out == f"{verdict(again.comparison.counts)}\n"
    assert not [show_difference(difference) for difference in again.comparison.differences]


async def test_an_unusable_record_is_counted_once(bus: MemoryBus, tmp_path: Path) -> None:
    async with bus.producer() as producer:
        await producer.publish(*place_of("node-a"), [Message(b"k", b"{}", BEGIN_MS)])
    outcome = await Again(bus=bus, output=tmp_path / "events").run()

    assert (outcome.events, outcome.unusable) == (40, 1)
    assert SAMPLES.name in (outcome.first_detail or "")


async def test_invalid_events_of_the_first_run_are_counted_and_the_others_are_compared(
    bus: MemoryBus,
) -> None:
    async with bus.producer() as producer:
        messages = [Message(b"k", value, BEGIN_MS) for value in (b"no json", b"[]", None)]
        await producer.publish(*place_of("node-a", EVENTS), messages)
    again = Again(bus=bus, compare=True)
    outcome = await again.run()

    assert again.comparison is not None
    assert print_comparison(again.comparison) == 0
    assert (outcome.unusable, again.comparison.counts.compared) == (3, 40)
    assert (outcome.first_detail or "").startswith(f"{EVENTS.name}: not an event")


@pytest.mark.parametrize(
    ("topic", "message"),
    [(EVENTS.name, "another name"), ("absent", "absent"), (PODS.name, "read by")],
)
async def test_a_topic_that_cannot_be_the_output_is_rejected(
    bus: MemoryBus, topic: str, message: str
) -> None:
    with pytest.raises(TopicsError, match=message):
        await Again(bus=bus, topic=topic).run()


async def test_a_file_that_cannot_be_written_is_rejected(bus: MemoryBus, tmp_path: Path) -> None:
    with pytest.raises(UserError, check=has_words("--output", "absent/events")):
        await Again(bus=bus, output=tmp_path / "absent" / "events").run()


class LosingReader(MemoryReader):
    """A reader whose broker becomes unavailable before the first run's events are read."""

    @override
    async def read(
        self, partition: TopicPartition, span: Span
    ) -> AsyncGenerator[Sequence[Record], None]:
        async for records in super().read(partition, span):
            if partition.topic == EVENTS.name:
                raise BusUnavailableError("no broker answers")
            yield records


class LosingBus(MemoryBus):
    """A bus of such readers."""

    @override
    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        yield LosingReader(logs=self._logs)


async def test_a_replay_that_fails_keeps_the_older_file_and_leaves_no_partial_one(
    bus: MemoryBus, tmp_path: Path
) -> None:
    path = tmp_path / "events"
    path.write_text("as before")
    bus.__class__ = LosingBus

    with pytest.raises(BusUnavailableError):
        await Again(bus=bus, output=path, compare=True).run()
    assert names_in(tmp_path) == ["events"]
    assert path.read_text() == "as before"


async def test_a_range_without_ticks_is_an_error(bus: MemoryBus) -> None:
    with pytest.raises(UserError, check=has_words("2026-11-18T")):
        await Again(bus=bus, begin_second=2000, end_second=3000, compare=True).run()


async def test_a_range_whose_start_was_removed_is_rejected_with_the_missing_part() -> None:
    bus = new_bus(max_partition_records=80)
    await publish_ticks(bus, [tick(second) for second in range(100)])
    again = Again(bus=bus, begin_second=0, end_second=100, compare=False, topic=AGAIN.name)

    with pytest.raises(
        UserError, check=has_words("first 22s of 1m 40s", "1 of 12", "--from 2026-11-18T")
    ):
        await again.run()

    again.begin_second = 30
    assert (await again.run()).events == 70
    again.begin_second, again.accept_gaps = 0, True
    assert (await again.run()).events == 78


async def test_a_range_that_was_removed_completely_is_rejected() -> None:
    bus = new_bus(max_partition_records=80)
    await publish_ticks(bus, [tick(second) for second in range(100)])

    with pytest.raises(UserError):
        await Again(bus=bus, begin_second=0, end_second=10, topic=AGAIN.name).run()
