"""Runs of nodes with a random turnover of pods on their GPUs, each node watched by an agent.

Pods share GPUs with each other and with processes of the host, or have an instance of a GPU. An
agent may be restarted in the middle. Its ticks are in the topics as it wrote them, some of them
twice, some late. The truth is kept as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from random import Random
from typing import Any, Final

from hypothesis import strategies as st
from typing_extensions import override

from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.keys import NodeId, key_in, node_key
from gpuledger.records import NodeSample
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.plan import PlannedPod
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.default_topics import PODS, SAMPLES
from tests.ticks import tick_of
from tests.unit.enricher.join.ticks import pod
from tests.unit.enricher.laws.topics import PARTITIONS, Topics

EPOCH_NS: Final = 1_795_000_000_000_000_000
SECOND_NS: Final = 10**9
LEAD_SECONDS: Final = 4.0
WINDOW_SECONDS: Final = 60.0
LATEST_SECONDS: Final = 30.0
"""How late a tick comes at most."""
MAX_LANES_OF_PODS: Final = 2
"""A third lane on a GPU belongs to the host."""
SHARED, PARTITIONED, SINGLE = "gpu-shared", "gpu-cut", "gpu-beside"
NODES: Final = {SHARED: PARTITIONS[0], PARTITIONED: PARTITIONS[0], SINGLE: PARTITIONS[1]}
"""The nodes and their partitions."""
_WHOLE: Final = {"model": "NVIDIA L4", "count": 2}
_INSTANCES: Final = ["1g.10gb", "3g.40gb", "2g.20gb"]
_IN_PARTS: Final = {"model": "NVIDIA H100 80GB HBM3", "mig": [{"instances": _INSTANCES}]}
_APART_SECONDS: Final = 3.0
"""After this time a process that ended is in no tick any more."""
GPUS: Final[Mapping[str, Mapping[str, Any]]] = {
    SHARED: _WHOLE,
    PARTITIONED: _IN_PARTS,
    SINGLE: _WHOLE | {"count": 1},
}


@dataclass(frozen=True)
class Life:
    """A pod with one process on one GPU, or a process of the host."""

    gpu: int
    start_seconds: float
    end_seconds: float
    load: float
    instance: int | None = None
    """The position of its instance on a partitioned GPU."""
    is_pod: bool = True
    """Whether it belongs to a pod."""


@dataclass(frozen=True, repr=False)
class Run:
    """An agent's report of a node's run, and the truth."""

    stretches: list[list[NodeSample]]
    """Its ticks, by restart of the agent."""
    simulation: Simulation
    node: SimulatedNode

    @override
    def __repr__(self) -> str:
        """Describe the run briefly: hypothesis shows this, and refuses to show everything."""
        ticks = [*map(len, self.stretches)]
        return f"Run({self.node.name}, ticks={ticks}, pods={len(self.simulation.pods)})"

    def covered_ns(self) -> list[tuple[int, int]]:
        """Return the beginning and end of each stretch that ticks cover, since the epoch."""
        return [
            (ticks[0].time_ns - ticks[0].interval_ns, ticks[-1].time_ns)
            for ticks in self.stretches
            if ticks
        ]

    def covered_seconds(self) -> float:
        """Return the total time that ticks cover."""
        return sum(end_ns - begin_ns for begin_ns, end_ns in self.covered_ns()) / SECOND_NS

    def true_seconds(self) -> dict[str, float]:
        """Return how long each pod's kernels ran while ticks covered it, by UID."""
        found: dict[str, float] = {}
        for begin_ns, end_ns in self.covered_ns():
            for used in self.simulation.truth(begin_ns, end_ns):
                found[used.uid] = found.get(used.uid, 0.0) + used.busy_seconds
        return found

    def host_seconds(self) -> float:
        """Return how long kernels of the host's processes ran while ticks covered it."""
        return sum(self.simulation.host_truth(*span).busy_seconds for span in self.covered_ns())

    def device_seconds(self) -> dict[str, float]:
        """Return how long each GPU's or instance's kernels ran while ticks covered it."""
        found: dict[str, float] = {}
        for begin_ns, end_ns in self.covered_ns():
            begin, end = begin_ns - EPOCH_NS, end_ns - EPOCH_NS
            whole = (gpu for gpu in self.node.gpus if gpu.cut(begin) is None)
            devices = {gpu.facts.uuid: gpu.device_busy_ns(begin, end) / SECOND_NS for gpu in whole}
            parts = self.simulation.instance_truth(begin_ns, end_ns, self.node.name)
            devices |= {part.uuid: part.usage.busy_seconds for part in parts}
            for uuid, seconds in devices.items():
                found[uuid] = found.get(uuid, 0.0) + seconds
        return found


def draw_lives(random: Random, node: str) -> list[Life]:
    """Draw, for each GPU, one or two lanes of successive pods, and the host's.

    In an instance there is one lane, and no two of its pods meet in a tick, because the driver
    reports only the instance as a whole and the user would be a guess (see
    docs/concepts/attribution.md).
    """
    made = []
    if node == PARTITIONED:
        for instance in range(len(_INSTANCES)):
            made += _draw_lane(random, 0, crowd=1, instance=instance)
        return made
    for gpu in range(GPUS[node]["count"]):
        crowd = random.choice([1, 2, 3])
        for lane in range(crowd):
            is_pod = lane < MAX_LANES_OF_PODS
            drawn = _draw_lane(random, gpu, crowd=crowd)
            made += [replace(life, is_pod=is_pod) for life in drawn]
    return made


def _draw_lane(random: Random, gpu: int, *, crowd: int, instance: int | None = None) -> list[Life]:
    made = []
    at = random.uniform(0.0, 20.0)
    while at < LEAD_SECONDS + WINDOW_SECONDS:
        end = at + random.uniform(2.0, 40.0)
        made.append(Life(gpu, at, end, random.uniform(0.05, 0.95) / crowd, instance))
        pause_seconds = random.choice([0.1, 1.3, 9.0]) * random.uniform(0.1, 1.1)
        at = end + pause_seconds + (0.0 if instance is None else _APART_SECONDS)
    return made


def draw_run(random: Random, name: str) -> Run:
    """Draw a run of 60 covered seconds, minus the gap that a restart of the agent leaves."""
    clock = ManualClock(start_ns=EPOCH_NS)
    scenario = parse_scenario(_scenario(name, draw_lives(random, name)))
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node(name)
    clock.advance(random.uniform(0.0, LEAD_SECONDS))
    jitters = [random.uniform(-0.2, 0.2) for _ in range(5)]
    first = random.choice([WINDOW_SECONDS, 25.0, 41.5])
    stretches = [_watch(node, clock, first, jitters)]
    if first < WINDOW_SECONDS:
        clock.advance(random.uniform(0.2, 5.0))
        stretches.append(_watch(node, clock, WINDOW_SECONDS - first, jitters))
    return Run(stretches, simulation, node)


Arrival = tuple[int, NodeSample]
"""When a tick reaches its topic, and the tick."""


def draw_arrivals(random: Random, run: Run) -> list[Arrival]:
    """Draw when a run's ticks reach their topic: some twice, and late after an outage."""
    message: list[NodeSample] = []
    for ticks in run.stretches:
        end = random.randint(1, len(ticks))
        message += [*ticks[:end], *ticks[max(0, end - random.randint(0, 8)) : end], *ticks[end:]]
    away_ns = EPOCH_NS + round(random.uniform(0.0, WINDOW_SECONDS) * SECOND_NS)
    back_ns = away_ns + round(random.uniform(0.0, LATEST_SECONDS) * SECOND_NS)
    made: list[Arrival] = []
    for tick in message:
        arrival_ns = back_ns if away_ns <= tick.time_ns < back_ns else tick.time_ns
        made.append((max(arrival_ns, made[-1][0] if made else 0), tick))
    return made


def draw_runs(random: Random) -> tuple[list[Run], Topics]:
    """Draw a run of each node and its place in the topics, in order of arrival."""
    runs = [draw_run(random, node) for node in NODES]
    message = {run.node.name: draw_arrivals(random, run) for run in runs}
    samples: dict[int, list[Record]] = {}
    pods: dict[int, list[Record]] = {}
    for partition in PARTITIONS:
        here = [run for run in runs if NODES[run.node.name] == partition]
        ticks = sorted(chain(*(message[run.node.name] for run in here)), key=itemgetter(0))
        samples[partition] = [
            Record(SAMPLES.name, partition, place, ms, node_key(one).encode(), encode(one))
            for place, (ms, one) in enumerate((at // 10**6, one) for at, one in ticks)
        ]
        reported = [(run, one) for run in here for one in run.simulation.pods]
        random.shuffle(reported)
        pods[partition] = [
            _pod_record(partition, place, *one) for place, one in enumerate(reported)
        ]
    return runs, Topics(samples, pods)


# Drawn by a seed: a run has more random values than hypothesis can shrink.
runs_in_topics: Final = st.randoms(use_true_random=True).map(draw_runs)


def _pod_record(partition: int, place: int, run: Run, planned: PlannedPod) -> Record:
    uid, name = run.simulation.uid(planned), planned.spec.name
    known = pod(uid=uid, name=name, node=run.node.name, containers=[])
    return Record(
        PODS.name,
        partition,
        place,
        EPOCH_NS // 10**6,
        key_in("default", uid).encode(),
        encode(known),
    )


def _watch(
    node: SimulatedNode, clock: ManualClock, seconds: float, jitters: Sequence[float]
) -> list[NodeSample]:
    """Let an agent that has just been started watch for this long."""
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made, lengths = [], _lengths(jitters)
    end_ns = clock.monotonic_ns() + round(seconds * SECOND_NS)
    while clock.monotonic_ns() < end_ns:
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        clock.advance(next(lengths))
    return made


def _lengths(jitters: Sequence[float]) -> Iterator[float]:
    yield 0.25
    while True:
        yield from (1 + jitter for jitter in jitters)


def _scenario(node: str, lives: Sequence[Life]) -> dict[str, object]:
    return {
        "name": "window",
        "nodes": [{"name": node, "gpus": GPUS[node]}],
        "pods": [
            {
                "namespace": "research",
                "name": f"{node}-{number}",
                "node": node,
                "start_seconds": life.start_seconds,
                "end_seconds": life.end_seconds,
                "containers": [{"name": "main", "processes": [_process(life)]}],
            }
            for number, life in enumerate(lives)
            if life.is_pod
        ],
        "host_processes": [
            _process(life)
            | {
                "node": node,
                "start_seconds": life.start_seconds,
                "end_seconds": life.end_seconds,
            }
            for life in lives
            if not life.is_pod
        ],
    }


def _process(life: Life) -> dict[str, object]:
    return {
        "command": "python",
        "gpus": [life.gpu],
        "instance": life.instance,
        "load": {"busy_ratio": life.load, "kernel_seconds": 0.007},
        "memory_bytes": 2**30,
    }
