"""Stand-ins for `pynvml` and `/proc`: what they answer, and which errors, a test decides.

`FakeNvml` is a small driver of its own; `Altered` is another library's functions, but for those
that a test puts in their place, or no functions at all but these.
"""
# ruff: noqa: N802, ANN401  # NVML's own names, and its structs have no types

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

SECOND_US = 1_000_000
NO_INSTANCE = 0xFFFFFFFF


@dataclass
class FakeGpu:
    uuid: str
    samples: list[tuple[int, int]] = field(default_factory=list)
    """(time stamp, percent)"""
    process_samples: list[tuple[int, int, int]] = field(default_factory=list)
    """(pid, time stamp, percent)"""
    compute: dict[int, int | None] = field(default_factory=dict)
    """memory by pid"""
    graphics: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    energy_mj: int = 1000
    temperature: int = 40
    used_bytes: int = 30_000
    lost: bool = False
    hangs: threading.Event | None = None
    """Calls block until it is set."""


class FakeNvml:
    """Plays `pynvml`; `errors[call]` holds codes to raise, each once, or one for ever as an int."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = gpus
        self.errors: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.inits = 0
        self.open = False

    def nvmlInit(self) -> None:
        self._fail("nvmlInit")
        self.inits += 1
        self.open = True

    def nvmlShutdown(self) -> None:
        self._fail("nvmlShutdown")
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        self._fail("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        self._check("nvmlDeviceGetName", gpu)
        return "Fake GPU"

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._check("nvmlDeviceGetUtilizationRates", gpu)
        return SimpleNamespace(gpu=50, memory=25)

    def nvmlDeviceGetSamples(
        self, gpu: FakeGpu, kind: int, last_seen: int
    ) -> tuple[int, list[Any]]:
        self._check("nvmlDeviceGetSamples", gpu)
        newer = [
            SimpleNamespace(timeStamp=stamp, sampleValue=SimpleNamespace(uiVal=percent))
            for stamp, percent in gpu.samples
            if stamp > last_seen
        ]
        if not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, newer

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        assert version in (pynvml.nvmlMemory_v2, None)
        self._check("nvmlDeviceGetMemoryInfo", gpu)
        return SimpleNamespace(total=80_000, used=gpu.used_bytes, reserved=500)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._check("nvmlDeviceGetPowerUsage", gpu)
        return 250_500

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._check("nvmlDeviceGetTotalEnergyConsumption", gpu)
        return gpu.energy_mj

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        self._check("nvmlDeviceGetTemperature", gpu)
        return gpu.temperature

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        self._check("nvmlDeviceGetClockInfo", gpu)
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[kind]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: FakeGpu) -> list[Any]:
        self._check("nvmlDeviceGetComputeRunningProcesses_v3", gpu)
        return _listed(gpu.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu: FakeGpu) -> list[Any]:
        self._check("nvmlDeviceGetGraphicsRunningProcesses_v3", gpu)
        return _listed(gpu.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, gpu: FakeGpu) -> list[Any]:
        self._check("nvmlDeviceGetMPSComputeRunningProcesses_v3", gpu)
        return _listed(gpu.mps)

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGpu, last_seen: int) -> list[Any]:
        self._check("nvmlDeviceGetProcessUtilization", gpu)
        return [
            SimpleNamespace(
                pid=pid,
                timeStamp=stamp,
                smUtil=percent,
                memUtil=percent // 2,
                encUtil=0,
                decUtil=0,
            )
            for pid, stamp, percent in gpu.process_samples
            if stamp > last_seen
        ]

    def _check(self, call: str, gpu: FakeGpu) -> None:
        if gpu.hangs:
            gpu.hangs.wait()
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        self._fail(call)

    def _fail(self, call: str) -> None:
        self.calls[call] += 1
        planned = self.errors.get(call)
        error = planned.pop(0) if isinstance(planned, list) and planned else planned
        if isinstance(error, Exception):
            raise error
        if isinstance(error, int):
            raise pynvml.NVMLError(error)


def _listed(processes: dict[int, int | None]) -> list[Any]:
    return [
        SimpleNamespace(
            pid=pid, usedGpuMemory=memory, gpuInstanceId=NO_INSTANCE, computeInstanceId=NO_INSTANCE
        )
        for pid, memory in processes.items()
    ]


class Altered:
    """Plays `pynvml` by another object's functions, but for those in `functions`; counts calls.

    Without another object it is a library that has no functions but these.
    """

    def __init__(self, library: Any = None, **functions: Callable[..., Any]) -> None:
        self._library = library
        self.functions = functions
        self.calls: Counter[str] = Counter()
        self.asked: list[tuple[Any, ...]] = []
        """Each call with its arguments behind the handle."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.functions and not hasattr(self._library, name):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            self.asked.append((name, *arguments[1:]))
            return (self.functions.get(name) or getattr(self._library, name))(*arguments)

        return call

    def refuse(self, name: str, code: int) -> None:
        """Let a function raise an error from now on."""
        self.answer(name, pynvml.NVMLError(code))

    def answer(self, name: str, answer: Any) -> None:
        """Let a function return this from now on, or raise it where it is an error."""

        def call(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.functions[name] = call


def answering(**answers: Any) -> Altered:
    """Return a library that has these functions alone, each with one answer or error."""
    library = Altered()
    for name, answer in answers.items():
        library.answer(name, answer)
    return library


class FakeProcfs:
    """A `/proc` whose processes a test starts, moves and ends."""

    def __init__(self) -> None:
        self.files: dict[str, list[bytes]] = defaultdict(list)
        """Each file's contents, one a read; the last one stays."""
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
