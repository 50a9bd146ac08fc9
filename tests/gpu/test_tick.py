"""The agent on this machine's GPUs; not part of `make test`, because few machines have a GPU.

Run it on a machine with NVML: `.venv/bin/python -m pytest tests/gpu`. It is skipped without NVML.
"""

import os
import time

import pynvml
import pytest

from gpuledger.clock import SystemClock
from gpuledger.keys import NodeId
from gpuledger.records import EnergyMethod
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from gpuledger_agent.host.procfs import SystemProcfs
from gpuledger_agent.sampling import Sampler
from tests.ticks import tick_of


@pytest.fixture(scope="module")
def ticks() -> list[NodeTick]:
    nvml = NvmlSession(pynvml)
    try:
        gpus = nvml.open()
    except SourceLostError as error:
        pytest.skip(f"no usable GPU: {error}")
    sampler, clock, made = (
        Sampler(node=NodeId("default", "here"), procfs=SystemProcfs()),
        SystemClock(),
        [],
    )
    for _ in range(6):
        tick = tick_of(sampler, gpus, clock)
        made.extend([tick] if tick else [])
        time.sleep(1)
    nvml.close()
    return made


def test_every_gpu_is_in_every_tick(ticks: list[NodeTick]) -> None:
    uuids = [[gpu.uuid for gpu in tick.sample.gpus] for tick in ticks]
    assert uuids[0]
    assert all(found == uuids[0] for found in uuids)
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in uuids[0])
    assert uuids[0][0].startswith("GPU-")


def test_readings_are_present_and_plausible(ticks: list[NodeTick]) -> None:
    for gpu in ticks[-1].sample.gpus:
        if gpu.mig_enabled or gpu.parent_uuid:
            continue
        assert gpu.model
        assert gpu.utilization_ratio is not None
        assert 0 <= gpu.utilization_ratio <= 1
        assert gpu.memory_total_bytes is not None
        assert gpu.memory_used_bytes is not None
        assert gpu.memory_total_bytes > gpu.memory_used_bytes
        assert gpu.power_milliwatts is not None
        assert gpu.power_milliwatts > 1_000
        assert gpu.temperature_celsius is not None


def test_energy_agrees_with_power(ticks: list[NodeTick]) -> None:
    for place, gpu in enumerate(ticks[-1].sample.gpus):
        if gpu.parent_uuid:
            continue
        drawn = sum(tick.sample.gpus[place].energy_millijoules or 0 for tick in ticks[1:])
        seconds = sum(tick.sample.interval_ns for tick in ticks[1:]) / 1e9
        draws = [tick.sample.gpus[place].power_milliwatts or 0 for tick in ticks[1:]]
        assert drawn / seconds == pytest.approx(sum(draws) / len(draws), rel=0.25), gpu.model


def test_ticks_add_up_to_the_energy_counter(ticks: list[NodeTick]) -> None:
    """Requires a counter that moves in each tick; on real GPUs it moves about every 100 ms."""
    for place, gpu in enumerate(ticks[-1].sample.gpus):
        if gpu.parent_uuid or gpu.energy_total_millijoules is None:
            continue
        board = [tick.sample.gpus[place] for tick in ticks]
        methods = {one.energy_method for one in board[1:]}
        assert methods == {EnergyMethod.COUNTER}, gpu.model
        risen = gpu.energy_total_millijoules - (board[0].energy_total_millijoules or 0)
        assert sum(one.energy_millijoules or 0 for one in board[1:]) == risen, gpu.model


def test_tick_numbers_rise_and_follow_the_time_since_boot(ticks: list[NodeTick]) -> None:
    seqs = [tick.sample.seq for tick in ticks]
    assert seqs == sorted(set(seqs))
    # The two clocks differ by the duration of the test, far less than a minute.
    assert abs(seqs[-1] / 1000 - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60


def test_processes_of_this_pid_namespace_are_identified_by_their_start(
    ticks: list[NodeTick],
) -> None:
    own = [process for process in ticks[-1].sample.processes if process.pid == os.getpid()]
    assert all(process.started_boottime_ns for process in own)
