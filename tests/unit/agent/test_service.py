"""The whole agent, on the in-memory bus and on a clock that a test moves."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pynvml
import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import decoder_of
from gpuledger.errors import BusUnavailableError, UserError
from gpuledger.records import NodeSample, ProcessChange, ProcessRecord
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.context import Host, make_page, run_agent
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.metrics import FAST_POLLS_FAILED, PROCESSES_UNRECOGNIZED, TICKS_FAILED
from gpuledger_agent.settings import AgentSettings, ExpositionSettings
from gpuledger_agent.source_selection import find_source, play, probe
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario, parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import PROCESSES, SAMPLES
from tests.errors import has_words
from tests.fakes.nvml import Altered, FakeProcfs, play_node
from tests.metric_values import value_of

QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"
EPOCH_NS = 1_795_000_000_000_000_000
NODES = ("gpu-node-1", "gpu-node-2")


class SleepersClock(ManualClock):
    """Advances to the next waking time when all sleepers sleep; rings once."""

    def __init__(
        self, *, sleepers: int, rings_after_seconds: float, epoch_ns: int = EPOCH_NS
    ) -> None:
        super().__init__(start_ns=epoch_ns)
        self._sleepers = sleepers
        self._rings_at_ns = epoch_ns + round(rings_after_seconds * NS_PER_SECOND)
        self._wakings: list[tuple[int, asyncio.Event]] = []
        self.rung = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        self._wakings.append((self.time_ns() + round(seconds * NS_PER_SECOND), awake))
        if len(self._wakings) == self._sleepers:
            self._wake_next()
        await awake.wait()

    def _wake_next(self) -> None:
        next_one = min(self._wakings, key=lambda waking: waking[0])
        self._wakings.remove(next_one)
        self.advance((next_one[0] - self.time_ns()) / NS_PER_SECOND)
        next_one[1].set()
        if self.time_ns() >= self._rings_at_ns:
            self.rung.set()


@asynccontextmanager
async def running(simulation: Simulation, bus: MemoryBus) -> AsyncIterator[Readiness]:
    """Run the agents of all nodes in this process, like the demo."""
    readiness = Readiness()
    agents = [
        asyncio.create_task(
            run_agent(
                host=Host(
                    gpus=NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns),
                    procfs=node.procfs,
                    clock=node.clock,
                ),
                bus=bus,
                settings=AgentSettings(node_name=node.name),
                readiness=readiness,
            )
        )
        for node in simulation.nodes.values()
    ]
    try:
        yield readiness
    finally:
        for agent in agents:
            agent.cancel()
        ended = await asyncio.gather(*agents, return_exceptions=True)
        assert [type(one) for one in ended] == [asyncio.CancelledError] * len(agents)


async def read_all(
    bus: MemoryBus, *, sample_count: int = 0
) -> tuple[list[NodeSample], list[ProcessRecord]]:
    """Return the published ticks and processes; stop once there are `sample_count` ticks."""
    samples: list[NodeSample] = []
    processes: list[ProcessRecord] = []
    topics = [SAMPLES.name, PROCESSES.name]
    async with (
        bus.consumer(Subscription(group="test", topics=topics)) as consumer,
        asyncio.timeout(120),
    ):
        while True:
            batches = await consumer.poll(timeout_seconds=0.05, max_records=500)
            for partition, records in batches.items():
                for record in records:
                    if partition.topic == SAMPLES.name:
                        samples.append(decoder_of(SAMPLES.name, NodeSample).decode(record.value))
                    else:
                        decoder = decoder_of(PROCESSES.name, ProcessRecord)
                        processes.append(decoder.decode(record.value))
            # Agents that still run publish without end, because the played clock does not wait.
            if len(samples) >= sample_count if sample_count else not batches:
                return samples, processes


async def test_several_nodes_in_one_process_publish_their_ticks_until_cancelled() -> None:
    clock = SleepersClock(sleepers=2, rings_after_seconds=20)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    bus = MemoryBus()
    async with running(simulation, bus) as readiness:
        await clock.rung.wait()
        assert readiness.is_ready(), readiness.report()
    samples, processes = await read_all(bus)
    for node in NODES:
        own = [sample for sample in samples if sample.node == node]
        assert len(own) in (20, 21)
        assert [sample.seq for sample in own] == sorted({sample.seq for sample in own})
        assert [sample.interval_ns for sample in own] == [
            250_000_000,
            *[1_000_000_000] * (len(own) - 1),
        ]
        for before, after in pairwise(own):
            assert after.time_ns - before.time_ns == pytest.approx(after.interval_ns, abs=2)
    changes = {(record.node, record.command, record.change) for record in processes}
    assert ("gpu-node-2", "render", ProcessChange.SEEN) in changes
    assert ("gpu-node-2", "render", ProcessChange.ENDED) in changes
    assert any(container.pod_uid for sample in samples for container in sample.containers)


async def shown_page(clock: SleepersClock, exposition: ExpositionSettings) -> tuple[str, Readiness]:
    """Return the page of a node that has run until the clock rings."""
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    host = replace(play(simulation.node(NODES[0])), kubelet=None)
    settings = AgentSettings(node_name=NODES[0], exposition=exposition)
    page = make_page(host, settings)
    readiness = Readiness()
    agent = run_agent(
        host=host,
        bus=None,
        settings=settings,
        readiness=readiness,
        page=page,
    )
    async with run_tasks(agent):
        # Scrapes make the agent request the labels of new pods.
        while not clock.rung.is_set():
            page.render()
            await asyncio.sleep(0)
        return page.render().decode(), readiness


async def test_the_page_of_a_node_has_the_requested_pod_labels() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=20)
    names = ("team", "training.kubeflow.org/job-name")
    text, readiness = await shown_page(clock, ExpositionSettings(pod_labels=names))
    used = [one for one in text.splitlines() if one.startswith("gpuledger_container_gpu_busy")]
    assert used
    assert [one for one in used if 'label_team="research"' not in one] == []
    assert any('label_training_kubeflow_org_job_name="llm-finetune"' in one for one in used)
    assert all('pod_uid="' in one for one in used)
    assert readiness.check("pod_labels").is_ok


async def test_no_pod_labels_are_requested_by_default() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=5)
    text, readiness = await shown_page(clock, ExpositionSettings())
    assert "gpuledger_container_gpu_busy_ratio{" in text
    assert "label_" not in text
    assert "pod_labels" not in json.dumps(readiness.report())


@pytest.mark.parametrize(("seconds", "is_reported"), [(1, False), (5, True)])
async def test_processes_hidden_from_proc_for_two_ticks_are_reported_without_failing_readiness(
    seconds: int, *, is_reported: bool
) -> None:
    """Processes of a single tick may all have just ended."""
    clock = SleepersClock(sleepers=1, rings_after_seconds=seconds)
    readiness = Readiness()
    agent = asyncio.create_task(
        run_agent(
            host=Host(
                gpus=NvmlSession(play_node(clock).nvml, monotonic_ns=clock.monotonic_ns),
                procfs=FakeProcfs(),
                clock=clock,
            ),
            bus=MemoryBus(),
            settings=AgentSettings(node_name="node-1"),
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert ("set hostPID: true" in readiness.check("procfs").detail) is is_reported
    assert readiness.is_ready(), readiness.report()


async def checks_of(cgroup: str, *, shows_pod_cgroups: bool = True) -> Readiness:
    """Run an agent whose GPU is allocated to a pod, with a process of the host in the cgroup."""
    clock, readiness = SleepersClock(sleepers=1, rings_after_seconds=5), Readiness()
    content = {
        "name": "allocated",
        "nodes": [{"name": "node-1", "gpus": {"model": "NVIDIA L4", "count": 1}}],
        "pods": [
            {
                "namespace": "a",
                "name": "p",
                "node": "node-1",
                "containers": [{"name": "main", "devices": [{"gpu": 0}]}],
            }
        ],
        "host_processes": [
            {
                "node": "node-1",
                "command": "python",
                "cgroup": cgroup,
                "gpus": [0],
                "memory_bytes": 1 << 20,
            }
        ],
    }
    simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    host = play(simulation.node("node-1"))
    agent = asyncio.create_task(
        run_agent(
            host=host if shows_pod_cgroups else replace(host, list_pod_cgroups=tuple),
            bus=MemoryBus(),
            settings=AgentSettings(node_name="node-1"),
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    return readiness


@pytest.mark.parametrize(
    ("cgroup", "reported"),
    [
        ("/system.slice/slurmstepd.scope/j8/step_0", "unrecognized:slurmstepd.scope/j8"),
        ("/kubepods.slice/workload.slice/main", "unrecognized:kubepods.slice/workload.slice"),
        ("/", "in the cgroup /"),
        ("/system.slice/slurmstepd.scope/job_8/step_0", None),
        ("/system.slice/dcgm.service", None),
    ],
)
async def test_processes_whose_cgroup_does_not_show_their_pod_or_job_are_reported(
    cgroup: str, reported: str | None
) -> None:
    before = value_of(PROCESSES_UNRECOGNIZED)
    readiness = await checks_of(cgroup)
    check = readiness.check("procfs")
    assert check.is_ok == (reported is None)
    assert (reported or "1 processes on GPUs") in check.detail
    is_counted = value_of(PROCESSES_UNRECOGNIZED) > before
    assert is_counted == (reported is not None and "unrecognized" in reported)
    assert readiness.is_ready()


@pytest.mark.parametrize("shows_pod_cgroups", [True, False])
async def test_missing_cgroups_of_pods_are_reported_because_ended_pods_cannot_be_found(
    *, shows_pod_cgroups: bool
) -> None:
    readiness = await checks_of("/x", shows_pod_cgroups=shows_pod_cgroups)
    check = readiness.check("kubelet")
    assert check.is_ok == shows_pod_cgroups
    assert ("kubelet.cgroup_root" in check.detail) == (not shows_pod_cgroups)
    assert readiness.is_ready()


async def test_process_lists_that_keep_failing_are_reported() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=30)
    readiness, node = Readiness(), play_node(clock)
    nvml = Altered(node.nvml)

    def list_thrice(handle: object) -> object:
        if nvml.calls["nvmlDeviceGetComputeRunningProcesses_v3"] > 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return node.nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)

    nvml.functions["nvmlDeviceGetComputeRunningProcesses_v3"] = list_thrice
    agent = asyncio.create_task(
        run_agent(
            host=Host(
                gpus=NvmlSession(nvml, monotonic_ns=clock.monotonic_ns),
                procfs=FakeProcfs(),
                clock=clock,
            ),
            bus=MemoryBus(),
            settings=AgentSettings(node_name="node-1"),
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert (
        f"refuses to list the processes on {node.gpus[0].facts.uuid}"
        in readiness.check("procfs").detail
    )
    assert not readiness.check("procfs").is_ok


async def test_a_lost_gpu_and_an_unavailable_kafka_leave_the_agent_ready() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=5)
    library, bus, readiness = Altered(play_node(clock, gpus=2).nvml), RefusingBus(), Readiness()
    library.lost.add(1)
    agent = asyncio.create_task(
        run_agent(
            host=Host(
                gpus=NvmlSession(library, monotonic_ns=clock.monotonic_ns),
                procfs=FakeProcfs(),
                clock=clock,
            ),
            bus=bus,
            settings=AgentSettings(node_name="node-1", flush_seconds=0.01),
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    ready = readiness.is_ready(), readiness.check("gpus").is_ok, readiness.check("kafka").is_ok
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert ready == (True, False, False)


class RefusingBus(MemoryBus):
    """A broker that is unavailable."""

    @override
    async def partitions(self, topic: str) -> int:
        raise BusUnavailableError("no broker")


class FickleProcfs(FakeProcfs):
    """Fails once with an error that no file can raise."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self.failing = [*paths]

    @override
    def read(self, path: str) -> bytes:
        if path in self.failing:
            self.failing.remove(path)
            raise RuntimeError("an unexpected error")
        return super().read(path)


async def test_a_tick_that_fails_is_counted_and_the_next_one_is_made() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=5)
    failed = value_of(TICKS_FAILED)
    readiness, bus, node = Readiness(), MemoryBus(), play_node(clock)
    agent = asyncio.create_task(
        run_agent(
            host=Host(
                gpus=NvmlSession(node.nvml, monotonic_ns=clock.monotonic_ns),
                procfs=FickleProcfs(f"/proc/{node.gpus[0].processes[0].pid}/stat"),
                clock=clock,
            ),
            bus=bus,
            settings=AgentSettings(node_name="node-1"),
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    # The played clock does not wait until a tick is published.
    await read_all(bus, sample_count=3)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert value_of(TICKS_FAILED) - failed == 1
    assert readiness.check("samples").is_ok


async def test_a_fast_poll_that_fails_is_counted_and_loses_no_tick() -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=15)
    failed, bus = value_of(FAST_POLLS_FAILED), MemoryBus()
    nvml = play_node(clock).nvml

    def fail_fast_polls(handle: object) -> object:
        if threading.current_thread().name == "fast-poll":
            raise RuntimeError("an unexpected error")
        return nvml.nvmlDeviceGetUtilizationRates(handle)

    library = Altered(nvml, nvmlDeviceGetUtilizationRates=fail_fast_polls)
    # Ticks of three seconds have a fast poll every second, whatever the driver has shown.
    settings = AgentSettings(node_name="node-1", sampling_interval_seconds=3.0)
    agent = asyncio.create_task(
        run_agent(
            host=Host(
                gpus=NvmlSession(library, monotonic_ns=clock.monotonic_ns),
                procfs=FakeProcfs(),
                clock=clock,
            ),
            bus=bus,
            settings=settings,
            readiness=Readiness(),
        )
    )
    await clock.rung.wait()
    # The played clock does not wait until a tick is published.
    await read_all(bus, sample_count=4)
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    assert value_of(FAST_POLLS_FAILED) > failed


async def test_a_node_without_proc_is_reported_in_one_line() -> None:
    clock, procfs = ManualClock(start_ns=EPOCH_NS), FakeProcfs()
    procfs.files.clear()
    with pytest.raises(UserError, check=has_words("/proc")):
        await run_agent(
            host=Host(gpus=NvmlSession(play_node(clock).nvml), procfs=procfs, clock=clock),
            bus=MemoryBus(),
            settings=AgentSettings(node_name="node-1"),
            readiness=Readiness(),
        )


def test_a_scenario_is_a_source() -> None:
    settings = AgentSettings(
        node_name="gpu-node-2",
        source=f"simulated:{QUICKSTART}",
    )
    source = find_source(settings)
    assert source.procfs.read("/proc/sys/kernel/random/boot_id")
    assert len(source.gpus.open()) == 2


def test_a_node_missing_from_the_scenario_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(UserError, check=has_words("gpu-node-1", "gpu-node-2")):
        find_source(AgentSettings(node_name="nobody", source=f"simulated:{QUICKSTART}"))


def test_the_automatic_source_names_the_remedy_if_nvml_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with pytest.raises(UserError, check=has_words("--source simulated")):
        find_source(AgentSettings(node_name="n"))


def test_a_library_that_hangs_is_not_a_source() -> None:
    hanging = threading.Event()
    with pytest.raises(UserError):
        probe(Altered(nvmlInit=hanging.wait), seconds=0.01)
    hanging.set()


def test_probing_a_library_leaves_it_closed() -> None:
    nvml = play_node(ManualClock(start_ns=EPOCH_NS)).nvml
    library = Altered(nvml)
    probe(library)
    assert (library.calls["nvmlInit"], nvml.session.users) == (1, 0)
