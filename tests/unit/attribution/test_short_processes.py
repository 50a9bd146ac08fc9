"""Processes of 50 to 900 ms that come and go between ticks: settled, pods are nearer to the truth.

The agent watches the simulator as it does a node: it ticks each second, and scans ten times
between. Truth is the simulator's; what its accounts say is rounded as the driver's are.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from agent.core.looks import LookScope
from agent.core.raw import ClockReading
from agent.gpu.nvidia.session import NvmlSession
from agent.sampling import Sampler
from enricher.join.booking.books import book_tick
from enricher.join.booking.settlement import settle_ends
from gpuledger.keys import NodeId
from gpuledger.records import Account, Entry, NodeSample
from simulator.clock import ManualClock
from simulator.scenario.load import parse_scenario
from simulator.simulation import SimulatedNode, Simulation
from tests.ticks import tick_of

PAGE: Final = (Path(__file__).parents[3] / "docs" / "attribution.md").read_text()
EPOCH_NS: Final = 1_795_000_000_000_000_000
SECOND_NS: Final = 10**9
RUN_SECONDS: Final = 24.0
LEAD_SECONDS: Final = 2.0
GLANCES: Final = 10
WINDOW_SECONDS: Final = 1 / 6
EntryOwner = str
"""A pod's UID, or the name of another account."""


@dataclass(frozen=True, repr=False)
class Run:
    """A run's ticks, and the truth behind them."""

    samples: Sequence[NodeSample]
    simulation: Simulation
    node: SimulatedNode

    @override
    def __repr__(self) -> str:
        """Tell the run in short: hypothesis shows this, and refuses to show all."""
        return f"Run(ticks={len(self.samples)}, pods={len(self.simulation.pods)})"

    def booked(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds that ticks book on each."""
        found: dict[EntryOwner, float] = defaultdict(float)
        for sample in self.samples:
            for books in book_tick(sample):
                for entry in books.entries:
                    found[_owner_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
        return found

    def settled(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds that settlements add to them."""
        found: dict[EntryOwner, float] = defaultdict(float)
        for sample in self.samples:
            for settlement in settle_ends(sample) or ():
                for entry in settlement.entries:
                    found[_owner_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
        return found

    def truth(self) -> Mapping[EntryOwner, float]:
        """Return the busy seconds of each pod, while ticks covered it."""
        begin_ns = self.samples[0].time_ns - self.samples[0].interval_ns
        used = self.simulation.truth(begin_ns, self.samples[-1].time_ns)
        return {one.uid: one.busy_seconds for one in used}


def _owner_of(entry: Entry, sample: NodeSample) -> EntryOwner:
    if entry.account is not Account.POD:
        return entry.account.value
    return sample.containers[entry.container or 0].pod_uid or "?"


def play(seed: int, *, pods_a_gpu: int, accounting: str, scans: int = GLANCES) -> Run:
    """Let an agent watch two GPUs on which pods run short processes, one after the other."""
    clock = ManualClock(start_ns=EPOCH_NS)
    random = Random(seed)  # noqa: S311  # no secret is made of it
    scenario = parse_scenario(_scenario(random, pods_a_gpu, accounting))
    simulation = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node("gpu-a")
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    while clock.monotonic_ns() < RUN_SECONDS * SECOND_NS:
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        for place in range(scans + 1):
            if place:
                at = ClockReading.read(node.clock)
                cursors = sampler.look_cursors(LookScope.ALL, now_ns=at.monotonic_ns)
                sampler.record_looks(
                    [gpu.look(cursors[gpu.uuid], at=at) for gpu in gpus if cursors]
                )
            clock.advance(1 / (scans + 1))
    return Run(made, simulation, node)


def _scenario(random: Random, pods_a_gpu: int, accounting: str) -> dict[str, object]:
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
                "containers": [{"name": "main", "processes": list(_lives(random, gpu))}],
            }
            for gpu in range(2)
            for number in range(pods_a_gpu)
        ],
    }


def _lives(random: Random, gpu: int) -> Iterator[dict[str, object]]:
    # What began before the agent did, or has not ended when it does, is not told.
    at = LEAD_SECONDS + random.uniform(0.0, 1.0)
    while at < RUN_SECONDS - LEAD_SECONDS:
        end = at + random.uniform(0.05, 0.9)
        yield {
            "command": "python",
            "gpus": [gpu],
            "load": {"busy_ratio": random.uniform(0.2, 0.95), "kernel_seconds": 0.005},
            "memory_bytes": 2**28,
            "start_seconds": at,
            "end_seconds": end,
        }
        at = end + random.uniform(0.2, 3.0)


def error_seconds(booked: Mapping[EntryOwner, float], truth: Mapping[EntryOwner, float]) -> float:
    """Return how far pods are from the truth, in sum."""
    return sum(abs(booked.get(uid, 0.0) - seconds) for uid, seconds in truth.items())


def added(
    one: Mapping[EntryOwner, float], other: Mapping[EntryOwner, float]
) -> dict[EntryOwner, float]:
    """Return the sums of both."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}


seeds = st.integers(0, 2**32)
accountings = st.sampled_from(["v1", "v2"])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, accountings)
def test_a_pod_alone_on_its_gpu_has_all_that_it_used(seed: int, accounting: str) -> None:
    """But for processes too short for a process scan, and the driver's rounding."""
    run = play(seed, pods_a_gpu=1, accounting=accounting)
    booked, truth = run.booked(), run.truth()
    both = added(booked, run.settled())
    assert error_seconds(both, truth) <= error_seconds(booked, truth)
    for uid, seconds in truth.items():
        assert both[uid] == pytest.approx(seconds, rel=0.01, abs=0.09)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, st.sampled_from([1, 2, 3]), accountings)
def test_nothing_is_taken_but_from_nobody_and_the_sum_over_all_accounts_stays(
    seed: int, pods_a_gpu: int, accounting: str
) -> None:
    run = play(seed, pods_a_gpu=pods_a_gpu, accounting=accounting)
    booked, settled = run.booked(), run.settled()
    assert sum(settled.values()) == pytest.approx(0.0, abs=1e-9)
    assert all(seconds > 0.0 for name, seconds in settled.items() if name != "unattributed")
    assert booked["unattributed"] + settled.get("unattributed", 0.0) >= -1e-9


def table() -> list[tuple[int, float, float]]:
    """Return the page's rows: pods on the GPU, and how far they are from the truth."""
    text = PAGE.partition("<!-- short:begin -->\n")[2].partition("<!-- short:end -->")[0]
    rows = [line.replace("%", "").strip("|").split("|") for line in text.splitlines()[2:]]
    return [(int(pods), float(one) / 100, float(other) / 100) for pods, one, other in rows]


@pytest.mark.parametrize(("pods", "without", "with_"), table())
def test_the_page_tells_how_much_nearer_to_the_truth_pods_are(
    pods: int, without: float, with_: float
) -> None:
    """By looks, which show the samples of a process while it is there."""
    for scans, expected in ((0, without), (GLANCES, with_)):
        used = off = 0.0
        for seed in range(20):
            run = play(seed, pods_a_gpu=pods, accounting="v1", scans=scans)
            truth = run.truth()
            used += sum(truth.values())
            off += error_seconds(added(run.booked(), run.settled()), truth)
        assert off / used == pytest.approx(expected, rel=0.05, abs=0.0006)


def test_without_glances_nobody_is_known_and_nothing_is_settled() -> None:
    run = play(7, pods_a_gpu=1, accounting="v2", scans=0)
    assert run.booked()["unattributed"] > 0.5
    assert run.settled() == {}
