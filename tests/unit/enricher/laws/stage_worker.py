"""A stage in a process of its own, to compare the results of other builds of its modules.

Reads topics from standard input, one after the other, and writes to standard output what a new
stage makes of each. First writes which modules it runs.
"""

import pickle
import sys
from collections.abc import Iterable, Iterator

import structlog

from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import decoder_of, encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.keys import node_key
from gpuledger.ledger.series import EventSeries
from gpuledger.records import GpuEvent
from gpuledger_enricher.join.stage import JoinStage
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals
from gpuledger_sinks.remote_write.wire import Version
from tests.compiled import describe_compiled
from tests.default_topics import DEAD_LETTERS, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.ticks import anywhere
from tests.unit.enricher.laws.topics import BEGIN_NS, Topics

Made = tuple[list[Message], list[Message], int, list[bytes]]
"""Events, watermarks, number of rejected records, and what remote-write sends for the events."""


def make(topics: Topics) -> Made:
    """Return what a stage makes of the topics, partition by partition, pods first."""
    dead_letters = DeadLetterQueue(
        consumer="test", producer=KeepingProducer(), partitions=1, topic=DEAD_LETTERS
    )
    stage = JoinStage(
        dead_letters=dead_letters, is_placed=anywhere, time_ns=lambda: BEGIN_NS, topics=TOPICS
    )
    events: list[Message] = []
    watermarks: list[Message] = []
    for partition, samples in topics.samples.items():
        stage.take_pods(topics.pods.get(partition, []))
        events += stage.take_samples(samples)
        watermarks += stage.drain_progress(partition)
    return events, watermarks, dead_letters.rejected, list(sent_of(events))


def sent_of(events: Iterable[Message]) -> Iterator[bytes]:
    """Yield requests of both versions with the samples of each tick, and the counts."""
    decode = decoder_of(TOPICS.events.name, GpuEvent).decode
    series, nodes = ActiveSeries(), dict[str, NodeIntervals]()
    for offset, message in enumerate(events):
        assert message.value is not None
        event = decode(message.value)
        key = node_key(event)
        record = Record(TOPICS.events.name, 0, offset, 0, None, None)
        node = nodes.setdefault(key, NodeIntervals(key, values=EventSeries(), interval_ns=0))
        for samples in node.add(event, record, is_past=False):
            encoded = series.encode(samples)
            yield from (encoded.encode(version) for version in Version)
    yield from (encode(node.take_record("group")) for node in nodes.values())


def main() -> None:
    """Answer until the input ends; the stage's log lines must not come between the answers."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    pickle.dump(describe_compiled(), sys.stdout.buffer)
    sys.stdout.flush()
    while True:
        try:
            topics = pickle.load(sys.stdin.buffer)  # noqa: S301 - the test's own
        except EOFError:
            return
        pickle.dump(make(topics), sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
