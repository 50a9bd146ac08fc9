"""GPUs cut into instances: who is where, what NVML tells of it, and that shares sum to the GPU."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy

import pynvml
import pytest

from gpuledger.errors import UserError
from simulator.clock import ManualClock
from simulator.nvml import SimulatedNvml
from simulator.nvml.session import Handle
from simulator.scenario.load import parse_scenario
from simulator.simulation import Simulation
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
    # Both compute instances of the third GPU instance see the memory that they share.
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
def test_what_nvml_does_not_give_under_mig_is_not_supported(
    nvml: SimulatedNvml, gpu: Handle, call: Callable[..., object]
) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(nvml, gpu)
    assert raised.value.value == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_new_cut_makes_old_handles_invalid(
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
        ("instance", 4, "is cut into 4 instances"),
        ("instance", None, "is cut into 4 instances"),
        ("end_seconds", 21.0, "is cut anew while it runs"),
        ("memory_bytes", 20 * GIB, "its instance of GPU 0 of node-a has"),
    ],
)
def test_a_process_must_fit_its_instance(where: str, value: object, words: str) -> None:
    content = deepcopy(CUT)
    content["pods"][0]["containers"][0]["processes"][0][where] = value
    with pytest.raises(UserError, match=words):
        parse_scenario(content)


def test_what_ran_in_the_instances_is_what_the_pods_ran(cut: Simulation) -> None:
    start_ns, end_ns = EPOCH_NS, EPOCH_NS + 30_000_000_000
    instances = cut.instance_truth(start_ns, end_ns, "node-a")
    assert [one.profile for one in instances] == [
        "1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb", "7g.80gb"
    ]  # fmt: skip
    pods = cut.truth(start_ns, end_ns)
    ran = [one.usage.busy_seconds for one in instances]
    assert ran == pytest.approx([pod.busy_seconds for pod in pods] + [0, 0])
    joules = sum(one.usage.joules for one in instances)
    assert joules == pytest.approx(sum(pod.joules for pod in pods))
    early = cut.instance_truth(start_ns, start_ns + 1, "node-a")
    assert len(early) == 4
