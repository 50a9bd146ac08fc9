"""One tick of one node: self-contained, numbered in order, and true to the simulator's truth."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuDetails,
    GpuReading,
    NodeReadings,
    NodeSample,
    ProcessChange,
    ProcessKind,
)
from gpuledger.records.bounds import MAX_INTERVAL_NS, MAX_INTERVAL_SECONDS
from gpuledger_agent.core.raw import (
    AnswerTime,
    ClockReading,
    InstanceIdentity,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
)
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.metrics import READINGS_DROPPED
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.fakes.nvml import FakeProcfs
from tests.metric_values import value_of
from tests.ticks import play

QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"
EPOCH_NS = 1_795_000_000_000_000_000
WINDOW_SECONDS = 1 / 6
ONE, TWO = "a" * 64, "b" * 64


def moment(seconds: float) -> ClockReading:
    now_ns = round(seconds * NS_PER_SECOND)
    return ClockReading(
        time_ns=EPOCH_NS + now_ns, monotonic_ns=now_ns, boottime_ns=100 * NS_PER_SECOND + now_ns
    )


def answers(*pids: int, index: int = 0) -> RawGpuSample:
    return RawGpuSample(
        uuid=f"GPU-{index}",
        index=index,
        percent=50,
        processes=tuple(
            ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=10) for pid in pids
        ),
        process_samples=(),
    )


def allocation() -> DeviceAllocation:
    return DeviceAllocation(
        gpu_uuid="GPU-0",
        device_id="GPU-0::1",
        resource_name="nvidia.com/gpu",
        namespace="serving",
        pod="chat",
        container="server",
    )


def sample(sampler: Sampler, given: Sequence[RawGpuSample], seconds: float) -> NodeTick | None:
    at = moment(seconds)
    return sampler.sample(given, at=at)


def tick_at(sampler: Sampler, given: Sequence[RawGpuSample], seconds: float) -> NodeSample:
    tick = sample(sampler, given, seconds)
    assert tick
    return tick.sample


def details_at(
    sampler: Sampler, given: Sequence[RawGpuSample], seconds: float
) -> Mapping[str, GpuDetails]:
    tick = sample(sampler, given, seconds)
    assert tick
    return {one.uuid: one for one in tick.readings.gpus}


@pytest.fixture
def procfs() -> FakeProcfs:
    return FakeProcfs()


@pytest.fixture
def sampler(procfs: FakeProcfs) -> Sampler:
    return Sampler(node=NodeId("default", "node-1"), procfs=procfs)


def test_the_first_readings_only_open_the_first_interval(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    assert sample(sampler, [answers(7)], 1) is None
    procfs.end(7)
    tick = sample(sampler, [answers()], 1.25)
    assert tick
    assert (tick.sample.node, tick.sample.boot_id) == ("node-1", "boot-1")
    assert (tick.sample.interval_ns, tick.sample.seq) == (NS_PER_SECOND // 4, 101_250)
    assert tick.sample.time_ns == EPOCH_NS + NS_PER_SECOND * 5 // 4
    assert [record.change for record in tick.processes] == [ProcessChange.SEEN, ProcessChange.ENDED]
    (process,) = tick.sample.processes
    assert process.ended
    assert tick.sample.containers == [ContainerRef(container_id=ONE)]


def test_a_known_gpu_that_does_not_answer_follows_the_others_in_the_tick(
    sampler: Sampler,
) -> None:
    cut = replace(
        answers(index=1),
        model="NVIDIA H200",
        mig_enabled=True,
        compute_slices=7,
        memory_slices=8,
        instances=(
            RawGpuSample(
                uuid="MIG-1",
                index=1,
                instance=InstanceIdentity(
                    uuid="MIG-1",
                    parent_uuid="GPU-1",
                    index=0,
                    gpu_instance=9,
                    compute_instance=0,
                    profile="1g.18gb",
                ),
                compute_slices=1,
                memory_slices=1,
            ),
        ),
    )
    both, allocated = ["GPU-0", "GPU-1"], [allocation()]

    def tick(given: Sequence[RawGpuSample], seconds: float, known: Sequence[str]) -> NodeSample:
        made = sampler.sample(given, at=moment(seconds), known=known, allocations=allocated)
        assert made
        return made.sample

    sampler.sample([cut, answers()], at=moment(0), known=both)
    assert [gpu.unresponsive for gpu in tick([cut, answers()], 1, both).gpus] == [None] * 3
    unresponsive = [
        GpuReading(
            uuid="GPU-1",
            index=1,
            model="NVIDIA H200",
            mig_enabled=True,
            compute_slices=7,
            memory_slices=8,
            unresponsive=True,
        ),
        GpuReading(
            uuid="MIG-1",
            index=1,
            parent_uuid="GPU-1",
            gpu_instance=9,
            compute_instance=0,
            mig_profile="1g.18gb",
            compute_slices=1,
            memory_slices=1,
            unresponsive=True,
        ),
    ]
    for seconds in range(2, 36):
        lost = tick([answers()], seconds, both)
        assert [gpu.uuid for gpu in lost.gpus] == ["GPU-0", "GPU-1", "MIG-1"]
        assert (lost.gpus[1:], lost.allocations) == (unresponsive, allocated)
    assert [gpu.unresponsive for gpu in tick([cut, answers()], 36, both).gpus] == [None] * 3
    assert [gpu.uuid for gpu in tick([answers()], 37, ["GPU-0"]).gpus] == ["GPU-0"], "removed"
    assert [gpu.uuid for gpu in tick([answers()], 38, both).gpus] == ["GPU-0"], "for good"


def test_if_no_gpu_answers_all_are_unresponsive_and_no_process_ends(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    sample(sampler, [answers(7)], 0)
    tick_at(sampler, [answers(7)], 1)
    away = sampler.sample([], at=moment(2), known=["GPU-0"])
    assert away
    assert [(gpu.uuid, gpu.unresponsive) for gpu in away.sample.gpus] == [("GPU-0", True)]
    assert (away.sample.processes, away.processes) == ([], [])
    assert book_tick(away.sample)
    back = tick_at(sampler, [answers(7)], 3)
    assert [process.pid for process in back.processes] == [7]


def test_an_interval_longer_than_a_record_allows_is_dropped_and_logged(sampler: Sampler) -> None:
    """For example after the agent was stopped for days; counters are kept, so that falls show."""
    sample(sampler, [answers()], 0)
    assert tick_at(sampler, [answers()], MAX_INTERVAL_SECONDS).interval_ns == MAX_INTERVAL_NS
    with capture_logs() as lines:
        assert sample(sampler, [answers()], 2 * MAX_INTERVAL_SECONDS + 0.5) is None
        after = tick_at(sampler, [answers()], 2 * MAX_INTERVAL_SECONDS + 1.5)
    assert after.interval_ns == NS_PER_SECOND
    assert [(line["event"], line["interval_seconds"]) for line in lines] == [
        ("interval_dropped", MAX_INTERVAL_SECONDS + 0.5)
    ]


def test_seq_rises_even_within_one_millisecond(sampler: Sampler) -> None:
    sample(sampler, [], 1)
    seqs = [tick_at(sampler, [], 1 + place / 10_000).seq for place in range(1, 5)]
    assert seqs == [101_000, 101_001, 101_002, 101_003]


def test_processes_point_into_one_table_of_gpus_and_one_of_containers(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    procfs.start(8, started_ticks=2, cgroup=f"/docker/{TWO}")
    procfs.start(9, started_ticks=3, cgroup="/system.slice/nvidia-dcgm.service")
    given = [answers(8, 9, index=1), answers(7, 8, index=0)]
    sample(sampler, given, 1)
    made = tick_at(sampler, given, 2)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-0", "GPU-1"]
    assert made.containers == [ContainerRef(container_id=ONE), ContainerRef(container_id=TWO)]
    assert [(one.gpu, one.pid, one.container) for one in made.processes] == [
        (0, 7, 0),
        (0, 8, 1),
        (1, 8, 1),
        (1, 9, None),
    ]


def process_sample(pid: int, percent: int) -> ProcessUtilizationSample:
    return ProcessUtilizationSample(
        pid=pid, timestamp_us=1_500_000, sm_percent=percent, memory_percent=0
    )


@pytest.mark.parametrize(
    ("given", "ratio", "method"),
    [((), None, None), ((process_sample(7, 40),), pytest.approx(0.2), "partial_samples")],
)
def test_the_samples_of_a_recycled_pid_are_divided_by_time_and_partial(
    sampler: Sampler,
    procfs: FakeProcfs,
    given: tuple[ProcessUtilizationSample, ...],
    ratio: float | None,
    method: str | None,
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    sample(sampler, [answers(7)], 1)
    procfs.start(7, started_ticks=10_150, cgroup=f"/docker/{TWO}")
    made = tick_at(sampler, [replace(answers(7), percent=None, process_samples=given)], 2)
    named = [
        (made.containers[one.container or 0].container_id, one.ended, one.sm_utilization_ratio)
        for one in made.processes
    ]
    assert named == [(TWO, None, ratio), (ONE, True, ratio)]
    (books,) = book_tick(made)
    assert books.busy_method == method


@pytest.mark.parametrize(("listed_seconds", "container"), [(2.0, None), (2.9, 0)])
def test_a_process_that_starts_before_a_slow_driver_lists_it_is_the_listed_one(
    sampler: Sampler, procfs: FakeProcfs, listed_seconds: float, container: int | None
) -> None:
    sample(sampler, [answers()], 1)
    procfs.start(7, started_ticks=10_250, cgroup=f"/docker/{ONE}")
    listed = AnswerTime(2 * NS_PER_SECOND, round(listed_seconds * NS_PER_SECOND))
    made = tick_at(sampler, [replace(answers(7), listed=listed)], 2)
    assert [process.container for process in made.processes] == [container]


def test_a_process_has_its_video_engine_use_if_it_used_one(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    procfs.start(8, started_ticks=1, cgroup=f"/docker/{ONE}")
    sample(sampler, [answers(7, 8)], 1)
    seen = [
        ProcessUtilizationSample(
            pid=7,
            timestamp_us=1_500_000,
            sm_percent=40,
            memory_percent=0,
            encoder_percent=25,
            decoder_percent=2**32 - 1,
        ),
        # A row with an implausible value loses its engines too.
        ProcessUtilizationSample(
            pid=8, timestamp_us=1_500_000, sm_percent=101, memory_percent=0, encoder_percent=50
        ),
    ]
    dropped = READINGS_DROPPED.labels(reading="process_decoder_utilization", reason="out_of_range")
    before = value_of(dropped)
    made = tick_at(sampler, [replace(answers(7, 8), process_samples=tuple(seen))], 2)
    assert [
        (one.pid, one.encoder_utilization_ratio, one.decoder_utilization_ratio)
        for one in made.processes
    ] == [(7, 0.25, None), (8, None, None)]
    assert value_of(dropped) == before + 1


def test_a_process_that_was_never_readable_has_no_container(sampler: Sampler) -> None:
    sample(sampler, [answers(7)], 1)
    (process,) = tick_at(sampler, [answers(7)], 2).processes
    assert (process.container, process.started_boottime_ns) == (None, None)


def test_a_process_that_ended_before_it_could_be_checked_has_no_container_in_the_tick(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    sample(sampler, [answers(7)], 1)
    procfs.end(7)
    (process,) = tick_at(sampler, [answers(7)], 2).processes
    assert (process.container, process.started_boottime_ns) == (None, None)
    last = sample(sampler, [answers()], 3)
    assert last
    assert [record.container_id for record in last.processes] == [ONE]
    assert [one.container for one in last.sample.processes] == [None]


def test_a_gpu_that_did_not_answer_is_not_in_the_tick_and_starts_over(sampler: Sampler) -> None:
    sample(sampler, [answers(index=0), answers(index=1)], 1)
    made = tick_at(sampler, [answers(index=1)], 2)
    assert [gpu.uuid for gpu in made.gpus] == ["GPU-1"]
    assert sampler.begin_tick().keys() == {"GPU-1"}


# Against the simulator, which knows the kernels' busy intervals; the agent sees only NVML.


def busy_seconds(samples: list[NodeSample]) -> dict[str | None, float]:
    busy: dict[str | None, float] = defaultdict(float)
    for one in samples:
        for process in one.processes:
            place = process.container
            uid = None if place is None else one.containers[place].pod_uid
            busy[uid] += (process.sm_utilization_ratio or 0) * one.interval_ns / NS_PER_SECOND
    return busy


@pytest.mark.parametrize("node_name", ["gpu-node-1", "gpu-node-2"])
@pytest.mark.parametrize("lengths", [[0.25, *[1.0] * 30], [0.25, *[0.97, 1.0, 1.06, 0.93] * 8]])
def test_the_sum_over_ticks_is_the_busy_time_of_the_kernels(
    node_name: str, lengths: list[float]
) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node(node_name)
    clock.advance(0.1)
    start_ns = clock.time_ns()
    samples = [tick.sample for tick in play(node, clock, lengths)]
    busy = busy_seconds(samples)
    covered_since_ns = samples[0].time_ns - samples[0].interval_ns
    truth = simulation.truth(covered_since_ns, samples[-1].time_ns, node_name)
    assert truth
    for used in truth:
        # Part of a window is not reported at each end of a process.
        assert busy[used.uid] == pytest.approx(used.busy_seconds, rel=0.005, abs=WINDOW_SECONDS)
    for place, gpu in enumerate(node.gpus):
        drawn = sum(one.gpus[place].energy_millijoules or 0 for one in samples)
        since = start_ns - EPOCH_NS, clock.time_ns() - EPOCH_NS
        # A tick covers the time up to some windows before it.
        covered = (samples[0].time_ns - samples[0].interval_ns, samples[-1].time_ns)
        joules = gpu.joules(*(at - EPOCH_NS for at in covered))
        assert drawn == pytest.approx(joules * 1_000, rel=0.005)
        ran = sum((one.gpus[place].utilization_ratio or 0) * one.interval_ns for one in samples)
        assert ran == pytest.approx(gpu.device_busy_ns(*since), rel=0.01)


def test_without_attribution_a_tick_has_no_processes_and_still_reads_the_gpus(
    procfs: FakeProcfs,
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    sampler = Sampler(node=NodeId("default", "node-1"), procfs=procfs, reads_processes=False)
    sample(sampler, [answers(7)], 1)
    tick = sample(sampler, [answers()], 2)
    assert tick
    assert (tick.processes, tick.sample.processes, tick.sample.containers) == ([], [], [])
    assert [gpu.utilization_ratio for gpu in tick.sample.gpus] == [0.5]


def test_a_tick_carries_its_allocations(sampler: Sampler) -> None:
    given = allocation()
    sample(sampler, [answers()], 1)
    at = moment(2)
    tick = sampler.sample([answers()], at=at, allocations=[given])
    assert tick
    assert tick.sample.allocations == [given]


def test_an_implausible_reading_is_counted_by_reading_and_reason(sampler: Sampler) -> None:
    counter = READINGS_DROPPED.labels(reading="power_milliwatts", reason="out_of_range")
    before = value_of(counter)
    sample(sampler, [replace(answers(), power_milliwatts=2**32 - 1)], 1)
    assert value_of(counter) == before + 1


def test_detailed_readings_are_a_separate_record_with_the_identity_of_the_tick(
    sampler: Sampler,
) -> None:
    sample(sampler, [answers(), answers(index=1)], 1)
    reported = [answers(), replace(answers(index=1), readings={"performance_state": 2})]
    tick = sample(sampler, reported, 2)
    assert tick
    assert tick.readings == NodeReadings(
        **{
            name: getattr(tick.sample, name)
            for name in ("cluster", "node", "boot_id", "seq", "time_ns", "interval_ns")
        },
        gpus=[GpuDetails(uuid="GPU-1", performance_state=2)],
    )


def test_counters_are_remembered_while_a_gpu_does_not_answer(sampler: Sampler) -> None:
    sample(sampler, [replace(answers(), energy_millijoules=9000)], 1)
    assert not details_at(sampler, [answers(index=1)], 2)
    tick = sample(sampler, [replace(answers(), energy_millijoules=10)], 3)
    assert tick
    assert [one.resets for one in tick.readings.gpus] == [["energy_total_millijoules"]]
    # Without a draw either, the energy since the GPU's return is not known.
    assert tick.sample.gpus[0].energy_millijoules is None


@pytest.mark.parametrize("unresponsive", [0, 1, 30])
def test_a_counter_that_rose_while_a_gpu_did_not_answer_is_accepted(
    sampler: Sampler, unresponsive: int
) -> None:
    throttled, sent = "throttling.power_ns_total", "traffic.pcie_sent_bytes_total"
    seconds = unresponsive + 1
    sample(sampler, [replace(answers(), readings={throttled: 0, sent: 0})], 1)
    for second in range(2, 2 + unresponsive):
        sample(sampler, [answers(index=1)], second)
    risen = {throttled: seconds * NS_PER_SECOND, sent: seconds * (200 << 30)}
    gpu = details_at(sampler, [replace(answers(), readings=risen)], 1 + seconds)["GPU-0"]
    assert gpu.throttling
    assert gpu.traffic
    assert gpu.throttling.power_ns_total == seconds * NS_PER_SECOND
    assert gpu.traffic.pcie_sent_bytes_total == seconds * (200 << 30)


def test_health_from_the_first_query_is_in_the_first_tick(sampler: Sampler) -> None:
    healthy = {"health.pcie_replays_total": 3, "health.remapped_rows_pending": 1}
    sample(sampler, [replace(answers(), health=healthy), answers(index=1)], 1)
    reported = details_at(sampler, [answers(), answers(index=1)], 1.25)
    assert reported.keys() == {"GPU-0"}
    health = reported["GPU-0"].health
    assert health
    assert (health.pcie_replays_total, health.remapped_rows_pending) == (3, True)
    assert not details_at(sampler, [answers()], 2.25)


def test_readings_from_the_first_query_are_only_in_the_first_tick(
    sampler: Sampler,
) -> None:
    """They are read every few seconds, and would be missing until the next time."""
    idle = {"performance_state": 8}
    sample(sampler, [replace(answers(), readings=idle)], 1)
    assert details_at(sampler, [answers()], 1.25)["GPU-0"].performance_state == 8
    assert details_at(sampler, [answers()], 2.25) == {}


def test_newer_health_replaces_that_of_the_first_query(sampler: Sampler) -> None:
    name = "health.pcie_replays_total"
    sample(sampler, [replace(answers(), health={name: 3})], 1)
    first = details_at(sampler, [replace(answers(), health={name: 4})], 1.25)["GPU-0"]
    assert first.health
    assert first.health.pcie_replays_total == 4


def test_after_a_skipped_tick_nothing_is_reported_for_its_time(sampler: Sampler) -> None:
    drawing = [replace(answers(), energy_millijoules=mj) for mj in (1000, 2000, 9000, 9500)]
    sample(sampler, drawing[:1], 1)
    assert tick_at(sampler, drawing[1:2], 2).gpus[0].energy_millijoules == 1_000
    sampler.forget()
    tick = sample(sampler, drawing[2:3], 4)
    assert tick
    (after,) = tick.sample.gpus
    # Its energy is the counter's difference over exactly the time that the tick covers.
    assert tick.sample.interval_ns == 2 * NS_PER_SECOND
    assert (after.energy_millijoules, after.energy_total_millijoules) == (7_000, 9_000)
    assert not tick.readings.gpus
    assert tick_at(sampler, drawing[3:], 5).gpus[0].energy_millijoules == 500


def test_a_process_list_that_keeps_failing_is_used_only_for_a_few_ticks(
    sampler: Sampler, procfs: FakeProcfs
) -> None:
    procfs.start(7, started_ticks=1, cgroup=f"/docker/{ONE}")
    given = answers(7)
    sample(sampler, [given], 1)
    sample(sampler, [given], 2)
    refused = replace(given, processes=None)
    ticks = [sample(sampler, [refused], 3 + number) for number in range(8)]
    listed = [[process.pid for process in tick.sample.processes] for tick in ticks if tick]
    assert listed == [[7]] * 5 + [[]] * 3
    # Whether it has ended is not known, so no end is reported.
    assert not any(tick.processes for tick in ticks if tick)
    assert sampler.unlisted_gpus == ["GPU-0"]
    back = sample(sampler, [given], 11)
    assert back
    assert [process.pid for process in back.sample.processes] == [7]
    assert not back.processes
    assert not sampler.unlisted_gpus


def test_a_gpu_that_never_had_a_process_list_is_not_reported_as_unlisted(sampler: Sampler) -> None:
    for second in range(9):
        sample(sampler, [replace(answers(), processes=None)], 1 + second)
    assert not sampler.unlisted_gpus
