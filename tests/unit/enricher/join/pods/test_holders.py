"""A name that a node gives a holder counts only where a pod of that very node has it."""

import pytest

from gpuledger.records import Account, DeviceAllocation, GpuEvent
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, UIDS, pod

REFUSED = "gpuledger_join_names_refused_total"


@pytest.fixture
def given() -> Given:
    """Return a stage that has read nothing."""
    return Given()


def held_by(*names: str) -> list[DeviceAllocation]:
    """Return what the kubelet says where each of these pods holds a share of the GPU."""
    return [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=f"GPU-a::{place}",
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod=name,
            container="main",
            replica=str(place),
        )
        for place, name in enumerate(names)
    ]


def idle_of(event: GpuEvent) -> list[tuple[int | None, int | None]]:
    """Return whose idle is, and how much."""
    entries = [one for one in event.gpus[0].entries if one.account is Account.IDLE]
    return [(one.allocation, one.busy_ns) for one in entries]


def test_a_node_puts_idle_on_no_pod_of_another_node(given: Given) -> None:
    """What it said stands in the event, and the part stays held; it is nobody's by name."""
    given.read_pod(pod(0))
    given.read_pod(pod(1, node="node-b"))
    before = value_of(REFUSED, reason="unknown_holder")
    held = held_by("train-0", "train-1", "train-1", "train-2")
    event = given.take(allocations=held, containers=[])
    assert event.holder_uids == [UIDS[0], None, None, None]
    assert event.allocations == held
    assert idle_of(event) == [(0, 125_000_000), (1, 250_000_000), (3, 125_000_000)]
    assert value_of(REFUSED, reason="unknown_holder") == before + 2


def test_a_holder_is_known_from_the_tick_after_its_record(given: Given) -> None:
    """And a tick without allocations says nothing of holders."""
    held = held_by("train-0")
    assert given.take(allocations=held).holder_uids == [None]
    given.read_pod(pod())
    assert given.take(allocations=held).holder_uids == [UIDS[0]]
    assert given.take().holder_uids is None
    assert given.take(allocations=held).holder_uids == [UIDS[0]]
    given.read_tombstone(UIDS[0])
    assert given.take(allocations=held).holder_uids == [None]


def test_of_pods_of_one_name_the_one_of_the_ticks_time_is_meant(given: Given) -> None:
    """In whatever order the ticks come."""
    at = [T_NS + seconds * SECOND_NS for seconds in (0, 10, 20)]
    given.read_pod(pod(0, name="db-0", created_time_ns=at[0], deleted_time_ns=at[1]))
    given.read_pod(pod(1, name="db-0", created_time_ns=at[1]))
    held = held_by("db-0")
    for seconds, number in ((5, 0), (15, 1), (6, 0), (25, 1)):
        event = given.take(allocations=held, time_ns=T_NS + seconds * SECOND_NS)
        assert event.holder_uids == [UIDS[number]], seconds
