"""Readings of the played GPUs, compared with the truth: chip counters, fields and health."""
# ruff: noqa: ANN401  # the binding's structs have no types

from contextlib import suppress
from ctypes import byref
from typing import Any

import pynvml
import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.nvml.session import Handle, MigHandle
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.unit.simulator.conftest import EPOCH_NS
from tests.unit.simulator.mig_builders import cut_simulation

H100 = "NVIDIA H100 80GB HBM3"
SECOND_NS = 1_000_000_000


def run(clock: ManualClock, *ailments: dict[str, Any], model: str = H100) -> Simulation:
    mix = {"sm_ratio": 0.5, "nvlink_bytes_per_second": 1e9, "pcie_bytes_per_second": 2**30}
    process = {"command": "train", "gpus": [0], "memory_bytes": 1 << 30, "load": {"mix": mix}}
    group = {"model": model, "ailments": list(ailments)}
    content = {
        "name": "one",
        "nodes": [{"name": "n", "gpus": group}],
        "host_processes": [{"node": "n", **process}],
    }
    return Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)


def opened(simulation: Simulation) -> tuple[SimulatedNvml, Handle]:
    library = next(iter(simulation.nodes.values())).nvml
    library.nvmlInit()
    return library, library.nvmlDeviceGetHandleByIndex(0)


def field(nvml: SimulatedNvml, gpu: Handle, number: int, scope: int = 0) -> Any:
    (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [(number, scope)])
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    is_long = value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    return value.value.ullVal if is_long else value.value.uiVal


def metrics(nvml: SimulatedNvml, older: Any, newer: Any, *numbers: int) -> dict[int, Any]:
    requested = pynvml.c_nvmlGpmMetricsGet_t()
    requested.version, requested.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(numbers)
    requested.sample1, requested.sample2 = older, newer
    for place, number in enumerate(numbers):
        requested.metrics[place].metricId = number
    nvml.nvmlGpmMetricsGet(requested)
    slots = requested.metrics[: len(numbers)]
    return {slot.metricId: None if slot.nvmlReturn else slot.value for slot in slots}


def test_the_chips_counters_are_the_truth_between_the_two_samples(clock: ManualClock) -> None:
    simulation = run(clock)
    nvml, gpu = opened(simulation)
    clock.advance(1)
    older = nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())
    clock.advance(2)
    newer = nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())
    clock.advance(5)
    busy = simulation.node("n").gpus[0].device_busy_ns(SECOND_NS, 3 * SECOND_NS) / (2 * SECOND_NS)
    found = metrics(nvml, older, newer, 1, 2, 10, 20, 61, 100)
    assert found[1] == pytest.approx(100 * busy)
    assert found[2] == pytest.approx(50 * busy)
    assert found[10] == pytest.approx(40 * busy)
    assert found[20] == pytest.approx(1024 * busy)
    assert found[61] == pytest.approx(1e9 / 2**20 * busy)
    assert found[100] is None


def test_samples_too_close_together_or_not_taken_are_rejected(clock: ManualClock) -> None:
    nvml, gpu = opened(run(clock))
    older = nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())
    clock.advance(0.09)
    newer = nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())
    for pair in ((older, newer), (older, nvml.nvmlGpmSampleAlloc())):
        with pytest.raises(pynvml.NVMLError):
            metrics(nvml, *pair, 1)
    nvml.nvmlGpmSampleFree(newer)
    with pytest.raises(pynvml.NVMLError):
        nvml.nvmlGpmSampleFree(newer)


@pytest.mark.parametrize("model", ["NVIDIA L4", "NVIDIA A100-SXM4-80GB", "Tesla T4"])
def test_only_hopper_and_newer_have_chip_counters(clock: ManualClock, model: str) -> None:
    nvml, gpu = opened(run(clock, model=model))
    assert not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice
    with pytest.raises(pynvml.NVMLError_NotSupported):
        nvml.nvmlGpmSampleGet(gpu, nvml.nvmlGpmSampleAlloc())


def test_the_counters_of_an_instance_are_those_of_its_processes(clock: ManualClock) -> None:
    simulation = cut_simulation(clock)
    nvml, gpu = opened(simulation)
    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
    assert isinstance(instance, MigHandle)
    number = nvml.nvmlDeviceGetGpuInstanceId(instance)
    buffers = [nvml.nvmlGpmSampleAlloc() for _ in range(4)]
    older = [nvml.nvmlGpmMigSampleGet(gpu, number, buffers[0]),
             nvml.nvmlGpmSampleGet(instance, buffers[1])]  # fmt: skip
    clock.advance(1)
    newer = [nvml.nvmlGpmMigSampleGet(gpu, number, buffers[2]),
             nvml.nvmlGpmSampleGet(instance, buffers[3])]  # fmt: skip
    train = next(one for one in simulation.processes if one.spec.command == "train")
    busy = simulation.node("node-a").gpus[0].busy_ns(train, 0, SECOND_NS) / SECOND_NS
    for pair in zip(older, newer, strict=True):
        assert metrics(nvml, *pair, 1)[1] == pytest.approx(100 * busy)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        nvml.nvmlGpmMigSampleGet(gpu, 99, buffers[0])


def test_a_field_that_a_gpu_lacks_has_its_own_error_code(clock: ManualClock) -> None:
    nvml, gpu = opened(run(clock, model="NVIDIA L4"))
    values = nvml.nvmlDeviceGetFieldValues(gpu, [74, 82, 9999, (138, 0)])
    assert [value.nvmlReturn for value in values] == [
        pynvml.NVML_SUCCESS,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ]


def test_the_byte_counters_rise_with_the_kernels(clock: ManualClock) -> None:
    simulation = run(clock)
    nvml, gpu = opened(simulation)
    clock.advance(4)
    busy = simulation.node("n").gpus[0].device_busy_ns(0, 4 * SECOND_NS) / SECOND_NS
    assert field(nvml, gpu, 197) == pytest.approx(2**30 * busy)
    assert field(nvml, gpu, 139, 0xFFFFFFFF) == pytest.approx(1e9 / 1024 * busy, abs=1)


@pytest.mark.parametrize(("model", "links"), [(H100, 18), ("NVIDIA A100-SXM4-80GB", 12)])
def test_the_bytes_of_the_links_add_up_to_their_total(
    clock: ManualClock, model: str, links: int
) -> None:
    nvml, gpu = opened(run(clock, model=model))
    assert field(nvml, gpu, 91) == links
    before = [0] * links
    for _ in range(5):
        clock.advance(0.377)
        carried = [field(nvml, gpu, 138, link) for link in range(links)]
        assert sum(carried) == field(nvml, gpu, 138, 0xFFFFFFFF)
        assert all(now >= was for now, was in zip(carried, before, strict=True))
        before = carried
    assert min(before) > 0
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        field(nvml, gpu, 138, links)


def test_a_gpu_without_links_has_no_number_of_links(clock: ManualClock) -> None:
    nvml, gpu = opened(run(clock, model="NVIDIA L4"))
    with pytest.raises(pynvml.NVMLError_NotSupported):
        field(nvml, gpu, 91)


def test_an_ailment_slows_the_clocks_while_it_lasts(clock: ManualClock) -> None:
    ailment = {"throttle": "hardware_thermal", "start_seconds": 2, "end_seconds": 5}
    nvml, gpu = opened(run(clock, ailment))
    seen = []
    for _ in range(7):
        reported = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        seen.append((reported, field(nvml, gpu, 75) / 1e9, field(nvml, gpu, 270) / 1e9))
        clock.advance(1)
    assert [reported for reported, _, _ in seen] == [0, 0, 0x48, 0x48, 0x48, 0, 0]
    assert [held for _, held, _ in seen] == [0, 0, 0, 1, 2, 3, 3]
    assert [held for _, _, held in seen] == [0, 0, 0, 1, 2, 3, 3]
    assert field(nvml, gpu, 74) == 0


def test_counts_of_an_ailment_stay_and_its_states_end(clock: ManualClock) -> None:
    ailment = {
        "start_seconds": 2, "end_seconds": 5, "recovery": "reset", "ecc_uncorrected": 2,
        "sram_uncorrected": 4, "rows_remapped": 3, "remap_pending": True, "pcie_replays": 7,
    }  # fmt: skip
    nvml, gpu = opened(run(clock, ailment))

    def read_health() -> tuple[Any, ...]:
        sram = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        nvml.nvmlDeviceGetSramEccErrorStatus(gpu, byref(sram))
        banks = nvml.nvmlDeviceGetRowRemapperHistogram(gpu)
        return (
            field(nvml, gpu, 230),
            nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, pynvml.NVML_VOLATILE_ECC),
            (sram.aggregateUncSecDed, sram.bThresholdExceeded),
            nvml.nvmlDeviceGetRemappedRows(gpu),
            (banks.max, banks.high),
            nvml.nvmlDeviceGetPcieReplayCounter(gpu),
        )

    assert read_health() == (0, 0, (0, 0), (0, 0, 0, 0), (640, 0), 0)
    clock.advance(3)
    assert read_health() == (1, 2, (4, 1), (0, 3, 1, 0), (637, 3), 7)
    clock.advance(3)
    assert read_health() == (0, 2, (4, 1), (0, 3, 0, 0), (637, 3), 7)


@pytest.mark.parametrize(
    ("model", "call"),
    [
        ("Tesla T4", lambda nvml, gpu: nvml.nvmlDeviceGetRemappedRows(gpu)),
        ("NVIDIA L4", lambda nvml, gpu: nvml.nvmlDeviceGetTemperatureThreshold(gpu, 1)),
        (H100, lambda nvml, gpu: nvml.nvmlDeviceGetFanSpeed(gpu)),
        (H100, lambda nvml, gpu: nvml.nvmlDeviceGetInforomVersion(gpu, 2)),
        ("Tesla T4", lambda nvml, gpu: field(nvml, gpu, 186)),
        (H100, lambda nvml, gpu: field(nvml, gpu, 29)),
    ],
)
def test_values_that_an_architecture_lacks_are_not_supported(
    clock: ManualClock, model: str, call: Any
) -> None:
    nvml, gpu = opened(run(clock, model=model))
    with pytest.raises(pynvml.NVMLError_NotSupported):
        call(nvml, gpu)


@pytest.mark.parametrize(
    ("model", "has"),
    [
        ("NVIDIA A100-SXM4-80GB", {38, 52}),
        (H100, {161, 165, 173}),
        ("NVIDIA B200", {165, 173, 206, 214, 222, 250}),
        ("NVIDIA L4", set()),
    ],
)
def test_each_generation_of_links_rejects_the_fields_of_the_others(
    clock: ManualClock, model: str, has: set[int]
) -> None:
    nvml, gpu = opened(run(clock, model=model))
    answered = set()
    for number in (38, 52, 161, 165, 173, 206, 214, 222, 250):
        with suppress(pynvml.NVMLError_NotSupported):
            field(nvml, gpu, number)
            answered.add(number)
    assert answered == has


def test_a_pcie_link_is_slow_on_an_idle_gpu_and_below_its_capability_in_a_fault(
    clock: ManualClock,
) -> None:
    fault = {"start_seconds": 2, "end_seconds": 4, "pcie_width": 4, "pcie_generation": 3}
    content = {
        "name": "one",
        "nodes": [{"name": "n", "gpus": {"model": H100, "ailments": [fault]}}],
        "host_processes": [
            {"node": "n", "command": "train", "gpus": [0], "memory_bytes": 1, "start_seconds": 1}
        ],
    }
    nvml, gpu = opened(Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock))
    seen = []
    for _ in range(5):
        seen.append(
            (
                nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
                nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            )
        )
        clock.advance(1)
    assert seen == [(1, 16), (5, 16), (3, 4), (3, 4), (5, 16)]
    maximum = nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
    assert maximum == (5, 16)


def test_the_limits_are_those_of_the_product(clock: ManualClock) -> None:
    nvml, gpu = opened(run(clock))
    assert nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == 700_000
    assert nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu) == [200_000, 700_000]
    assert nvml.nvmlDeviceGetTemperatureThreshold(gpu, 1) == 89
