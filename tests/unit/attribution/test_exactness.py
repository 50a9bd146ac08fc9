"""Booked time is used time: the agent's ticks and the join's entries against the kernels.

Load starts and ends at any time, off the driver's grid and off the ticks, which themselves come
early and late.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.keys import NodeId
from gpuledger.records import NodeSample
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.examples import examples
from tests.ticks import tick_of
from tests.unit.owners import pod_of

EPOCH_NS = 1_795_000_000_000_000_000
SECOND_NS = 1_000_000_000
WINDOW_SECONDS = 1 / 6
RUN_SECONDS = 30.0

loads = st.floats(min_value=0.2, max_value=0.95)
moments = st.floats(min_value=0.0, max_value=1.0)


@dataclass(frozen=True)
class Life:
    """A pod with one process."""

    name: str
    gpu: int
    start_seconds: float
    end_seconds: float
    load: float


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    """Draw a turnover on one GPU, and on another one a pod that a second one joins for a while."""
    first_end, gap = 12 + draw(moments), draw(moments) * draw(st.sampled_from([0.1, 3.0]))
    return [
        Life("first", 0, 4 + draw(moments), first_end, draw(loads)),
        Life("second", 0, first_end + gap, 24 + draw(moments), draw(loads)),
        Life("third", 0, 25.5, 99.0, draw(loads)),
        Life("lasting", 1, 0.0, 99.0, draw(st.floats(min_value=0.2, max_value=0.5))),
        Life("passing", 1, 8 + draw(moments), 19 + draw(moments), draw(loads) / 2),
    ]


@dataclass(frozen=True)
class Run:
    """A run's ticks, and the truth."""

    samples: list[NodeSample]
    simulation: Simulation
    node: SimulatedNode

    @property
    def covered_ns(self) -> tuple[int, int]:
        """Return the beginning and end of the time that the ticks cover, since the epoch."""
        return self.samples[0].time_ns - self.samples[0].interval_ns, self.samples[-1].time_ns

    def booked(self) -> dict[str | None, float]:
        """Return each pod's booked busy seconds, by UID."""
        found: dict[str | None, float] = defaultdict(float)
        for sample in self.samples:
            for books in book_tick(sample):
                for entry in books.entries:
                    found[pod_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
        return found


def scenario(pods: list[Life]) -> dict[str, object]:
    return {
        "name": "exactness",
        "nodes": [{"name": "gpu-a", "gpus": {"model": "NVIDIA L4", "count": 2}}],
        "pods": [
            {
                "namespace": "research",
                "name": life.name,
                "node": "gpu-a",
                "start_seconds": life.start_seconds,
                "end_seconds": life.end_seconds,
                "containers": [
                    {
                        "name": "main",
                        "processes": [
                            {
                                "command": "python",
                                "gpus": [life.gpu],
                                "load": {"busy_ratio": life.load, "kernel_seconds": 0.007},
                                "memory_bytes": 2**30,
                            }
                        ],
                    }
                ],
            }
            for life in pods
        ],
    }


def play(pods: list[Life], phase_seconds: float, lengths: Iterator[float]) -> Run:
    """Let an agent watch the pods for the length of a run."""
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(parse_scenario(scenario(pods)), epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node("gpu-a")
    sampler, gpus = (
        Sampler(node=NodeId("default", node.name), procfs=node.procfs),
        NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open(),
    )
    clock.advance(phase_seconds)
    made = []
    while clock.monotonic_ns() < RUN_SECONDS * SECOND_NS:
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        clock.advance(next(lengths))
    return Run(made, simulation, node)


def lengths_of(jitters: list[float]) -> Iterator[float]:
    """Yield the ticks' lengths: a short first one, then one second, alternately early and late."""
    yield 0.25
    while True:
        yield from (1 + jitter for jitter in jitters)


runs = st.builds(
    play,
    lives(),
    moments,
    st.lists(st.floats(min_value=-0.2, max_value=0.2), min_size=1, max_size=7).map(lengths_of),
)


@examples(15)
@given(runs)
def test_the_ticks_of_a_gpu_add_up_to_the_time_in_which_kernels_ran(run: Run) -> None:
    """Except for the driver's whole percents, and a window at either end of the run."""
    start_ns, end_ns = run.covered_ns
    for place, gpu in enumerate(run.node.gpus):
        ran = sum(
            (sample.gpus[place].utilization_ratio or 0) * sample.interval_ns / SECOND_NS
            for sample in run.samples
        )
        true_ns = gpu.device_busy_ns(start_ns - EPOCH_NS, end_ns - EPOCH_NS)
        covered_seconds = (end_ns - start_ns) / SECOND_NS
        assert ran == pytest.approx(
            true_ns / SECOND_NS, abs=0.005 * covered_seconds + WINDOW_SECONDS
        )


@examples(30)
@given(runs)
def test_each_pod_is_booked_what_its_kernels_used(run: Run) -> None:
    """Pods that live within the run, with or without turnover, to one percent."""
    booked = run.booked()
    start_ns, end_ns = run.covered_ns
    for used in run.simulation.truth(start_ns, end_ns):
        is_partitioned = used.pod in {"third", "lasting"}
        expected = pytest.approx(
            used.busy_seconds, rel=0.01, abs=WINDOW_SECONDS if is_partitioned else 0.02
        )
        assert booked[used.uid] == expected, used
