"""A busy node's ticks without waiting in between: processes come and go, and the agent reads them.

The code of a tick is included: NVML's answers, /proc, reading, booking, encoding, the page.
Threads, Kafka and sockets are not; `bench_agent` has them.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import pynvml

from gpuledger.clock import NS_PER_US
from gpuledger.keys import NodeId
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.exposition import PageRenderer
from gpuledger_agent.exposition.node_state import make_node_state
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.loop import Outputs
from gpuledger_agent.publish.message_bundle import bundle_size_bytes, bundle_tick
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import ExpositionSettings
from gpuledger_simulator.clock import ManualClock
from tests.default_topics import TOPICS
from tests.fakes.nvml import NO_INSTANCE, FakeProcfs
from tests.ticks import tick_of

_EPOCH_NS: Final = 1_795_000_000_000_000_000
_GPUS: Final = 2
_ALIVE: Final = 6
_LIFE_SECONDS: Final = 6
_PIDS: Final = 4_000
_FIRST_PID: Final = 1_000
_WINDOWS: Final = 6
_SCRAPE_SECONDS: Final = 15


@dataclass
class DayGpu:
    """The changing state of a GPU."""

    uuid: str
    """Its UUID."""
    stamps_us: list[int] = field(default_factory=list)
    """When the driver has sampled it."""
    pids: list[int] = field(default_factory=list)
    """Its processes."""
    energy_millijoules: int = 0
    """The energy that it has used."""


def play_nvml(gpus: list[DayGpu]) -> SimpleNamespace:
    """Return a library that keeps no history; the simulator keeps all processes that it plays."""

    def list_processes(gpu: DayGpu) -> list[Any]:
        known = {"usedGpuMemory": 1_000, "gpuInstanceId": NO_INSTANCE}
        return [
            SimpleNamespace(pid=pid, computeInstanceId=NO_INSTANCE, **known) for pid in gpu.pids
        ]

    def sample(gpu: DayGpu, _kind: int, last_seen: int) -> tuple[int, list[Any]]:
        value = SimpleNamespace(uiVal=50)
        newer = [stamp for stamp in gpu.stamps_us if stamp > last_seen]
        samples = [SimpleNamespace(timeStamp=stamp, sampleValue=value) for stamp in newer]
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples

    def sample_processes(gpu: DayGpu, last_seen: int) -> list[Any]:
        used = {"smUtil": 8, "memUtil": 4, "encUtil": 0, "decUtil": 0}
        return [
            SimpleNamespace(pid=pid, timeStamp=stamp, **used)
            for stamp in gpu.stamps_us
            if stamp > last_seen
            for pid in gpu.pids
        ]

    memory = SimpleNamespace(total=80_000, used=30_000, reserved=500)
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetName=lambda _: "GPU of a day",
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetSamples=sample,
        nvmlDeviceGetMemoryInfo=lambda *_: memory,
        nvmlDeviceGetPowerUsage=lambda _: 250_500,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: gpu.energy_millijoules,
        nvmlDeviceGetTemperature=lambda *_: 40,
        nvmlDeviceGetClockInfo=lambda *_: 1980,
        nvmlDeviceGetComputeRunningProcesses_v3=list_processes,
        nvmlDeviceGetGraphicsRunningProcesses_v3=lambda _: [],
        nvmlDeviceGetMPSComputeRunningProcesses_v3=lambda _: [],
        nvmlDeviceGetProcessUtilization=sample_processes,
    )


@dataclass
class Day:
    """One node's day, in steps of a second."""

    second: int = 0
    """Number of seconds that have passed."""
    started: int = 0
    """Number of processes that were started."""
    ticks: int = 0
    """Number of ticks."""
    bytes_reported: int = 0
    """Number of bytes that were encoded or rendered."""
    _gpus: list[DayGpu] = field(
        default_factory=lambda: [DayGpu(f"GPU-{number}") for number in range(_GPUS)]
    )
    _procfs: FakeProcfs = field(default_factory=FakeProcfs)
    _clock: ManualClock = field(default_factory=lambda: ManualClock(start_ns=_EPOCH_NS))

    def __post_init__(self) -> None:
        """Assemble the agent's parts."""
        settings = ExpositionSettings(process_series=True, dcgm_names="both")
        view = make_node_state(settings, clock=self._clock, sampling_interval_seconds=1)
        self._page = PageRenderer(view, settings=settings, clock=self._clock)
        self._outlets = Outputs(send_queue=None, node_state=view, topics=TOPICS)
        self._sampler = Sampler(node=NodeId(DEFAULT_CLUSTER, "node"), procfs=self._procfs)
        nvml = NvmlSession(play_nvml(self._gpus), monotonic_ns=self._clock.monotonic_ns)
        self._device = nvml.open()

    def pass_seconds(self, seconds: int) -> None:
        """Advance the time, with a tick per second."""
        for _ in range(seconds):
            self.second += 1
            self._clock.advance(1)
            for gpu in self._gpus:
                self._churn(gpu)
                self._run(gpu)
            self._tick()

    def _churn(self, gpu: DayGpu) -> None:
        """Start and end processes; pids are reused, containers are not."""
        if self.second % _LIFE_SECONDS == 0:
            for pid in gpu.pids[: _ALIVE // 2]:
                gpu.pids.remove(pid)
                self._procfs.end(pid)
        while len(gpu.pids) < _ALIVE:
            self.started += 1
            pid = _FIRST_PID + self.started % _PIDS
            container = f"{self.started:064x}"
            self._procfs.start(
                pid,
                started_ticks=self.second * 100 - 50,
                cgroup=f"/kubepods.slice/cri-containerd-{container}.scope",
                command=f"job-{self.started}",
            )
            gpu.pids.append(pid)

    def _run(self, gpu: DayGpu) -> None:
        now_us = self._clock.time_ns() // NS_PER_US
        stamps = [now_us - 1_000_000 * place // _WINDOWS for place in range(2 * _WINDOWS)]
        gpu.stamps_us = stamps[::-1]
        gpu.energy_millijoules += 300_000

    def _tick(self) -> None:
        if tick := tick_of(self._sampler, self._device, self._clock):
            self._report(tick)

    def _report(self, tick: NodeTick) -> None:
        self.ticks += 1
        self.bytes_reported += bundle_size_bytes(bundle_tick(tick, topics=TOPICS))
        self._outlets.report_tick(tick)
        if self.second % _SCRAPE_SECONDS == 0:
            self.bytes_reported += len(self._page())
