"""Runs of a node with a random turnover of pods that share its GPUs, watched by an agent.

The agent may be started again in the middle; what it says is in the topics as it says it, some of
it twice. Beside it stands the truth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st
from typing_extensions import override

from agent.nvml.library import Nvml
from agent.sampling import Sampler
from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.records import NodeSample
from gpuledger.topics import PODS, SAMPLES
from simulator.clock import HandClock
from simulator.scenario import parse_scenario
from simulator.simulation import SimulatedNode, Simulation
from tests.ticks import tick_of
from tests.unit.enricher.join.ticks import pod
from tests.unit.enricher.laws.topics import PARTITIONS, Topics

EPOCH_NS: Final = 1_795_000_000_000_000_000
SECOND_NS: Final = 10**9
NODE: Final = "gpu-a"
GPUS: Final = 2
LEAD_SECONDS: Final = 4.0
WINDOW_SECONDS: Final = 60.0
PLACE: Final = PARTITIONS[0]

moments = st.floats(min_value=0.0, max_value=1.0)


@dataclass(frozen=True)
class Life:
    """A pod with one process on one GPU."""

    gpu: int
    start_seconds: float
    end_seconds: float
    load: float


@dataclass(frozen=True, repr=False)
class Run:
    """What an agent said of a run, and the truth behind it."""

    stretches: list[list[NodeSample]]
    """Its ticks, between its restarts."""
    simulation: Simulation
    node: SimulatedNode

    @override
    def __repr__(self) -> str:
        """Tell the run in short: hypothesis shows this, and refuses to show all."""
        return f"Run(ticks={[*map(len, self.stretches)]}, pods={len(self.simulation.pods)})"

    def covered_ns(self) -> list[tuple[int, int]]:
        """Give from when to when ticks cover, for each stretch, since the epoch."""
        return [
            (ticks[0].time_ns - ticks[0].interval_ns, ticks[-1].time_ns)
            for ticks in self.stretches
            if ticks
        ]

    def true_seconds(self) -> dict[str, float]:
        """Give for how long each pod's kernels ran while ticks covered it, by UID."""
        found: dict[str, float] = {}
        for begin_ns, end_ns in self.covered_ns():
            for used in self.simulation.truth(begin_ns, end_ns):
                found[used.uid] = found.get(used.uid, 0.0) + used.busy_seconds
        return found

    def device_seconds(self) -> list[float]:
        """Give for how long each GPU's kernels ran while ticks covered it."""
        return [
            sum(
                gpu.device_busy_ns(begin_ns - EPOCH_NS, end_ns - EPOCH_NS)
                for begin_ns, end_ns in self.covered_ns()
            )
            / SECOND_NS
            for gpu in self.node.gpus
        ]


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    """Draw, for each GPU, one or two lanes of pods that follow one another."""
    made = []
    for gpu in range(GPUS):
        lanes = draw(st.integers(1, 2))
        for _ in range(lanes):
            at = draw(st.floats(min_value=0.0, max_value=20.0))
            while at < LEAD_SECONDS + WINDOW_SECONDS:
                end = at + draw(st.floats(min_value=2.0, max_value=40.0))
                made.append(Life(gpu, at, end, draw(st.floats(0.05, 0.95)) / lanes))
                at = end + draw(st.sampled_from([0.1, 1.3, 9.0])) * (0.1 + draw(moments))
    return made


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draw a run of 60 covered seconds, less what a restart of the agent leaves uncovered."""
    clock = HandClock(start_ns=EPOCH_NS)
    scenario = parse_scenario(_scenario(draw(lives())))
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node(NODE)
    clock.advance(LEAD_SECONDS * draw(moments))
    jitters = draw(st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=5))
    first = draw(st.sampled_from([WINDOW_SECONDS, 25.0, 41.5]))
    stretches = [_watch(node, clock, first, jitters)]
    if first < WINDOW_SECONDS:
        clock.advance(draw(st.floats(min_value=0.2, max_value=5.0)))
        stretches.append(_watch(node, clock, WINDOW_SECONDS - first, jitters))
    return Run(stretches, simulation, node)


@st.composite
def runs_in_topics(draw: st.DrawFn) -> tuple[Run, Topics]:
    """Draw a run, and how it lies in the topics: some ticks of each stretch twice."""
    run = draw(runs())
    said: list[NodeSample] = []
    for ticks in run.stretches:
        end = draw(st.integers(1, len(ticks)))
        again = ticks[max(0, end - draw(st.integers(0, 8))) : end]
        said += [*ticks[:end], *again, *ticks[end:]]
    samples = [
        Record(SAMPLES.name, PLACE, place, one.time_ns // 10**6, NODE.encode(), encode(one))
        for place, one in enumerate(said)
    ]
    pods = [
        pod(uid=run.simulation.uid(one), name=one.spec.name, node=NODE, containers=[])
        for one in run.simulation.pods
    ]
    told = [
        Record(PODS.name, PLACE, place, EPOCH_NS // 10**6, one.uid.encode(), encode(one))
        for place, one in enumerate(pods)
    ]
    empty: dict[int, list[Record]] = {partition: [] for partition in PARTITIONS}
    return run, Topics(empty | {PLACE: samples}, empty | {PLACE: told})


def _watch(
    node: SimulatedNode, clock: HandClock, seconds: float, jitters: Sequence[float]
) -> list[NodeSample]:
    """Let an agent that has just been started watch for so long."""
    sampler, gpus = Sampler(node=node.name, procfs=node.procfs), Nvml(node.nvml).open()
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


def _scenario(pods: Sequence[Life]) -> dict[str, object]:
    return {
        "name": "window",
        "nodes": [{"name": NODE, "gpus": {"model": "NVIDIA L4", "count": GPUS}}],
        "pods": [
            {
                "namespace": "research",
                "name": f"pod-{number}",
                "node": NODE,
                "start_seconds": life.start_seconds,
                "end_seconds": life.end_seconds,
                "containers": [{"name": "main", "processes": [_process(life)]}],
            }
            for number, life in enumerate(pods)
        ],
    }


def _process(life: Life) -> dict[str, object]:
    return {
        "command": "python",
        "gpus": [life.gpu],
        "load": {"busy_ratio": life.load, "kernel_seconds": 0.007},
        "memory_bytes": 2**30,
    }
