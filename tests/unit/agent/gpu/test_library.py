"""The seam to NVML: its errors end here, and values that it does not give are absent."""
# ruff: noqa: ANN401  # the structs of nvidia-ml-py have no types

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuledger.records import ProcessKind
from gpuledger_agent.core.incidents import Bus
from gpuledger_agent.core.raw import (
    CallGroup,
    ListedProcess,
    ProcessUtilizationSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.gpu.nvidia.kernel import list_kernel_gpus
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from gpuledger_simulator.clock import ManualClock
from tests.errors import has_words
from tests.fakes.nvml import NO_INSTANCE, Altered, answering, play_node
from tests.fakes.nvml_pointers import play_gpu, referent_of
from tests.ticks import query_all

UTILIZATION = "nvmlDeviceGetProcessUtilization"
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"


SAMPLES = "nvmlDeviceGetSamples"
LISTS = {
    "compute": COMPUTE,
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}
CLOCKS = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}


def a_gpu(**functions: Any) -> tuple[Altered, NvidiaGpu]:
    """Return a GPU with these functions in addition to those that every GPU has."""
    library = answering(
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=80_000, used=30_000, reserved=500),
        nvmlDeviceGetPowerUsage=250_500,
        nvmlDeviceGetTotalEnergyConsumption=1000,
        **{name: [] for name in LISTS.values()},
    )
    library.functions |= functions
    return library, NvidiaGpu(library=library, handle=object(), uuid="GPU-0", index=0)


def listed(*pids: int, memory: int | None = 100) -> list[Any]:
    return [
        SimpleNamespace(
            pid=pid, usedGpuMemory=memory, gpuInstanceId=NO_INSTANCE, computeInstanceId=NO_INSTANCE
        )
        for pid in pids
    ]


def sampled(*samples: tuple[int, int]) -> Callable[..., Any]:
    """Return a function with (time stamp, percent) samples in the driver's buffers."""
    return lambda _handle, _kind, last_seen: (
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT,
        [
            SimpleNamespace(timeStamp=stamp, sampleValue=SimpleNamespace(uiVal=percent))
            for stamp, percent in samples
            if stamp > last_seen
        ],
    )


def used(*samples: tuple[int, int, int]) -> Callable[..., Any]:
    """Return a function with (pid, time stamp, percent) samples in the driver's buffer."""
    return lambda _handle, last_seen: [
        SimpleNamespace(
            pid=pid, timeStamp=stamp, smUtil=percent, memUtil=percent // 2, encUtil=0, decUtil=0
        )
        for pid, stamp, percent in samples
        if stamp > last_seen
    ]


def failing(*codes: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises each of these errors once."""
    left = [*codes]

    def call(*arguments: Any) -> Any:
        if left:
            raise pynvml.NVMLError(left.pop(0))
        return then(*arguments)

    return call


def test_all_values_are_read_in_the_drivers_own_units() -> None:
    _, gpu = a_gpu(
        nvmlDeviceGetSamples=sampled((1, 10), (2, 20), (3, 30)),
        nvmlDeviceGetComputeRunningProcesses_v3=lambda _: listed(7),
        nvmlDeviceGetProcessUtilization=used((7, 2, 9), (7, 3, 8)),
        nvmlDeviceGetClockInfo=lambda _, kind: CLOCKS[kind],
    )
    answer = query_all(gpu, SampleCursor(gpu_us=1, memory_us=2, process_us=2))
    assert answer.uuid == "GPU-0"
    assert answer.samples == (
        UtilizationSample(timestamp_us=2, percent=20),
        UtilizationSample(timestamp_us=3, percent=30),
    )
    assert answer.memory_samples == (UtilizationSample(timestamp_us=3, percent=30),)
    assert (answer.memory_total_bytes, answer.memory_used_bytes) == (80_000, 30_000)
    assert (answer.power_milliwatts, answer.energy_millijoules) == (250_500, 1000)
    assert answer.sensors["sm_clock_hertz"] == 1980
    assert answer.sensors["memory_clock_hertz"] == 2619
    assert answer.processes == (ListedProcess(pid=7, kind=ProcessKind.COMPUTE, memory_bytes=100),)
    assert answer.process_samples == (
        ProcessUtilizationSample(pid=7, timestamp_us=3, sm_percent=8, memory_percent=4),
    )


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
        pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND),
        pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION),
        pynvml.NVMLLibraryMismatchError("no such symbol"),
    ],
)
def test_an_unsupported_value_is_absent_and_queried_once(error: Any) -> None:
    library, gpu = a_gpu()
    library.answer("nvmlDeviceGetPowerUsage", error)
    assert [query_all(gpu).power_milliwatts for _ in range(3)] == [None] * 3
    assert library.calls["nvmlDeviceGetPowerUsage"] == 1


def test_a_value_that_fails_now_is_absent_now_and_queried_again() -> None:
    _, gpu = a_gpu(
        nvmlDeviceGetPowerUsage=failing(pynvml.NVML_ERROR_TIMEOUT, then=lambda _: 250_500)
    )
    assert query_all(gpu).power_milliwatts is None
    assert query_all(gpu).power_milliwatts == 250_500


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (2, (ProcessUtilizationSample(pid=7, timestamp_us=3, sm_percent=8, memory_percent=4),)),
        (3, None),
    ],
)
def test_a_list_that_grew_during_the_read_is_tried_three_times(
    failures: int, expected: object
) -> None:
    errors = [pynvml.NVML_ERROR_INSUFFICIENT_SIZE] * failures
    _, gpu = a_gpu(nvmlDeviceGetProcessUtilization=failing(*errors, then=used((7, 3, 8))))
    assert query_all(gpu).process_samples == expected
    assert query_all(gpu).process_samples is not None


@pytest.mark.parametrize("error", [pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND])
def test_no_samples_are_an_empty_list_and_not_an_error(error: int) -> None:
    library, gpu = a_gpu()
    library.refuse(UTILIZATION, error)
    assert query_all(gpu).process_samples == ()
    assert query_all(gpu).process_samples == ()


def test_a_list_that_failed_leaves_the_processes_unknown() -> None:
    library, gpu = a_gpu()
    library.answer(LISTS["graphics"], listed(8))
    library.refuse(COMPUTE, pynvml.NVML_ERROR_TIMEOUT)
    assert query_all(gpu).processes is None


def test_a_list_that_is_not_supported_counts_as_empty() -> None:
    library, gpu = a_gpu()
    library.answer(LISTS["graphics"], listed(8, memory=None))
    library.refuse(COMPUTE, pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert query_all(gpu).processes == (
        ListedProcess(pid=8, kind=ProcessKind.GRAPHICS, memory_bytes=None),
    )


def test_the_latest_rates_are_read_even_without_samples() -> None:
    library, gpu = a_gpu(nvmlDeviceGetSamples=sampled((1, 10)))
    assert query_all(gpu).percent == 50
    library.refuse(SAMPLES, pynvml.NVML_ERROR_NOT_SUPPORTED)
    answer = query_all(gpu)
    assert (answer.samples, answer.percent, answer.memory_percent) == (None, 50, 25)


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_UNINITIALIZED,
    ],
)
def test_a_lost_gpu_requires_a_restart_of_the_library(code: int) -> None:
    library, gpu = a_gpu()
    library.refuse("nvmlDeviceGetMemoryInfo", code)
    with pytest.raises(SourceLostError, match="nvmlDeviceGetMemoryInfo"):
        query_all(gpu)


def test_a_single_call_with_an_unknown_error_is_not_a_lost_gpu() -> None:
    library, gpu = a_gpu()
    library.refuse("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN)
    answer = query_all(gpu)
    assert (answer.power_milliwatts, answer.energy_millijoules) == (None, 1000)


def test_a_gpu_that_is_lost_at_the_start_does_not_affect_the_others() -> None:
    node = play_node(ManualClock(start_ns=0), gpus=2)
    library = Altered(node.nvml)
    library.lost.add(0)
    nvml = NvmlSession(library)
    assert [(gpu.uuid, gpu.index) for gpu in nvml.open()] == [(node.gpus[1].facts.uuid, 1)]
    assert len(nvml.unfound) == 1


def test_a_gpu_that_does_not_report_its_uuid_is_named_by_its_slot() -> None:
    library = Altered(play_node(ManualClock(start_ns=0)).nvml)
    library.refuse("nvmlDeviceGetUUID", pynvml.NVML_ERROR_GPU_IS_LOST)
    library.answer("nvmlDeviceGetPciInfo_v3", SimpleNamespace(busId="00000000:1B:00.0"))
    nvml = NvmlSession(library)
    nvml.open()
    assert nvml.unfound == {0: "PCI:0000:1b:00"}


FIRST, SECOND = (0, 0x1B, 0), (0, 0x2B, 0)
"""The PCI addresses of the simulator's first GPUs."""


@pytest.mark.parametrize(
    ("law", "kernel", "name"),
    [
        ("by the kernel's UUID", {FIRST: "GPU-a", SECOND: "GPU-b"}, "GPU-a"),
        ("by its slot, if the kernel has no UUID", {FIRST: None, SECOND: None}, "PCI:0000:1b:00"),
        ("by its index, if several slots are left", {FIRST: "GPU-a", (0, 1, 0): None}, "INDEX:0"),
        ("by its index, without a kernel's list", {}, "INDEX:0"),
    ],
)
def test_a_gpu_without_a_handle_is_named_as_exactly_as_possible(
    law: str, kernel: Mapping[Bus, str | None], name: str
) -> None:
    library = Altered(play_node(ManualClock(start_ns=0), gpus=2).nvml)
    library.lost.add(0)
    nvml = NvmlSession(library, kernel_gpus=lambda: kernel)
    nvml.open()
    assert nvml.unfound == {0: name}, law


def test_a_gpu_that_has_answered_before_keeps_its_uuid() -> None:
    node = play_node(ManualClock(start_ns=0), gpus=2)
    library = Altered(node.nvml)
    nvml = NvmlSession(library)
    nvml.open()
    library.lost.add(0)
    nvml.open()
    assert nvml.unfound == {0: node.gpus[0].facts.uuid}


def test_a_list_of_the_kernel_that_hangs_costs_only_the_name() -> None:
    library = Altered(play_node(ManualClock(start_ns=0), gpus=2).nvml)
    library.lost.add(0)
    released = threading.Event()

    def hang() -> Mapping[Bus, str | None]:
        released.wait()
        return {}

    nvml = NvmlSession(library, kernel_gpus=hang)
    assert len(nvml.open()) == 1
    assert nvml.unfound == {0: "INDEX:0"}
    released.set()


def test_a_lost_gpu_is_probed_by_its_pci_address() -> None:
    node = play_node(ManualClock(start_ns=0), gpus=2)
    library = Altered(node.nvml)
    nvml = NvmlSession(library, kernel_gpus=lambda: {FIRST: "GPU-a", SECOND: None})
    library.lost.add(0)
    nvml.open()
    assert not nvml.is_answering("GPU-a")
    library.lost.clear()
    assert nvml.is_answering("GPU-a")
    assert ("nvmlDeviceGetHandleByPciBusId",) in library.requests
    assert not nvml.is_answering("GPU-unknown")


@pytest.mark.parametrize(
    "uuid", [ValueError("a bug"), "", pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)]
)
def test_a_gpu_whose_uuid_cannot_be_read_does_not_affect_the_others(uuid: object) -> None:
    node = play_node(ManualClock(start_ns=0), gpus=2)

    def give_uuid(handle: Any) -> object:
        if handle.index:
            return node.gpus[handle.index].facts.uuid
        if isinstance(uuid, Exception):
            raise uuid
        return uuid

    nvml = NvmlSession(Altered(node.nvml, nvmlDeviceGetUUID=give_uuid))
    assert [gpu.index for gpu in nvml.open()] == [1]
    assert nvml.unfound == {0: "PCI:0000:1b:00"}


def test_the_kernels_files_have_the_uuids_of_initialized_gpus(tmp_path: Path) -> None:
    uuid = "GPU-411b6c67-9a0f-5e2b-8f5e-2f2a9a6b1c3d"
    for address, written in (
        ("0000:1b:00.0", uuid),
        ("0000:2b:00.0", "GPU-????????-????-????-????-????????????"),
        ("0000:3b:00.0", None),
        ("readme", uuid),
    ):
        folder = tmp_path / "driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        if written:
            (folder / "information").write_text(
                f"Model: \t\t NVIDIA H100\nGPU UUID: \t {written}\nBus Type: \t PCIe\n"
            )
    third = (0, 0x3B, 0)
    assert list_kernel_gpus(tmp_path) == {FIRST: uuid, SECOND: None, third: None}
    assert list_kernel_gpus(tmp_path / "missing") == {}


def test_a_gpu_that_hangs_at_the_start_does_not_affect_the_others() -> None:
    node = play_node(ManualClock(start_ns=0), gpus=2)
    released = threading.Event()
    requested: list[int] = []

    def give_uuid(handle: Any) -> Any:
        requested.append(handle.index)
        if handle.index == 0:
            released.wait()
        return node.gpus[handle.index].facts.uuid

    nvml = NvmlSession(Altered(node.nvml, nvmlDeviceGetUUID=give_uuid), find_seconds=1.0)
    for _ in range(2):
        assert [gpu.index for gpu in nvml.open()] == [1]
    assert len(nvml.unfound) == 1
    assert sorted(requested) == [0, 1, 1], "no second thread hangs"
    assert nvml.is_stuck
    released.set()
    while len(nvml.open()) < 2:
        pass
    assert not nvml.is_stuck


def test_a_missing_library_is_reported_with_its_error() -> None:
    library = Altered()
    library.refuse("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(SourceLostError, check=has_words("nvmlInit")):
        NvmlSession(library).open()


# The real functions of nvidia-ml-py, over a library of nothing but function pointers.


def test_the_real_wrapper_over_a_library_without_functions_returns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = query_all(play_gpu(monkeypatch, {}))
    assert (answer.samples, answer.memory_total_bytes, answer.processes) == (None, None, None)


def test_the_real_wrapper_treats_success_without_rows_as_an_error_and_we_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = {UTILIZATION: lambda *_: pynvml.NVML_SUCCESS}
    assert query_all(play_gpu(monkeypatch, functions)).process_samples == ()


def test_the_real_wrapper_is_called_again_if_the_list_grew_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    answers = iter([grown, grown, grown, 0])

    def list_processes(handle: Any, count: Any, processes: Any) -> int:
        referent_of(count).value = 1
        if processes is not None:
            processes[0].pid = 7
            processes[0].usedGpuMemory = 2**64 - 1
            processes[0].gpuInstanceId = processes[0].computeInstanceId = 2**32 - 1
        return next(answers)

    gpu = play_gpu(monkeypatch, {COMPUTE: list_processes})
    assert query_all(gpu).processes == (
        ListedProcess(pid=7, kind=ProcessKind.COMPUTE, memory_bytes=None),
    )


class Lists:
    """A GPU whose lists are queried as in ticks."""

    def __init__(self) -> None:
        self.library, self.opened = a_gpu()
        self.put("compute", 1)
        self.tick()

    def put(self, name: str, *pids: int) -> None:
        """Let a list have these processes from now on."""
        self.library.answer(LISTS[name], listed(*pids))

    def tick(self) -> tuple[set[int] | None, int]:
        """Return the pids of all lists, and how many of the rarely queried lists were queried."""
        before = sum(self.library.calls[LISTS[name]] for name in ("graphics", "mps"))
        processes = self.opened.query(CallGroup.USAGE, SampleCursor())["processes"]
        requested = sum(self.library.calls[LISTS[name]] for name in ("graphics", "mps")) - before
        return (None if processes is None else {one.pid for one in processes}), requested


def test_empty_lists_are_queried_at_first_and_then_only_with_the_readings() -> None:
    lists = Lists()
    for _ in range(5):
        assert lists.tick() == ({1}, 0)
    lists.opened.query(CallGroup.READINGS, SampleCursor())
    assert lists.tick() == ({1}, 2)
    assert lists.tick() == ({1}, 0)


def test_a_list_with_a_process_is_queried_in_each_tick_until_it_is_empty() -> None:
    lists = Lists()
    lists.put("graphics", 2)
    lists.opened.query(CallGroup.READINGS, SampleCursor())
    assert lists.tick() == ({1, 2}, 2)
    assert lists.tick() == ({1, 2}, 1), "the empty one is still not queried"
    lists.put("graphics")
    assert lists.tick() == ({1}, 1), "the end is seen at once"


@pytest.mark.parametrize(
    ("compute", "used_bytes"),
    [
        pytest.param({1, 3}, 30_000, id="a new process on the compute list"),
        pytest.param(set(), 30_000, id="a process gone from the compute list"),
        pytest.param({1}, 31_000, id="memory in use"),
    ],
)
def test_a_change_makes_all_lists_be_queried_at_once(compute: set[int], used_bytes: int) -> None:
    lists = Lists()
    assert lists.tick() == ({1}, 0)
    lists.put("compute", *compute)
    lists.put("graphics", 2)
    lists.put("mps", 4)
    memory = SimpleNamespace(total=80_000, used=used_bytes, reserved=500)
    lists.library.answer("nvmlDeviceGetMemoryInfo", memory)
    assert lists.tick() == ({2, 4, *compute}, 2)


def test_without_the_memory_in_use_all_lists_are_queried_in_each_tick() -> None:
    lists = Lists()
    lists.library.refuse("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_NOT_SUPPORTED)
    lists.tick()
    lists.put("graphics", 2)
    assert lists.tick() == ({1, 2}, 2)


def test_a_list_that_fails_is_not_an_empty_one() -> None:
    lists = Lists()
    lists.opened.query(CallGroup.READINGS, SampleCursor())
    lists.library.refuse(LISTS["graphics"], pynvml.NVML_ERROR_TIMEOUT)
    assert lists.tick()[0] is None
    lists.put("graphics", 2)
    assert lists.tick() == ({1, 2}, 2), "it is queried again at once"


def test_without_the_compute_list_the_others_are_queried_in_each_tick() -> None:
    lists = Lists()
    lists.library.refuse(COMPUTE, pynvml.NVML_ERROR_NOT_SUPPORTED)
    lists.tick()
    lists.put("graphics", 2)
    assert lists.tick()[0] == {2}
