"""A stage in a process of its own, for who wants to know what other modules make of records.

Reads topics from standard input, one after the other, and writes to standard output what a stage
that knows nothing yet makes of each. Says first which modules it runs.
"""

import pickle
import sys

import structlog

from enricher.join.stage import JoinStage
from gpuledger.bus.protocol import Message
from gpuledger.dead_letter_queue import DeadLetterQueue
from tests.compiled import describe_compiled
from tests.default_topics import DEAD_LETTERS, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.unit.enricher.join.ticks import anywhere
from tests.unit.enricher.laws.topics import BEGIN_NS, Topics

Made = tuple[list[Message], list[Message], int]
"""Events, watermarks, and how many records were put aside."""


def make(topics: Topics) -> Made:
    """Return what comes of the topics, partition by partition, pods first."""
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
    return events, watermarks, dead_letters.rejected


def main() -> None:
    """Answer until the input ends; what the stage logs must not come between the answers."""
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
