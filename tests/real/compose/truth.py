"""The truth about the scenario within a window: each pod's use of each GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Final

import pynvml

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuledger_simulator.device import SimulatedGpu
    from gpuledger_simulator.plan import PlannedPod
    from gpuledger_simulator.schema import Scenario

_NS: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Used:
    """Means over a window."""

    gpus: float
    """GPUs kept busy."""
    bytes: float
    """Device memory used."""
    watts: float
    """Power drawn by its kernels, and the idle power during that time."""


class Truth:
    """The scenario within [start, end), in seconds since the epoch."""

    def __init__(self, scenario: Scenario, *, epoch_ns: int, start: int, end: int) -> None:
        self._clock = ManualClock(start_ns=start * _NS)
        self._run = Simulation(scenario, epoch_ns=epoch_ns, clock=self._clock)
        self._start_ns, self._end_ns = start * _NS - epoch_ns, end * _NS - epoch_ns
        self._seconds = end - start

    @property
    def gpus(self) -> list[tuple[str, SimulatedGpu]]:
        """The GPUs, with their nodes' names."""
        return [(node.name, gpu) for node in self._run.nodes.values() for gpu in node.gpus]

    def busy(self, gpu: SimulatedGpu) -> float:
        """Return the ratio of the window in which a kernel ran on a GPU."""
        return gpu.device_busy_ns(self._start_ns, self._end_ns) / _NS / self._seconds

    @property
    def namespaces(self) -> set[str]:
        """The namespaces of all pods of the scenario."""
        return {pod.spec.namespace for pod in self._run.pods}

    @property
    def watts(self) -> float:
        """The power of all GPUs."""
        drawn = (gpu.joules(self._start_ns, self._end_ns) for _, gpu in self.gpus)
        return sum(drawn) / self._seconds

    @property
    def idle_watts(self) -> float:
        """The power of all GPUs for the time in which no kernel ran."""
        return sum(gpu.facts.idle_watts * (1 - self.busy(gpu)) for _, gpu in self.gpus)

    def celsius(self) -> float:
        """Return the mean of the hottest die's temperature in the window; slow, so call it once."""
        reported = []
        for _ in range(self._seconds):
            self._clock.advance(1)
            reported.append(max(self._celsius()))
        return mean(reported)

    def used(self, pod: PlannedPod | None) -> Used:
        """Return a pod's use; for None, the use of processes without a pod."""
        gpus = allocated = watts = 0.0
        for _, gpu in self.gpus:
            for process in gpu.processes:
                if process.pod is pod:
                    busy_ns = gpu.busy_ns(process, self._start_ns, self._end_ns)
                    busy = busy_ns / _NS / self._seconds
                    gpus += busy
                    allocated += process.spec.memory_bytes * process.is_on_gpu(self._end_ns - 1)
                    watts += busy * gpu.facts.max_watts
        return Used(gpus=gpus, bytes=allocated, watts=watts)

    def allocated(self, pod: PlannedPod) -> float:
        """Return the number of GPUs of a pod; a GPU shared by several counts in equal parts."""
        there = [
            {id(one.pod) for one in gpu.users(self._end_ns - 1) if one.pod is not None}
            for _, gpu in self.gpus
        ]
        return sum(1 / len(pods) for pods in there if id(pod) in pods)

    def pods(self) -> list[PlannedPod]:
        """Return the pods that ran through the whole window with a process on a GPU."""
        lived = [
            pod
            for pod in self._run.pods
            if pod.start_ns < self._start_ns and pod.end_ns > self._end_ns
        ]
        cut_off = [
            pod
            for pod in self._run.pods
            if pod not in lived and pod.start_ns < self._end_ns and pod.end_ns > self._start_ns
        ]
        assert not cut_off, "a pod started or ended in the window; choose another one"
        return [pod for pod in lived if any(one.pod is pod for one in self._run.processes)]

    def methods(self) -> dict[str, int]:
        """Count the pairs of a GPU and a pod by whether the pod had the GPU to itself."""
        found: Counter[str] = Counter()
        for _, gpu in self.gpus:
            there = {id(one.pod): one.pod for one in gpu.users(self._end_ns - 1)}
            pods = [pod for pod in there.values() if pod is not None]
            found["exclusive" if len(there) == 1 else "process_utilization"] += len(pods)
        return found

    def _celsius(self) -> Iterator[int]:
        for node in self._run.nodes.values():
            node.nvml.nvmlInit()
            for index in range(len(node.gpus)):
                handle = node.nvml.nvmlDeviceGetHandleByIndex(index)
                yield node.nvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
