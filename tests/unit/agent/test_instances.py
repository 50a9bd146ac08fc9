"""A node with a MIG-partitioned GPU and with process accounts, against the simulator's truth."""

from collections import defaultdict
from typing import Any

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import Category, NodeSample, ProcessChange, ProcessRecord
from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import play, query_all
from tests.unit.simulator.mig_builders import EPOCH_NS, GIB, cut_simulation


def records_of(ticks: list[NodeTick]) -> list[ProcessRecord]:
    return [record for tick in ticks for record in tick.processes]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


@pytest.fixture
def cut(clock: ManualClock) -> list[NodeTick]:
    return play(cut_simulation(clock).node("node-a"), clock, [0.25, *[1.0] * 22])


def test_the_instances_of_a_gpu_follow_its_row(cut: list[NodeTick]) -> None:
    gpus = cut[4].sample.gpus
    assert [gpu.mig_profile for gpu in gpus] == [
        None, "1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb"
    ]  # fmt: skip
    assert [gpu.mig_enabled for gpu in gpus] == [True, None, None, None, None]
    assert {gpu.parent_uuid for gpu in gpus[1:]} == {gpus[0].uuid}
    assert gpus[0].utilization_ratio is None
    assert {gpu.energy_millijoules is None for gpu in gpus[1:]} == {True}
    assert gpus[0].energy_millijoules


def test_processes_point_to_the_row_of_their_instance(cut: list[NodeTick]) -> None:
    sample = cut[4].sample
    held = [(process.gpu, (process.memory_used_bytes or 0) // GIB) for process in sample.processes]
    assert held == [(1, 5), (2, 30), (3, 6)]
    assert len({process.container for process in sample.processes}) == 3


def test_the_busy_time_of_an_instance_equals_the_time_of_its_kernels(clock: ManualClock) -> None:
    simulation = cut_simulation(clock)
    node = simulation.node("node-a")
    ticks = play(node, clock, [0.25, *[1.0] * 15])[1:]
    end_ns = clock.time_ns() - EPOCH_NS
    start_ns = end_ns - sum(tick.sample.interval_ns for tick in ticks)
    for place, process in enumerate(node.gpus[0].processes, start=1):
        ran_ns = sum(
            (tick.sample.gpus[place].utilization_ratio or 0) * tick.sample.interval_ns
            for tick in ticks
        )
        assert ran_ns == pytest.approx(node.gpus[0].busy_ns(process, start_ns, end_ns), rel=1e-6)


def test_the_traffic_of_the_gpu_belongs_to_no_instance(cut: list[NodeTick]) -> None:
    board, *instances = [gpu.profiling for gpu in cut[4].readings.gpus if gpu.profiling]
    assert board.pcie_sent_bytes_per_second
    assert len(instances) == 4
    assert {instance.pcie_sent_bytes_per_second for instance in instances} == {None}
    booked = [gpu.sm_active_ratio for gpu in cut[4].sample.gpus[1:]]
    assert [one.sm_active_ratio for one in instances] == booked
    assert None not in booked


def test_a_repartitioned_gpu_is_in_the_next_tick_and_ends_the_processes_of_old_instances(
    cut: list[NodeTick],
) -> None:
    profiles = [[gpu.mig_profile for gpu in tick.sample.gpus] for tick in cut]
    assert profiles[18][1:] == ["1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb"]
    assert profiles[-1][1:] == ["7g.80gb"]
    ended = [one for one in records_of(cut) if one.change is ProcessChange.ENDED]
    assert len(ended) == 3
    assert all(uuid.startswith("MIG-") for one in ended for uuid in one.gpu_uuids)


def test_the_tick_after_a_repartitioning_reports_it(cut: list[NodeTick]) -> None:
    reported = [(place, tick.relayouted) for place, tick in enumerate(cut) if tick.relayouted]
    first_new = next(
        place for place, tick in enumerate(cut) if tick.sample.gpus[1].mig_profile == "7g.80gb"
    )
    assert reported == [(first_new, [cut[0].sample.gpus[0].uuid])]


def test_an_instance_that_vanishes_ends_the_process_in_it(clock: ManualClock) -> None:
    """The driver forbids it, but an agent that slept may see it. The process must not stay."""
    node = cut_simulation(clock).node("node-a")
    sampler = Sampler(node=NodeId("default", "node-a"), procfs=node.procfs)
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    records: list[ProcessRecord] = []
    for seconds in (1.0, 1.0, 19.0, 1.0):
        clock.advance(seconds)
        at = ClockReading.read(node.clock)
        tick = sampler.sample([query_all(gpu)], at=at)
        records += tick.processes if tick else []
    changes = [record.change for record in records]
    assert changes == [ProcessChange.SEEN] * 3 + [ProcessChange.ENDED] * 3


def test_an_incident_of_an_instance_has_its_processes_even_if_the_gpu_does_not_answer(
    clock: ManualClock,
) -> None:
    node = cut_simulation(clock).node("node-a")
    sampler = Sampler(node=NodeId("default", "node-a"), procfs=node.procfs)
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    clock.advance(1.0)
    answer = query_all(gpu)
    ids = [one.instance.gpu_instance for one in answer.instances if one.instance]
    named = []
    for raw in ([answer], [], []):
        sampler.sample(raw, at=ClockReading.read(node.clock))
        clock.advance(1.0)
        named.append([[one.command for one in sampler.processes_on(gpu.uuid, id_)] for id_ in ids])
    assert named[0][:3] == [["infer"], ["train"], ["notebook"]]
    assert named[0] == named[1] == named[2]
    assert len(sampler.processes_on(gpu.uuid, None)) == 3


def sums(samples: list[NodeSample]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for sample in samples:
        for row in book_tick(sample):
            for entry in row.entries:
                found["memory"] += entry.memory_bytes or 0
                found["energy"] += entry.energy_millijoules or 0
                found[f"busy {entry.category}"] += entry.busy_ns or 0
    return found


def test_the_booked_amounts_of_a_gpu_with_mig_sum_to_the_gpu(cut: list[NodeTick]) -> None:
    samples = [tick.sample for tick in cut]
    booked = sums(samples)
    boards = [one.gpus[0] for one in samples]
    assert booked["memory"] == sum(gpu.memory_total_bytes or 0 for gpu in boards)
    assert booked["energy"] == sum(gpu.energy_millijoules or 0 for gpu in boards) > 0
    assert booked[f"busy {Category.POD}"] > 30 * NS_PER_SECOND


def accounted_scenario(version: str) -> dict[str, Any]:
    """Return a GPU with one long process, and short ones that no tick lists."""

    def process(command: str, start: float, end: float | None, busy: float) -> dict[str, Any]:
        return {
            "command": command,
            "gpus": [0],
            "memory_bytes": GIB,
            "start_seconds": start,
            "end_seconds": end,
            "load": {"busy_ratio": busy, "kernel_seconds": 0.005},
        }

    short = [process(f"short-{n}", 2.2 + n, 2.7 + n, 0.9) for n in range(5)]
    content = {"name": "main", "processes": [process("long", 0, 9.5, 0.4), *short]}
    return {
        "name": "accounts",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", "accounting": version}}],
        "pods": [{"namespace": "a", "name": "p", "node": "n", "containers": [content]}],
    }


@pytest.mark.parametrize(("version", "within"), [("v1", 0.005), ("v2", 0.001)])
def test_processes_shorter_than_a_tick_still_get_their_seconds(
    clock: ManualClock, version: str, within: float
) -> None:
    simulation = Simulation(
        parse_scenario(accounted_scenario(version)), epoch_ns=EPOCH_NS, clock=clock
    )
    node = simulation.node("n")
    records = records_of(play(node, clock, [1.0] * 12))
    ends = {record.pid: record for record in records if record.change is ProcessChange.ENDED}
    gpu = node.gpus[0]
    assert len(ends) == len(gpu.processes) == 6
    for process in gpu.processes:
        found = ends[process.pid].totals
        assert found
        (totals,) = found
        lived_ns = process.end_ns - process.start_ns
        busy_ns = gpu.busy_ns(process, process.start_ns, process.end_ns)
        assert totals.busy_ns == pytest.approx(busy_ns, abs=within * lived_ns)
        assert totals.lifetime_ns == pytest.approx(lived_ns, abs=1_000_000)
        assert totals.max_memory_bytes == GIB
        assert totals.started_time_ns == pytest.approx(EPOCH_NS + process.start_ns, abs=1000)
    seen = [record.pid for record in records if record.change is ProcessChange.SEEN]
    assert sorted(seen) == sorted(ends)
    named = {pid for pid, end in ends.items() if end.container_id}
    assert named == {process.pid for process in gpu.processes if process.spec.command == "long"}


def test_without_accounts_short_processes_leave_no_record(clock: ManualClock) -> None:
    content = parse_scenario(accounted_scenario("off"))
    node = Simulation(content, epoch_ns=EPOCH_NS, clock=clock).node("n")
    records = records_of(play(node, clock, [1.0] * 12))
    assert [record.change for record in records] == [ProcessChange.SEEN, ProcessChange.ENDED]
    assert {record.totals for record in records} == {None}
