"""An NVML library whose results and errors a test changes, and a fake `/proc`.

`Altered` changes functions of the simulator's NVML, or has only the functions that a test gives.
"""
# ruff: noqa: ANN401  # NVML's structs have no types

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pynvml

from gpuledger.clock import Clock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation

NO_INSTANCE = 0xFFFFFFFF


def play_node(clock: Clock, *, gpus: int = 1) -> SimulatedNode:
    """Return a simulated node with one process on each of its GPUs."""
    process = {"node": "n", "command": "python", "memory_bytes": 1 << 20}
    content = {
        "name": "small",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", "count": gpus}}],
        "host_processes": [{**process, "gpus": [index]} for index in range(gpus)],
    }
    return Simulation(parse_scenario(content), epoch_ns=clock.time_ns(), clock=clock).nodes["n"]


class Altered:
    """Plays `pynvml`: functions in `functions` replace those of another object; counts calls.

    Without another object, the library has only the functions in `functions`.
    """

    def __init__(self, library: Any = None, **functions: Callable[..., Any]) -> None:
        self._library = library
        self.functions = functions
        self.calls: Counter[str] = Counter()
        self.requests: list[tuple[Any, ...]] = []
        """Each call with its arguments after the handle."""
        self.lost: set[int] = set()
        """Indices of simulated GPUs that are lost."""
        self.hanging: dict[int, threading.Event] = {}
        """Indices of simulated GPUs whose calls block until the event is set."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.functions and not hasattr(self._library, name):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            self.requests.append((name, *arguments[1:]))
            if name.startswith("nvmlDevice") and arguments:
                self._touch(getattr(arguments[0], "index", arguments[0]))
            return (self.functions.get(name) or getattr(self._library, name))(*arguments)

        return call

    def _touch(self, index: Any) -> None:
        if index in self.hanging:
            self.hanging[index].wait()
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def refuse(self, name: str, code: int) -> None:
        """Let a function raise an error from now on."""
        self.answer(name, pynvml.NVMLError(code))

    def answer(self, name: str, answer: Any) -> None:
        """Let a function return this value from now on; raise it if it is an error."""

        def call(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.functions[name] = call


def answering(**answers: Any) -> Altered:
    """Return a library that has only these functions, each with one result or error."""
    library = Altered()
    for name, answer in answers.items():
        library.answer(name, answer)
    return library


class FakeProcfs:
    """A `/proc` in which a test starts, moves and ends processes."""

    def __init__(self) -> None:
        self.files: dict[str, list[bytes]] = defaultdict(list)
        """Each file's contents, one per read; the last one stays."""
        self.files["/proc/sys/kernel/random/boot_id"] = [b"boot-1\n"]
        self.files["/proc/2/stat"] = [b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0\n"]

    def start(self, pid: int, *, started_ticks: int, cgroup: str, command: str = "python") -> None:
        self.files[f"/proc/{pid}/stat"] = [stat(pid, started_ticks, command)]
        self.files[f"/proc/{pid}/cgroup"] = [f"0::{cgroup}\n".encode()]

    def end(self, pid: int) -> None:
        for name in ("stat", "cgroup"):
            self.files.pop(f"/proc/{pid}/{name}", None)

    def read(self, path: str) -> bytes:
        contents = self.files.get(path)
        if not contents:
            raise FileNotFoundError(path)
        return contents.pop(0) if len(contents) > 1 else contents[0]


def stat(pid: int, started_ticks: int, command: str = "python") -> bytes:
    before = " ".join(["0"] * 18)
    return f"{pid} ({command}) S {before} {started_ticks} 0 0\n".encode()
