"""The watermarks of a sink that is killed repeatedly, over a real Kafka."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.kafka import KafkaBus
from gpuledger.codec import decoder_of
from gpuledger.completeness import Completeness, message_of
from gpuledger.keys import key_in
from gpuledger.records import Watermark
from gpuledger.settings import KafkaSettings
from gpuledger.time_ranges import write_moment
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS, ROWS, WATERMARKS
from tests.real.sinks.running_sinks import NODES, Sink, make_topics, publish
from tests.real.sinks.test_processes import stored
from tests.unit.sinks.builders import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

PER_ROUND = 10
ROUNDS = 3
GPULEDGER = Path(sys.executable).with_name("gpuledger")
DECODER = decoder_of(WATERMARKS.name, Watermark)
AT = partition_of_node(key_in("default", NODES[0]), partitions=EVENTS.partitions)


async def publish_watermarks(kafka: Kafka, start_ns: int, *, events: int) -> None:
    """Publish the join's watermark of each partition: the node has sent this many events."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with KafkaBus(settings).producer() as producer:
        for partition in range(EVENTS.partitions):
            one = Watermark(
                component="join",
                cluster="default",
                partition=partition,
                complete_until_ns=start_ns + (events - 1) * SECOND_NS,
                topic=EVENTS.name,
                next_offset=events if partition == AT else 0,
                publisher="test",
            )
            message = message_of(one, time_ns=time.time_ns())
            await producer.publish(WATERMARKS.name, partition, [message])


def output(kafka: Kafka, kcat: Kcat, component: str) -> list[Watermark]:
    found = kcat.consume(kafka.bootstrap_servers, WATERMARKS.name)
    decoded = [DECODER.decode(each.value or b"") for each in found]
    return [each for each in decoded if each.component == component and each.partition == AT]


@pytest.mark.parametrize("component", ["store", "rows"])
async def test_a_sink_that_is_killed_after_its_commit_has_reported_less_and_never_more(
    component: str, broker: Kafka, kcat: Kcat, tmp_path: Path, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    folder, start_ns = tmp_path / "store", time.time_ns() - 3_600 * SECOND_NS
    about = (
        {"store__uri": str(folder), "store__flush_seconds": "0.01", "store__entries": "true"}
        if component == "store"
        else {}
    )

    def done() -> int:
        """Return how many events the sink has committed."""
        if component == "store":
            return stored(folder)[0] if list(folder.glob("entries/event_date=*/*")) else 0
        return len(kcat.consume(broker.bootstrap_servers, ROWS.name))

    def until() -> int:
        """Return how many events it has reported as complete."""
        reported = output(broker, kcat, component)
        newest = max((each.complete_until_ns for each in reported), default=start_ns - SECOND_NS)
        return (newest - start_ns) // SECOND_NS + 1

    sink = start_sink(component, broker, **about)
    behind = 0
    for number in range(1, ROUNDS + 1):
        first, count = (number - 1) * PER_ROUND, number * PER_ROUND
        await publish_watermarks(broker, start_ns, events=count)
        await publish(
            broker,
            [
                event(each, node=NODES[0], time_ns=start_ns + each * SECOND_NS, entries=[entry()])
                for each in range(first, count)
            ],
        )
        sink.wait_until(lambda: done() >= count, deadline_seconds=120)  # noqa: B023  # bound at once
        sink.kill()
        reported = until()
        assert reported <= done()
        behind += reported < count
        sink.start()
    # The kill came between the commit and the watermark, which the restarted sink wrote.
    assert behind
    count = ROUNDS * PER_ROUND
    sink.wait_until(lambda: until() == count, deadline_seconds=120)
    assert done() == count
    complete = Completeness(
        component=component, topic=ROWS.name if component == "rows" else EVENTS.name
    )
    for each in output(broker, kcat, component):
        complete.take(each)
    complete.read_to(AT, count - 1)
    assert (complete.complete_until_ns([AT]) or 0) < start_ns + (count - 1) * SECOND_NS

    def run_watermarks(*options: str) -> subprocess.CompletedProcess[str]:
        servers = ["--bootstrap-servers", broker.bootstrap_servers, "--component", component]
        command: list[str | Path] = [GPULEDGER, "watermarks", *servers, *options]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    sink.wait_until(lambda: run_watermarks().returncode == 0, deadline_seconds=120)
    assert run_watermarks("--until", write_moment(start_ns // 10**6)).returncode == 0
    later = run_watermarks("--until", "now")
    assert (later.returncode, later.stdout.partition(" through")[0]) == (1, "not complete")
    assert sink.stop(deadline_seconds=120) == 0
