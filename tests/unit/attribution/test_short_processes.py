"""Use shorter than a tick: processes of 50 to 900 ms, and visits to a GPU of 20 to 80 ms.

Fast polls show the former while they run. The latter are shorter than a fast poll's interval, by
processes that live on, and are booked as late adjustments. The agent watches the simulator as it
does a node: it ticks each second, with ten fast polls in between. The truth is the simulator's;
its accounting is rounded as the driver's is.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from gpuledger.keys import NodeId
from gpuledger.records import Category, Entry, NodeSample
from gpuledger_agent.core.fast_polls import OthersScope
from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.late_adjustments import adjust_ends
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.examples import examples
from tests.ticks import tick_of

PAGE: Final = (Path(__file__).parents[3] / "docs" / "concepts" / "attribution.md").read_text()
EPOCH_NS: Final = 1_795_000_000_000_000_000
SECOND_NS: Final = 10**9
RUN_SECONDS: Final = 24.0
LEAD_SECONDS: Final = 2.0
FAST_POLLS: Final = 10
WINDOW_SECONDS: Final = 1 / 6
ROUNDING_SECONDS: Final = 0.009
"""The driver's accounting is in whole percent of a process's life, which is at most 0.9 s."""
EntryOwner = str
"""A pod's UID, or the name of another category."""


@dataclass(frozen=True, repr=False)
class Run:
    """A run's ticks, and the truth."""

    samples: Sequence[NodeSample]
    simulation: Simulation
    node: SimulatedNode

    @override
    def __repr__(self) -> str:
        """Describe the run briefly: hypothesis shows this, and refuses to show everything."""
        return f"Run(ticks={len(self.samples)}, pods={len(self.simulation.pods)})"

    def booked(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds that ticks book on each owner."""
        found: dict[EntryOwner, float] = defaultdict(float)
        for sample in self.samples:
            for books in book_tick(sample):
                for entry in books.entries:
                    found[_owner_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
        return found

    def adjusted(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds that late adjustments add to each owner."""
        found: dict[EntryOwner, float] = defaultdict(float)
        for sample in self.samples:
            for adjustment in adjust_ends(sample) or ():
                for entry in adjustment.entries:
                    found[_owner_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
        return found

    def count_adjustments(self) -> int:
        """Return the number of late adjustments."""
        return sum(len(adjust_ends(sample) or ()) for sample in self.samples)

    def truth(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds of each pod while ticks covered it."""
        begin_ns = self.samples[0].time_ns - self.samples[0].interval_ns
        used = self.simulation.truth(begin_ns, self.samples[-1].time_ns)
        return {one.uid: one.busy_seconds for one in used}


def _owner_of(entry: Entry, sample: NodeSample) -> EntryOwner:
    if entry.category is not Category.POD:
        return entry.category.value
    return sample.containers[entry.container or 0].pod_uid or "?"


Load = Callable[[Random, int], Iterable[dict[str, object]]]
"""Returns the processes of a pod on a GPU."""


def play(
    seed: int, load: Load, *, pods_a_gpu: int, accounting: str = "v1", polls: int = FAST_POLLS
) -> Run:
    """Let an agent watch two GPUs on which pods run what `load` returns."""
    clock = ManualClock(start_ns=EPOCH_NS)
    random = Random(seed)  # noqa: S311  # not for secrets
    scenario = parse_scenario(_scenario(random, load, pods_a_gpu, accounting))
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node("gpu-a")
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    while clock.monotonic_ns() < RUN_SECONDS * SECOND_NS:
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        for place in range(polls + 1):
            if place:
                at = ClockReading.read(node.clock)
                cursors = sampler.fast_poll_cursors(OthersScope.ALL, now_ns=at.monotonic_ns)
                sampler.take_fast_polls(
                    [gpu.fast_poll(cursors[gpu.uuid], at=at) for gpu in gpus if cursors]
                )
            clock.advance(1 / (polls + 1))
    return Run(made, simulation, node)


def _scenario(random: Random, load: Load, pods_a_gpu: int, accounting: str) -> dict[str, object]:
    return {
        "name": "short",
        "nodes": [
            {
                "name": "gpu-a",
                "gpus": {"model": "NVIDIA L4", "count": 2, "accounting": accounting},
            }
        ],
        "pods": [
            {
                "namespace": "research",
                "name": f"short-{gpu}-{number}",
                "node": "gpu-a",
                "containers": [{"name": "main", "processes": list(load(random, gpu))}],
            }
            for gpu in range(2)
            for number in range(pods_a_gpu)
        ],
    }


def short_processes(random: Random, gpu: int) -> Iterator[dict[str, object]]:
    """Yield successive processes of 50 to 900 ms."""
    # A process that began before the agent, or has not ended when it does, is not reported.
    at = LEAD_SECONDS + random.uniform(0.0, 1.0)
    while at < RUN_SECONDS - LEAD_SECONDS:
        end = at + random.uniform(0.05, 0.9)
        yield {**_process(random, gpu), "start_seconds": at, "end_seconds": end}
        at = end + random.uniform(0.2, 3.0)


def short_visits(random: Random, gpu: int) -> list[dict[str, object]]:
    """Return a process that lives on, and has the GPU open for 20 to 80 ms again and again."""
    every = random.uniform(1.1, 2.0)
    visits = {
        "first_seconds": LEAD_SECONDS + random.uniform(0.0, 1.0),
        "length_seconds": random.uniform(0.02, 0.08),
        "every_seconds": every,
        "count": int((RUN_SECONDS - 2 * LEAD_SECONDS - 1) / every),
    }
    return [{**_process(random, gpu), "visits": visits}]


def _process(random: Random, gpu: int) -> dict[str, object]:
    return {
        "command": "python",
        "gpus": [gpu],
        "load": {"busy_ratio": random.uniform(0.2, 0.95), "kernel_seconds": 0.005},
        "memory_bytes": 2**28,
    }


def error_seconds(booked: Mapping[EntryOwner, float], truth: Mapping[EntryOwner, float]) -> float:
    """Return how far pods are from the truth, in total."""
    return sum(abs(booked.get(uid, 0.0) - seconds) for uid, seconds in truth.items())


def added(
    one: Mapping[EntryOwner, float], other: Mapping[EntryOwner, float]
) -> dict[EntryOwner, float]:
    """Return the sums of both."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}


seeds = st.integers(0, 2**32)
accountings = st.sampled_from(["v1", "v2"])


@settings(examples(15), derandomize=True)
@given(seeds, accountings)
def test_a_single_pod_on_a_gpu_gets_everything_that_its_short_processes_used(
    seed: int, accounting: str
) -> None:
    """By fast polls; late adjustments improve that, except for rounding."""
    run = play(seed, short_processes, pods_a_gpu=1, accounting=accounting)
    booked, truth = run.booked(), run.truth()
    both = added(booked, run.adjusted())
    rounding = ROUNDING_SECONDS * run.count_adjustments()
    assert error_seconds(both, truth) <= error_seconds(booked, truth) + rounding
    for uid, seconds in truth.items():
        assert both[uid] == pytest.approx(seconds, rel=0.01, abs=0.09)


@settings(examples(15), derandomize=True)
@given(seeds, accountings, st.sampled_from([0, FAST_POLLS]))
def test_a_single_pod_on_a_gpu_gets_its_use_in_visits_shorter_than_a_fast_poll(
    seed: int, accounting: str, polls: int
) -> None:
    """By late adjustments: without them, a part of the visits is unattributed."""
    run = play(seed, short_visits, pods_a_gpu=1, accounting=accounting, polls=polls)
    booked, adjusted, truth = run.booked(), run.adjusted(), run.truth()
    assert sum(seconds for name, seconds in adjusted.items() if name in truth) > 0.0
    off, off_adjusted = error_seconds(booked, truth), error_seconds(added(booked, adjusted), truth)
    assert off_adjusted < 0.5 * off
    # A run has only some ten visits. Of 438 runs, 2 % exceeded 3 %, and the worst had 5.0 %. The
    # mean of 20 runs, which the page shows, is lower.
    assert off_adjusted <= 0.06 * sum(truth.values())


@settings(examples(15), derandomize=True)
@given(
    seeds,
    st.sampled_from([short_processes, short_visits]),
    st.sampled_from([1, 2, 3]),
    accountings,
)
def test_late_adjustments_take_only_unattributed_time_and_keep_the_sum(
    seed: int, load: Load, pods_a_gpu: int, accounting: str
) -> None:
    run = play(seed, load, pods_a_gpu=pods_a_gpu, accounting=accounting)
    booked, adjusted = run.booked(), run.adjusted()
    assert sum(adjusted.values()) == pytest.approx(0.0, abs=1e-9)
    assert all(seconds > 0.0 for name, seconds in adjusted.items() if name != "unattributed")
    assert booked["unattributed"] + adjusted.get("unattributed", 0.0) >= -1e-9
    # Visits always leave something to adjust; without adjustments the test would prove nothing.
    assert adjusted or load is short_processes


def table(name: str) -> list[ParameterSet]:
    """Return the page's rows: pods on the GPU, and how far they are from the truth.

    All but the first are extended.
    """
    text = PAGE.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return [
        pytest.param(
            int(pods),
            *(float(cell.replace("%", "")) / 100 for cell in cells),
            marks=[pytest.mark.extended] if number else [],
        )
        for number, (pods, *cells) in enumerate(rows)
    ]


def parts_off(load: Load, *, pods: int, polls: int) -> tuple[float, float]:
    """Return how far pods are from the truth, before and after late adjustments."""
    used = off = off_adjusted = 0.0
    for seed in range(20):
        run = play(seed, load, pods_a_gpu=pods, polls=polls)
        truth, booked = run.truth(), run.booked()
        used += sum(truth.values())
        off += error_seconds(booked, truth)
        off_adjusted += error_seconds(added(booked, run.adjusted()), truth)
    return off / used, off_adjusted / used


@pytest.mark.parametrize(("pods", "without", "with_"), table("short"))
def test_the_page_shows_how_much_fast_polls_improve_accuracy(
    pods: int, without: float, with_: float
) -> None:
    """Fast polls read the samples of a process while it is running."""
    for polls, expected in ((0, without), (FAST_POLLS, with_)):
        off, _ = parts_off(short_processes, pods=pods, polls=polls)
        assert off == pytest.approx(expected, rel=0.05, abs=0.0006)


@pytest.mark.parametrize(("pods", "alone", "alone_adjusted", "off", "adjusted"), table("visits"))
def test_the_page_shows_how_much_late_adjustments_improve_accuracy(
    pods: int, alone: float, alone_adjusted: float, off: float, adjusted: float
) -> None:
    for polls, expected in ((0, (alone, alone_adjusted)), (FAST_POLLS, (off, adjusted))):
        found = parts_off(short_visits, pods=pods, polls=polls)
        assert found == pytest.approx(expected, rel=0.05, abs=0.0006)


def test_without_fast_polls_short_processes_are_unattributed_and_not_adjusted() -> None:
    run = play(7, short_processes, pods_a_gpu=1, accounting="v2", polls=0)
    assert run.booked()["unattributed"] > 0.5
    assert run.adjusted() == {}
