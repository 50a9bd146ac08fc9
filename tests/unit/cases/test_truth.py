"""Booked time is within 1 % of the truth, or its method declares an estimate."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, Final

import pytest

from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml.readings import Readings
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests import ticks
from tests.truth_runs import EPOCH_NS, Played, Use, errors_of, play_use

BOUND: Final = 0.01
SAMPLED_BOUND: Final = 0.011
"""The error of rates that are polled ten times a second, as documented."""


def drawn(seed: int) -> Random:
    return Random(seed)  # noqa: S311  # a scenario, no secret


def process(load: float, kernel_seconds: float, **more: object) -> dict[str, Any]:
    return {
        "command": "python",
        "gpus": [0],
        "load": {"busy_ratio": load, "kernel_seconds": kernel_seconds},
        "memory_bytes": 2**30,
        **more,
    }


def use_of(*processes: Mapping[str, Any]) -> Use:
    """Return what pods do on a GPU, each with one of these processes."""
    return Use([{"processes": [one]} for one in processes])


LEARNING_TICKS: Final = 20
"""Within these ticks, an agent learns that each window shows only one process."""
ACTIVE_BOUND: Final = 0.03
"""The error of windows that show only one process, as documented."""
LONG_KERNELS: Final = use_of(process(0.4, 0.8))


def methods_of(played: Played) -> set[str]:
    return {str(books.busy_method) for one in played.samples for books in book_tick(one)}


def hold_to_claim(played: Played, sampling_interval_seconds: float) -> None:
    """Check that GPU-seconds are within the bound where a method claims to have measured them."""
    off = errors_of(played, sampling_interval_seconds=sampling_interval_seconds).claimed
    assert off <= BOUND, f"off by {off:.1%}"


@pytest.mark.parametrize("use", [LONG_KERNELS, use_of(process(0.2, 0.5), process(0.3, 0.9))])
@pytest.mark.parametrize("sampling_interval_seconds", [1.0, 5.0, 10.0])
def test_rates_without_samples_are_averaged_and_not_reported_as_measured(
    sampling_interval_seconds: float, use: Use
) -> None:
    played = play_use(
        use,
        {"has_samples": False},
        sampling_interval_seconds=sampling_interval_seconds,
        random=drawn(1),
    )
    assert methods_of(played) <= {"sampled", "memory_share"}
    errors = errors_of(played, sampling_interval_seconds=sampling_interval_seconds)
    assert errors.largest.busy_ns <= SAMPLED_BOUND


@pytest.mark.parametrize(
    ("process_time", "method"),
    [("filled", "partial_samples"), ("running", "process_utilization")],
)
def test_process_samples_far_below_the_device_are_not_reported_as_measured(
    process_time: str, method: str
) -> None:
    """A driver may report how much of the chip a process fills, and not how long it ran."""
    loads = [process(0.45, 0.005), process(0.45, 0.005)]
    loads[0]["load"]["draw_ratio"] = 0.2
    driver = {"process_time": process_time}
    played = play_use(use_of(*loads), driver, sampling_interval_seconds=1.0, random=drawn(1))
    assert methods_of(played) == {method}


@pytest.mark.parametrize(
    "use",
    [
        use_of(process(0.4, 0.005), process(0.4, 0.005)),
        use_of(process(0.3, 0.3), process(0.4, 0.1)),
        use_of(process(0.1, 0.005), process(0.5, 0.005)),
    ],
)
def test_windows_that_show_only_one_process_are_not_reported_as_measured(use: Use) -> None:
    """A driver may report the device's use under the process that was active at one instant."""
    driver = {"processes": "active"}
    played = play_use(use, driver, sampling_interval_seconds=1.0, random=drawn(1))
    learned = replace(played, samples=played.samples[LEARNING_TICKS:])
    assert methods_of(learned) == {"partial_samples"}
    assert errors_of(played, sampling_interval_seconds=1.0).largest.busy_ns <= ACTIVE_BOUND


@pytest.mark.parametrize("length", [0.4, 0.7, 1.1])
@pytest.mark.parametrize("sampling_interval_seconds", [1.0, 5.0])
def test_pods_that_take_turns_faster_than_the_interval_are_distinguished(
    sampling_interval_seconds: float, length: float
) -> None:
    turns = [
        {
            "first_seconds": length * place,
            "length_seconds": length,
            "every_seconds": 2 * length,
            "count": 300,
        }
        for place in range(2)
    ]
    use = use_of(*(process(0.9, 0.004, visits=visits) for visits in turns))
    played = play_use(use, {}, sampling_interval_seconds=sampling_interval_seconds, random=drawn(0))
    hold_to_claim(played, sampling_interval_seconds)


@pytest.mark.parametrize("sampling_interval_seconds", [1.0, 5.0])
@pytest.mark.parametrize("late", [{"late_seconds": 2.0}, {"busy_late_seconds": 3.0}])
def test_samples_that_come_seconds_late_are_not_mistaken_for_idle(
    late: Mapping[str, float], sampling_interval_seconds: float
) -> None:
    """They come 2 s after their end, or up to 3 s after it while the GPU is busy."""
    played = play_use(
        LONG_KERNELS, late, sampling_interval_seconds=sampling_interval_seconds, random=drawn(1)
    )
    hold_to_claim(played, sampling_interval_seconds)
    learned = replace(played, samples=played.samples[-6:])
    assert methods_of(learned) == {"sampled"}


def test_a_memory_total_of_zero_is_not_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some drivers of GPUs with unified memory return success and zeros."""
    answer = Readings.nvmlDeviceGetMemoryInfo

    def zeros(self: Readings, handle: Any, version: int | None = None) -> Any:  # noqa: ANN401  # a ctypes struct
        memory = answer(self, handle, version)
        memory.total = memory.used = memory.free = 0
        if version:
            memory.reserved = 0
        return memory

    monkeypatch.setattr(Readings, "nvmlDeviceGetMemoryInfo", zeros)
    clock = ManualClock(start_ns=EPOCH_NS)
    containers = [{"name": "main", "processes": [process(0.5, 0.005)]}]
    scenario = {
        "name": "zeros",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA A100-SXM4-80GB", "count": 1}}],
        "pods": [{"namespace": "a", "name": "a-0", "node": "n", "containers": containers}],
    }
    simulation = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock)
    (tick,) = ticks.play(simulation.node("n"), clock, [1.0])
    (reading,) = tick.sample.gpus
    assert reading.memory_unified
    assert reading.memory_total_bytes != 0
    assert reading.memory_used_bytes is None
