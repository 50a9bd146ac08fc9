"""The agent's readings of two processes with known loads, in two containers' cgroups.

The loads never overlap, so each is exact. Tests that need the driver's pids in this namespace, or a
cgroup, are skipped without them; the tests of shares are not.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pynvml
import pytest

from gpuledger.clock import SystemClock
from gpuledger.keys import NodeId
from gpuledger.records import NodeSample
from gpuledger_agent.core.raw import ClockReading, SampleCursor
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from gpuledger_agent.host.procfs import SystemProcfs
from gpuledger_agent.sampling import Sampler
from tests.ticks import query_all, tick_of

LOAD = Path(__file__).with_name("load.py")
CGROUPS = Path("/sys/fs/cgroup")
BUSY_SECONDS = (0.15, 0.45)
FROM_SECONDS = (0.0, 0.3)
HELD_BYTES = (1 << 30, 3 << 30)
TICKS = 20
MAX_SECONDS = 120


@dataclass
class Load:
    """One of the two processes, in a cgroup named as Docker names it."""

    busy_seconds: float
    container_id: str
    process: "subprocess.Popen[str]"
    is_in_container: bool = field(default=False)

    @property
    def cgroup(self) -> Path:
        return CGROUPS / f"docker-{self.container_id}.scope"

    def enter_container(self) -> None:
        """Move it to its cgroup, if this machine allows it, so that it looks like a container's."""
        try:
            self.cgroup.mkdir()
            (self.cgroup / "cgroup.procs").write_text(str(self.process.pid))
            self.is_in_container = True
        except OSError:
            self.is_in_container = False

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        if self.is_in_container:
            self.cgroup.rmdir()


def start(place: int) -> Load:
    command = [
        sys.executable, str(LOAD),
        "--busy", str(BUSY_SECONDS[place]),
        "--from", str(FROM_SECONDS[place]),
        "--hold-bytes", str(HELD_BYTES[place]),
        "--seconds", str(MAX_SECONDS),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    load = Load(BUSY_SECONDS[place], f"{place}" * 64, process)
    load.enter_container()
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        load.end()
        pytest.skip("CUDA is not available")
    return load


@pytest.fixture(scope="module")
def loads() -> Iterator[list[Load]]:
    try:
        nvml = NvmlSession(pynvml)
        nvml.open()
        nvml.close()
    except SourceLostError as error:
        pytest.skip(f"no usable GPU: {error}")
    started: list[Load] = []
    try:
        started.append(start(0))
        started.append(start(1))
        yield started
    finally:
        for load in started:
            load.end()


@pytest.fixture(scope="module")
def ticks(loads: list[Load]) -> list[NodeTick]:
    """Return ticks of one second, without the first ones, in which contexts and windows settle."""
    assert loads
    nvml = NvmlSession(pynvml)
    gpus, clock = nvml.open(), SystemClock()
    sampler, made = Sampler(node=NodeId("default", "here"), procfs=SystemProcfs()), []
    for _ in range(TICKS + 4):
        tick = tick_of(sampler, gpus, clock)
        made.extend([tick] if tick else [])
        time.sleep(1)
    nvml.close()
    return made[3:]


def busy_ratio_by_pid(samples: list[NodeSample]) -> dict[int, float]:
    """Return each process's mean share of the first GPU's time, by pid."""
    seconds: dict[int, float] = defaultdict(float)
    for one in samples:
        for process in one.processes:
            if process.gpu == 0 and process.sm_utilization_ratio is not None:
                seconds[process.pid] += process.sm_utilization_ratio * one.interval_ns / 1e9
    total = sum(one.interval_ns for one in samples) / 1e9
    return {pid: busy / total for pid, busy in seconds.items()}


def test_the_gpu_was_busy_for_both_loads(ticks: list[NodeTick]) -> None:
    ratios = [tick.sample.gpus[0].utilization_ratio or 0.0 for tick in ticks]
    assert sum(ratios) / len(ratios) == pytest.approx(sum(BUSY_SECONDS), rel=0.05)


def test_shares_are_within_a_twentieth_of_the_loads(ticks: list[NodeTick]) -> None:
    """Compared by size, not by pid, because the driver's pids may be from another namespace."""
    ratios = sorted(busy_ratio_by_pid([tick.sample for tick in ticks]).values())[-2:]
    assert ratios == pytest.approx(sorted(BUSY_SECONDS), rel=0.05)


def test_each_share_is_reported_for_its_own_process_and_container(
    ticks: list[NodeTick], loads: list[Load]
) -> None:
    samples = [tick.sample for tick in ticks]
    ratios = busy_ratio_by_pid(samples)
    if not all(load.process.pid in ratios for load in loads):
        pytest.skip("the driver's pids are from another namespace")
    if not all(load.is_in_container for load in loads):
        pytest.skip("cannot create a cgroup")
    last = samples[-1]
    shown = {
        process.pid: last.containers[process.container].container_id
        for process in last.processes
        if process.container is not None
    }
    for load in loads:
        assert ratios[load.process.pid] == pytest.approx(load.busy_seconds, rel=0.05)
        assert shown[load.process.pid] == load.container_id


def test_each_process_has_at_least_the_memory_that_it_allocated(ticks: list[NodeTick]) -> None:
    held = sorted(
        process.memory_used_bytes or 0 for process in ticks[-1].sample.processes if process.gpu == 0
    )[-2:]
    assert [took <= found < took + (2 << 30) for took, found in zip(HELD_BYTES, held, strict=True)]


def test_the_ends_of_processes_are_reported_and_with_accounting_their_usage(
    loads: list[Load],
) -> None:
    """Must be the file's last test, because it ends the loads."""
    nvml = NvmlSession(pynvml)
    gpus, clock = nvml.open(), SystemClock()
    sampler, records = Sampler(node=NodeId("default", "here"), procfs=SystemProcfs()), []
    is_accounted = False
    for number in range(12):
        if number == 2:
            for load in loads:
                load.process.terminate()
        at, seen = ClockReading.read(clock), sampler.begin_tick()
        answers = [query_all(gpu, seen.get(gpu.uuid, SampleCursor())) for gpu in gpus]
        is_accounted = answers[0].process_stats is not None
        tick = sampler.sample(answers, at=at)
        records += tick.processes if tick else []
        time.sleep(1)
    nvml.close()
    ended = [record for record in records if record.change == "ended"]
    assert len(ended) >= len(loads)
    assert any(record.totals for record in ended) == is_accounted
    assert os.getpid() not in {record.pid for record in ended}
