"""An hour of two clusters, from the devices to the store, and what a bill of it adds up to.

The two clusters have nodes and pods of the same names. The expected values follow from the
scenario: what was allocated to whom, from when to when. The agent, the join and the store are the
real ones; time is played.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of
from gpuledger.records import GpuEvent, NodeSample, PodRecord
from gpuledger.runtime import Readiness
from gpuledger.store.schema import PODS as PODS_SCHEMA
from gpuledger_agent.context import run_agent
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import play
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.schema import Scenario
from gpuledger_simulator.simulation import Simulation
from gpuledger_sinks.store.dimensions import rows_of_pod
from gpuledger_sinks.store.table import StreamTable
from tests.default_topics import EVENTS, PODS
from tests.month import pod_records_of
from tests.unit.agent.test_service import EPOCH_NS, SleepersClock, read_all
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import record
from tests.unit.sinks.store.storing import fill, query

SECOND_NS: Final = 1_000_000_000
HOUR_SECONDS: Final = 3_600
TICK_SECONDS: Final = 5.0
CLUSTERS: Final = {"east": 11, "west": 23}
"""The clusters, each with the seed of its scenario, from which UUIDs are drawn."""
LATE_SECONDS: Final = 30
"""How long after its start each pod's record comes."""
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
LOST: Final = (1_000.0, 1_033.0)
SHORT: Final = {"short-1": (600.0, 611.3), "short-2": (620.0, 634.0), "short-3": (640.5, 681.1)}


def pod(
    name: str,
    *,
    node: str,
    owner: str,
    devices: list[dict[str, Any]],
    lives: tuple[float, float | None] = (0.0, None),
    runs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a pod with these devices, and with a process if it runs one."""
    process = {"command": name, "memory_bytes": 2**30, **(runs or {})}
    return {
        "namespace": "research",
        "name": name,
        "node": node,
        "owner": {"kind": "Job", "name": owner},
        "labels": {"team": owner},
        "start_seconds": lives[0],
        **({} if lives[1] is None else {"end_seconds": lives[1]}),
        "containers": [
            {"name": "main", "processes": [process] if runs else [], "devices": devices}
        ],
    }


def busy(gpu: int, ratio: float, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # a process
    return {"gpus": [gpu], "load": {"busy_ratio": ratio, "kernel_seconds": 0.01}, **more}


def scenario_of(cluster: str) -> Scenario:
    """Return a cluster: whole GPUs, a shared one, a partitioned one, a lost one."""
    pods = [
        pod("train", node="whole", owner="train", devices=[{"gpu": 0}], runs=busy(0, 0.9)),
        pod("unused", node="whole", owner="unused", devices=[{"gpu": 1}], lives=(900.0, 2_700.0)),
        pod("chat", node="shared", owner="chat", devices=[share(0)], runs=busy(0, 0.3)),
        pod("embed", node="shared", owner="embed", devices=[share(1)], runs=busy(0, 0.2)),
        pod(
            "small",
            node="cut",
            owner="small",
            devices=[{"gpu": 0, "instance": 0}],
            runs=busy(0, 0.5, instance=0),
        ),
        pod("spare", node="cut", owner="spare", devices=[{"gpu": 0, "instance": 1}]),
        pod("lost", node="lost", owner="lost", devices=[{"gpu": 0}], runs=busy(0, 0.4)),
        *(
            pod(name, node="lost", owner="short", devices=[{"gpu": 1}], lives=lives)
            for name, lives in SHORT.items()
        ),
    ]
    return parse_scenario(
        {
            "name": cluster,
            "seed": CLUSTERS[cluster],
            "nodes": [
                {"name": "whole", "gpus": {"model": H100, "count": 2}},
                {"name": "shared", "gpus": {"model": L4}},
                {
                    "name": "cut",
                    "gpus": {"model": H100, "mig": [{"instances": ["1g.10gb", "3g.40gb"]}]},
                },
                {"name": "lost", "gpus": {"model": L4, "count": 2}},
            ],
            "pods": pods,
            "faults": [
                {
                    "node": "lost",
                    "kind": "lost",
                    "gpus": [0],
                    "start_seconds": LOST[0],
                    "end_seconds": LOST[1],
                }
            ],
        }
    )


def share(number: int) -> dict[str, Any]:
    return {"gpu": 0, "replica": number, "resource": "nvidia.com/gpu.shared"}


ALLOCATED: Final[dict[str, Fraction]] = {
    "train": Fraction(HOUR_SECONDS),
    "unused": Fraction(1_800),
    # Each pod has one of the two shares.
    "chat": Fraction(HOUR_SECONDS, 2),
    "embed": Fraction(HOUR_SECONDS, 2),
    "small": Fraction(HOUR_SECONDS, 7),
    "spare": Fraction(3 * HOUR_SECONDS, 7),
    "lost": Fraction(HOUR_SECONDS),
    "short": Fraction(11.3 + 14.0 + 40.6),
}
"""Seconds of whole GPUs allocated to each owner in a cluster, by the scenario."""
ENDS: Final = {"train": 0, "unused": 2, "chat": 0, "embed": 0, "small": 0, "spare": 0, "short": 6}
"""How often each began or ended within the hour, when one tick may be in doubt."""


async def ticks_of(
    simulation: Simulation,
    node: str,
    cluster: str,
    *,
    seconds: int = HOUR_SECONDS,
    tick_seconds: float = TICK_SECONDS,
) -> list[NodeSample]:
    """Return a node's ticks of an hour or less, as its agent publishes them."""
    epoch_ns = simulation.epoch_ns
    clock = SleepersClock(sleepers=1, rings_after_seconds=seconds + tick_seconds, epoch_ns=epoch_ns)
    played = Simulation(simulation.scenario, epoch_ns=epoch_ns, clock=clock).node(node)
    bus = MemoryBus()
    settings = AgentSettings(
        cluster=cluster,
        node_name=node,
        sampling_interval_seconds=tick_seconds,
        # In real time, not played time: on a busy machine threads answer late, and the publisher
        # may get no turn within the hour.
        gpu_timeout_seconds=60.0,
        queue_samples=2 * round(seconds / tick_seconds),
    )
    agent = asyncio.create_task(
        run_agent(host=play(played), bus=bus, settings=settings, readiness=Readiness())
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    return (await read_all(bus))[0]


@dataclass(frozen=True)
class Hour:
    """The hour of two clusters, booked and stored."""

    store: Path
    events: list[GpuEvent]

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return query(self.store, sql)


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Hour:
    """Play the hour once, join it in order of time, and store it."""
    given, waiting = Given(), list[tuple[int, PodRecord]]()
    ticks: list[NodeSample] = []
    for cluster in CLUSTERS:
        simulation = Simulation(
            scenario_of(cluster),
            epoch_ns=EPOCH_NS,
            clock=SleepersClock(sleepers=1, rings_after_seconds=1.0),
        )
        for node in simulation.nodes:
            ticks += asyncio.run(ticks_of(simulation, node, cluster))
        waiting += [
            (one.created_time_ns + LATE_SECONDS * SECOND_NS, one)
            for one in pod_records_of(simulation, cluster)
        ]
    waiting.sort(key=lambda due: due[0])
    written = list(waiting)
    decode = decoder_of(EVENTS.name, GpuEvent).decode
    events = []
    for offset, tick in enumerate(sorted(ticks, key=lambda one: one.time_ns)):
        given.now_ns = tick.time_ns
        while waiting and waiting[0][0] <= tick.time_ns:
            given.read_pod(waiting.pop(0)[1])
        made = given.stage.take_samples([record(tick, offset=offset)])
        events += [decode(message.value) for message in made]
    assert len(events) == len(ticks)
    store = tmp_path_factory.mktemp("hour")
    fill(store, events)
    store_pods(store, written)
    return Hour(store, events)


def store_pods(store: Path, written: Sequence[tuple[int, PodRecord]]) -> None:
    """Write the table of pods next to the rows, as the store sink does when it reads the topic."""
    table = StreamTable(PODS_SCHEMA, store_uri=str(store))
    stream = f"gpuledger-store|{PODS.name}|0"
    table.load([stream])
    rows = [
        row
        for offset, (time_ns, one) in enumerate(written)
        for row in rows_of_pod(
            one, Record(PODS.name, 0, offset, time_ns // 10**6, one.uid.encode(), b"")
        )
    ]
    table.append(rows, {stream: len(written) - 1}, time_ms=0)


def covered_seconds(hour: Hour) -> dict[tuple[str, str], Fraction]:
    """Return how long each node's ticks cover, by their own lengths."""
    found: defaultdict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for event in hour.events:
        found[event.cluster, event.node] += Fraction(event.interval_ns, SECOND_NS)
    return found


def test_gpu_hours_by_model_are_the_physical_gpus_hours_to_the_last_digit(hour: Hour) -> None:
    """An instance is a part of a GPU, and so is the rest that no instance has."""
    physical = {("whole", H100): 2, ("cut", H100): 1, ("shared", L4): 1, ("lost", L4): 2}
    covered = covered_seconds(hour)
    sql = (
        "SELECT cluster, node, model, sum(allocated_ns::HUGEINT * compute_slices"
        " * (420 // gpu_compute_slices)) FROM {entries} GROUP BY ALL"
    )
    found = {
        (cluster, node, model): Fraction(int(total), 420 * SECOND_NS)
        for cluster, node, model, total in hour.ask(sql)
    }
    assert found == {
        (cluster, node, model): count * covered[cluster, node]
        for cluster in CLUSTERS
        for (node, model), count in physical.items()
    }
    for seconds in covered.values():
        assert abs(seconds - HOUR_SECONDS) <= 2 * TICK_SECONDS


def test_allocated_hours_by_owner_agree_with_the_scenario(hour: Hour) -> None:
    sql = (
        "SELECT cluster, allocated_owner_name, sum(allocated_gpu_hours) * 3600 FROM {entries}"
        " WHERE allocated_ns > 0 AND allocated_owner_name IS NOT NULL GROUP BY ALL"
    )
    found = {(cluster, owner): seconds for cluster, owner, seconds in hour.ask(sql)}
    assert found.keys() == {(cluster, owner) for cluster in CLUSTERS for owner in ALLOCATED}
    for (cluster, owner), seconds in found.items():
        doubt = (1 + ENDS.get(owner, 0)) * TICK_SECONDS
        assert seconds == pytest.approx(float(ALLOCATED[owner]), abs=doubt), (cluster, owner)


def test_allocated_and_unallocated_hours_sum_to_the_physical_gpus_hours(hour: Hour) -> None:
    sql = "SELECT sum(allocated_gpu_hours) * 3600 FROM {entries}"
    ((seconds,),) = hour.ask(sql)
    assert seconds == pytest.approx(
        sum(
            float(covered * (2 if node in {"whole", "lost"} else 1))
            for (_, node), covered in covered_seconds(hour).items()
        )
    )


def test_no_allocated_second_is_without_an_owner_once_its_record_has_come(hour: Hour) -> None:
    """Before that the name comes from the node, and the store completes it."""
    states = {
        (pod.state.value, pod.owner_name is None)
        for event in hour.events
        for holder in event.allocations
        for pod in [event.pods[holder.pod]]
    }
    assert states == {("known", False), ("named", True)}
    sql = (
        "SELECT allocated_pod_state, count(*) FROM {entries}"
        " WHERE allocated_pod IS NOT NULL AND allocated_owner_name IS NULL GROUP BY ALL"
    )
    assert hour.ask(sql) == []


def test_busy_time_and_allocated_time_of_each_device_sum_to_the_tick(hour: Hour) -> None:
    for event in hour.events:
        for books in event.gpus:
            allocated = [
                entry.allocated_ns for entry in books.entries if entry.allocated_ns is not None
            ]
            assert sum(allocated) == event.interval_ns
            used = [entry.busy_ns for entry in books.entries]
            if None not in used:
                assert sum(one or 0 for one in used) == event.interval_ns


def test_the_energy_of_each_gpu_agrees_with_its_counter(hour: Hour) -> None:
    """From the first to the last tick; ticks cover the time up to some windows before them."""
    drawn: defaultdict[str, int] = defaultdict(int)
    counter: dict[str, tuple[int, int]] = {}
    for event in hour.events:
        for books in event.gpus:
            uuid = books.reading.parent_uuid or books.reading.uuid
            drawn[uuid] += sum(entry.energy_millijoules or 0 for entry in books.entries)
            total = books.reading.energy_total_millijoules
            if books.reading.parent_uuid is None and total is not None:
                first = books.reading.energy_millijoules or 0
                counter[uuid] = (counter.get(uuid, (total - first, 0))[0], total)
    lost = {books.reading.uuid for event in hour.events for books in event.gpus if books.gap_ns}
    assert len(lost) == len(CLUSTERS)
    for uuid, (begun, ended) in counter.items():
        if uuid not in lost:
            assert drawn[uuid] == pytest.approx(ended - begun, rel=0.0005), uuid


def test_the_gap_of_the_lost_gpu_names_its_allocatee(hour: Hour) -> None:
    sql = (
        "SELECT cluster, allocated_owner_name, sum(gpu_gap_seconds)::DOUBLE FROM {entries}"
        " WHERE gpu_gap_ns > 0 GROUP BY ALL"
    )
    found = {(cluster, owner): seconds for cluster, owner, seconds in hour.ask(sql)}
    assert found.keys() == {(cluster, "lost") for cluster in CLUSTERS}
    # The agent queries a lost GPU after waits that double from 5 s on, each random between half
    # and all of it: so the last wait is at most twice as long as all before it.
    lost_seconds, first_wait_seconds = LOST[1] - LOST[0], 5.0
    longest_seconds = 3 * lost_seconds + first_wait_seconds + TICK_SECONDS
    for seconds in found.values():
        assert lost_seconds - TICK_SECONDS < seconds <= longest_seconds


def test_the_clusters_are_separate_although_their_names_are_equal(hour: Hour) -> None:
    sql = (
        "SELECT count(DISTINCT cluster), count(DISTINCT pod_uid) FROM {entries}"
        " WHERE pod = 'train' GROUP BY cluster"
    )
    assert hour.ask(sql) == [(1, 1), (1, 1)]
    ((uids,),) = hour.ask("SELECT count(DISTINCT pod_uid) FROM {entries} WHERE pod = 'train'")
    assert uids == len(CLUSTERS)
