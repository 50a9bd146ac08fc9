"""The events of two runs are paired, and events without a counterpart are counted."""

import pytest

from gpuledger.codec import encode
from gpuledger_enricher.join.replay_diff import Comparison, EventId


def event(seq: int, *, node: str = "node-a", gpus: object = ()) -> bytes:
    """Return the parts of an event that are compared."""
    return encode(
        {
            "cluster": "default",
            "node": node,
            "boot_id": "boot",
            "seq": seq,
            "gpus": gpus,
            "pods": [],
        }
    )


def test_events_are_paired_in_any_order() -> None:
    comparison = Comparison(shown=5)
    comparison.take_replayed([event(1), event(2)])
    comparison.take_first([event(2), event(3), event(1)])
    comparison.take_replayed([event(3)])
    comparison.end_partition()

    assert (comparison.counts.equal, comparison.counts.compared) == (3, 3)
    assert comparison.counts.is_agreed


def test_an_event_of_only_one_run_is_missing_or_extra() -> None:
    comparison = Comparison(shown=5)
    comparison.take_first([event(1), event(2)])
    comparison.take_replayed([event(2), event(3), event(2, node="node-b")])
    comparison.end_partition()

    counts = comparison.counts
    assert (counts.equal, counts.missing, counts.extra, counts.compared) == (1, 1, 2, 4)
    assert not counts.is_agreed
    assert [difference.event for difference in comparison.differences] == [
        EventId("default", "node-a", "boot", 1),
        EventId("default", "node-a", "boot", 3),
        EventId("default", "node-b", "boot", 2),
    ]


@pytest.mark.parametrize("is_paired_before", [True, False])
def test_an_event_that_the_first_run_has_twice_is_compared_once(*, is_paired_before: bool) -> None:
    comparison = Comparison(shown=5)
    if is_paired_before:
        comparison.take_replayed([event(1)])
    comparison.take_first([event(1), event(1)])
    if not is_paired_before:
        comparison.take_replayed([event(1)])
    comparison.end_partition()

    counts = comparison.counts
    assert (counts.equal, counts.repeated, counts.compared) == (1, 1, 1)


def test_differences_beyond_the_kept_ones_are_counted() -> None:
    comparison = Comparison(shown=2)
    comparison.take_first([event(seq, gpus=[0]) for seq in range(5)])
    comparison.take_replayed([event(seq, gpus=[1]) for seq in range(5)])

    assert comparison.counts.different == comparison.changes == 5
    assert len(comparison.differences) == 2


def test_the_events_that_wait_for_their_counterpart_are_bounded() -> None:
    comparison = Comparison(shown=100, max_waiting_bytes=10 * len(event(10)))
    comparison.take_first([event(seq) for seq in range(10, 90)])
    assert (comparison.counts.missing, len(comparison.differences)) == (70, 70)
    assert not comparison.needs_first

    comparison.take_replayed([event(seq) for seq in range(80, 90)])
    assert comparison.counts.equal == 10
    assert comparison.needs_first


def test_a_partition_begins_without_waiting_events() -> None:
    comparison = Comparison(shown=5)
    comparison.take_first([event(1)])
    comparison.end_partition()
    comparison.take_replayed([event(1)])
    comparison.end_partition()

    assert (comparison.counts.missing, comparison.counts.extra) == (1, 1)
