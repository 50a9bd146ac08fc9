"""Device ids to GPUs: the form of every plugin, and ids that cannot be resolved."""

import pytest

from gpuledger.records import GpuFacts, MigInstance
from gpuledger_agent.host.kubelet.assignments import (
    DeviceIndex,
    ResolvedDevice,
    Unresolved,
    find_claimed,
    find_device,
)

WHOLE = "GPU-5a5a7118-e550-79a1-597e-7631e126c57a"
CUT = "GPU-b0d3a1c2-1111-4222-8333-944455556666"
MIG = "MIG-b8ea3855-276c-c9cb-b366-c6fa655957c5"
SHARED_MIG = "MIG-42f0f413-f7b0-58cc-aced-c1d1fb54db26"
GONE = "GPU-00000000-0000-0000-0000-000000000000"


def instance(uuid: str, gi: int, *, profile: str | None, start: int | None) -> MigInstance:
    return MigInstance(
        uuid=uuid, gpu_instance=gi, compute_instance=0, profile=profile, placement_start=start
    )


def facts(uuid: str, minor: int | None, *instances: MigInstance) -> GpuFacts:
    return GpuFacts(
        uuid=uuid, index=0, minor_number=minor, instances=list(instances), capabilities=[]
    )


ONE = DeviceIndex.of([facts(WHOLE, 0)])
NODE = DeviceIndex.of(
    [
        facts(WHOLE, 0),
        facts(
            CUT,
            1,
            instance(MIG, 3, profile="3g.40gb", start=0),
            instance(SHARED_MIG, 9, profile="1g.10gb", start=4),
            instance("MIG-third", 10, profile="1g.10gb+me", start=5),
            instance("MIG-fourth", 11, profile="1g.10gb", start=6),
        ),
    ]
)
UNPLACED = DeviceIndex.of(
    [
        facts(
            CUT,
            1,
            instance(MIG, 3, profile="3g.40gb", start=None),
            instance(SHARED_MIG, 9, profile="1g.10gb", start=None),
            instance("MIG-third", 10, profile="1g.10gb", start=None),
        )
    ]
)


@pytest.mark.parametrize(
    ("device_id", "expected"),
    [
        (WHOLE, ResolvedDevice(gpu_uuid=WHOLE)),
        (f"{WHOLE}::3", ResolvedDevice(gpu_uuid=WHOLE, replica="3")),
        (MIG, ResolvedDevice(gpu_uuid=CUT, gpu_instance=3)),
        (f"{SHARED_MIG}::0", ResolvedDevice(gpu_uuid=CUT, gpu_instance=9, replica="0")),
        (f"MIG-{CUT}/9/0", ResolvedDevice(gpu_uuid=CUT, gpu_instance=9)),
        (f"MIG-{CUT}/9/0::1", ResolvedDevice(gpu_uuid=CUT, gpu_instance=9, replica="1")),
        ("nvidia0", ResolvedDevice(gpu_uuid=WHOLE)),
        ("nvidia0/vgpu1", ResolvedDevice(gpu_uuid=WHOLE, replica="1")),
        ("nvidia1/gi3", ResolvedDevice(gpu_uuid=CUT, gpu_instance=3)),
        ("nvidia1/gi3/vgpu0", ResolvedDevice(gpu_uuid=CUT, gpu_instance=3, replica="0")),
        (GONE, Unresolved.UNKNOWN_GPU),
        (f"{GONE}::3", Unresolved.UNKNOWN_GPU),
        (f"{GONE}-3", Unresolved.UNKNOWN_GPU),
        (f"MIG-{GONE}/7/0", Unresolved.UNKNOWN_GPU),
        ("MIG-00000000-0000-0000-0000-000000000000", Unresolved.UNKNOWN_INSTANCE),
        (f"MIG-{CUT}/7/0", Unresolved.UNKNOWN_INSTANCE),
        (f"MIG-{CUT}/7/0::1", Unresolved.UNKNOWN_INSTANCE),
        (f"MIG-{WHOLE}/9/0", Unresolved.UNKNOWN_INSTANCE),
        ("nvidia1/gi7", Unresolved.UNKNOWN_INSTANCE),
        ("nvidia1/gi7/vgpu0", Unresolved.UNKNOWN_INSTANCE),
        ("nvidia0/gi3", Unresolved.UNKNOWN_INSTANCE),
        ("nvidia2", Unresolved.UNKNOWN_GPU),
        ("nvidia2/gi3", Unresolved.UNKNOWN_GPU),
        ("nvidia0/gi", Unresolved.UNKNOWN_FORM),
        ("nvidia0/gi3/vgpu0/1", Unresolved.UNKNOWN_FORM),
        ("0", Unresolved.UNKNOWN_FORM),
        ("", Unresolved.UNKNOWN_FORM),
        (f"{WHOLE}-0", Unresolved.CHOSEN_ELSEWHERE),
        (f"{WHOLE}-_-15", Unresolved.CHOSEN_ELSEWHERE),
    ],
)
def test_a_plugins_device_is_found_or_left_out_for_a_reason(
    device_id: str, expected: ResolvedDevice | Unresolved
) -> None:
    assert find_device(device_id, NODE) == expected


@pytest.mark.parametrize("device_id", [f"{WHOLE}-15", f"{WHOLE}-_-15"])
def test_a_number_of_shares_identifies_the_gpu_if_the_node_has_only_one(device_id: str) -> None:
    assert find_device(device_id, ONE) == ResolvedDevice(gpu_uuid=WHOLE, replica="15")


@pytest.mark.parametrize(
    ("name", "share", "expected"),
    [
        ("gpu-0", None, ResolvedDevice(gpu_uuid=WHOLE)),
        ("gpu-0", "a1", ResolvedDevice(gpu_uuid=WHOLE, replica="a1")),
        ("gpu-1-mig-9-0-4", None, ResolvedDevice(gpu_uuid=CUT, gpu_instance=3)),
        ("gpu-1-mig-19-6-1", None, ResolvedDevice(gpu_uuid=CUT, gpu_instance=11)),
        ("gpu-1-mig-1g10gb-19-4", None, ResolvedDevice(gpu_uuid=CUT, gpu_instance=9)),
        ("gpu-1-mig-1g10gb-me-20-5", None, ResolvedDevice(gpu_uuid=CUT, gpu_instance=10)),
        ("gpu-1-mig-1g10gb-19-5", None, Unresolved.UNKNOWN_INSTANCE),
        ("gpu-1-mig-19-3-1", None, Unresolved.UNKNOWN_INSTANCE),
        ("gpu-2", None, Unresolved.UNKNOWN_GPU),
        ("gpu-2-mig-19-3-1", None, Unresolved.UNKNOWN_GPU),
        ("gpu-vfio-0", None, Unresolved.UNKNOWN_FORM),
        ("mlx-0", None, Unresolved.UNKNOWN_FORM),
    ],
)
def test_a_claims_device_is_found_or_left_out_for_a_reason(
    name: str, share: str | None, expected: ResolvedDevice | Unresolved
) -> None:
    assert find_claimed(name, NODE, share_id=share) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu-1-mig-3g40gb-9-0", ResolvedDevice(gpu_uuid=CUT, gpu_instance=3)),
        ("gpu-1-mig-1g10gb-19-4", Unresolved.UNKNOWN_INSTANCE),
        ("gpu-1-mig-9-0-4", Unresolved.UNKNOWN_INSTANCE),
    ],
)
def test_without_placements_only_a_unique_profile_is_found(
    name: str, expected: ResolvedDevice | Unresolved
) -> None:
    assert find_claimed(name, UNPLACED, share_id=None) == expected


def test_an_unknown_minor_number_is_not_guessed_from_the_index() -> None:
    index = DeviceIndex.of([facts(WHOLE, None)])

    assert find_device("nvidia0", index) is Unresolved.UNKNOWN_GPU
