"""The kubelet's devices together with the shares that annotations state, up to parts of GPUs."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.codec import validate
from gpuledger.ledger.allocated_parts import (
    allocated_containers,
    exclusive_container,
    find_allocated_parts,
)
from gpuledger.records import (
    AllocationSource,
    DeviceAllocation,
    GpuFacts,
    GpuReading,
    MigInstance,
    NodeSample,
)
from gpuledger_agent.host.kubelet.assignments import (
    DeviceAssignment,
    DeviceIndex,
    Unresolved,
    count_replicas,
)
from gpuledger_agent.host.kubelet.messages import ContainerDevices
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.find import SOURCES, find_shares
from gpuledger_agent.host.kubelet.shares.merge import MAX_SHARES, Merged, merge_allocations
from gpuledger_agent.host.kubelet.shares.stated import MIB
from tests.unit.agent.host.kubelet.shares.pods import pod

A, B = "GPU-a", "GPU-b"
MIG = "MIG-00000000-0000-4000-8000-000000000001"
GPU_MIB: Final = 81_920
INDEX: Final = DeviceIndex.of(
    GpuFacts(
        uuid=uuid,
        index=number,
        minor_number=number,
        memory_total_bytes=GPU_MIB * MIB,
        capabilities=[],
        instances=[
            MigInstance(uuid=MIG, gpu_instance=3, compute_instance=0, memory_total_bytes=10 * MIB)
        ]
        if uuid == "GPU-c"
        else [],
    )
    for number, uuid in enumerate((A, B, "GPU-c"))
)
RESERVED: Final = ("kai-resource-reservation", "runai-reservation")


def device(device_id: str, name: str = "chat-0", **changes: Any) -> DeviceAssignment:  # noqa: ANN401  # any field
    values: dict[str, Any] = {
        "namespace": "serving",
        "pod": name,
        "container": "main",
        "resource_name": "nvidia.com/gpu",
        "device_id": device_id,
    }
    return DeviceAssignment(**values | changes)


def reservation(uuid: str, name: str, namespace: str = RESERVED[0]) -> DeviceAssignment:
    return device(uuid, name, namespace=namespace, container="resource-reservation")


def reserving(name: str, group: str | None = None) -> ListedPod:
    labels = {"runai-gpu-group": group} if group else None
    return pod(name=name, namespace=RESERVED[0], labels=labels)


def hami(*shares: str, name: str = "chat-0") -> ListedPod:
    return pod({"hami.io/vgpu-devices-allocated": ":".join(shares) + ":;"}, name=name)


def koordinator(minor: int, cores: int, name: str = "chat-0") -> ListedPod:
    resources = f'{{"koordinator.sh/gpu-core":"{cores}"}}'
    devices = f'{{"gpu":[{{"minor":{minor},"resources":{resources}}}]}}'
    return pod({"scheduling.koordinator.sh/device-allocated": devices}, name=name)


def both(first: ListedPod, second: ListedPod) -> ListedPod:
    """Return the first pod, with the annotations of the second one too."""
    annotations = {**(first.metadata.annotations or {}), **(second.metadata.annotations or {})}
    metadata = msgspec.structs.replace(first.metadata, annotations=annotations)
    return msgspec.structs.replace(first, metadata=metadata)


def fraction(value: str, name: str = "chat-0", group: str | None = None) -> ListedPod:
    labels = {"runai-gpu-group": group} if group else None
    return pod({"gpu-fraction": value}, name=name, labels=labels)


def merged(
    devices: Sequence[DeviceAssignment],
    pods: Sequence[ListedPod] | None = (),
    **settings: Any,  # noqa: ANN401  # of `merge_allocations`
) -> Merged:
    stated = None if pods is None else find_shares(pods, SOURCES, placeholder_namespaces=RESERVED)
    return merge_allocations(devices, stated, INDEX, placeholder_namespaces=RESERVED, **settings)


def sample(allocations: list[DeviceAllocation]) -> NodeSample:
    return NodeSample(
        cluster="default",
        node="n",
        boot_id="b",
        seq=1,
        time_ns=1,
        interval_ns=1,
        gpus=[GpuReading(uuid=A, index=0), GpuReading(uuid=B, index=1)],
        processes=[],
        containers=[],
        allocations=allocations,
    )


def parts(found: Merged) -> list[dict[str | None, Fraction]]:
    """Return each pod's part of the first two GPUs; the part of `None` is not allocated."""
    names = [container.pod for container in allocated_containers(found.allocations)]
    return [
        {
            names[who] if isinstance(who, int) else None: Fraction(part, allocated.whole)
            for who, part in allocated.parts
        }
        for allocated in find_allocated_parts(sample(found.allocations))
    ]


FREE: Final[dict[str | None, Fraction]] = {None: Fraction(1)}
QUARTER, HALF = Fraction(1, 4), Fraction(1, 2)

CASES: list[
    tuple[str, list[DeviceAssignment], list[ListedPod], list[dict[str | None, Fraction]]]
] = [
    (
        "the annotation names the GPU, not the id",
        [device(f"{A}-0")],
        [hami(f"{B},NVIDIA,20480,25")],
        [FREE, {"chat-0": QUARTER, None: 3 * QUARTER}],
    ),
    (
        "four pods of 25 % are one GPU",
        [device(f"{A}-{number}", f"pod-{number}") for number in range(4)],
        [hami(f"{B},NVIDIA,0,25", name=f"pod-{number}") for number in range(4)],
        [FREE, {f"pod-{number}": QUARTER for number in range(4)}],
    ),
    (
        "the greater of memory and cores counts",
        [device(f"{A}-0"), device(f"{A}-1", "pod-1")],
        [hami(f"{A},NVIDIA,40960,25"), hami(f"{A},NVIDIA,8192,25", name="pod-1")],
        [{"chat-0": HALF, "pod-1": QUARTER, None: QUARTER}, FREE],
    ),
    (
        "shares above one GPU are scaled",
        [device(f"{A}-0"), device(f"{A}-1", "pod-1")],
        [hami(f"{A},NVIDIA,81920,0"), hami(f"{A},NVIDIA,0,100", name="pod-1")],
        [{"chat-0": HALF, "pod-1": HALF}, FREE],
    ),
    (
        "two GPUs of one container",
        [device(f"{A}-0"), device(f"{A}-1")],
        [hami(f"{A},NVIDIA,20480,0", f"{B},NVIDIA,40960,0")],
        [{"chat-0": QUARTER, None: 3 * QUARTER}, {"chat-0": HALF, None: HALF}],
    ),
    (
        "the same GPU twice",
        [device(f"{A}-0"), device(f"{A}-1")],
        [hami(f"{A},NVIDIA,20480,0", f"{A},NVIDIA,20480,0")],
        [{"chat-0": HALF, None: HALF}, FREE],
    ),
    (
        "ids of cGPU",
        [device(f"{A}-_-{number}", resource_name="aliyun.com/gpu-mem") for number in range(20)],
        [pod({"scheduler.framework.gpushare.allocation": '{"0":{"1":20}}'}, name="chat-0")],
        [FREE, {"chat-0": QUARTER, None: 3 * QUARTER}],
    ),
    (
        "ids of Volcano",
        [device("0-3", resource_name="volcano.sh/vgpu-number")],
        [pod({"volcano.sh/vgpu-ids-new": f"{B},NVIDIA,20480,0:;"})],
        [FREE, {"chat-0": QUARTER, None: 3 * QUARTER}],
    ),
    (
        "Koordinator's pods have no devices",
        [],
        [
            pod(
                {
                    "scheduling.koordinator.sh/device-allocated": (
                        '{"gpu":[{"minor":1,"resources":{"koordinator.sh/gpu-core":"50"}}]}'
                    )
                }
            )
        ],
        [FREE, {"chat-0": HALF, None: HALF}],
    ),
    (
        "an id that names the GPU counts, not the annotation",
        [device(A)],
        [hami(f"{A},NVIDIA,1,1"), fraction("0.01")],
        [{"chat-0": Fraction(1)}, FREE],
    ),
    (
        "a replica that names the GPU counts, not the annotation",
        [device(f"{A}::0")],
        [hami(f"{A},NVIDIA,1,1")],
        [{"chat-0": Fraction(1)}, FREE],
    ),
    (
        "an annotation of HAMi gives nothing to a container without devices",
        [],
        [hami(f"{A},NVIDIA,81920,100")],
        [FREE, FREE],
    ),
    (
        "fractions of a reserved GPU; the rest is unallocated",
        [reservation(A, "r-0")],
        [reserving("r-0", "g1"), fraction("0.5", group="g1"), fraction("0.25", "pod-1", "g1")],
        [{"chat-0": HALF, "pod-1": QUARTER, None: QUARTER}, FREE],
    ),
    (
        "each group has its GPU",
        [reservation(A, "r-0"), reservation(B, "r-1", RESERVED[1])],
        [
            reserving("r-0", "g1"),
            pod(name="r-1", namespace=RESERVED[1], labels={"runai-gpu-group": "g2"}),
            fraction("0.5", group="g2"),
            fraction("0.25", "pod-1", "g1"),
        ],
        [{"pod-1": QUARTER, None: 3 * QUARTER}, {"chat-0": HALF, None: HALF}],
    ),
    (
        "without a label, the only reserved GPU",
        [reservation(B, "r-0")],
        [reserving("r-0"), fraction("0.5")],
        [FREE, {"chat-0": HALF, None: HALF}],
    ),
    (
        "a reserved GPU that is listed twice",
        [reservation(A, "r-0"), reservation(A, "r-0")],
        [reserving("r-0", "g1"), fraction("0.5", group="g1")],
        [{"chat-0": HALF, None: HALF}, FREE],
    ),
    (
        "the former and the new reservation pod of a group",
        [reservation(A, "r-0"), reservation(A, "r-1")],
        [reserving("r-0", "g1"), reserving("r-1", "g1"), fraction("0.5", group="g1")],
        [{"chat-0": HALF, None: HALF}, FREE],
    ),
    (
        "an ended reservation pod that the kubelet still lists",
        [reservation(B, "r-0"), reservation(A, "r-1")],
        [pod(name="r-0", namespace=RESERVED[0], phase="Failed"), reserving("r-1"), fraction("0.5")],
        [{"chat-0": HALF, None: HALF}, FREE],
    ),
    (
        "memory of a reserved GPU",
        [reservation(A, "r-0")],
        [reserving("r-0"), pod({"gpu-memory": "20480"})],
        [{"chat-0": QUARTER, None: 3 * QUARTER}, FREE],
    ),
    (
        "a fraction of each of two GPUs",
        [reservation(A, "r-0"), reservation(B, "r-1")],
        [
            reserving("r-0", "g1"),
            reserving("r-1", "g2"),
            pod(
                {"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"},
                labels={"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2"},
            ),
        ],
        [{"chat-0": QUARTER, None: 3 * QUARTER}, {"chat-0": QUARTER, None: 3 * QUARTER}],
    ),
    (
        "a reservation pod pays nothing, even if nobody is behind it",
        [reservation(A, "r-0")],
        [reserving("r-0", "g1")],
        [FREE, FREE],
    ),
]


@pytest.mark.parametrize(
    ("devices", "pods", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_each_pod_has_its_part_of_each_gpu(
    devices: list[DeviceAssignment],
    pods: list[ListedPod],
    expected: list[dict[str | None, Fraction]],
) -> None:
    found = merged(devices, pods)
    assert parts(found) == expected
    assert found.problems == []
    assert not found.unnamed
    assert not any(found.unresolved.values())
    validate(sample(found.allocations))


UNRESOLVED: list[tuple[str, list[DeviceAssignment], list[ListedPod], Unresolved]] = [
    (
        "a GPU of another node",
        [device("0-3")],
        [hami("GPU-z,NVIDIA,1,1")],
        Unresolved.UNKNOWN_GPU,
    ),
    ("no UUID", [device("0-3")], [hami("x,NVIDIA,1,1")], Unresolved.UNKNOWN_FORM),
    ("a counted id", [device("0-3")], [hami(f"{A}-1,NVIDIA,1,1")], Unresolved.UNKNOWN_FORM),
    (
        "a number without a GPU",
        [],
        [
            pod(
                {
                    "scheduling.koordinator.sh/device-allocated": (
                        '{"gpu":[{"minor":9,"resources":{"koordinator.sh/gpu-core":"50"}}]}'
                    )
                }
            )
        ],
        Unresolved.UNKNOWN_GPU,
    ),
    (
        "a share of a partitioned GPU",
        [device("0-3")],
        [hami("GPU-c,NVIDIA,20480,0")],
        Unresolved.UNKNOWN_INSTANCE,
    ),
    ("no reserved GPU", [], [fraction("0.5", group="g1")], Unresolved.UNKNOWN_GROUP),
    (
        "no group among two",
        [reservation(A, "r-0"), reservation(B, "r-1")],
        [reserving("r-0", "g1"), reserving("r-1", "g2"), fraction("0.5")],
        Unresolved.UNKNOWN_GROUP,
    ),
    (
        "another group",
        [reservation(A, "r-0")],
        [reserving("r-0", "g1"), fraction("0.5", group="g2")],
        Unresolved.UNKNOWN_GROUP,
    ),
]


@pytest.mark.parametrize(
    ("devices", "pods", "reason"),
    [row[1:] for row in UNRESOLVED],
    ids=[row[0] for row in UNRESOLVED],
)
def test_a_share_of_an_unknown_gpu_is_counted_and_named_and_allocates_nothing(
    devices: list[DeviceAssignment], pods: list[ListedPod], reason: Unresolved
) -> None:
    found = merged(devices, pods)
    assert parts(found) == [FREE, FREE]
    assert found.unresolved[reason] >= 1
    assert ["serving/chat-0" in problem for problem in found.problems] == [True]


def test_a_bad_annotation_is_counted() -> None:
    found = merged([device("0-3")], [hami("x,NVIDIA"), fraction("half", "pod-1")])
    assert found.unresolved[Unresolved.BAD_ANNOTATION] == 2
    assert len(found.problems) == 2


def test_memory_of_a_gpu_of_unknown_size_is_an_unknown_share() -> None:
    """As on a machine whose GPU shares the memory of the CPU."""
    facts = GpuFacts(uuid=A, index=0, instances=[], capabilities=[])
    index = DeviceIndex.of([facts])
    for annotation, unresolved in ((f"{A},NVIDIA,1,0:;", 1), (f"{A},NVIDIA,1,50:;", 0)):
        pods = [pod({"hami.io/vgpu-devices-allocated": annotation})]
        stated = find_shares(pods, SOURCES, placeholder_namespaces=())
        found = merge_allocations([device("0-1")], stated, index)
        assert found.unresolved[Unresolved.UNKNOWN_MEMORY] == unresolved
        assert len(found.allocations) == 1 - unresolved


def test_an_allocation_names_its_source_and_the_resource_that_the_kubelet_allocated() -> None:
    devices = [device(f"{A}-0", resource_name="nvidia.com/vgpu"), reservation(B, "r-0")]
    pods = [hami(f"{A},NVIDIA,20480,0"), reserving("r-0"), fraction("0.5", "pod-1")]
    of_hami, of_kai = merged(devices, pods).allocations
    assert (of_hami.source, of_hami.resource_name) == (AllocationSource.HAMI, "nvidia.com/vgpu")
    assert (of_hami.device_id, of_hami.share_ppm) == (A, 250_000)
    assert (of_kai.source, of_kai.resource_name) == (AllocationSource.KAI, "nvidia.com/gpu")
    assert (of_kai.device_id, of_kai.share_ppm) == (B, 500_000)


def test_a_share_of_a_whole_gpu_is_exclusive_and_a_smaller_one_is_not() -> None:
    reading = GpuReading(uuid=A, index=0)
    for cores, is_exclusive in ((100, True), (99, False)):
        found = merged([device(f"{A}-0")], [hami(f"{A},NVIDIA,1,{cores}")])
        assert (exclusive_container(reading, found.allocations) is not None) == is_exclusive


def test_a_mig_instance_in_an_annotation_is_resolved_by_its_uuid() -> None:
    (found,) = merged([device("0-3")], [hami(f"{MIG},NVIDIA,5,0")]).allocations
    assert (found.gpu_uuid, found.gpu_instance, found.share_ppm) == ("GPU-c", 3, 500_000)


def test_a_container_without_a_usable_annotation_keeps_the_devices_of_the_kubelet() -> None:
    index = DeviceIndex.of([GpuFacts(uuid=A, index=0, instances=[], capabilities=[])])
    for pods in (None, [], [hami("x,NVIDIA,1,1")]):
        stated = pods and find_shares(pods, SOURCES, placeholder_namespaces=())
        found = merge_allocations([device(f"{A}-0")], stated or None, index)
        (allocation,) = found.allocations
        assert (allocation.source, allocation.replica) == (None, "0")
        assert found.unnamed == [("serving", "chat-0", "main")]


def test_nothing_is_allocated_to_a_reservation_pod_while_the_list_of_pods_is_unknown() -> None:
    found = merged([reservation(A, "r-0")], None)
    assert parts(found) == [FREE, FREE]
    assert found.reserved == 1


@given(st.lists(st.integers(min_value=1, max_value=100), min_size=1, max_size=12))
def test_shares_in_percent_add_up_exactly_and_never_exceed_the_gpu(percents: list[int]) -> None:
    names = [f"pod-{number:02}" for number in range(len(percents))]
    found = merged(
        [device(f"{A}-{number}", name) for number, name in enumerate(names)],
        [
            hami(f"{A},NVIDIA,0,{percent}", name=name)
            for percent, name in zip(percents, names, strict=True)
        ],
    )
    (on_gpu, _), total = parts(found), sum(percents)
    whole = max(100, total)
    expected: dict[str | None, Fraction] = {
        name: Fraction(percent, whole) for name, percent in zip(names, percents, strict=True)
    }
    assert on_gpu == expected | ({None: Fraction(whole - total, whole)} if total < 100 else {})


def test_a_pod_above_the_maximum_of_the_node_is_named_and_has_no_share() -> None:
    names = [f"pod-{number:04}" for number in range(MAX_SHARES + 1)]
    found = merged(
        [device(f"{A}-{number}", name) for number, name in enumerate(names)],
        # A pod without a device does not use up the maximum.
        [
            koordinator(0, 1, "no-device"),
            *(hami(f"{A},NVIDIA,1,0", name=name) for name in ("no-device-0", *names)),
        ],
    )
    assert [one.pod for one in found.allocations] == names[:-1]
    assert [problem.split(":")[0] for problem in found.problems] == [
        f"pod serving/{names[-1]}",
        "pod serving/no-device",
    ]
    assert found.unresolved[Unresolved.BAD_ANNOTATION] == 2


CGPU: Final = [
    device(f"{A}-_-{number}", resource_name="aliyun.com/gpu-mem") for number in range(20)
]
OTHERS: Final = {
    "HAMi": hami(f"{B},NVIDIA,0,1"),
    "Volcano": pod({"volcano.sh/vgpu-ids-new": f"{B},NVIDIA,0,1:;"}),
    "Koordinator": koordinator(1, 1),
    "KAI": fraction("0.01"),
}
OWN: Final[dict[str, tuple[list[DeviceAssignment], ListedPod]]] = {
    "HAMi": ([device(f"{A}-0")], hami(f"{A},NVIDIA,0,25")),
    "Volcano": (
        [device("0-3", resource_name="volcano.sh/vgpu-number")],
        pod({"volcano.sh/vgpu-ids-new": f"{A},NVIDIA,0,25:;"}),
    ),
    "cGPU": (CGPU, pod({"scheduler.framework.gpushare.allocation": '{"0":{"0":20}}'})),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("own", OWN)
def test_only_the_product_of_the_resource_may_replace_the_kubelets_devices(
    own: str, other: str
) -> None:
    devices, stating = OWN[own]
    behind = [reservation(B, "r-0"), *devices], [reserving("r-0")]
    expected = {"chat-0": QUARTER, None: 3 * QUARTER}
    if own != other:
        stating = both(stating, OTHERS[other])
    assert parts(merged(behind[0], [*behind[1], stating])) == [expected, FREE]


@pytest.mark.parametrize(
    ("own", "other"),
    [("HAMi", "KAI"), ("HAMi", "Koordinator"), ("Volcano", "HAMi"), ("cGPU", "Volcano")],
)
def test_an_annotation_of_another_product_alone_replaces_nothing(own: str, other: str) -> None:
    devices, _ = OWN[own]
    found = merged([reservation(B, "r-0"), *devices], [reserving("r-0"), OTHERS[other]])
    assert found.stated_count == 0
    assert found.unnamed == [("serving", "chat-0", "main")]


@pytest.mark.parametrize("claim", ["Koordinator", "KAI"])
def test_no_other_annotation_makes_a_share_without_devices_smaller(claim: str) -> None:
    """Such a share adds up with shares of other products, and ignores those that need devices."""
    own = {"Koordinator": fraction("0.5"), "KAI": koordinator(0, 50)}[claim]
    other = both(OTHERS[claim], hami(f"{A},NVIDIA,0,1"))
    found = merged([reservation(A, "r-0")], [reserving("r-0"), both(own, other)])
    assert parts(found)[0]["chat-0"] >= HALF


@pytest.mark.parametrize(
    ("memory", "cores", "expected"),
    [(20, 0, 250_000), (1, 0, None), (1, 50, 500_000), (1, 24, None)],
    ids=["the same", "less", "more", "less in both"],
)
def test_an_exact_share_of_the_kubelet_is_never_replaced_by_a_smaller_one(
    memory: int, cores: int, expected: int | None
) -> None:
    index = DeviceIndex.of(
        [
            GpuFacts(
                uuid=A,
                index=0,
                minor_number=0,
                memory_total_bytes=GPU_MIB * MIB,
                instances=[],
                capabilities=[],
            )
        ]
    )
    annotations = {
        "scheduler.framework.gpushare.allocation": f'{{"0":{{"0":{memory}}}}}',
        "gpushare.alibabacloud.com/core-percentage": f'{{"0":{{"0":{cores}}}}}',
    }
    there = [f"{A}-_-{number}" for number in range(80)]
    replicas = count_replicas(
        [ContainerDevices(resource_name="aliyun.com/gpu-mem", device_ids=there)], index
    )
    stated = find_shares([pod(annotations)], SOURCES, placeholder_namespaces=())
    found = merge_allocations(CGPU, stated, index, replicas)
    shares = [(one.share_ppm, one.count) for one in found.allocations]
    assert shares == [(expected, None) if expected else (None, 20)]
    assert parts(found)[0]["chat-0"] == Fraction(expected or 250_000, 1_000_000)
    assert not found.unnamed


WHOLE: Final = {
    "a device plugin": device(A, "victim"),
    "a resource claim": device(
        "gpu-0", "victim", resource_name="gpu.nvidia.com", claim="serving/gpu"
    ),
}
TAKERS: Final[dict[str, tuple[list[DeviceAssignment], list[ListedPod]]]] = {
    "Koordinator": ([], [koordinator(0, 100)]),
    "HAMi": ([device("0-3")], [hami(f"{A},NVIDIA,0,100")]),
    "KAI": ([reservation(A, "r-0")], [reserving("r-0"), fraction("1")]),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("holder", WHOLE)
def test_no_annotation_takes_from_a_device_that_the_kubelet_gave_to_another_container(
    holder: str, taker: str
) -> None:
    devices, pods = TAKERS[taker]
    found = merged([*devices, WHOLE[holder]], pods)
    assert parts(found) == [{"victim": Fraction(1)}, FREE]
    assert found.unresolved[Unresolved.ALLOCATED_WHOLE] == 1
    assert ["serving/chat-0" in problem for problem in found.problems] == [True]


@pytest.mark.parametrize(
    "other",
    [
        device(f"{A}::0", "other"),
        device(B, "other"),
        device("gpu-0", "other", claim="serving/gpu", share_id="1"),
        device("gpu-0", "other", namespace="monitoring", claim="monitoring/gpu"),
    ],
    ids=["a replica", "another GPU", "a share of a claim", "admin access"],
)
def test_a_device_that_no_container_has_as_a_whole_may_be_shared(other: DeviceAssignment) -> None:
    found = merged([other], [koordinator(0, 50)], admin_access_namespaces=("monitoring",))
    assert [one.pod for one in found.allocations if one.source] == ["chat-0"]
    assert not found.problems


def test_an_instance_is_not_shared_if_the_kubelet_gave_its_gpu_to_another_container() -> None:
    for held in (MIG, "GPU-c"):
        found = merged([device(held, "victim"), device("0-3")], [hami(f"{MIG},NVIDIA,5,0")])
        assert found.stated_count == 0
        assert found.unresolved[Unresolved.ALLOCATED_WHOLE] == 1


GONE: Final = "GPU-04dc48d7-9f0c-4d0a-8b52-6b6f3a5f2b11"


@pytest.mark.parametrize(
    ("device_id", "resource_name", "stating"),
    [
        (f"{GONE}-3", "nvidia.com/gpu", hami(f"{A},NVIDIA,0,25")),
        (
            f"{GONE}-_-3",
            "aliyun.com/gpu-mem",
            pod({"scheduler.framework.gpushare.allocation": '{"0":{"0":20}}'}),
        ),
    ],
    ids=["HAMi", "cGPU"],
)
def test_an_id_counts_shares_even_if_the_node_no_longer_has_the_gpu_in_it(
    device_id: str, resource_name: str, stating: ListedPod
) -> None:
    counted = device(device_id, resource_name=resource_name)
    found = merged([counted], [stating])
    assert parts(found) == [{"chat-0": QUARTER, None: 3 * QUARTER}, FREE]
    assert not found.problems
    assert merged([counted], []).unnamed == [("serving", "chat-0", "main")]


def test_the_uuid_of_a_gpu_that_the_node_no_longer_has_names_a_gpu() -> None:
    """Even if its last group of digits looks like the number of a share."""
    digits = "GPU-04dc48d7-9f0c-4d0a-8b52-123456789012"
    for uuid in (GONE, digits):
        found = merged([device(uuid)], [hami(f"{A},NVIDIA,0,25")])
        assert found.allocations == []
        assert not found.unnamed


def test_a_gpu_of_an_ended_pod_that_the_kubelet_still_lists_may_be_shared() -> None:
    victim = pod(name="victim", phase="Succeeded")
    found = merged([device(A, "victim")], [victim, koordinator(0, 50)])
    assert found.stated_count == 1
