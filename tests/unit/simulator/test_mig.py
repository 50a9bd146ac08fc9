"""GPUs with MIG: the processes of each instance, NVML's view, and shares that sum to the GPU."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pynvml
import pytest

from gpuledger.errors import UserError
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.nvml.session import Handle
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.errors import has_words
from tests.unit.simulator.mig_builders import CUT, EPOCH_NS, GIB, cut_simulation


@pytest.fixture
def cut(clock: ManualClock) -> Simulation:
    return cut_simulation(clock)


@pytest.fixture
def nvml(cut: Simulation) -> SimulatedNvml:
    library = cut.node("node-a").nvml
    library.nvmlInit()
    return library


@pytest.fixture
def gpu(nvml: SimulatedNvml) -> Handle:
    handle: Handle = nvml.nvmlDeviceGetHandleByIndex(0)
    return handle


def instances(nvml: SimulatedNvml, gpu: Handle) -> dict[int, Handle]:
    found = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(pynvml.NVMLError_NotFound):
            found[index] = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    return found


def test_an_instance_is_named_by_its_profile_and_has_its_part(
    nvml: SimulatedNvml, gpu: Handle
) -> None:
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    found = instances(nvml, gpu)
    assert list(found) == [1, 2, 3, 4]
    names = [nvml.nvmlDeviceGetName(one).rpartition(" ")[2] for one in found.values()]
    assert names == ["1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb"]
    ids = [
        (nvml.nvmlDeviceGetGpuInstanceId(one), nvml.nvmlDeviceGetComputeInstanceId(one))
        for one in found.values()
    ]
    assert ids == [(1, 0), (2, 0), (3, 0), (3, 1)]
    slices = [
        nvml.nvmlDeviceGetAttributes_v2(one).computeInstanceSliceCount for one in found.values()
    ]
    assert slices == [1, 3, 1, 1]
    assert len({nvml.nvmlDeviceGetUUID(one) for one in found.values()}) == 4


def test_memory_and_processes_are_those_of_the_instance(
    nvml: SimulatedNvml, gpu: Handle, clock: ManualClock
) -> None:
    clock.advance(1)
    used = [
        nvml.nvmlDeviceGetMemoryInfo(one, pynvml.nvmlMemory_v2).used // GIB
        for one in instances(nvml, gpu).values()
    ]
    # Both compute instances of the third GPU instance see their shared memory.
    assert used == [5, 30, 6, 6]
    listed = [
        len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(one))
        for one in instances(nvml, gpu).values()
    ]
    assert listed == [1, 1, 1, 0]
    whole = nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    assert [(one.gpuInstanceId, one.computeInstanceId) for one in whole] == [(1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu),
        lambda nvml, gpu: nvml.nvmlDeviceGetSamples(gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0),
        lambda nvml, gpu: nvml.nvmlDeviceGetProcessUtilization(gpu, 0),
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
        ),
    ],
)
def test_calls_that_nvml_lacks_under_mig_are_not_supported(
    nvml: SimulatedNvml, gpu: Handle, call: Callable[..., object]
) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(nvml, gpu)
    assert raised.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    "call",
    [
        lambda nvml, gpu: nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1),
        lambda nvml, gpu: nvml.nvmlDeviceGetGpuInstanceById(gpu, 1),
        lambda nvml, gpu: nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu),
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu),
    ],
)
def test_without_permission_to_monitor_mig_instances_and_their_sums_are_refused(
    clock: ManualClock, call: Callable[..., object]
) -> None:
    node = cut_simulation(clock, mig_monitor=False).node("node-a")
    node.nvml.nvmlInit()
    handle = node.nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_NoPermission):
        call(node.nvml, handle)
    # The GPU's own values are returned, and all values while it has no instances.
    assert node.nvml.nvmlDeviceGetPowerUsage(handle)
    node.gpus[0].facts.cuts.clear()
    assert node.nvml.nvmlDeviceGetMemoryInfo(handle).used
    assert node.nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)


def test_a_repartitioning_makes_old_handles_invalid(
    nvml: SimulatedNvml, gpu: Handle, clock: ManualClock
) -> None:
    old = instances(nvml, gpu)[1]
    clock.advance(20)
    assert [nvml.nvmlDeviceGetName(one)[-7:] for one in instances(nvml, gpu).values()] == [
        "7g.80gb"
    ]
    with pytest.raises(pynvml.NVMLError) as raised:
        nvml.nvmlDeviceGetUUID(old)
    assert raised.value.value == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_instances_run_side_by_side_and_draw_their_shares(
    cut: Simulation, clock: ManualClock
) -> None:
    gpu = cut.node("node-a").gpus[0]
    second = 1_000_000_000
    alone = {
        process.spec.command: gpu.busy_ns(process, 0, 10 * second) for process in gpu.processes
    }
    assert alone["train"] > 9 * second
    assert alone["infer"] > 9 * second
    drawn = gpu.joules(0, 10 * second)
    expected = 10 * 70 + sum(
        gpu.busy_ns(one, 0, 10 * second) / second * (700 - 70) * gpu.share(one)
        for one in gpu.processes
    )
    assert drawn == pytest.approx(expected)
    assert drawn < 10 * 700


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("instance", 4, "has 4 MIG instances"),
        ("instance", None, "has 4 MIG instances"),
        ("end_seconds", 21.0, "the MIG layout of GPU 0 of node-a changes"),
        ("memory_bytes", 20 * GIB, "its instance of GPU 0 of node-a has"),
    ],
)
def test_a_process_must_fit_its_instance(where: str, value: object, words: str) -> None:
    content = deepcopy(CUT)
    content["pods"][0]["containers"][0]["processes"][0][where] = value
    with pytest.raises(UserError, match=words):
        parse_scenario(content)


def test_the_true_use_of_instances_equals_the_true_use_of_their_pods(cut: Simulation) -> None:
    start_ns, end_ns = EPOCH_NS, EPOCH_NS + 30_000_000_000
    instances = cut.instance_truth(start_ns, end_ns, "node-a")
    assert [one.profile for one in instances] == [
        "1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb", "7g.80gb"
    ]  # fmt: skip
    pods = cut.truth(start_ns, end_ns)
    ran = [instance.usage.busy_seconds for instance in instances]
    assert ran == pytest.approx([pod.busy_seconds for pod in pods] + [0, 0])
    joules = sum(one.usage.joules for one in instances)
    assert joules == pytest.approx(sum(pod.joules for pod in pods))
    early = cut.instance_truth(start_ns, start_ns + 1, "node-a")
    assert len(early) == 4


# From "Supported MIG Profiles" in NVIDIA's "Multi-Instance GPU User Guide": profiles by product and
# MiB of memory, each with the number of available instances.
GUIDE: dict[tuple[str, int], dict[str, int]] = {
    ("NVIDIA A30", 24_576): {"1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1},
    ("NVIDIA A100-SXM4-40GB", 40_960): {
        "1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1,
    },
    ("NVIDIA A100 80GB PCIe", 81_920): {
        "1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1,
    },
    ("NVIDIA H100 80GB HBM3", 81_559): {
        "1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1,
    },
    ("NVIDIA H100 NVL", 95_830): {
        "1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.47gb": 2, "4g.47gb": 1, "7g.94gb": 1,
    },
    ("NVIDIA GH200 480GB", 97_871): {
        "1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.48gb": 2, "4g.48gb": 1, "7g.96gb": 1,
    },
    ("NVIDIA H200", 143_771): {
        "1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1, "7g.141gb": 1,
    },
    ("NVIDIA B200", 183_359): {
        "1g.23gb": 7, "1g.45gb": 4, "2g.45gb": 3, "3g.90gb": 2, "4g.90gb": 1, "7g.180gb": 1,
    },
}  # fmt: skip
PROFILES = [(*board, name) for board, profiles in GUIDE.items() for name in profiles]


def cut_into(model: str, mebibytes: int, *instances: str) -> dict[str, Any]:
    gpus = {
        "model": model,
        "memory_bytes": mebibytes << 20,
        "mig": [{"instances": list(instances)}],
    }
    return {"name": "board", "nodes": [{"name": "node-a", "gpus": gpus}]}


@pytest.mark.parametrize(("model", "mebibytes", "profile"), PROFILES)
def test_a_gpu_has_as_many_instances_of_a_profile_as_nvidia_documents(
    model: str, mebibytes: int, profile: str, clock: ManualClock
) -> None:
    count = GUIDE[model, mebibytes][profile]
    with pytest.raises(UserError, check=has_words("gpus.mig")):
        parse_scenario(cut_into(model, mebibytes, *[profile] * (count + 1)))
    scenario = parse_scenario(cut_into(model, mebibytes, *[profile] * count))
    library = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a").nvml
    library.nvmlInit()
    gpu = library.nvmlDeviceGetHandleByIndex(0)
    found = list(instances(library, gpu).values())
    assert len(found) == count
    # The driver reserves some of the memory, and the name rounds up the rest.
    compute, _, memory = profile.removesuffix("gb").partition("g.")
    for one in found:
        attributes = library.nvmlDeviceGetAttributes_v2(one)
        assert attributes.gpuInstanceSliceCount == int(compute)
        assert attributes.memorySizeMB / 1024 == pytest.approx(int(memory), rel=0.04, abs=1)


@pytest.mark.parametrize(("model", "mebibytes"), GUIDE)
def test_a_gpu_has_the_slices_of_its_largest_profile(
    model: str, mebibytes: int, clock: ManualClock
) -> None:
    smallest = min(GUIDE[model, mebibytes])
    scenario = parse_scenario(cut_into(model, mebibytes, smallest))
    node = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a")
    board = node.gpus[0].facts.mig_gpu
    assert board is not None
    assert set(board.profiles) == set(GUIDE[model, mebibytes])
    slices = (4, 4) if model == "NVIDIA A30" else (7, 8)
    assert board.whole == slices
    node.nvml.nvmlInit()
    gpu = node.nvml.nvmlDeviceGetHandleByIndex(0)
    assert node.nvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == slices[0]
    # The agent, which knows the GPU only by its profiles, finds the same.
    answer = (
        NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns)
        .open()[0]
        .query(CallGroup.USAGE, SampleCursor())
    )
    assert (answer["compute_slices"], answer["memory_slices"]) == slices


@pytest.mark.parametrize(
    ("model", "profile", "words"),
    [
        ("NVIDIA A30", "1g.10gb", "for A30 with 24 GB; available: 1g.6gb, 2g.12gb, 4g.24gb"),
        ("NVIDIA H200", "1g.10gb", "unknown profile '1g.10gb' for H200"),
        ("NVIDIA L4", "1g.6gb", "does not support MIG"),
    ],
)
def test_a_profile_that_the_gpu_lacks_is_an_error_of_the_scenario(
    model: str, profile: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        parse_scenario(cut_into(model, 24_576, profile))
