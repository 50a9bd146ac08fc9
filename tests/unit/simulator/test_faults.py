"""Callers of a failing driver get the scenario's faults, and nothing else."""
# ruff: noqa: ANN401  # faults and structs of ctypes have many forms

import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from gpuledger.errors import UserError
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.schema import Kind
from gpuledger_simulator.simulation import Simulation
from tests.hanging import HANG_SECONDS

Play = Callable[..., SimulatedNvml]
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
UNBIND = pynvml.nvmlSystemEventTypeGpuDriverUnbind
BIND = pynvml.nvmlSystemEventTypeGpuDriverBind


def content(**fault: Any) -> dict[str, Any]:
    node = {"name": "node-a", "gpus": {"model": "NVIDIA H100 80GB HBM3", "count": 2}}
    return {"name": "faulty", "nodes": [node], "faults": [{"node": "node-a", **fault}]}


@pytest.fixture
def play(clock: ManualClock, epoch_ns: int) -> Play:
    """Return a function that opens a library with one fault."""

    def make(**fault: Any) -> SimulatedNvml:
        scenario = parse_scenario(content(**fault))
        library = Simulation(scenario, epoch_ns=epoch_ns, clock=clock).node("node-a").nvml
        library.nvmlInit()
        return library

    return make


def code_of(call: Callable[[], object]) -> int:
    """Return the NVML code with which a call ends; 0 if it succeeds."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def power_code(library: SimulatedNvml, handle: Any) -> int:
    return code_of(lambda: library.nvmlDeviceGetPowerUsage(handle))


def restart(library: SimulatedNvml) -> int:
    library.nvmlShutdown()
    return code_of(library.nvmlInit)


@pytest.mark.parametrize(
    ("kind", "code"), [("lost", LOST), ("reset_required", pynvml.NVML_ERROR_RESET_REQUIRED)]
)
def test_a_lost_gpu_stays_lost_until_its_end_and_a_restart(
    play: Play, clock: ManualClock, kind: Kind, code: int
) -> None:
    library = play(kind=kind, gpus=[1], start_seconds=1, end_seconds=3)
    good, sick = (library.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    assert power_code(library, sick) == 0
    clock.advance(2)
    assert (power_code(library, good), power_code(library, sick)) == (0, code)
    assert code_of(lambda: library.nvmlDeviceGetHandleByIndex(1)) == code
    clock.advance(2)
    assert power_code(library, sick) == code, "an old handle stays invalid"
    assert restart(library) == 0
    assert power_code(library, library.nvmlDeviceGetHandleByIndex(1)) == 0


def test_a_hanging_call_returns_when_the_fault_is_over(play: Play, clock: ManualClock) -> None:
    library = play(kind="hang", gpus=[0], calls=["nvmlDeviceGetPowerUsage"], end_seconds=5)
    sick, good = (library.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    assert library.nvmlDeviceGetName(sick)
    assert power_code(library, good) == 0
    returned = threading.Event()

    def query() -> None:
        library.nvmlDeviceGetPowerUsage(sick)
        returned.set()

    threading.Thread(target=query, daemon=True).start()
    assert not returned.wait(0.1)
    clock.advance(5)
    assert returned.wait(HANG_SECONDS)


def test_garbage_has_the_usual_form_and_implausible_values(play: Play, clock: ManualClock) -> None:
    library = play(kind="garbage", start_seconds=1, end_seconds=2)
    handle = library.nvmlDeviceGetHandleByIndex(0)
    clock.advance(1)
    assert library.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) > 1_000
    memory = library.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    assert memory.used > 1 << 60
    assert library.nvmlDeviceGetUtilizationRates(handle).gpu > 100
    _, samples = library.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert all(sample.sampleValue.uiVal > 100 for sample in samples)
    assert library.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
    clock.advance(1)
    assert library.nvmlDeviceGetUtilizationRates(handle).gpu <= 100


def test_a_call_that_is_no_longer_supported_returns_that_error(
    play: Play, clock: ManualClock
) -> None:
    library = play(kind="not_supported", calls=["nvmlDeviceGetPowerUsage"], start_seconds=1)
    handle = library.nvmlDeviceGetHandleByIndex(0)
    assert power_code(library, handle) == 0
    clock.advance(1)
    assert power_code(library, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_growing_list_fails_the_given_number_of_times_and_then_succeeds(play: Play) -> None:
    call = "nvmlDeviceGetComputeRunningProcesses_v3"
    library = play(kind="growing_list", calls=[call], failures=2)
    handle = library.nvmlDeviceGetHandleByIndex(0)
    grown = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    codes = [code_of(lambda: getattr(library, call)(handle)) for _ in range(6)]
    assert codes == [grown, grown, 0, grown, grown, 0]


def test_a_reloaded_driver_forgets_handles_and_restarts_its_counters(
    play: Play, clock: ManualClock
) -> None:
    library = play(kind="driver_reload", start_seconds=10, end_seconds=20)
    handle = library.nvmlDeviceGetHandleByIndex(0)
    before = library.nvmlDeviceGetTotalEnergyConsumption(handle)
    clock.advance(15)
    assert power_code(library, handle) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    assert restart(library) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    clock.advance(6)
    assert power_code(library, handle) == pynvml.NVML_ERROR_UNINITIALIZED
    library.nvmlInit()
    after = library.nvmlDeviceGetTotalEnergyConsumption(library.nvmlDeviceGetHandleByIndex(0))
    assert 0 < after < before


def test_a_library_of_another_version_does_nothing(play: Play, clock: ManualClock) -> None:
    library = play(kind="version_mismatch", start_seconds=1)
    handle = library.nvmlDeviceGetHandleByIndex(0)
    clock.advance(1)
    assert power_code(library, handle) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert restart(library) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH


def wait_for_events(library: SimulatedNvml, held: Any) -> list[int]:
    data = (pynvml.c_nvmlSystemEventData_v1_t * 4)()
    events = library.nvmlSystemEventSetWait(
        pynvml.nvmlSystemEventSetWaitRequest_v1, held, 1, data, len(data)
    )
    return [event["eventType"] for event in events]


def listen(library: SimulatedNvml) -> Any:
    held = library.nvmlSystemEventSetCreate(pynvml.nvmlSystemEventSetCreateRequest_v1)
    library.nvmlSystemRegisterEvents(pynvml.nvmlSystemRegisterEventRequest_v1, UNBIND | BIND, held)
    return held


def test_an_unbinding_is_reported_and_waits_until_the_library_is_closed(
    play: Play, clock: ManualClock
) -> None:
    library = play(kind="unbind", start_seconds=10, end_seconds=20)
    held, handle = listen(library), library.nvmlDeviceGetHandleByIndex(0)
    assert wait_for_events(library, held) == []
    clock.advance(11)
    assert wait_for_events(library, held) == [UNBIND]
    assert wait_for_events(library, held) == []
    assert power_code(library, handle) == 0, "an open library blocks the unbinding"
    assert restart(library) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    clock.advance(10)
    library.nvmlInit()
    again = library.nvmlDeviceGetHandleByIndex(0)
    assert library.nvmlDeviceGetTotalEnergyConsumption(again) < 1_000_000


def test_a_driver_that_was_not_released_reports_that_it_is_bound(
    play: Play, clock: ManualClock
) -> None:
    library = play(kind="unbind", start_seconds=10, end_seconds=20)
    held = listen(library)
    clock.advance(30)
    assert wait_for_events(library, held) == [UNBIND, BIND]
    library.nvmlSystemEventSetFree(pynvml.nvmlSystemEventSetFreeRequest_v1, held)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "lost", "node": "node-x"}, r"faults\[0\].node: unknown node 'node-x'"),
        ({"kind": "lost", "gpus": [2]}, r"faults\[0\].gpus: node-a has no GPU 2"),
        (
            {"kind": "lost", "start_seconds": 2, "end_seconds": 2},
            r"faults\[0\].end_seconds: 2.0 is not after start_seconds 2.0",
        ),
        ({"kind": "unbind", "gpus": [0]}, r"faults\[0\].kind: unbind affects the whole driver"),
        ({"kind": "gone"}, r"faults\[0\]\.kind"),
    ],
)
def test_an_impossible_fault_is_reported_with_its_field(
    fault: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse_scenario(content(**fault))


def test_without_faults_the_library_is_not_wrapped(
    simulation: Simulation,
) -> None:
    assert type(simulation.node("node-a").nvml) is SimulatedNvml


def test_a_frozen_call_repeats_its_first_result(play: Play, clock: ManualClock) -> None:
    call = "nvmlDeviceGetTotalEnergyConsumption"
    library = play(kind="frozen", gpus=[1], calls=[call], start_seconds=1, end_seconds=4)
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in (0, 1)]
    answers = []
    for _ in range(6):
        clock.advance(1)
        answers.append([library.nvmlDeviceGetTotalEnergyConsumption(one) for one in handles])
    well, frozen = (list(column) for column in zip(*answers, strict=True))
    assert len(set(well)) == 6
    assert len(set(frozen[:3])) == 1
    assert frozen[3:] == sorted(set(frozen[2:]))[1:], "the energy in between is counted"
