"""Which GPUs are lost, since when, and why."""

import pytest
from msgspec.structs import replace

from gpuledger.records import AttributedIncident
from gpuledger_cli.demo.totals import GpuTracker
from tests.unit.cli.demo.events import HELD, SECOND_NS, event, incident


def tracker_of(*happened: object) -> GpuTracker:
    """Return the tracker after events and incidents."""
    gpu_tracker = GpuTracker()
    for one in happened:
        if isinstance(one, AttributedIncident):
            gpu_tracker.add_incident(one)
        else:
            gpu_tracker.add(one)  # type: ignore[arg-type]  # only events are left
    return gpu_tracker


def test_a_gpu_that_stops_answering_is_lost_since_its_last_reading() -> None:
    newest = event(second=5, gpus=[0])
    (lost,) = tracker_of(event(second=4, gpus=[0, 1]), newest).lost(newest)
    assert (lost.index, lost.since_ns, lost.cause, lost.allocatees) == (1, 4 * SECOND_NS, None, ())


def test_the_end_of_a_state_that_was_already_over_at_the_agents_start_is_not_an_incident() -> None:
    reported = incident("state_ended", second=1, gpu=0)
    well = replace(
        reported,
        incident=replace(
            reported.incident, present_at_start=True, ended_kinds=["row_remap_failed"]
        ),
    )
    assert list(tracker_of(well, reported).incidents) == [reported]


def test_the_incidents_give_the_time_and_the_cause_whenever_they_arrive() -> None:
    newest = event(second=5, gpus=[0])
    reported = [incident("xid", second=3.9, gpu=1, xid=79), incident("gpu_lost", second=4.5, gpu=1)]
    for order in ([*reported, newest], [newest, *reported]):
        (lost,) = tracker_of(event(second=4, gpus=[0, 1]), *order).lost(newest)
        assert (lost.since_ns, lost.cause) == (4_500_000_000, "XID 79")


@pytest.mark.parametrize(
    "other",
    [
        incident("xid", second=1, gpu=0, xid=13),
        incident("xid", second=-300, gpu=1, xid=13),
        incident("ecc_uncorrected", second=4, gpu=1),
    ],
)
def test_an_incident_of_another_gpu_or_kind_or_of_long_ago_is_not_the_cause(
    other: AttributedIncident,
) -> None:
    newest = event(second=5, gpus=[0])
    (lost,) = tracker_of(event(second=4, gpus=[0, 1]), other, newest).lost(newest)
    assert lost.cause is None


def test_the_pod_to_which_a_lost_gpu_is_allocated_is_named() -> None:
    newest = event(second=5, gpus=[0], unresponsive=[1], allocations=[HELD])
    (lost,) = tracker_of(event(second=4, gpus=[0, 1]), newest).lost(newest)
    assert lost.allocatees == ("research/notebook-0",)


def test_a_gpu_that_answers_again_or_was_replaced_is_not_lost() -> None:
    before, without = event(second=4, gpus=[0, 1]), event(second=5, gpus=[0])
    back = event(second=6, gpus=[0, 1])
    assert tracker_of(before, without, back).lost(back) == []
    other = replace(
        back,
        gpus=[
            replace(g, reading=replace(g.reading, uuid=f"new-{g.reading.index}")) for g in back.gpus
        ],
    )
    assert tracker_of(before, without, other).lost(other) == []


def test_gpus_of_different_nodes_are_independent() -> None:
    newest = event(second=5, node="node-b", gpus=[0])
    gpu_tracker = tracker_of(event(second=4, gpus=[0, 1]))
    assert gpu_tracker.lost(newest) == []
