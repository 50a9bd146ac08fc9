"""The library that plays NVML for the benchmark has the functions that the agent calls."""

from pathlib import Path
from typing import Final

import pynvml

from benchmarks.nvml_stub.functions import FUNCTIONS, as_bytes, as_header
from benchmarks.nvml_stub.memory import Question, SharedMemory
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.fakes.nvml import Altered
from tests.ticks import query_all

QUICKSTART: Final = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"
SOURCE: Final = Path(__file__).parents[3] / "benchmarks" / "nvml_stub" / "stub.c"
EPOCH_NS: Final = 1_795_000_000_000_000_000


def called_by_the_agent() -> set[str]:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    library = Altered(simulation.node("gpu-node-1").nvml)
    nvml = NvmlSession(library, monotonic_ns=clock.monotonic_ns)
    gpus = nvml.open()
    for _ in range(3):
        clock.advance(1)
        for gpu in gpus:
            query_all(gpu)
    nvml.close()
    return set(library.calls)


def test_the_stub_has_every_function_that_the_agent_calls() -> None:
    source = SOURCE.read_text()
    plain = {function.python for function in FUNCTIONS}
    called = called_by_the_agent()
    assert {"nvmlDeviceGetSamples", "nvmlGpmMetricsGet", "nvmlDeviceGetFieldValues"} <= called
    others = {name.removesuffix("WithFlags") for name in called - plain}
    assert {name for name in others if f"{name}(" not in _aliased(source)} == set()


def _aliased(source: str) -> str:
    return source.replace("_v2(", "(").replace("WithFlags(", "(")


def test_results_have_the_memory_layout_of_the_c_interface() -> None:
    by_name = {function.name: function for function in FUNCTIONS}
    memory = pynvml.c_nvmlMemory_v2_t(total=5)
    cases = {
        "nvmlDeviceGetPowerUsage": (7, b"\7\0\0\0"),
        "nvmlDeviceGetTotalEnergyConsumption": (7, b"\7" + bytes(7)),
        "nvmlDeviceGetMigMode": ([1, 2], b"\1\0\0\0\2\0\0\0"),
        "nvmlDeviceGetUUID": ("GPU-1", b"GPU-1\0"),
        "nvmlDeviceGetMemoryInfo_v2": (memory, bytes(memory)),
        "nvmlDeviceGetRetiredPages": ([1, 2], b"\1" + bytes(7) + b"\2" + bytes(7)),
    }
    for name, (answer, expected) in cases.items():
        assert as_bytes(by_name[name], answer) == expected, name


def test_each_function_is_in_the_header_once() -> None:
    lines = as_header().splitlines()
    assert len({line.split(",")[1] for line in lines}) == len(lines) == len(FUNCTIONS)


def test_a_query_is_recorded_once_and_its_answer_can_change(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "memory", devices=2)
    assert memory.wanted() == []
    for answer in (b"one", b"three"):
        memory.answer(Question(1, 0, 0, 0), error=0, answer=answer)
    assert b"three" in (tmp_path / "memory").read_bytes()
    assert b"one" not in (tmp_path / "memory").read_bytes()
