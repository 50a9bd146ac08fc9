"""A container's equal shares of a device are one allocation, and its allocated time stays equal."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.allocated_parts import find_allocated_parts
from gpuledger.records import DeviceAllocation
from gpuledger_agent.host.kubelet.assignments import combine_equal_shares
from tests.unit.enricher.join.ticks import reading, sample

MIG_UUIDS = [f"MIG-00000000-0000-4000-8000-00000000000{digit}" for digit in range(2)]
GPUS = [
    reading(uuid="GPU-a", index=0),
    reading(uuid="GPU-b", index=1),
    *(
        reading(uuid=uuid, index=1, parent_uuid="GPU-b", gpu_instance=3, compute_instance=number)
        for number, uuid in enumerate(MIG_UUIDS)
    ),
]


@st.composite
def shares(draw: st.DrawFn) -> DeviceAllocation:
    uuid = draw(st.sampled_from(["GPU-a", "GPU-b", *MIG_UUIDS]))
    replica = draw(st.none() | st.integers(0, 5).map(str))
    is_claimed = draw(st.integers(0, 9)) == 0
    return DeviceAllocation(
        gpu_uuid="GPU-a" if uuid == "GPU-a" else "GPU-b",
        device_id=uuid if replica is None else f"{uuid}::{replica}",
        resource_name=draw(st.sampled_from(["nvidia.com/gpu", "aliyun.com/gpu-mem"])),
        namespace="research",
        pod=draw(st.sampled_from(["p", "p", "q"])),
        container=draw(st.sampled_from(["main", "main", "side"])),
        gpu_instance=3 if uuid in MIG_UUIDS else None,
        replica=replica,
        device_replicas=draw(st.none() | st.sampled_from([1, 6, 7])),
        claim="research/c" if is_claimed else None,
        share_ppm=draw(st.none() | st.just(250_000)),
    )


@given(st.lists(shares(), max_size=30))
def test_merging_shares_leaves_the_parts_of_each_device_unchanged(
    allocations: Sequence[DeviceAllocation],
) -> None:
    merged = combine_equal_shares(allocations)
    assert len(merged) <= len(allocations)
    before = sample(gpus=GPUS, allocations=list(allocations))
    after = sample(gpus=GPUS, allocations=merged)
    assert find_allocated_parts(after) == find_allocated_parts(before)


@given(st.permutations(range(4)))
def test_equal_shares_are_one_allocation_whatever_their_order(numbers: Sequence[int]) -> None:
    whole = DeviceAllocation(
        gpu_uuid="GPU-a",
        device_id="GPU-a",
        resource_name="nvidia.com/gpu",
        namespace="research",
        pod="p",
        container="main",
        device_replicas=4,
    )
    (merged,) = combine_equal_shares(
        [
            DeviceAllocation(
                gpu_uuid="GPU-a",
                device_id=f"GPU-a::{number}",
                resource_name="nvidia.com/gpu",
                namespace="research",
                pod="p",
                container="main",
                replica=str(number),
                device_replicas=4,
            )
            for number in numbers
        ]
    )
    assert (merged.device_id, merged.replica, merged.count) == ("GPU-a::0", "0", 4)
    assert combine_equal_shares([whole]) == [whole]
