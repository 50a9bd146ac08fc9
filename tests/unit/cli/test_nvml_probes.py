"""What `record-nvml` says of the driver that it met, on drivers of each form."""

from collections.abc import Mapping
from typing import Any

import pytest

from cli.nvml_probes import GpuProbes
from simulator.clock import ManualClock
from simulator.scenario.load import parse_scenario
from simulator.simulation import Simulation

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
    return GpuProbes(library, library.nvmlDeviceGetHandleByIndex(0), sleep=clock.advance)


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({}, "one for each window"),
        ({"processes": "mean"}, "one a process"),
        ({"processes": "newest"}, "one a process"),
        ({"processes": "absent"}, "no process computes"),
        ({"ring_samples": 300}, "and 300 of the GPU"),
    ],
)
def test_the_form_of_process_samples_is_told(driver: Mapping[str, Any], words: str) -> None:
    assert words in probes(driver).process_form()


def test_processes_that_wait_come_to_more_than_the_device() -> None:
    sums = []
    for driver in ({}, {"process_time": "submitted"}):
        words = probes(driver).process_form().split()
        claimed, used = (
            int(words[words.index("sum") + 1]),
            int(words[words.index("device's") + 1].rstrip(";")),
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
def test_the_steps_of_the_energy_counter_are_told(gpu: Mapping[str, Any], words: str) -> None:
    assert words in probes({}, gpu=gpu).energy_steps()
