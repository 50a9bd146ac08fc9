"""Whatever a driver returns, readings contain only plausible values, and nothing raises."""
# ruff: noqa: ANN401  # the binding's structs have no types

import ctypes
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.codec import decoder_of, encode, validate
from gpuledger.records import GpuReading
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.gpu.nvidia.catalogue import CATALOGUE
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.examples import examples
from tests.ticks import query_all, tick_gpu

EPOCH_NS = 1_790_000_000_000_000_000
SECOND_NS = 1_000_000_000
NUMBERS = [0, 1, 2, 50, 100, 101, 255, 2**31 - 1, 2**32 - 1, 2**32, 2**53, 2**63, 2**64 - 1, -1]
FLOATS = [0.0, 55.5, 100.0, 100.1, -1.0, 1e308, math.inf, -math.inf, math.nan]
ERRORS = [
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE,
]
SOUND = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex",
         "nvmlDeviceGetUUID", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmSampleFree",
         "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMigMode")  # fmt: skip


class Garbled:
    """A library that sometimes returns any number, or raises any error."""

    def __init__(self, library: Any, chance: random.Random) -> None:
        self._library = library
        self._chance = chance

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Any] = getattr(self._library, name)
        if name in SOUND:
            return call

        def garble(*arguments: Any, **named: Any) -> Any:
            if self._chance.random() < 0.1:
                raise pynvml.NVMLError(self._chance.choice(ERRORS))
            answer = self._garble(call(*arguments, **named))
            for argument in arguments:
                self._garble(getattr(argument, "_obj", None))
            return answer

        return garble

    def _garble(self, value: Any) -> Any:
        if isinstance(value, pynvml.c_nvmlGpmMetricsGet_t):
            return self._each(value.metrics[: value.numMetrics]) and value
        if isinstance(value, ctypes.Structure | ctypes.Union):
            return self._members(value)
        if isinstance(value, ctypes.Array | list | tuple):
            return type(value)(self._each(value)) if isinstance(value, list | tuple) else value
        if isinstance(value, int | float) and self._chance.random() < 0.3:
            return self._chance.choice(FLOATS if isinstance(value, float) else NUMBERS)
        return value

    def _each(self, values: Any) -> list[Any]:
        return [self._garble(value) for value in values]

    def _members(self, struct: Any) -> Any:
        for name, *_ in struct._fields_:
            if name not in ("metricId", "metricInfo", "version", "fieldId"):
                member = getattr(struct, name)
                garbled = self._garble(member)
                if isinstance(member, int | float):
                    setattr(struct, name, garbled)
        return struct


def machine(seed: int) -> tuple[Garbled, ManualClock]:
    process = {"command": "train", "gpus": [0], "memory_bytes": 1 << 30}
    scenario = parse_scenario(
        {
            "name": "garbage",
            "nodes": [{"name": "n", "gpus": {"model": "NVIDIA H100 80GB HBM3"}}],
            "host_processes": [{"node": "n", **process}],
        }
    )
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    return Garbled(simulation.node("n").nvml, random.Random(seed)), clock  # noqa: S311  # chance in a test


def value_of(tick: GpuTick, name: str) -> Any:
    part, _, field = name.rpartition(".")
    if part:
        return getattr(getattr(tick.details, part), field, None)
    return getattr(tick.reading if hasattr(tick.reading, field) else tick.details, field)


def check_plausible(tick: GpuTick) -> None:
    for record in (tick.reading, tick.details):
        validate(record)
        assert decoder_of("readings", type(record)).decode(encode(record)) == record
    for readings in CATALOGUE.values():
        for reading in readings:
            field, value = reading.name.rpartition(".")[2], value_of(tick, reading.name)
            if field.endswith(("_ratio", "_ratios")) and value is not None:
                ratios = value if isinstance(value, list) else [value]
                assert all(0 <= ratio <= 1 for ratio in ratios), reading.name
                continue
            for number in value.values() if isinstance(value, dict) else [value]:
                if isinstance(number, int | float):
                    low, high = (
                        limit * reading.unit.times
                        for limit in (reading.unit.low, reading.unit.high)
                    )
                    assert low <= number <= high, reading.name


def check_totals(tick: GpuTick, before: dict[str, float]) -> None:
    for readings in CATALOGUE.values():
        for one in (one for one in readings if one.unit.is_total):
            field, value = one.name.rpartition(".")[2], value_of(tick, one.name)
            values = {field: value}
            if isinstance(value, dict):
                values = {f"{field}.{link}": each for link, each in value.items()}
            for name, now in values.items():
                if now is not None:
                    fell = now < before.get(name, 0)
                    assert fell == (name in (tick.details.resets or ())), name
                    before[name] = now


@examples(40)
@given(seed=st.integers(0, 2**32))
def test_garbage_never_becomes_a_reading_or_an_error(seed: int) -> None:
    library, clock = machine(seed)
    (gpu,) = NvmlSession(library, monotonic_ns=clock.monotonic_ns).open()
    sampler = GpuSampler()
    totals: dict[str, float] = {}
    for _ in range(8):
        clock.advance(1)
        answers = query_all(gpu, sampler.request_tick(is_set_back=False))
        tick = tick_gpu(sampler, answers, now_ns=clock.monotonic_ns())
        check_plausible(tick)
        check_totals(tick, totals)


def test_the_garbage_library_does_return_garbage_and_the_check_detects_it() -> None:
    library, _ = machine(1)
    gpu = NvmlSession(library).open()[0]
    ticks = [tick_gpu(GpuSampler(), query_all(gpu), now_ns=0) for _ in range(20)]
    assert sum(tick.dropped_readings.total() for tick in ticks) > 20
    with pytest.raises(msgspec.ValidationError, match="power_milliwatts"):
        check_plausible(
            replace(ticks[0], reading=GpuReading(uuid="GPU-0", index=0, power_milliwatts=4_000_000))
        )
