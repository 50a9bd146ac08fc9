"""The driver's event sets, through the real functions of nvidia-ml-py over played ones."""
# ruff: noqa: ANN401  # ctypes' objects have no types

from ctypes import POINTER, c_int, cast
from typing import Any

import pynvml
import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.nvidia.events import KINDS, WANTED, NvmlGpuEvents
from gpuledger_agent.gpu.protocol import FailedError, GpuLostError, UnsupportedError
from gpuledger_agent.metrics import EVENT_SET_FAILURES
from gpuledger_simulator.clock import ManualClock
from tests.fakes.nvml_pointers import CLibrary
from tests.metric_values import value_of
from tests.unit.agent.core.incidents.builders import (
    EPOCH_NS,
    SUCCESS,
    Device,
    device,
    fails,
    supports,
    v2,
    v3,
)

ALL = 0xFFFF


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> CLibrary:
    made = CLibrary(monkeypatch)
    made.functions |= {
        "nvmlEventSetCreate": lambda _set: SUCCESS,
        "nvmlEventSetFree": lambda _set: SUCCESS,
        "nvmlDeviceGetSupportedEventTypes": supports(ALL),
        "nvmlDeviceRegisterEvents": lambda *_: SUCCESS,
    }
    return made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


def opened(*devices: Device, clock: ManualClock) -> NvmlGpuEvents:
    return NvmlGpuEvents(pynvml, devices, clock=clock)


def test_version_3_gives_the_drivers_own_time(functions: CLibrary, clock: ManualClock) -> None:
    stamp_us = (EPOCH_NS - NS_PER_SECOND) // 1000
    functions.functions["nvmlEventSetWait_v3"] = v3(
        "GPU-1", 0x8, eventData=79, timestampUsec=stamp_us, gpuInstanceId=9, computeInstanceId=0
    )

    assert opened(device("GPU-1"), clock=clock).wait(0) == Detection(
        kind="xid",
        gpu_uuid="GPU-1",
        time_ns=EPOCH_NS - NS_PER_SECOND,
        source="nvml",
        xid=79,
        gpu_instance=9,
        compute_instance=0,
    )


@pytest.mark.parametrize("stamp_us", [0, 18_000_000_000, 2**63])
def test_a_stamp_from_another_clock_is_replaced_by_the_time_of_receipt(
    functions: CLibrary, clock: ManualClock, stamp_us: int
) -> None:
    functions.functions["nvmlEventSetWait_v3"] = v3("GPU-1", 0x8, timestampUsec=stamp_us)

    seen = opened(device("GPU-1"), clock=clock).wait(0)

    assert seen is not None
    assert seen.time_ns == EPOCH_NS


@pytest.mark.parametrize(
    "refusal", [pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT]
)
def test_without_version_3_events_have_the_time_of_receipt_and_it_is_tried_once(
    functions: CLibrary, clock: ManualClock, refusal: int
) -> None:
    one, other = device("GPU-1"), device("GPU-22")
    functions.functions["nvmlEventSetWait_v3"] = fails(refusal)
    functions.functions["nvmlEventSetWait_v2"] = v2(other.handle, 0x8, 31)
    events = opened(one, other, clock=clock)

    assert events.wait(0) == Detection(
        kind="xid", gpu_uuid="GPU-22", time_ns=EPOCH_NS, source="nvml", xid=31
    )
    events.wait(0)
    assert functions.calls.count("nvmlEventSetWait_v3") == 1


def test_the_uuid_of_an_unregistered_handle_is_queried_from_the_driver(
    functions: CLibrary, clock: ManualClock
) -> None:
    def name(_handle: Any, text: Any, _size: Any) -> int:
        text.value = b"GPU-333"
        return SUCCESS

    functions.functions["nvmlEventSetWait_v2"] = v2(device("GPU-333").handle, 0x8, 31)
    unknown = opened(device("GPU-1"), clock=clock).wait(0)
    functions.functions["nvmlDeviceGetUUID"] = name
    requested = opened(device("GPU-1"), clock=clock).wait(0)

    assert unknown is not None
    assert requested is not None
    assert (unknown.gpu_uuid, requested.gpu_uuid) == ("unknown", "GPU-333")


@pytest.mark.parametrize(("bit", "kind"), KINDS.items())
def test_every_registered_event_type_has_a_kind(
    functions: CLibrary, clock: ManualClock, bit: int, kind: str
) -> None:
    functions.functions["nvmlEventSetWait_v3"] = v3("GPU-1", bit, eventData=7)

    seen = opened(device("GPU-1"), clock=clock).wait(0)

    assert seen is not None
    assert (seen.kind, seen.xid) == (kind, 7 if kind == "xid" else None)


@pytest.mark.parametrize("version", ["nvmlEventSetWait_v3", "nvmlEventSetWait_v2"])
def test_a_wait_without_an_event_returns_none_and_is_not_an_error(
    functions: CLibrary, clock: ManualClock, version: str
) -> None:
    functions.functions[version] = fails(pynvml.NVML_ERROR_TIMEOUT)

    assert opened(device("GPU-1"), clock=clock).wait(0) is None


def test_a_failure_of_a_version_3_that_worked_is_reported(
    functions: CLibrary, clock: ManualClock
) -> None:
    functions.functions["nvmlEventSetWait_v3"] = fails(pynvml.NVML_ERROR_TIMEOUT)
    events = opened(device("GPU-1"), clock=clock)
    events.wait(0)
    functions.functions["nvmlEventSetWait_v3"] = fails(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    with pytest.raises(FailedError):
        events.wait(0)


@pytest.mark.parametrize("version", ["nvmlEventSetWait_v3", "nvmlEventSetWait_v2"])
def test_a_lost_gpu_is_reported_by_the_wait(
    functions: CLibrary, clock: ManualClock, version: str
) -> None:
    functions.functions[version] = fails(pynvml.NVML_ERROR_GPU_IS_LOST)

    with pytest.raises(GpuLostError):
        opened(device("GPU-1"), clock=clock).wait(0)


def test_only_events_that_a_gpu_supports_are_registered(
    functions: CLibrary, clock: ManualClock
) -> None:
    registered = []

    def register(_handle: Any, bits: Any, _set: Any) -> int:
        registered.append(bits.value)
        return SUCCESS

    functions.functions["nvmlDeviceGetSupportedEventTypes"] = supports(0x1F | 0x8000)
    functions.functions["nvmlDeviceRegisterEvents"] = register
    opened(device("GPU-1"), clock=clock)

    assert registered == [0x8 | 0x2 | 0x8000]
    assert registered[0] & ~WANTED == 0


def test_a_rejected_event_type_does_not_affect_the_others(
    functions: CLibrary, clock: ManualClock
) -> None:
    registered = []

    def register(_handle: Any, bits: Any, _set: Any) -> int:
        if bits.value & 0x8000:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        registered.append(bits.value)
        return SUCCESS

    functions.functions["nvmlDeviceRegisterEvents"] = register
    functions.functions["nvmlEventSetWait_v3"] = v3("GPU-1", 0x8)
    events = opened(device("GPU-1"), clock=clock)

    assert sum(registered) == WANTED & ~0x8000
    assert events.wait(0) is not None


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST, 999]
)
def test_a_gpu_that_cannot_be_registered_does_not_affect_the_others(
    functions: CLibrary, clock: ManualClock, code: int
) -> None:
    lost, well = device("GPU-1"), device("GPU-22")
    before = value_of(EVENT_SET_FAILURES.labels(reason="register"))

    def register(handle: Any, _bits: Any, _set: Any) -> int:
        return code if cast(handle, POINTER(c_int)).contents.value == len(lost.uuid) else SUCCESS

    functions.functions["nvmlDeviceRegisterEvents"] = register
    functions.functions["nvmlEventSetWait_v2"] = v2(well.handle, 0x8, 31)
    seen = opened(lost, well, clock=clock).wait(0)

    assert seen is not None
    assert seen.gpu_uuid == "GPU-22"
    assert value_of(EVENT_SET_FAILURES.labels(reason="register")) == before + 1


def test_waiting_on_a_set_without_any_gpu_fails(functions: CLibrary, clock: ManualClock) -> None:
    functions.functions["nvmlDeviceGetSupportedEventTypes"] = supports(0)

    with pytest.raises(FailedError):
        opened(device("GPU-1"), clock=clock).wait(0)


def test_a_driver_without_events_is_unsupported(functions: CLibrary, clock: ManualClock) -> None:
    functions.functions["nvmlEventSetCreate"] = fails(pynvml.NVML_ERROR_NOT_SUPPORTED)

    with pytest.raises(UnsupportedError):
        opened(device("GPU-1"), clock=clock)
