"""The page shows only recent readings: no frozen value, and no series of what is gone."""

from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from gpuledger.records import (
    GpuHealth,
    GpuProfiling,
    GpuTraffic,
    ProcessChange,
    ProcessRecord,
)
from gpuledger_agent.exposition.node_state import make_node_state
from gpuledger_agent.settings import ExpositionSettings
from gpuledger_simulator.clock import ManualClock
from tests.held_objects import is_bounded
from tests.unit.agent.exposition.builders import (
    START_NS,
    Node,
    allocation,
    gpu,
    incident,
    instance,
    node,
    process,
    sample,
)

TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
REPLAYS = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"


def gpus_of(it: Node, name: str) -> set[str]:
    return {gpu for (gpu,) in it.values(name, "gpu")}


def test_a_gpu_that_is_unresponsive_for_several_ticks_is_no_longer_shown() -> None:
    it = node()
    it.show(sample(gpu(0, temperature_celsius=40), gpu(1, temperature_celsius=41)))
    for _ in range(5):
        it.clock.advance(1)
        it.show(sample(gpu(0, temperature_celsius=42)))
        assert gpus_of(it, TEMPERATURE) == {"0", "1"}
    it.clock.advance(1)
    it.show(sample(gpu(0, temperature_celsius=42)))
    assert gpus_of(it, TEMPERATURE) == {"0"}


def test_gpus_are_not_shown_without_recent_ticks() -> None:
    it = node()
    it.show(sample(gpu(0, temperature_celsius=40)))
    assert it.lines(TEMPERATURE)
    it.clock.advance(6)
    assert not it.lines(TEMPERATURE)
    assert not it.lines("gpuledger_node_gpu_info")


def test_processes_and_allocations_are_not_shown_without_recent_ticks() -> None:
    it = node(ExpositionSettings(process_series=True), a="ns/pod/main")
    it.show(
        sample(
            gpu(0),
            containers=["a"],
            processes=[process(0, 0)],
            allocations=[allocation(0, "ns/pod/main")],
        )
    )
    families = (
        "nvidia_pid_pod",
        "gpuledger_process_gpu_memory_bytes",
        "gpuledger_container_gpu_memory_bytes",
        "gpuledger_node_gpu_allocation_info",
    )
    assert all(it.lines(name) for name in families)
    it.clock.advance(6)
    assert [name for name in families if it.lines(name)] == []
    assert it.lines("gpuledger_node_sample_timestamp_seconds")


def test_a_slow_reading_is_kept_until_its_next_one_for_a_limited_time() -> None:
    it = node()
    it.show(sample(gpu(0, health=GpuHealth(pcie_replays_total=7))))
    for _ in range(60):
        it.clock.advance(1)
        it.show(sample(gpu(0)))
    assert it.values(REPLAYS, "gpu") == {("0",): 7}
    it.clock.advance(1)
    it.show(sample(gpu(0)))
    assert not it.lines(REPLAYS)


def test_a_fast_reading_that_misses_a_tick_is_kept_only_for_a_few_ticks() -> None:
    it = node()
    it.show(sample(gpu(0, profiling=GpuProfiling(dram_active_ratio=0.5))))
    it.clock.advance(5)
    it.show(sample(gpu(0)))
    assert it.lines("DCGM_FI_PROF_DRAM_ACTIVE")
    it.clock.advance(1)
    it.show(sample(gpu(0)))
    assert not it.lines("DCGM_FI_PROF_DRAM_ACTIVE")


def test_a_reading_taken_every_few_seconds_is_shown_until_the_next_one() -> None:
    clock = ManualClock(start_ns=START_NS)
    view = make_node_state(
        ExpositionSettings(), clock=clock, sampling_interval_seconds=1, readings_seconds=5
    )
    of_ticks = GpuProfiling(sm_active_ratio=0.5)
    view.update(
        *sample(
            gpu(
                0,
                performance_state=2,
                profiling=replace(of_ticks, fp16_active_ratio=0.25),
                traffic=GpuTraffic(pcie_sent_bytes_total=7),
            )
        )
    )
    for second in range(1, 17):
        clock.advance(1)
        of_ticks = GpuProfiling(sm_active_ratio=second / 100)
        view.update(*sample(gpu(0, profiling=of_ticks)))
        snapshot = view.snapshot()
        assert snapshot is not None
        (shown,) = snapshot.devices
        assert shown.profiling is not None
        assert shown.profiling.sm_active_ratio == second / 100, "the value of this tick"
        is_fresh = second <= 15
        assert shown.profiling.fp16_active_ratio == (0.25 if is_fresh else None)
        assert (shown.details and shown.details.performance_state) == (2 if is_fresh else None)
        assert bool(shown.traffic) == is_fresh


def test_an_instance_disappears_at_once_with_its_layout() -> None:
    it = node()
    it.show(sample(gpu(0, mig_enabled=True), instance(1, memory_used_bytes=1 << 30)))
    assert it.lines("DCGM_FI_DEV_FB_USED")
    it.clock.advance(1)
    it.show(sample(gpu(0)))
    assert not it.lines("DCGM_FI_DEV_FB_USED")


def test_readings_are_kept_longer_if_ticks_are_slow() -> None:
    clock = ManualClock(start_ns=START_NS)
    view = make_node_state(ExpositionSettings(), clock=clock, sampling_interval_seconds=10)
    view.update(*sample(gpu(0)))
    clock.advance(29)
    snapshot = view.snapshot()
    assert snapshot is not None
    assert len(snapshot.devices) == 1


def test_before_the_first_tick_the_page_is_empty() -> None:
    assert node().page() == b""


def test_memory_for_incidents_of_ever_new_gpus_is_bounded() -> None:
    it = node()

    def happen(number: int) -> None:
        it.view.record_incident(incident(number, number))
        it.view.record_incident(incident(0, number))

    assert is_bounded(it.view, happen, times=2500)


def record(change: ProcessChange, pid: int = 100) -> ProcessRecord:
    return ProcessRecord(
        cluster="default",
        node="node-1",
        boot_id="boot",
        pid=pid,
        time_ns=1,
        change=change,
        gpu_uuids=["GPU-0"],
        command="python",
    )


def test_a_process_has_its_name_from_first_seen_to_ended() -> None:
    it = node(ExpositionSettings(process_series=True))
    shown = sample(gpu(0), processes=[process(0, None)])
    it.show(shown, processes=[record(ProcessChange.SEEN)])
    it.show(shown)
    name = "gpuledger_process_gpu_memory_bytes"
    assert it.values(name, "process_name").keys() == {("python",)}
    it.show(sample(gpu(0)), processes=[record(ProcessChange.ENDED)])
    it.show(shown)
    assert it.values(name, "process_name").keys() == {("",)}


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_page_of_a_tick_is_rendered_once(seconds: float) -> None:
    it = node()
    it.show(sample(gpu(0, temperature_celsius=40)))
    first = it.page()
    it.clock.advance(seconds)
    assert it.page() is first
    it.show(sample(gpu(0, temperature_celsius=41)))
    assert it.page() is not first


def test_a_changed_list_of_counters_is_reloaded_and_an_invalid_one_is_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "counters.csv"
    file.write_text("DCGM_FI_DEV_GPU_TEMP, gauge, x")
    it = node(ExpositionSettings(counters_file=file))
    shown = sample(gpu(0, temperature_celsius=40, power_milliwatts=1_000))
    it.show(shown)
    assert it.lines(TEMPERATURE)

    file.write_text("DCGM_FI_DEV_POWER_USAGE, gauge, x, mistake")
    it.show(shown)
    with structlog.testing.capture_logs() as logs:
        assert it.lines(TEMPERATURE)
    assert [line["event"] for line in logs] == ["counters_refused"]
    assert f"{file}:1: expected 3 columns" in logs[0]["error"]

    file.unlink()
    (tmp_path / "new.csv").write_text("DCGM_FI_DEV_POWER_USAGE, gauge, x")
    (tmp_path / "new.csv").rename(file)
    it.show(shown)
    assert it.lines("DCGM_FI_DEV_POWER_USAGE")
    assert not it.lines(TEMPERATURE)
