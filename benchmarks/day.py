"""A busy node's ticks without their waiting: processes come and go, and the agent reads them.

What a tick touches is here: NVML's answers, /proc, reading, booking, encoding, the page. Threads,
Kafka and sockets are not; `bench_agent` has them.
"""

from dataclasses import dataclass, field
from typing import Final

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
from tests.fakes.nvml import FakeGpu, FakeNvml, FakeProcfs
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
class Day:
    """One node's day, a second a step."""

    second: int = 0
    """How many have passed."""
    started: int = 0
    """How many processes have been started."""
    ticks: int = 0
    """How many ticks were made."""
    bytes_told: int = 0
    """How much was encoded and shown."""
    _gpus: list[FakeGpu] = field(
        default_factory=lambda: [FakeGpu(f"GPU-{number}") for number in range(_GPUS)]
    )
    _procfs: FakeProcfs = field(default_factory=FakeProcfs)
    _clock: ManualClock = field(default_factory=lambda: ManualClock(start_ns=_EPOCH_NS))

    def __post_init__(self) -> None:
        """Put the agent's parts together."""
        settings = ExpositionSettings(process_series=True, dcgm_names="both")
        view = make_node_state(settings, clock=self._clock, tick_seconds=1)
        self._page = PageRenderer(view, settings=settings, clock=self._clock)
        self._outlets = Outputs(send_queue=None, node_state=view, topics=TOPICS)
        self._sampler = Sampler(node=NodeId(DEFAULT_CLUSTER, "node"), procfs=self._procfs)
        nvml = NvmlSession(FakeNvml(*self._gpus), monotonic_ns=self._clock.monotonic_ns)
        self._asked = nvml.open()

    def pass_seconds(self, seconds: int) -> None:
        """Let time go by, a tick a second."""
        for _ in range(seconds):
            self.second += 1
            self._clock.advance(1)
            for gpu in self._gpus:
                self._churn(gpu)
                self._run(gpu)
            self._tick()

    def _churn(self, gpu: FakeGpu) -> None:
        """Start and end processes; pids come again, containers do not."""
        if self.second % _LIFE_SECONDS == 0:
            for pid in list(gpu.compute)[: _ALIVE // 2]:
                del gpu.compute[pid]
                self._procfs.end(pid)
        while len(gpu.compute) < _ALIVE:
            self.started += 1
            pid = _FIRST_PID + self.started % _PIDS
            container = f"{self.started:064x}"
            self._procfs.start(
                pid,
                started_ticks=self.second * 100 - 50,
                cgroup=f"/kubepods.slice/cri-containerd-{container}.scope",
                command=f"job-{self.started}",
            )
            gpu.compute[pid] = 1_000

    def _run(self, gpu: FakeGpu) -> None:
        now_us = self._clock.time_ns() // NS_PER_US
        stamps = [now_us - 1_000_000 * place // _WINDOWS for place in range(2 * _WINDOWS)]
        gpu.samples = [(stamp, 50) for stamp in reversed(stamps)]
        gpu.process_samples = [(pid, stamp, 8) for stamp in reversed(stamps) for pid in gpu.compute]
        gpu.energy_mj += 300_000

    def _tick(self) -> None:
        if tick := tick_of(self._sampler, self._asked, self._clock):
            self._tell(tick)

    def _tell(self, tick: NodeTick) -> None:
        self.ticks += 1
        self.bytes_told += bundle_size_bytes(bundle_tick(tick, topics=TOPICS))
        self._outlets.report_tick(tick)
        if self.second % _SCRAPE_SECONDS == 0:
            self.bytes_told += len(self._page())
