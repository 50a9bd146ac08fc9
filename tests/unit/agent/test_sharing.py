"""GPUs shared by MIG, by MPS and by short processes in turn: the booked use matches the truth."""

from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import Category, Entry, ProcessKind
from gpuledger_agent.core.normalize.shares import ProcessUsage, share_server
from gpuledger_agent.core.raw import ListedProcess
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.drivers import DriverModel
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import play, tick_of
from tests.unit.owners import pod_of

SHARING = Path(__file__).parents[3] / "scenarios" / "sharing.yaml"
EPOCH_NS = 1_795_000_000_000_000_000


class Run:
    """A node of the scenario, read by an agent every second."""

    def __init__(self, node: str, seconds: int, *, driver: DriverModel = DriverModel()) -> None:  # noqa: B008  # frozen, so one shared default is safe
        clock = ManualClock(start_ns=EPOCH_NS)
        scenario = load_scenario(SHARING)
        nodes = [msgspec.structs.replace(one, driver=driver) for one in scenario.nodes]
        scenario = msgspec.structs.replace(scenario, nodes=nodes)
        self.simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
        self.node = self.simulation.node(node)
        self.ticks: list[NodeTick] = []
        sampler = Sampler(node=NodeId("default", node), procfs=self.node.procfs)
        gpus = NvmlSession(self.node.nvml, monotonic_ns=self.node.clock.monotonic_ns).open()
        for length in [1.0] * seconds:
            clock.advance(length)
            if tick := tick_of(sampler, gpus, self.node.clock):
                self.ticks.append(tick)
        # The first tick only starts the counters; each covers the time up to its own `time_ns`.
        samples = [tick.sample for tick in self.ticks]
        self.start_ns = samples[0].time_ns - samples[0].interval_ns
        self.end_ns = samples[-1].time_ns

    def entries(self) -> list[Entry]:
        return [one for tick in self.ticks for gpu in book_tick(tick.sample) for one in gpu.entries]

    def busy_by_pod(self) -> dict[str | None, float]:
        busy: dict[str | None, float] = defaultdict(float)
        for tick in self.ticks:
            for gpu in book_tick(tick.sample):
                for entry in gpu.entries:
                    busy[pod_of(entry, tick.sample)] += (entry.busy_ns or 0) / NS_PER_SECOND
        return busy


def test_pods_in_instances_are_booked_the_time_for_which_they_ran() -> None:
    run = Run("mig-node", 60)
    busy = run.busy_by_pod()
    truth = run.simulation.truth(run.start_ns, run.end_ns, "mig-node")
    assert len(truth) == 5
    for pod in truth:
        # The busy time of a process that ends within a tick is not attributed.
        assert busy[pod.uid] == pytest.approx(pod.busy_seconds, abs=1.0)
    instances = run.simulation.instance_truth(run.start_ns, run.end_ns, "mig-node")
    ran: dict[str, float] = defaultdict(float)
    for tick in run.ticks:
        for gpu in tick.sample.gpus[1:]:
            ran[gpu.uuid] += (
                (gpu.utilization_ratio or 0.0) * tick.sample.interval_ns / NS_PER_SECOND
            )
    for instance in instances:
        # The first sample of the chip's counters has no predecessor to compare with.
        assert ran[instance.uuid] == pytest.approx(instance.usage.busy_seconds, abs=1.0)


def test_a_fast_poll_of_a_gpu_with_mig_shows_only_its_energy() -> None:
    """Its processes belong to its instances: none has ended on the GPU itself."""
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(SHARING), epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node("mig-node")
    looked = [tick.sample for tick in play(node, clock, [5.0] * 8)]
    boards = {place for place, gpu in enumerate(looked[0].gpus) if gpu.mig_enabled}
    assert boards
    assert any(sample.processes for sample in looked)
    assert [one for sample in looked for one in sample.processes if one.gpu in boards] == []
    drawn = [sample.gpus[place].energy_method for sample in looked[1:] for place in boards]
    assert {str(method) for method in drawn} == {"counter"}


def test_an_mps_client_that_also_renders_graphics_is_one_process_and_counts_once() -> None:
    run = Run("mps-node", 6)
    sample = run.ticks[-1].sample
    by_command = {
        process.pid: process.spec.command.split()[0] for process in run.node.gpus[0].processes
    }
    kinds = {by_command[one.pid]: one.kind for one in sample.processes}
    assert kinds == {
        "/usr/bin/detect": ProcessKind.MPS,
        "/usr/bin/render": ProcessKind.COMPUTE,
        "nvidia-cuda-mps-server": ProcessKind.COMPUTE,
    }
    held = sum(one.memory_used_bytes or 0 for one in sample.processes)
    assert held == sample.gpus[0].memory_used_bytes


def test_the_mps_server_belongs_to_the_host() -> None:
    run = Run("mps-node", 12)
    server = next(one for one in run.node.gpus[0].processes if one.pod is None)
    host = [one for one in run.entries() if one.category is Category.HOST]
    reserved = run.node.gpus[0].facts.model.reserved_bytes
    held = sum(one.memory_bytes or 0 for one in host)
    assert held == (reserved + server.spec.memory_bytes) * len(run.ticks)
    busy = run.busy_by_pod()
    for pod in run.simulation.truth(run.start_ns, run.end_ns, "mps-node"):
        assert busy[pod.uid] == pytest.approx(pod.busy_seconds, rel=0.02)


def test_clients_get_equal_parts_if_only_their_mps_server_is_sampled() -> None:
    run = Run("mps-node", 12, driver=DriverModel(mps_samples="server"))
    assert {str(tick.sample.gpus[0].busy_method) for tick in run.ticks[2:]} == {"mps_server"}
    busy = run.busy_by_pod()
    clients = [pod.uid for pod in run.simulation.truth(run.start_ns, run.end_ns, "mps-node")]
    assert len(clients) > 1
    assert len({round(busy[uid], 3) for uid in clients}) == 1
    device_ns = run.node.gpus[0].device_busy_ns(run.start_ns - EPOCH_NS, run.end_ns - EPOCH_NS)
    assert sum(busy[uid] for uid in clients) == pytest.approx(device_ns / 1e9, rel=0.03)


def usage(pid: int, ratio: float, kind: ProcessKind = ProcessKind.COMPUTE) -> ProcessUsage:
    process = ListedProcess(pid=pid, kind=kind, memory_bytes=None)
    return ProcessUsage(process=process, sm_ratio=ratio, ended=False)


CLIENT = ProcessKind.MPS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            [usage(1, 0.6, CLIENT), usage(2, 0, CLIENT), usage(3, 0, CLIENT)],
            [0, 0.3, 0.3],
            id="a server in the list of clients is no client",
        ),
        pytest.param(
            [usage(1, 0.6), usage(2, 0), usage(3, 0), usage(4, 0.1)],
            [0, 0.3, 0.3, 0.1],
            id="without a list of clients, processes without samples are clients",
        ),
        pytest.param([usage(1, 0.6)], [0.6], id="a server without clients keeps its use"),
        pytest.param(
            [usage(1, 0.1), usage(2, 0.5, CLIENT)], None, id="sampled clients keep their use"
        ),
        pytest.param([usage(1, 0), usage(2, 0, CLIENT)], None, id="an idle server has no use"),
    ],
)
def test_the_use_of_an_mps_server_is_divided_among_its_clients(
    given: list[ProcessUsage], expected: list[float] | None
) -> None:
    shared = share_server(given, {1})
    assert (None if shared is None else [one.sm_ratio for one in shared]) == expected


def test_a_batch_of_short_processes_is_reported_exactly() -> None:
    run = Run("accounts-node", 15)
    totals = [
        total for tick in run.ticks for record in tick.processes for total in record.totals or ()
    ]
    (truth,) = run.simulation.truth(EPOCH_NS, run.end_ns, "accounts-node")
    assert len(totals) == 4
    assert sum(one.busy_ns or 0 for one in totals) == pytest.approx(
        truth.busy_seconds * 1e9, rel=0.001
    )
