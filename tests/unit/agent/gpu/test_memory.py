"""The memory of a GPU, also on drivers that do not report their own part separately."""
# ruff: noqa: ANN401  # ctypes' structs have no types

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pynvml
import pytest

from gpuledger_agent.core.gpu_sampler import GpuSampler
from gpuledger_agent.core.raw import CallGroup, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.nvidia.core import Memory, query_memory
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.inventory import Facts
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu
from tests.fakes.nvml_pointers import Function, play, referent_of
from tests.ticks import tick_gpu

V1, V2 = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"
NEWER, OLDER = Memory(1000, 300, 50), Memory(1000, 350, None)
REFUSALS = [
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
]


class Driver:
    """A GPU with 1000 bytes: 50 reserved by the driver and 300 in use; counts its calls."""

    def __init__(self, *, newer: int = 0, older: int = 0) -> None:
        self.codes = {V1: older, V2: newer}
        self.calls: Counter[str] = Counter()

    def functions(self) -> Mapping[str, Function]:
        return {V1: self._older, V2: self._newer}

    def _older(self, _device: Any, reference: Any) -> int:
        self.calls[V1] += 1
        memory = referent_of(reference)
        memory.total, memory.used, memory.free = 1000, 350, 650
        return self.codes[V1]

    def _newer(self, _device: Any, reference: Any) -> int:
        self.calls[V2] += 1
        memory = referent_of(reference)
        memory.total, memory.reserved, memory.used, memory.free = 1000, 50, 300, 650
        return self.codes[V2]


def test_the_drivers_reserve_is_reported_separately_if_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    client = play(monkeypatch, driver.functions())
    assert [query_memory(client) for _ in range(2)] == [NEWER] * 2
    assert driver.calls == {V2: 2}


@pytest.mark.parametrize("code", REFUSALS)
def test_an_older_driver_is_queried_by_the_older_call_after_one_try_of_the_newer(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    driver = Driver(newer=code)
    client = play(monkeypatch, driver.functions())
    assert [query_memory(client) for _ in range(3)] == [OLDER] * 3
    assert driver.calls == {V2: 1, V1: 3}


def test_a_library_without_the_newer_function_uses_the_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = play(monkeypatch, {V1: Driver().functions()[V1]})
    assert query_memory(client) == OLDER
    assert client.outcomes == {(V1, pynvml.nvmlMemory_v2): "FunctionNotFound", (V1,): None}


def test_one_failed_call_does_not_change_the_meaning_of_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(newer=pynvml.NVML_ERROR_TIMEOUT)
    client = play(monkeypatch, driver.functions())
    assert query_memory(client) == Memory()
    driver.codes[V2] = 0
    assert query_memory(client) == NEWER
    assert driver.calls == {V2: 2}


def test_if_neither_call_is_supported_neither_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(newer=REFUSALS[0], older=REFUSALS[1])
    client = play(monkeypatch, driver.functions())
    assert [query_memory(client) for _ in range(3)] == [Memory(is_unified=True)] * 3
    assert driver.calls == {V2: 1, V1: 1}


@pytest.mark.parametrize(
    ("code", "is_unified"),
    [
        pytest.param(pynvml.NVML_ERROR_NOT_SUPPORTED, True, id="no memory of its own"),
        pytest.param(pynvml.NVML_ERROR_NO_PERMISSION, False, id="it is hidden"),
        pytest.param(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, False, id="the call is missing"),
        pytest.param(pynvml.NVML_ERROR_TIMEOUT, False, id="it failed"),
    ],
)
def test_a_gpu_without_memory_of_its_own_is_marked_unified(
    monkeypatch: pytest.MonkeyPatch, code: int, *, is_unified: bool
) -> None:
    client = play(monkeypatch, Driver(newer=code, older=code).functions())
    assert query_memory(client) == Memory(is_unified=is_unified)


def test_a_reading_of_an_older_driver_has_no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    client = play(monkeypatch, {V1: Driver().functions()[V1]})
    gpu = NvidiaGpu(library=pynvml, handle=client.handle, uuid="GPU-0", index=0)
    answers = RawGpuSample(uuid="GPU-0", index=0, **gpu.query(CallGroup.USAGE, SampleCursor()))
    reading = tick_gpu(GpuSampler(), answers, now_ns=0).reading
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (1000, 350)
    assert reading.memory_reserved_bytes is None


@pytest.mark.parametrize("code", [0, *REFUSALS])
def test_the_size_in_the_inventory_works_with_any_driver(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    client: DeviceClient = play(monkeypatch, Driver(newer=code).functions())
    assert Facts(client, uuid="GPU-0", index=0, peers=()).query().memory_total_bytes == 1000
