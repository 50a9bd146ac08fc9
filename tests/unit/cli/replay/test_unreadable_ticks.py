"""A replay over unreadable batches: they are counted, and the others are joined."""

from gpuledger.bus.protocol import Record, Unreadable, UnreadableReason
from gpuledger_cli.replay.range_plan import TimeRange
from gpuledger_cli.replay.run import Replay
from tests.default_topics import PODS, SAMPLES, TOPICS
from tests.unit.enricher.join.ticks import UIDS, anywhere, pod, record, sample

WHY = Unreadable(0, UnreadableReason.TOO_LARGE, "too many bytes")


def test_an_unreadable_batch_of_pods_or_ticks_is_counted_and_the_records_around_it_are_joined() -> (
    None
):
    replay = Replay(TimeRange(0, 2**63), is_placed=anywhere, topics=TOPICS)
    known = record(pod(), topic=PODS.name, key=f"default/{UIDS[0]}")
    tombstone = record(None, topic=PODS.name, key=f"default/{UIDS[0]}")

    replay.take_pods([known, tombstone, Record(PODS.name, 3, 9, 0, None, None, WHY)])
    events = replay.take_samples([Record(SAMPLES.name, 3, 9, 0, None, None, WHY), record(sample())])

    assert len(events) == 1
    assert replay.unusable.rejected == 2
    assert "offsets 0 to 9 are in a batch that cannot be unpacked" in (
        replay.unusable.first_detail or ""
    )
