"""The output of `gpuledger watermarks`, over the bus in memory."""

from gpuledger.bus.protocol import Message
from gpuledger.completeness import message_of
from gpuledger.records import UnresponsiveNode, Watermark
from gpuledger_cli.watermarks import completeness_lines, read_watermarks
from tests.default_topics import EVENTS, ROWS, WATERMARKS
from tests.unit.sinks.builders import PARTITIONS, bus

NOON_NS = 1_795_176_000_000_000_000


def output(partition: int, *, seconds: int, **changes: object) -> Watermark:
    values: dict[str, object] = {
        "component": "store",
        "cluster": "default",
        "partition": partition,
        "complete_until_ns": NOON_NS + seconds * 10**9,
        "topic": EVENTS.name,
        "next_offset": 12,
        "publisher": "test",
    }
    return Watermark(**(values | changes))  # type: ignore[arg-type]  # the names are a Watermark's


def lines(*watermarks: Watermark, until_seconds: int | None = None) -> list[str]:
    until_ns = None if until_seconds is None else NOON_NS + until_seconds * 10**9
    return completeness_lines(watermarks, partitions=PARTITIONS, until_ns=until_ns)


def test_a_time_is_complete_once_every_partition_is() -> None:
    assert lines(output(0, seconds=5), output(1, seconds=60), until_seconds=5) == [
        "complete through 2026-11-20T12:00:05Z"
    ]


def test_incomplete_partitions_are_named_with_their_times() -> None:
    assert lines(output(0, seconds=5), output(1, seconds=60), until_seconds=60) == [
        "not complete through 2026-11-20T12:01:00Z, only through 2026-11-20T12:00:05Z",
        "partition 0, cluster default: complete through 2026-11-20T12:00:05Z",
    ]


def test_a_partition_without_a_watermark_is_not_complete() -> None:
    assert lines(output(0, seconds=5)) == [
        "not complete: no watermark of 1 of 2 partitions",
        "partition 1: no watermark",
    ]


def test_unresponsive_nodes_are_named_with_the_end_of_their_last_tick() -> None:
    unresponsive = [UnresponsiveNode(node="node-b", since_time_ns=NOON_NS)]
    assert lines(output(0, seconds=5, unresponsive=unresponsive), output(1, seconds=60))[1:] == [
        "node node-b, cluster default: unresponsive since 2026-11-20T12:00:00Z, not waited for"
    ]


async def test_only_the_newest_valid_watermark_of_each_partition_counts() -> None:
    on = bus()
    async with on.producer() as producer:
        for each in (
            output(0, seconds=1),
            output(0, seconds=7),
            output(0, seconds=9, component="join"),
            output(0, seconds=9, component="rows", topic=ROWS.name),
            output(1, seconds=9),  # in the partition of another one
            output(0, seconds=100 * 365 * 86_400),
        ):
            message = message_of(each, time_ns=NOON_NS)
            await producer.publish(WATERMARKS.name, 0, [message])
        forged = message_of(output(0, seconds=9), time_ns=NOON_NS)._replace(key=b"anything/else")
        await producer.publish(WATERMARKS.name, 0, [forged])
        await producer.publish(WATERMARKS.name, 0, [Message(b"store/default/0", b"{", 0)])

    assert await read_watermarks(on, "store") == (PARTITIONS, [output(0, seconds=7)])
