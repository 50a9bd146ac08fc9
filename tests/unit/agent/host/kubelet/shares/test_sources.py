"""The shares that one pod's annotations state, for each product, from annotations as it writes."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger_agent.host.kubelet.pod_list import ListedPod, ListedSpec
from gpuledger_agent.host.kubelet.shares.find import SOURCES, find_shares
from gpuledger_agent.host.kubelet.shares.gpushare import GPUSHARE
from gpuledger_agent.host.kubelet.shares.hami import HAMI, VOLCANO
from gpuledger_agent.host.kubelet.shares.kai import KAI
from gpuledger_agent.host.kubelet.shares.koordinator import KOORDINATOR
from gpuledger_agent.host.kubelet.shares.stated import (
    GIB,
    MAX_LENGTH,
    MAX_SHARES_OF_POD,
    MIB,
    BadAnnotationError,
    GpuName,
    ShareSource,
    StatedShare,
)
from tests.unit.agent.host.kubelet.shares.pods import pod

A = "GPU-0fc3eda5-e98b-a25b-5b0d-cf5c855d1448"
B = "GPU-04dc48d7-9f0c-4d0a-8b52-6b6f3a5f2b11"


def by_uuid(uuid: str, container: str = "main", **share: int) -> StatedShare:
    return StatedShare(container, GpuName("uuid", uuid), **share)


def by_minor(minor: int, container: str = "main", **share: int) -> StatedShare:
    return StatedShare(container, GpuName("minor", minor), **share)


def of_group(group: str, container: str = "main", **share: int) -> StatedShare:
    return StatedShare(container, GpuName("group", group), **share)


def hami(value: str, *containers: str, **options: Any) -> ListedPod:  # noqa: ANN401  # of `pod`
    return pod({"hami.io/vgpu-devices-allocated": value}, *containers, **options)


def volcano(value: str, name: str = "volcano.sh/vgpu-ids-new") -> ListedPod:
    return pod({name: value})


def koordinator(value: str, *containers: Any) -> ListedPod:  # noqa: ANN401  # of `pod`
    return pod({"scheduling.koordinator.sh/device-allocated": value}, *containers)


def gpushare(memory: str, *containers: str, cores: str = "") -> ListedPod:
    annotations = {"scheduler.framework.gpushare.allocation": memory}
    return pod(annotations | {"gpushare.alibabacloud.com/core-percentage": cores}, *containers)


def older(*containers: Any, **values: str) -> ListedPod:  # noqa: ANN401  # of `pod`
    return pod({f"ALIYUN_COM_GPU_MEM_{name}": value for name, value in values.items()}, *containers)


def kai(*containers: str, labels: dict[str, str] | None = None, **values: str) -> ListedPod:
    annotations = {name.replace("_", "-"): value for name, value in values.items()}
    return pod(annotations, *containers, labels=labels, init=["prepare"])


STATED: list[tuple[str, ShareSource, ListedPod, list[StatedShare]]] = [
    ("nothing", HAMI, pod(), []),
    (
        "memory and cores of a GPU",
        HAMI,
        hami(f"{A},NVIDIA,20480,25:;"),
        [by_uuid(A, share_ppm=250_000, memory_bytes=20480 * MIB)],
    ),
    (
        "without a limit of cores, only memory",
        HAMI,
        hami(f"{A},NVIDIA,3000,0:;"),
        [by_uuid(A, memory_bytes=3000 * MIB)],
    ),
    (
        "two containers, the second with two GPUs",
        HAMI,
        hami(f"{A},NVIDIA,3000,0:;{A},NVIDIA,5000,10:{B},NVIDIA,5000,10:;", "one", "two"),
        [
            by_uuid(A, "one", memory_bytes=3000 * MIB),
            by_uuid(A, "two", share_ppm=100_000, memory_bytes=5000 * MIB),
            by_uuid(B, "two", share_ppm=100_000, memory_bytes=5000 * MIB),
        ],
    ),
    (
        "containers without devices, in both spellings",
        HAMI,
        hami(f";{A},NVIDIA,1000,0:;,,0,0:;", "one", "two", "three"),
        [by_uuid(A, "two", memory_bytes=1000 * MIB)],
    ),
    (
        "init containers are listed first by newer versions",
        HAMI,
        hami(f";{A},NVIDIA,1000,0:;", "one", init=["prepare"]),
        [by_uuid(A, "one", memory_bytes=1000 * MIB)],
    ),
    (
        "and not at all by older versions",
        HAMI,
        hami(f"{A},NVIDIA,1000,0:;", "one", init=["prepare"]),
        [by_uuid(A, "one", memory_bytes=1000 * MIB)],
    ),
    (
        "Volcano's vGPU",
        VOLCANO,
        volcano(f"{A},NVIDIA,1126,50:;"),
        [by_uuid(A, share_ppm=500_000, memory_bytes=1126 * MIB)],
    ),
    (
        "Volcano's vGPU under its older name",
        VOLCANO,
        volcano(f"{A},NVIDIA,1126,0:", "4pd.io/vgpu-ids-new"),
        [by_uuid(A, memory_bytes=1126 * MIB)],
    ),
    (
        "GiB of a GPU for each container",
        GPUSHARE,
        gpushare('{"0":{"1":1},"1":{"1":7}}', "one", "two"),
        [by_minor(1, "one", memory_bytes=GIB), by_minor(1, "two", memory_bytes=7 * GIB)],
    ),
    (
        "GiB and cores",
        GPUSHARE,
        gpushare('{"0":{"1":1},"1":{"0":7}}', "one", "two", cores='{"0":{"1":50}}'),
        [
            by_minor(1, "one", share_ppm=500_000, memory_bytes=GIB),
            by_minor(0, "two", memory_bytes=7 * GIB),
        ],
    ),
    (
        "the older annotations: each container's units of the GPU's",
        GPUSHARE,
        older(
            ("one", {"aliyun.com/gpu-mem": "2"}),
            ("two", {"cpu": "4", "aliyun.com/gpu-mem": "4"}),
            IDX="3",
            POD="6",
            DEV="24",
            ASSIGNED="true",
        ),
        [by_minor(3, "one", share_ppm=83_333), by_minor(3, "two", share_ppm=166_667)],
    ),
    (
        "the older annotations, without the GPU's size and the containers' requests",
        GPUSHARE,
        older(IDX="3", POD="6"),
        [by_minor(3, memory_bytes=6 * GIB)],
    ),
    (
        "percentages of two GPUs",
        KOORDINATOR,
        koordinator(
            '{"gpu":[{"minor":1,"resources":{"koordinator.sh/gpu-core":"50",'
            '"koordinator.sh/gpu-memory":"11520Mi","koordinator.sh/gpu-memory-ratio":"50"}},'
            '{"minor":2,"id":"0000:08.00.0","resources":{"koordinator.sh/gpu-core":30,'
            '"koordinator.sh/gpu-memory-ratio":50}}],"rdma":[{"minor":0,"id":"0000:01:00.0"}]}'
        ),
        [by_minor(1, share_ppm=500_000), by_minor(2, share_ppm=500_000)],
    ),
    (
        "memory without a percentage, under the older names",
        KOORDINATOR,
        koordinator(
            '{"gpu":[{"minor":0,"resources":{"kubernetes.io/gpu-core":"10",'
            '"kubernetes.io/gpu-memory":"12508288Ki"}}]}'
        ),
        [by_minor(0, share_ppm=100_000, memory_bytes=12508288 * 1024)],
    ),
    (
        "for the first container that requests a GPU",
        KOORDINATOR,
        koordinator(
            '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"100"}}]}',
            ("proxy", {"cpu": "1"}),
            ("train", {"koordinator.sh/gpu.shared": "1"}),
        ),
        [by_minor(0, "train", share_ppm=1_000_000)],
    ),
    ("no GPU", KOORDINATOR, koordinator('{"rdma":[{"minor":0}]}'), []),
    (
        "a fraction for the first container",
        KAI,
        kai("one", "two", gpu_fraction="0.5", labels={"runai-gpu-group": "g1"}),
        [of_group("g1", "one", share_ppm=500_000)],
    ),
    (
        "a fraction for a named init container, in scientific notation",
        KAI,
        kai("one", gpu_fraction="2.5e-1", gpu_fraction_container_name="prepare"),
        [of_group("", "prepare", share_ppm=250_000)],
    ),
    ("memory", KAI, kai(gpu_memory="2000"), [of_group("", memory_bytes=2000 * MIB)]),
    (
        "fractions of two GPUs",
        KAI,
        kai(
            gpu_fraction="0.3",
            gpu_fraction_num_devices="2",
            labels={"runai-gpu-group/g1": "g1", "runai-gpu-group/g2": "g2", "app": "a"},
        ),
        [of_group("g1", share_ppm=300_000), of_group("g2", share_ppm=300_000)],
    ),
    ("no fraction", KAI, pod(labels={"runai-gpu-group": "g1"}), []),
]


@pytest.mark.parametrize(
    ("source", "listed", "shares"),
    [row[1:] for row in STATED],
    ids=[f"{source.source}: {case}" for case, source, *_ in STATED],
)
def test_a_pod_has_the_shares_that_its_annotations_state(
    source: ShareSource, listed: ListedPod, shares: list[StatedShare]
) -> None:
    assert list(source.find(listed)) == shares
    others = [other for other in SOURCES if other is not source]
    assert [share for other in others for share in other.find(listed)] == []


ENDLESS = "9" * 10_000
BAD: list[tuple[Callable[..., ListedPod], str | dict[str, str]]] = [
    *(
        (hami, value)
        for value in (
            f"{A}:;",
            f"{A},NVIDIA,1000:;",
            f"{A},NVIDIA,,:;",
            f"{A},NVIDIA,0,0:;",
            f"{A},NVIDIA,-1,0:;",
            f"{A},NVIDIA,1_0,0:;",
            f"{A},NVIDIA,\u0661,0:;",
            f"{A},NVIDIA,1e3,0:;",
            f"{A},NVIDIA,{ENDLESS},0:;",
            f"{A},NVIDIA,1000,0:;{A},NVIDIA,1000,0:;",
            "no annotation of HAMi",
        )
    ),
    *(
        (gpushare, value)
        for value in (
            "",
            "[]",
            "{",
            '{"0":1}',
            '{"a":{"0":1}}',
            '{"0":{"0":-1}}',
            '{"7":{"0":1}}',
            '{"-1":{"0":1}}',
            '{"0":{"0":1.5}}',
            f'{{"0":{{"0":{ENDLESS}}}}}',
            "[" * 10_000,
            "[" * 100_000,
        )
        if value
    ),
    (older, {"IDX": "-1", "POD": "1"}),
    (older, {"IDX": "0"}),
    (older, {"IDX": "0", "POD": "x"}),
    (older, {"IDX": "0", "POD": "1", "DEV": "a"}),
    *(
        (koordinator, value)
        for value in (
            "{",
            '{"gpu":{}}',
            '{"gpu":[{}]}',
            '{"gpu":[{"minor":"0"}]}',
            '{"gpu":[{"minor":0}]}',
            '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"0"}}]}',
            '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"x"}}]}',
            '{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-memory":"-1Gi"}}]}',
        )
    ),
    *(
        (kai, {"gpu_fraction": value})
        for value in ("0", "-0.5", "1.01", "half", "nan", "inf", "1e999999999", ENDLESS)
    ),
    (kai, {"gpu_memory": "0"}),
    (kai, {"gpu_memory": "2Gi"}),
    (kai, {"gpu_fraction": "0.5", "gpu_fraction_container_name": "other"}),
    (kai, {"gpu_fraction": "0.5", "gpu_fraction_num_devices": "2"}),
]


@pytest.mark.parametrize(("make", "given"), BAD)
def test_a_bad_annotation_is_named_with_its_pod_and_gives_no_share(
    make: Callable[..., ListedPod], given: str | dict[str, str]
) -> None:
    bad = make(**given) if isinstance(given, dict) else make(given)
    found = find_shares([bad], SOURCES, placeholder_namespaces=())
    assert not found.shares
    (problem,) = found.problems
    assert problem.startswith("pod serving/chat-0: ")
    assert any(name[:15] in problem for name in bad.metadata.annotations or ())
    assert len(problem) < 300


def test_a_bad_annotation_does_not_affect_other_pods() -> None:
    good = hami(f"{A},NVIDIA,1000,0:;", name="good")
    found = find_shares([hami("x,"), good], SOURCES, placeholder_namespaces=())
    assert [*found.shares] == [("serving", "good", "main")]
    assert len(found.problems) == 1


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_whose_containers_have_ended_has_no_share(phase: str) -> None:
    ended = hami(f"{A},NVIDIA,1000,0:;", phase=phase)
    found = find_shares([ended], SOURCES, placeholder_namespaces=())
    assert (found.shares, found.groups, found.problems) == ({}, {}, [])
    assert found.ended == {("serving", "chat-0")}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"created": "2026-11-29T08:00:00Z"}, {"created": "2026-11-29T08:00:01Z"}),
        ({}, {"created": "2026-11-29T08:00:01Z"}),
        ({"created": "2026-11-29T08:00:01Z", "phase": "Failed"}, {}),
    ],
    ids=["a newer pod", "a static pod", "an ended pod"],
)
def test_of_several_pods_of_one_name_the_newest_that_runs_has_its_shares(
    older: dict[str, str], newer: dict[str, str], order: int
) -> None:
    pods = [hami(f"{A},NVIDIA,0,60:;", **older), hami(f"{B},NVIDIA,0,60:;", **newer)]
    found = find_shares(pods[::order], SOURCES, placeholder_namespaces=())
    assert found.shares == {("serving", "chat-0", "main"): {HAMI: [by_uuid(B, share_ppm=600_000)]}}
    assert not found.ended


def test_a_reservation_pod_has_a_group_and_no_share() -> None:
    reservation = pod(
        {"gpu-fraction": "0.5"}, namespace="reserved", labels={"runai-gpu-group": "g1"}
    )
    found = find_shares([reservation], SOURCES, placeholder_namespaces=("reserved",))
    assert not found.shares
    assert found.groups == {("reserved", "chat-0"): ["g1"]}


def test_a_container_has_the_shares_of_each_product_that_is_read() -> None:
    both = pod(
        {
            "hami.io/vgpu-devices-allocated": f"{A},NVIDIA,1000,0:;",
            "gpu-fraction": "0.5",
        }
    )
    found = find_shares([both], SOURCES, placeholder_namespaces=())
    assert found.shares == {
        ("serving", "chat-0", "main"): {
            HAMI: [by_uuid(A, memory_bytes=1000 * MIB)],
            KAI: [of_group("", share_ppm=500_000)],
        }
    }
    only_kai = find_shares([both], [KAI], placeholder_namespaces=())
    assert [*only_kai.shares["serving", "chat-0", "main"]] == [KAI]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_pod_with_too_many_shares_is_named_and_other_pods_keep_theirs(position: int) -> None:
    pods = [
        hami(f"{A},NVIDIA,1,0:;", name="good"),
        pod(name="r-0", namespace="reserved", labels={"runai-gpu-group": "g1"}),
    ]
    expected = find_shares(pods, SOURCES, placeholder_namespaces=("reserved",))
    pods.insert(position, hami(f"{A},NVIDIA,1,0:" * (MAX_SHARES_OF_POD + 1)))
    found = find_shares(pods, SOURCES, placeholder_namespaces=("reserved",))
    assert (found.shares, found.groups) == (expected.shares, expected.groups)
    assert ["serving/chat-0" in problem for problem in found.problems] == [True]


def test_a_pod_may_have_the_maximum_number_of_shares() -> None:
    found = find_shares(
        [hami(f"{A},NVIDIA,1,0:" * MAX_SHARES_OF_POD)], SOURCES, placeholder_namespaces=()
    )
    assert found.shares
    assert not found.problems


def test_a_product_reports_bad_values_by_the_name_of_the_annotation_only() -> None:
    with pytest.raises(BadAnnotationError, match="gpu-fraction") as caught:
        KAI.find(pod({"gpu-fraction": "secret"}))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("gpu-fraction", "0.5"), ("gpu-memory", "1000")])
def test_a_missing_container_is_reported_by_the_annotation_that_needs_it(
    name: str, value: str
) -> None:
    with pytest.raises(BadAnnotationError, match=name):
        KAI.find(replace(pod({name: value}), spec=ListedSpec()))


DEVICE = '{"minor":0,"resources":{"koordinator.sh/gpu-core":"1"}}'
FLOODS: list[tuple[Callable[[str], ListedPod], str]] = [
    (hami, ":"),
    (hami, ";"),
    (hami, ","),
    (hami, ",,0,0:"),
    (hami, f"{A},NVIDIA,1,0:"),
    (volcano, ":"),
    (lambda text: koordinator(f'{{"gpu":[{text}{DEVICE}]}}'), f"{DEVICE},"),
    (lambda text: gpushare(f'{{"0":{{{text}"9":1}}}}'), '"{}":1,'),
    (lambda text: kai(gpu_fraction=text), "0"),
]


def flood(part: str, size: int) -> str:
    return "".join(part.replace("{}", str(number)) for number in range(size // len(part)))


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of function calls of this work."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("size", [MAX_LENGTH // 2, MAX_LENGTH + 1, 250_000])
@pytest.mark.parametrize(("make", "part"), FLOODS)
def test_the_work_for_a_pod_does_not_rise_with_the_length_of_its_annotations(
    make: Callable[[str], ListedPod], part: str, size: int
) -> None:
    listed = make(flood(part, size))
    read = partial(find_shares, [listed], SOURCES, placeholder_namespaces=())
    assert calls_of(read) < 10 * MAX_SHARES_OF_POD
    assert not read().shares
