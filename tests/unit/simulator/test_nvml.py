"""The played NVML, compared with the truth and with the real binding."""

import inspect
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.nvml.session import Handle
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.tables import for_each
from tests.unit.simulator.conftest import EPOCH_NS

WITHOUT_GPUS = SimulatedNvml(
    [], clock=ManualClock(start_ns=0), epoch_ns=0, uptime_ns=0, sample_period_ns=1
)
PLAYED = sorted(name for name in dir(WITHOUT_GPUS) if name.startswith("nvml"))
SUBJECTS = ("Handle", "Memory", "Power", "Samples", "RunningProcesses", "Accounting", "Mig")
PERIOD_NS = round(1e9 / 6)
GIB = 1 << 30


@pytest.fixture
def nvml(simulation: Simulation) -> SimulatedNvml:
    library = simulation.node("node-a").nvml
    library.nvmlInit()
    return library


@pytest.fixture
def shared(nvml: SimulatedNvml) -> Handle:
    """Return GPU 1 of node-a, which two pods share from second 2 to 8.25."""
    handle: Handle = nvml.nvmlDeviceGetHandleByIndex(1)
    return handle


def fields_of(struct: type[Any]) -> set[str]:
    return {name for name, _ in struct._fields_}


def test_the_simulator_plays_functions_of_every_subject_of_the_library() -> None:
    assert {subject for name in PLAYED for subject in SUBJECTS if subject in name} == set(SUBJECTS)


@for_each("name", PLAYED)
def test_a_played_function_has_the_parameters_of_the_real_one(
    name: str, nvml: SimulatedNvml
) -> None:
    real = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
    played = inspect.signature(getattr(nvml, name))
    # nvidia-ml-py wraps functions that return text, and their signature is lost.
    if list(real.parameters) != ["args", "kwargs"]:
        assert [(p.name, p.default) for p in played.parameters.values()] == [
            (p.name, p.default) for p in real.parameters.values()
        ]


def test_a_running_process_has_the_fields_of_the_bindings_own_struct(
    nvml: SimulatedNvml, shared: Handle
) -> None:
    (process,) = nvml.nvmlDeviceGetComputeRunningProcesses_v3(shared)
    assert set(vars(process)) == fields_of(pynvml.c_nvmlProcessInfo_v3_t)
    assert process.usedGpuMemory == 40 * GIB


@pytest.mark.parametrize(
    "call",
    [
        lambda nvml, gpu, seen: nvml.nvmlDeviceGetProcessUtilization(gpu, seen),
        lambda nvml, gpu, seen: nvml.nvmlDeviceGetSamples(
            gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, seen
        ),
    ],
)
def test_without_a_new_sample_the_error_is_not_found(
    nvml: SimulatedNvml,
    shared: Handle,
    clock: ManualClock,
    epoch_ns: int,
    call: Callable[..., Any],
) -> None:
    clock.advance(0.1)
    with pytest.raises(pynvml.NVMLError) as raised:
        call(nvml, shared, epoch_ns // 1000)
    assert raised.value.value == pynvml.NVML_ERROR_NOT_FOUND


def test_a_closed_library_and_an_old_handle_return_errors(
    simulation: Simulation,
) -> None:
    library = simulation.node("node-a").nvml
    with pytest.raises(pynvml.NVMLError) as closed:
        library.nvmlDeviceGetCount()
    library.nvmlInit()
    old = library.nvmlDeviceGetHandleByIndex(0)
    library.nvmlShutdown()
    library.nvmlInit()
    with pytest.raises(pynvml.NVMLError) as stale:
        library.nvmlDeviceGetUUID(old)
    assert closed.value.value == pynvml.NVML_ERROR_UNINITIALIZED
    assert stale.value.value == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_the_percent_of_a_window_is_the_rounded_truth(
    simulation: Simulation, nvml: SimulatedNvml, shared: Handle, clock: ManualClock, epoch_ns: int
) -> None:
    clock.advance(10)
    gpu = simulation.node("node-a").gpus[1]
    kind, samples = nvml.nvmlDeviceGetSamples(
        shared, pynvml.NVML_GPU_UTILIZATION_SAMPLES, epoch_ns // 1000
    )
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    assert len(samples) == 60 - 1  # the period is slightly longer than a sixth of a second
    for number, sample in enumerate(samples, start=1):
        window = (number - 1) * PERIOD_NS, number * PERIOD_NS
        assert sample.timeStamp == (epoch_ns + window[1]) // 1000
        busy_percent = 100 * gpu.device_busy_ns(*window) / PERIOD_NS
        assert abs(sample.sampleValue.uiVal - busy_percent) <= 0.5


def test_a_reader_that_keeps_up_with_the_ring_buffer_sees_each_window_once(
    nvml: SimulatedNvml, shared: Handle, clock: ManualClock, epoch_ns: int
) -> None:
    kind, last, seen = pynvml.NVML_GPU_UTILIZATION_SAMPLES, epoch_ns // 1000, list[int]()
    for _ in range(40):
        clock.advance(1)
        _, samples = nvml.nvmlDeviceGetSamples(shared, kind, last)
        seen += [sample.timeStamp for sample in samples]
        last = seen[-1]
    assert len(seen) == len(set(seen)) == int(40e9) // PERIOD_NS
    assert len(nvml.nvmlDeviceGetSamples(shared, kind, 0)[1]) == 100


def test_idle_gpus_have_samples_from_before_the_scenario(
    nvml: SimulatedNvml, shared: Handle
) -> None:
    _, samples = nvml.nvmlDeviceGetSamples(shared, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    assert [sample.sampleValue.uiVal for sample in samples] == [0] * 100


def test_process_samples_sum_to_the_device_and_end_with_the_process(
    simulation: Simulation, nvml: SimulatedNvml, shared: Handle, clock: ManualClock, epoch_ns: int
) -> None:
    clock.advance(10)
    chat = next(p for p in simulation.processes if p.spec.command == "serve")
    samples = nvml.nvmlDeviceGetProcessUtilization(shared, 0)
    of_chat = [sample.timeStamp * 1000 - epoch_ns for sample in samples if sample.pid == chat.pid]
    assert min(of_chat) > chat.start_ns
    assert max(of_chat) <= chat.end_ns
    assert chat.end_ns - max(of_chat) < PERIOD_NS
    _, device = nvml.nvmlDeviceGetSamples(shared, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    for window in device:
        parts = [s.smUtil for s in samples if s.timeStamp == window.timeStamp]
        if abs(window.timeStamp * 1000 - epoch_ns - chat.end_ns) > PERIOD_NS:
            assert abs(sum(parts) - window.sampleValue.uiVal) <= 1.5


def test_utilization_rates_are_those_of_the_newest_window(
    nvml: SimulatedNvml, shared: Handle, clock: ManualClock
) -> None:
    clock.advance(5.1)
    _, samples = nvml.nvmlDeviceGetSamples(shared, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)
    rates = nvml.nvmlDeviceGetUtilizationRates(shared)
    assert rates.gpu == samples[-1].sampleValue.uiVal
    assert 0 < rates.memory < rates.gpu


def test_before_the_first_window_utilization_is_zero(nvml: SimulatedNvml, shared: Handle) -> None:
    assert nvml.nvmlDeviceGetUtilizationRates(shared).gpu == 0


@pytest.mark.parametrize(("seconds", "held"), [(1, 40), (2, 50), (8.2, 50), (8.25, 40)])
def test_memory_is_that_of_the_currently_running_processes(
    nvml: SimulatedNvml, shared: Handle, clock: ManualClock, seconds: float, held: int
) -> None:
    clock.advance(seconds)
    memory = nvml.nvmlDeviceGetMemoryInfo(shared, version=pynvml.nvmlMemory_v2)
    assert memory.used == held * GIB
    assert memory.total == memory.used + memory.free + memory.reserved
    with_reserve = nvml.nvmlDeviceGetMemoryInfo(shared)
    assert with_reserve.used == memory.used + memory.reserved


def test_the_energy_counter_never_falls_and_counts_idle_and_active_draw(
    simulation: Simulation, nvml: SimulatedNvml, shared: Handle, clock: ManualClock
) -> None:
    gpu = simulation.node("node-a").gpus[1]
    readings = [nvml.nvmlDeviceGetTotalEnergyConsumption(shared)]
    for _ in range(100):
        clock.advance(0.1)
        readings.append(nvml.nvmlDeviceGetTotalEnergyConsumption(shared))
    assert readings == sorted(readings)
    busy_seconds = gpu.device_busy_ns(0, 10_000_000_000) / 1e9
    drawn = 10 * 70 + busy_seconds * (700 - 70)
    assert (readings[-1] - readings[0]) / 1000 == pytest.approx(drawn, abs=0.002)


def test_power_is_the_mean_of_the_last_second(
    nvml: SimulatedNvml, shared: Handle, clock: ManualClock
) -> None:
    clock.advance(4)
    before = nvml.nvmlDeviceGetTotalEnergyConsumption(shared)
    clock.advance(1)
    after = nvml.nvmlDeviceGetTotalEnergyConsumption(shared)
    assert nvml.nvmlDeviceGetPowerUsage(shared) == pytest.approx(after - before, abs=2)


def test_memory_that_the_driver_does_not_report_is_none(
    nvml: SimulatedNvml, clock: ManualClock
) -> None:
    clock.advance(3)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    reported = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]
    assert reported == [40 * GIB, None]
    assert nvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used == 41 * GIB


def test_each_kind_of_process_is_on_its_own_list(simulation: Simulation) -> None:
    library = simulation.node("node-b").nvml
    library.nvmlInit()
    handle = library.nvmlDeviceGetHandleByIndex(0)
    assert library.nvmlDeviceGetComputeRunningProcesses_v3(handle) == []
    assert library.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle) == []
    assert len(library.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)) == 1


def test_the_driver_rejects_unknown_arguments(nvml: SimulatedNvml, shared: Handle) -> None:
    refused: list[Callable[[], object]] = [
        lambda: nvml.nvmlDeviceGetHandleByIndex(2),
        lambda: nvml.nvmlDeviceGetSamples(shared, pynvml.NVML_ENC_UTILIZATION_SAMPLES, 0),
        lambda: nvml.nvmlDeviceGetClockInfo(shared, pynvml.NVML_CLOCK_VIDEO),
        lambda: nvml.nvmlDeviceGetTemperature(shared, 9),
    ]
    for call in refused:
        with pytest.raises(pynvml.NVMLError):
            call()


def test_a_gpu_warms_up_under_load(nvml: SimulatedNvml, shared: Handle, clock: ManualClock) -> None:
    cold = nvml.nvmlDeviceGetTemperature(shared, pynvml.NVML_TEMPERATURE_GPU)
    clock.advance(20)
    warm = nvml.nvmlDeviceGetTemperature(shared, pynvml.NVML_TEMPERATURE_GPU)
    assert cold == 31
    assert 60 < warm < 80
    assert nvml.nvmlDeviceGetClockInfo(shared, pynvml.NVML_CLOCK_SM) == 1980


def test_an_energy_counter_does_not_change_between_its_steps(
    clock: ManualClock, epoch_ns: int
) -> None:
    gpu = {"model": "NVIDIA L4", "idle_watts": 20, "energy_step_seconds": 0.1}
    content = {"name": "steps", "nodes": [{"name": "n", "gpus": gpu}]}
    node = Simulation(parse_scenario(content), epoch_ns=epoch_ns, clock=clock).node("n")
    node.nvml.nvmlInit()
    handle = node.nvml.nvmlDeviceGetHandleByIndex(0)
    first = node.nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    risen = []
    for _ in range(6):
        clock.advance(0.05)
        risen.append(node.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - first)
    assert risen == [0, 2_000, 2_000, 4_000, 4_000, 6_000]


def played_lists(clock: ManualClock, **driver: object) -> tuple[list[int], list[int]]:
    """Return three processes' pids, and the pids that nvidia-ml-py reads from such a driver."""
    content = {
        "name": "lists",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}, "driver": driver}],
        "host_processes": [
            {"node": "n", "command": f"p{i}", "gpus": [0], "memory_bytes": 1 << 20}
            for i in range(3)
        ],
    }
    node = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock).nodes["n"]
    node.nvml.nvmlInit()
    handle = node.nvml.nvmlDeviceGetHandleByIndex(0)
    listed = node.nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    return [process.pid for process in node.gpus[0].processes], [one.pid for one in listed]


def test_nvidia_ml_py_misreads_rows_of_32_bytes_from_the_second_on(clock: ManualClock) -> None:
    pids, read = played_lists(clock)
    assert read == pids
    pids, read = played_lists(clock, version="535.54.03", process_row_bytes=32)
    # The protected memory of the first process, and the second's "no GPU instance" id.
    assert read == [pids[0], 0, 0xFFFFFFFF]


def test_nvidia_ml_py_sees_no_process_if_the_size_call_succeeds(clock: ManualClock) -> None:
    _, read = played_lists(clock, process_size_answer="success")
    assert read == []
