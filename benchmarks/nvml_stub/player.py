"""`python -m benchmarks.nvml_stub.player`: keeps a scenario's answers and `/proc` files up to date.

It runs outside of the measured agent, so that the agent's cost does not include the simulation's.
"""

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pynvml

from benchmarks.nvml_stub.functions import (
    FIELD_VALUES,
    FUNCTIONS,
    GPM_METRICS,
    Function,
    as_bytes,
)
from benchmarks.nvml_stub.memory import Question, SharedMemory
from gpuledger.clock import NS_PER_US
from gpuledger_simulator.simulation import SimulatedNode, open_simulation

_REFRESH_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.005
_LIST_BYTES: Final = 8192
_BUFFERED_US: Final = 3_000_000
_GPM_SECONDS: Final = 1.0
# /proc/2/stat of any kernel: the parent of its threads, identified by a flag that no program can
# have.
_KTHREADD: Final = f"2 (kthreadd) S 0 0 0 0 -1 2129984 {'0 ' * 10}20 0 1 0 1 {'0 ' * 29}0\n"


class Player:
    """One node's NVML, in shared memory."""

    def __init__(self, node: SimulatedNode, memory: SharedMemory) -> None:
        self._nvml: Any = node.nvml
        self._memory = memory
        self._nvml.nvmlInit()
        self._handles = [
            self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(len(node.gpus))
        ]
        self._known: dict[Question, Callable[[], bytes]] = {}
        self._gpm: dict[int, GpmPair] = {}

    def check(self) -> None:
        """Answer new questions."""
        for question in self._memory.wanted():
            if question not in self._known:
                self._known[question] = self._querying(question)
                self._answer(question)

    def refresh(self) -> None:
        """Update the answers to all earlier questions."""
        for pair in self._gpm.values():
            pair.take()
        for question in self._known:
            self._answer(question)

    def _answer(self, question: Question) -> None:
        try:
            error, answer = pynvml.NVML_SUCCESS, self._known[question]()
        except pynvml.NVMLError as failed:
            error, answer = failed.value, b""
        except (AttributeError, pynvml.NVMLLibraryMismatchError):
            error, answer = pynvml.NVML_ERROR_NOT_SUPPORTED, b""
        self._memory.answer(question, error=error, answer=answer, room=_room(question))

    def _querying(self, question: Question) -> Callable[[], bytes]:
        handle = self._handles[question.device]
        if question.function == FIELD_VALUES:
            return lambda: self._field(handle, question)
        if question.function == GPM_METRICS:
            if question.device not in self._gpm:
                self._gpm[question.device] = GpmPair(self._nvml, handle)
            pair = self._gpm[question.device]
            return lambda: pair.metric(question.first)
        function = FUNCTIONS[question.function - 1]
        return lambda: self._plain(function, question)

    def _plain(self, function: Function, question: Question) -> bytes:
        numbers = iter((question.first, question.second))
        arguments: list[Any] = []
        for letter in filter("dei".__contains__, function.pattern):
            number = question.device if letter == "d" else next(numbers)
            arguments.append(number if letter == "i" else self._handles[number])
        arguments += function.more
        if "q" in function.pattern:
            arguments.append(time.time_ns() // NS_PER_US - _BUFFERED_US)
        call = getattr(self._nvml, function.python)
        if function.fills is not None:
            struct = function.fills()
            call(*arguments, ctypes.byref(struct))
            return bytes(struct)
        try:
            return as_bytes(function, call(*arguments))
        except pynvml.NVMLError as failed:
            if "q" in function.pattern and failed.value == pynvml.NVML_ERROR_NOT_FOUND:
                return b""
            raise

    def _field(self, handle: Any, question: Question) -> bytes:  # noqa: ANN401  # the simulator's own
        requested = [(question.first, question.second)]
        return bytes(self._nvml.nvmlDeviceGetFieldValues(handle, requested)[0])


class GpmPair:
    """Two samples of one GPU's counters, a second apart."""

    def __init__(self, nvml: Any, handle: Any) -> None:  # noqa: ANN401  # the simulator's own
        self._nvml, self._handle = nvml, handle
        self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._taken_seconds = time.monotonic()
        for sample in self._samples:
            nvml.nvmlGpmSampleGet(handle, sample)
            time.sleep(0.15)

    def take(self) -> None:
        """Take a new sample if the newest is old enough."""
        if time.monotonic() - self._taken_seconds >= _GPM_SECONDS:
            self._taken_seconds = time.monotonic()
            self._samples.reverse()
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[1])

    def metric(self, number: int) -> bytes:
        """Return id, return code and value of a metric, in the layout of its struct."""
        struct = pynvml.c_nvmlGpmMetricsGet_t()
        struct.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        struct.numMetrics = 1
        struct.sample1, struct.sample2 = self._samples
        struct.metrics[0].metricId = number
        self._nvml.nvmlGpmMetricsGet(struct)
        return bytes(struct.metrics[0])[:16]


def write_procfs(node: SimulatedNode, root: Path, pids: set[int]) -> None:
    """Write the files of the running processes; delete those of ended ones."""
    for pid in pids:
        folder = root / str(pid)
        for name in ("stat", "cgroup", "comm", "cmdline"):
            try:
                content = node.procfs.read(f"/proc/{pid}/{name}")
            except FileNotFoundError:
                (folder / name).unlink(missing_ok=True)
                continue
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def write_machine(node: SimulatedNode, root: Path) -> None:
    """Write the files that never change."""
    boot_id = root / "sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_bytes(node.procfs.read("/proc/sys/kernel/random/boot_id"))
    (root / "2").mkdir(exist_ok=True)
    (root / "2/stat").write_text(_KTHREADD)


def _room(question: Question) -> int:
    plain = 0 < question.function <= len(FUNCTIONS)
    return _LIST_BYTES if plain and FUNCTIONS[question.function - 1].item else 0


def main() -> None:
    """Play until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--procfs", type=Path, required=True)
    options = parser.parse_args()
    simulation = open_simulation(options.scenario)
    node = simulation.node(options.node)
    pids = {process.pid for process in simulation.processes if process.node == options.node}
    write_machine(node, options.procfs)
    write_procfs(node, options.procfs, pids)
    player = Player(node, SharedMemory(options.memory, devices=len(node.gpus)))
    print("ready", flush=True)
    parent, refreshed = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        player.check()
        if time.monotonic() - refreshed >= _REFRESH_SECONDS:
            refreshed = time.monotonic()
            player.refresh()
            write_procfs(node, options.procfs, pids)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
