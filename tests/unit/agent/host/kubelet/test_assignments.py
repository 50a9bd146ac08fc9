"""From the kubelet's response to allocations."""

import pytest
from msgspec.structs import replace

from gpuledger.records import DeviceAllocation, GpuFacts
from gpuledger_agent.host.kubelet.assignments import (
    DeviceAssignment,
    DeviceIndex,
    Unresolved,
    allocate,
    find_assignments,
    find_on,
)
from gpuledger_agent.host.kubelet.messages import (
    ClaimedDevice,
    ContainerDevices,
    ContainerResources,
    PodResources,
    ResourceClaim,
)
from gpuledger_agent.settings import KubeletSettings

GPU = "GPU-5a5a7118-e550-79a1-597e-7631e126c57a"
INDEX = DeviceIndex.of([GpuFacts(uuid=GPU, index=0, minor_number=0, instances=[], capabilities=[])])


def pod(*devices: ContainerDevices, claims: tuple[ResourceClaim, ...] = ()) -> PodResources:
    container = ContainerResources(name="server", devices=list(devices), claims=list(claims))
    return PodResources(name="chat", namespace="serving", containers=[container])


def given(resource: str, *ids: str) -> ContainerDevices:
    return ContainerDevices(resource_name=resource, device_ids=list(ids))


def claim(driver: str, device: str, share_id: str | None = None) -> ResourceClaim:
    one = ClaimedDevice(
        driver_name=driver, pool_name="node-1", device_name=device, share_id=share_id
    )
    return ResourceClaim(name="one-gpu", namespace="serving", devices=[one])


@pytest.mark.parametrize(
    ("resource", "is_gpu"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/gpu.shared", True),
        ("nvidia.com/gpu-tesla-t4", True),
        ("nvidia.com/mig-1g.5gb", True),
        ("nvidia.com/mig-1g.5gb.shared", True),
        ("aliyun.com/gpu-mem", True),
        ("volcano.sh/vgpu-number", True),
        ("nvidia.com/gpumem", False),
        ("nvidia.com/gpuX", False),
        ("my.nvidia.com/gpu", False),
        ("rdma/hca", False),
        ("aliyun.com/gpu-core", False),
    ],
)
def test_only_gpu_resources_are_used(resource: str, *, is_gpu: bool) -> None:
    assignments = find_assignments(
        [pod(given(resource, "nvidia0"))], KubeletSettings().resource_names
    )

    assert [assignment.is_gpu_resource for assignment in assignments] == [is_gpu]
    assert bool(allocate(assignments, INDEX)[0]) == is_gpu


@pytest.mark.parametrize("device_id", [GPU, f"{GPU}::3"])
def test_a_device_whose_id_is_a_gpu_counts_whatever_its_resource_is_called(device_id: str) -> None:
    one = pod(given("example.com/a100", device_id, "GPU-gone", "0000:3b:00.2"))
    allocations, unresolved = allocate(find_assignments([one], []), INDEX)

    assert [(each.resource_name, each.gpu_uuid) for each in allocations] == [
        ("example.com/a100", GPU)
    ]
    assert not unresolved


def test_claims_of_other_drivers_are_not_gpus() -> None:
    one = pod(
        claims=(claim("compute-domain.nvidia.com", "channel-0"), claim("gpu.amd.com", "gpu-0"))
    )

    assert find_assignments([one], ["*"]) == []


def test_an_allocation_has_pod_container_device_and_resource() -> None:
    one = pod(
        given("nvidia.com/gpu", f"{GPU}::2"), claims=(claim("gpu.nvidia.com", "gpu-0", "a1"),)
    )
    allocations, unresolved = allocate(find_assignments([one], ["nvidia.com/gpu"]), INDEX)

    plain = DeviceAllocation(
        gpu_uuid=GPU,
        device_id=f"{GPU}::2",
        resource_name="nvidia.com/gpu",
        namespace="serving",
        pod="chat",
        container="server",
        replica="2",
    )
    claimed = replace(
        plain,
        device_id="gpu-0",
        resource_name="gpu.nvidia.com",
        replica="a1",
        claim="serving/one-gpu",
    )
    assert allocations == [plain, claimed]
    assert not unresolved


@pytest.mark.parametrize(
    ("namespaces", "is_admin"),
    [((), None), (("serving",), True), (("monitoring", "serving"), True), (("monitoring",), None)],
)
def test_claims_in_a_namespace_with_admin_access_are_marked_and_plugin_devices_are_not(
    namespaces: tuple[str, ...], *, is_admin: bool | None
) -> None:
    one = pod(given("nvidia.com/gpu", GPU), claims=(claim("gpu.nvidia.com", "gpu-0"),))
    assignments = find_assignments([one], ["nvidia.com/gpu"])
    allocations, _ = allocate(assignments, INDEX, admin_access_namespaces=namespaces)

    assert [each.admin_access for each in allocations] == [None, is_admin]


HELD = [
    DeviceAllocation(
        gpu_uuid=gpu_uuid,
        gpu_instance=gpu_instance,
        device_id=device_id,
        resource_name="nvidia.com/gpu",
        namespace="serving",
        pod="chat",
        container="server",
    )
    for device_id, gpu_uuid, gpu_instance in [
        ("whole", GPU, None),
        ("first", GPU, 1),
        ("second", GPU, 2),
        ("other", "GPU-other", 1),
    ]
]


@pytest.mark.parametrize(
    ("gpu_uuid", "gpu_instance", "found"),
    [
        (GPU, None, ["whole", "first", "second"]),
        (GPU, 1, ["whole", "first"]),
        (GPU, 7, ["whole"]),
        ("PCI:0000:1b:00", None, []),
    ],
)
def test_allocations_on_an_instance_are_its_own_and_those_of_the_whole_gpu(
    gpu_uuid: str, gpu_instance: int | None, found: list[str]
) -> None:
    assert [each.device_id for each in find_on(HELD, gpu_uuid, gpu_instance)] == found


def test_a_device_that_cannot_be_resolved_is_counted_and_left_out() -> None:
    one = pod(given("nvidia.com/gpu", "GPU-gone", "7", GPU))
    allocations, unresolved = allocate(find_assignments([one], ["nvidia.com/gpu"]), INDEX)

    assert [allocation.device_id for allocation in allocations] == [GPU]
    assert unresolved == {Unresolved.UNKNOWN_GPU: 1, Unresolved.UNKNOWN_FORM: 1}


def test_a_device_of_a_claim_is_resolved_only_by_the_drivers_names() -> None:
    assignment = DeviceAssignment(
        namespace="n", pod="p", container="c", resource_name="r", device_id=GPU, claim="n/c"
    )
    assert allocate([assignment], INDEX)[1] == {Unresolved.UNKNOWN_FORM: 1}
