"""A field number is queried only on drivers in which it has the expected meaning."""
# ruff: noqa: ANN401, N802, N803  # NVML's own names, and structs without types

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pynvml
import pytest

from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation

EPOCH_NS = 1_790_000_000_000_000_000
SMOOTHING = 7
"""The value of every power-smoothing field here."""
BEFORE: Final = {251: 269, 252: 270, 253: 271}
"""The throttle counters as drivers up to 580.65 number them, by today's numbers."""
THROTTLED = {
    "throttling.software_thermal_ns_total": 0,
    "throttling.hardware_thermal_ns_total": 3_000_000_000,
    "throttling.power_brake_ns_total": 0,
}


class Driver:
    """A simulated driver of another version, with that version's numbers."""

    def __init__(self, node: Any, *, version: Any, numbers: Mapping[int, int]) -> None:
        self._node = node
        self.version = version
        self.numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def nvmlSystemGetDriverVersion(self) -> str:
        if isinstance(self.version, int):
            raise pynvml.NVMLError(self.version)
        return str(self.version)

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Sequence[Any]) -> Any:
        requested = [number if isinstance(number, int) else number[0] for number in fieldIds]
        truth = [
            (self.numbers.get(number) or number, 0) if number > 250 else one
            for number, one in zip(requested, fieldIds, strict=True)
        ]
        values = self._node.nvmlDeviceGetFieldValues(handle, truth)
        for number, value in zip(requested, values, strict=True):
            if 250 < number < 274 and number not in self.numbers:
                value.nvmlReturn = pynvml.NVML_SUCCESS
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = SMOOTHING
        return values


TODAY: Final[Mapping[int, int]] = {number: number for number in BEFORE.values()}


@pytest.mark.parametrize(
    ("version", "numbers", "expected"),
    [
        ("535.183.01", {}, {}),
        ("570.86.15", {}, {}),
        ("575.50.01", {}, {}),
        ("575.51", BEFORE, THROTTLED),
        ("575.57.08", BEFORE, THROTTLED),
        ("580.65.06", BEFORE, THROTTLED),
        ("580.66", BEFORE, {}),
        ("580.81.99", TODAY, {}),
        ("580.82.07", TODAY, THROTTLED),
        ("580.126.16", TODAY, THROTTLED),
        ("590.44.01", TODAY, THROTTLED),
        ("", TODAY, {}),
        ("1.0", TODAY, {}),
        ("vGPU 580.95", TODAY, {}),
        ("580", TODAY, {}),
        ("580.9500000000", TODAY, {}),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, TODAY, {}),
        (pynvml.NVML_ERROR_TIMEOUT, TODAY, {}),
    ],
)
def test_power_smoothing_is_never_read_as_seconds(
    version: str | int, numbers: Mapping[int, int], expected: Mapping[str, int]
) -> None:
    readings = throttled_on(version, numbers)
    assert {name: readings[name] for name in THROTTLED if name in readings} == expected
    # Fields with the same number in every driver are read on each of them.
    assert readings["throttling.thermal_ns_total"] == 3_000_000_000


def throttled_on(version: str | int, numbers: Mapping[int, int]) -> Mapping[str, Any]:
    """Return the readings on a driver of a GPU whose hardware slowed its clocks for 3 s."""
    return readings_of(NvmlSession(Driver(throttled_node(), version=version, numbers=numbers)))


def throttled_node() -> SimulatedNvml:
    ailment = {"throttle": "hardware_thermal", "start_seconds": 2, "end_seconds": 5}
    gpu = {"model": "NVIDIA H100 80GB HBM3", "ailments": [ailment]}
    scenario = parse_scenario({"name": "one", "nodes": [{"name": "n", "gpus": [gpu]}]})
    clock = ManualClock(start_ns=EPOCH_NS)
    nvml = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("n").nvml
    clock.advance(9)
    return nvml


def readings_of(session: NvmlSession) -> Mapping[str, Any]:
    (gpu,) = session.open()
    found: Mapping[str, Any] = gpu.query(CallGroup.READINGS, SampleCursor())["readings"]
    session.close()
    return found


def test_after_a_driver_update_its_own_numbers_are_used() -> None:
    driver = Driver(throttled_node(), version="575.57.08", numbers=BEFORE)
    session = NvmlSession(driver)
    before = readings_of(session)
    driver.version, driver.numbers = "580.95.05", TODAY
    assert before["throttling.hardware_thermal_ns_total"] == 3_000_000_000
    assert readings_of(session) == before
