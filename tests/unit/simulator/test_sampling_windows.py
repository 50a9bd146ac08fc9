"""How drivers sample windows: which windows they keep, and what a process sample covers."""

from typing import Any

import msgspec
import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.drivers import DriverModel
from gpuledger_simulator.sampling_windows import SamplingWindows
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.held_objects import is_bounded
from tests.unit.simulator.conftest import EPOCH_NS

SECOND_NS = 10**9
PERIOD_NS = SECOND_NS // 6


def played(*spans: tuple[float, float], **load: float) -> SimulatedNode:
    """Return a node with a GPU on which a process runs in each of these spans."""
    content: dict[str, Any] = {
        "name": "windows",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}}],
        "host_processes": [
            {
                "node": "n",
                "command": "train",
                "gpus": [0],
                "memory_bytes": 1 << 20,
                "load": {"busy_ratio": 0.9, **load},
                "start_seconds": start,
                "end_seconds": end,
            }
            for start, end in spans
        ],
    }
    simulation = Simulation(
        parse_scenario(content), epoch_ns=EPOCH_NS, clock=ManualClock(start_ns=EPOCH_NS)
    )
    return simulation.node("n")


def windows_of(node: SimulatedNode, **driver: object) -> SamplingWindows:
    return SamplingWindows(
        node.gpus[0],
        period_ns=PERIOD_NS,
        stamp_us=lambda ns: ns // 1000,
        driver=msgspec.convert(driver, DriverModel),
    )


def test_a_ring_without_idle_windows_keeps_the_latest_windows_of_use() -> None:
    node = played((1, 3), (100, 101))
    windows, gpu = windows_of(node, ring_idle="skipped", ring_samples=10), node.gpus[0]
    for seconds in (0.5, 2.0, 50.0, 100.5, 200.0):
        now_ns = round(seconds * SECOND_NS)
        found = windows.newer_than(0, now_ns=now_ns)
        used = [
            number
            for number in range(1, now_ns // PERIOD_NS + 1)
            if gpu.device_busy_ns((number - 1) * PERIOD_NS, number * PERIOD_NS)
        ]
        assert [window.end_ns // PERIOD_NS for window in found] == used[-10:]
    third_last = windows.newer_than(0, now_ns=200 * SECOND_NS)[-3]
    assert len(windows.newer_than(third_last.timestamp_us, now_ns=200 * SECOND_NS)) == 2


@pytest.mark.parametrize("ring_idle", ["kept", "skipped", "dry"])
def test_hours_of_an_idle_gpu_take_no_memory(ring_idle: str) -> None:
    windows = windows_of(played((1, 3)), ring_idle=ring_idle, ring_samples=10)
    # The simulation keeps the intervals of kernels that ran, and no more are added.
    assert is_bounded(
        windows, lambda minute: windows.newer_than(0, now_ns=minute * 60 * SECOND_NS), times=30
    )


def test_a_late_driver_shows_each_window_later_and_hides_none_again() -> None:
    windows = windows_of(played((1, 60)), late_seconds=2.0, busy_late_seconds=3.0)
    shown_ns = 0
    for now_ns in range(5 * SECOND_NS, 70 * SECOND_NS, SECOND_NS // 4):
        end_ns = windows.latest(now_ns).end_ns
        assert now_ns - 5 * SECOND_NS - PERIOD_NS < end_ns <= now_ns - 2 * SECOND_NS
        assert end_ns >= shown_ns
        shown_ns = end_ns


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5])
def test_a_driver_loses_the_same_windows_in_each_answer(ratio: float) -> None:
    windows = windows_of(played((1, 60)), lost_ratio=ratio, ring_samples=300)
    found = windows.newer_than(0, now_ns=60 * SECOND_NS)
    assert len(found) == pytest.approx(300 * (1 - ratio), abs=30)
    assert found == windows.newer_than(0, now_ns=60 * SECOND_NS)


@pytest.mark.parametrize(
    ("form", "is_of_the_last_window"), [("mean", True), ("mean_of_used", False), ("newest", False)]
)
def test_a_mean_since_the_last_query_covers_the_time_until_now_even_if_a_process_rests(
    form: str, *, is_of_the_last_window: bool
) -> None:
    node = played((1, 60), busy_ratio=0.2, kernel_seconds=1.0)
    windows, at_rest = windows_of(node, processes=form), 0
    for now_ns in range(5 * SECOND_NS, 20 * SECOND_NS, PERIOD_NS):
        latest = windows.latest(now_ns)
        since_us = (now_ns - 5 * SECOND_NS) // 1000
        for sample in windows.list_process_samples(since_us, now_ns=now_ns):
            is_of_latest = sample.timestamp_us == latest.timestamp_us
            ran_ns = node.gpus[0].device_busy_ns(latest.start_ns, latest.end_ns)
            at_rest += not ran_ns
            assert is_of_latest == (is_of_the_last_window or ran_ns > 0.005 * PERIOD_NS)
    assert at_rest
