"""The findings of `record-nvml` about the driver, for each variant of a driver."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pynvml
import pytest

from gpuledger_cli.nvml_probes import CallHangsError, GpuProbes, probe_all
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario, parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.fakes.nvml import Altered

T = TypeVar("T")
QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"

EPOCH_NS = 1_795_000_000_000_000_000


def probes(driver: Mapping[str, Any], *, gpu: Mapping[str, Any] | None = None) -> GpuProbes:
    """Return the probes of a GPU on which two processes compute."""
    content = {
        "name": "probes",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", **(gpu or {})}, "driver": driver}],
        "host_processes": [
            {
                "node": "n",
                "command": f"p{number}",
                "gpus": [0],
                "memory_bytes": 2**30,
                "load": {"busy_ratio": 0.4, "kernel_seconds": 0.005},
            }
            for number in range(2)
        ],
    }
    clock = ManualClock(start_ns=EPOCH_NS)
    library = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock).node("n").nvml
    clock.advance(60.0)
    library.nvmlInit()
    device = library.nvmlDeviceGetHandleByIndex(0)
    return GpuProbes(library, device, sleep=clock.advance, monotonic_ns=clock.monotonic_ns)


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({}, "one for each window"),
        ({"processes": "mean"}, "one per process"),
        ({"processes": "newest"}, "one per process"),
        ({"processes": "absent"}, "process samples: NotSupported"),
        ({"ring_samples": 300}, "and 300 of the GPU"),
        ({}, "samples of 2 processes and"),
        ({"processes": "mean"}, "their sum is unknown"),
    ],
)
def test_the_form_of_process_samples_is_reported(driver: Mapping[str, Any], words: str) -> None:
    assert words in probes(driver).process_form()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, "process samples: NoPermission"),
        (pynvml.NVML_ERROR_NOT_FOUND, "process samples: no process computes"),
    ],
)
def test_an_error_of_process_samples_does_not_count_as_no_processes(code: int, words: str) -> None:
    library = Altered(nvmlDeviceGetSamples=lambda *_: (1, []))
    library.refuse("nvmlDeviceGetProcessUtilization", code)
    found = GpuProbes(library, object(), sleep=lambda _: None).process_form()
    assert found.startswith(words)


@pytest.mark.parametrize(
    ("call_seconds", "words"), [(0.0, "moves at least every 10 ms"), (0.03, "every 40 ms")]
)
def test_steps_of_the_counter_are_measured_with_the_clock(call_seconds: float, words: str) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)

    def energy(_: object) -> int:
        clock.advance(call_seconds)
        return clock.monotonic_ns()

    library = Altered(nvmlDeviceGetTotalEnergyConsumption=energy)
    requested = GpuProbes(library, object(), sleep=clock.advance, monotonic_ns=clock.monotonic_ns)
    assert words in requested.energy_steps()


def test_a_gpu_that_hangs_affects_only_its_own_findings() -> None:
    library = (
        Simulation(
            load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=ManualClock(start_ns=EPOCH_NS)
        )
        .node("gpu-node-1")
        .nvml
    )
    done: list[object] = []

    def run(do: Callable[[], T]) -> T:
        arguments = getattr(do, "args", ())[1:]
        if arguments == (0,):
            raise CallHangsError("nvmlDeviceGetHandleByIndex has not returned for 30 s")
        done.extend(arguments)
        return do()

    found = probe_all(library, report=lambda _: None, sleep=lambda _: None, run=run)
    assert [line for line in found if line.startswith("GPU 0")] == [
        "GPU 0: nvmlDeviceGetHandleByIndex has not returned for 30 s; its other probes are skipped"
    ]
    assert sum(line.startswith("GPU 1: ") for line in found) > 10
    assert "nvmlShutdown" not in done, "it would wait for the call that hangs"


def test_waiting_processes_sum_to_more_than_the_device() -> None:
    sums = []
    for driver in ({}, {"process_time": "submitted"}):
        words = probes(driver).process_form().split()
        claimed, used = (
            int(words[words.index("sum") + 1]),
            int(words[words.index("device's") + 1]),
        )
        sums.append(claimed / used)
    assert sums[0] == pytest.approx(1.0, abs=0.05)
    assert sums[1] > 1.15


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({"energy_step_seconds": 0.1}, "moves every 100 ms"),
        ({"energy_counter": "frozen"}, "stood still for 2 s"),
        ({"energy_counter": "absent"}, "NotSupported"),
    ],
)
def test_the_steps_of_the_energy_counter_are_reported(gpu: Mapping[str, Any], words: str) -> None:
    assert words in probes({}, gpu=gpu).energy_steps()
