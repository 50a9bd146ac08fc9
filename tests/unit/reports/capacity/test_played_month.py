"""Each report ranks the planted problem of a played fleet first, and finds none in a healthy one.

The plan of the fleet is the truth. Savings in the reports differ from it by at most 5 %.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import duckdb
import pytest

from gpuledger.clock import NS_PER_MINUTE
from gpuledger_cli.demo.play import play
from gpuledger_cli.demo.play_command import FLEET, price_file
from gpuledger_reports.capacity.asking import answer, ask, open_store
from gpuledger_reports.capacity.node_states import find_instants
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Question, Row
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_simulator.fleet.load import load_fleet
from gpuledger_simulator.fleet.plan import (
    MINUTES_AN_HOUR,
    FleetPlan,
    FleetPod,
    plan_fleet,
)

BEGIN_NS = 1_790_812_800 * 10**9
"""2026-10-01T00:00:00Z."""
REMAPPED = 63
"""An XID that is only a warning."""
HEALTHY = Path(__file__).parents[3] / "data" / "healthy_fleet.yaml"


@dataclass(frozen=True)
class Month:
    """A played fleet and its store. Times are in minutes since the start of the fleet."""

    plan: FleetPlan
    store: Path

    def rows(self, report: str, **given: str) -> list[Row]:
        """Return the rows of a report on the whole time range."""
        with duckdb.connect() as connection:
            question = self.question(connection, report, given)
            return answer(REPORTS[report], question, connection).rows

    def question(
        self, connection: duckdb.DuckDBPyConnection, report: str, given: dict[str, str]
    ) -> Question:
        return ask(
            REPORTS[report],
            {"window": f"{self.plan.days}d"} | given,
            complete=open_store(connection, str(self.store)),
            policy=read_policy(self.store.parent / "prices.yaml").policy,
            now_us=self.plan.time_ns(self.plan.minutes) // 1000,
            advance=lambda _: None,
        )

    @cached_property
    def first_minute(self) -> int:
        """The start of complete usage."""
        with duckdb.connect() as connection:
            begin_us = self.question(connection, "queue", {}).window.begin_us
        return (begin_us * 1000 - BEGIN_NS) // NS_PER_MINUTE

    def hours_within(self, begin: int, end: int) -> float:
        """Return the part of a time that is complete usage, in hours."""
        return max(0, end - max(begin, self.first_minute)) / MINUTES_AN_HOUR

    def idle_stretches(self, pod: FleetPod) -> Iterator[tuple[int, int]]:
        """Yield the times within complete usage in which a pod uses none of its devices."""
        start = max(pod.start, self.first_minute)
        borders = [start, *range(start // 60 * 60 + 60, pod.end, 60), pod.end]
        idle_from: int | None = None
        for begin, end in pairwise(borders):
            if self.plan.busy_ppm(pod, begin // MINUTES_AN_HOUR):
                idle_from = None
                continue
            idle_from = begin if idle_from is None else idle_from
            if end == pod.end or self.plan.busy_ppm(pod, end // MINUTES_AN_HOUR):
                yield idle_from, end

    def gpus(self, pod: FleetPod) -> float:
        """Return the number of physical GPUs that are allocated to a pod."""
        return sum(
            float(device.size) * len(slots.numbers) / device.slots
            for slots in pod.slots
            for device in [pod.node.devices[slots.device]]
        )


@pytest.fixture(scope="module", params=[10, pytest.param(30, marks=pytest.mark.extended)])
def month(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Month:
    """Play the fleet that ships with the command."""
    return played(FLEET, request.param, tmp_path_factory.mktemp("month"))


@pytest.fixture(scope="module", params=[10, pytest.param(30, marks=pytest.mark.extended)])
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Month:
    """Play a fleet without anything to improve."""
    return played(HEALTHY, request.param, tmp_path_factory.mktemp("healthy"))


def played(fleet: Path, days: int, folder: Path) -> Month:
    plan = plan_fleet(load_fleet(fleet), begin_ns=BEGIN_NS, days=days)
    (folder / "prices.yaml").write_text(price_file(plan))
    asyncio.run(play(plan, str(folder / "store"), advance=lambda _: None))
    return Month(plan, folder / "store")


def test_waste_ranks_the_unused_notebook_first(month: Month) -> None:
    rows = month.rows("waste", by="workload")
    assert rows[0]["workload"] == "StatefulSet/notebook-ada"
    assert rows[0]["unused_ratio"] == 1


@pytest.mark.parametrize("limit", [30, 60, 120])
def test_a_limit_of_idle_minutes_would_have_reclaimed_what_the_plan_knows(
    month: Month, limit: int
) -> None:
    expected: dict[str, float] = defaultdict(float)
    for pod in month.plan.pods:
        reclaimed = sum(max(0, end - begin - limit) for begin, end in month.idle_stretches(pod))
        expected[f"{pod.workload.kind}/{pod.workload.name}"] += reclaimed / 60 * month.gpus(pod)
    rows = month.rows("waste", by="workload")
    found = {row["workload"]: row[f"reclaimed_{limit}_gpu_hours"] for row in rows}
    assert found == pytest.approx(expected, rel=0.05, abs=0.01)
    assert len([hours for hours in found.values() if hours]) == 2


def test_queue_ranks_the_growing_queue_first_with_its_unmet_demand(month: Month) -> None:
    expected: dict[str, float] = defaultdict(float)
    for request, start in chain(
        ((pod, pod.start) for pod in month.plan.pods),
        ((request, month.plan.minutes) for request in month.plan.waiting),
    ):
        if request.workload.name == "sweep":
            expected[request.workload.name] += 2 * month.hours_within(request.created, start)
    first, *_ = month.rows("queue", by="queue,workload")
    assert (first["queue"], first["workload"]) == ("robotics", "Job/sweep")
    assert first["unmet_gpu_hours"] == pytest.approx(expected["sweep"], rel=0.05)
    assert first["waiting"] == sum(each.workload.name == "sweep" for each in month.plan.waiting)


def test_a_healthy_fleet_has_nothing_to_reclaim(healthy: Month) -> None:
    rows = healthy.rows("waste")
    assert not any(row[f"reclaimed_{limit}_gpu_hours"] for row in rows for limit in (30, 60, 120))


def test_in_a_healthy_fleet_nobody_waits(healthy: Month) -> None:
    assert not any(row["unmet_gpu_hours"] or row["waiting"] for row in healthy.rows("queue"))


def test_fragmentation_ranks_the_spread_pool_first_with_its_stranded_gpus(month: Month) -> None:
    """Pods of four GPUs can use a node only if it is empty; pods of two can use any free pair."""
    plan, size = month.plan, 4
    nodes = [node for node in plan.nodes if node.pool.name == "a100"]
    pods = [pod for pod in plan.pods if pod.node in nodes]
    share_of_large = sum(len(pod.slots) == size for pod in pods) / len(pods)
    with duckdb.connect() as connection:
        instants = find_instants(month.question(connection, "fragmentation", {}).window)
    stranded = 0.0
    for instant_us in instants:
        minute = (instant_us * 1000 - BEGIN_NS) // NS_PER_MINUTE + 30
        used = [
            sum(
                len(pod.slots) for pod in pods if pod.node is node and pod.start <= minute < pod.end
            )
            for node in nodes
        ]
        free_in_part = sum(size - count for count in used if count)
        # Packed, at most one node has GPUs in use and free.
        stranded += share_of_large * (free_in_part - (-sum(used)) % size) / len(instants)
    first, *others = month.rows("fragmentation", by="pool")
    assert first["pool"] == "a100"
    assert first["stranded_gpus"] == pytest.approx(stranded, rel=0.05)
    assert "pods of 4 GPUs" in first["advice"]
    assert not any(row["advice"] for row in others)
    assert not any(row["by_cpu_gpus"] or row["by_memory_gpus"] for row in (first, *others))


def test_faults_ranks_the_flaky_node_first_with_the_hours_of_interrupted_runs(
    month: Month,
) -> None:
    first, *others = month.rows("faults", by="node")
    assert first["node"] == "h100-1"
    assert first["note"]
    assert not any(row["note"] for row in others)
    interrupted = sum(
        len(pod.slots) * (pod.end - pod.start) / MINUTES_AN_HOUR
        for xid in month.plan.xids
        for pod in xid.pods
        if pod.workload.run_hours and xid.minute >= month.first_minute and xid.xid != REMAPPED
    )
    assert first["interrupted_gpu_hours"] == pytest.approx(interrupted, rel=0.05)
    lost = {row["node"]: row["lost_gpu_hours"] for row in others if not row["cordoned_gpu_hours"]}
    unresponsive = sum(
        loss.restart - loss.start for node in month.plan.nodes for loss in node.losses
    )
    assert lost == {"l4-0": pytest.approx(unresponsive / MINUTES_AN_HOUR, rel=0.05)}


def test_faults_finds_the_cordoned_node_with_the_hours_of_its_free_gpu(month: Month) -> None:
    (node,) = (each for each in month.plan.nodes if each.cordons)
    (cordon,) = node.cordons
    found = {row["node"]: row for row in month.rows("faults", by="node")}
    assert {name for name, row in found.items() if row["cordoned_gpu_hours"]} == {"a30-0"}
    # Its pods share one of its two GPUs all the time.
    assert len({each.device for pod in month.plan.pods_of[node] for each in pod.slots}) == 1
    assert found["a30-0"]["cordoned_gpu_hours"] == pytest.approx(month.hours_within(*cordon))


def test_fleet_has_the_power_that_the_gpus_of_the_plan_may_draw_and_drew(month: Month) -> None:
    """Whole GPUs draw their idle power, and the rest in proportion to their use."""
    found = {row["node"]: row for row in month.rows("fleet", by="node")}
    for node in month.plan.nodes:
        row, hours = found[node.name], range(month.first_minute // 60, month.plan.minutes // 60)
        assert row["power_limit_watts"] == sum(gpu.max_watts for gpu in node.gpus)
        if node.losses or node.is_shared or node.gpus[0].cuts:
            continue
        gpu = node.gpus[0]
        used = [0.0] * len(hours)
        for pod in month.plan.pods_of[node]:
            for hour in range(max(pod.start // 60, hours.start), -(-pod.end // 60)):
                minutes = min(pod.end, hour * 60 + 60) - max(pod.start, hour * 60)
                busy = month.plan.busy_ppm(pod, hour) / 1e6 * len(pod.used_slots)
                used[hour - hours.start] += busy * minutes / 60
        watts = [
            len(node.gpus) * gpu.idle_watts + each * (gpu.max_watts - gpu.idle_watts)
            for each in used
        ]
        assert row["mean_power_watts"] == pytest.approx(sum(watts) / len(watts), rel=0.001)
        assert row["peak_power_watts"] == pytest.approx(max(watts), rel=0.001)


@pytest.mark.parametrize(
    ("report", "by"),
    [("rightsizing", "recommendation"), ("fragmentation", "advice"), ("faults", "failures")],
)
def test_a_healthy_fleet_needs_no_advice(healthy: Month, report: str, by: str) -> None:
    assert not any(row[by] for row in healthy.rows(report))


def test_rightsizing_ranks_the_oversized_pods_first_with_the_hours_that_they_do_not_need(
    month: Month,
) -> None:
    """They compute on one of two GPUs, for a seventh of the time, and hold 9 GiB."""
    first, *others = month.rows("rightsizing")
    assert first["workload"] == "Deployment/rerank"
    assert (first["gpus"], first["used_gpus"]) == (2, 1)
    assert first["recommended_mig_profile"] == "2g.20gb"
    hours = sum(
        month.hours_within(pod.start, pod.end)
        for pod in month.plan.pods
        if pod.workload.name == "rerank"
    )
    assert first["saved_gpu_hours"] == pytest.approx(hours * (2 - 2 / 7), rel=0.05)
    assert not any(row["recommendation"] for row in others)


@pytest.mark.extended
@pytest.mark.parametrize("month", [30], indirect=True)
def test_forecast_finds_that_the_growing_demand_exceeds_its_gpus(month: Month) -> None:
    rows = month.rows("forecast", by="model", horizon="2d")
    full = {row["full_days_p50"]: row["model"] for row in rows if row["full_days_p50"] is not None}
    assert min(full.items()) == (0, "NVIDIA H200")


@pytest.mark.parametrize(
    ("report", "place"),
    [
        ("waste", "notebook-ada"),
        ("fragmentation", "a100"),
        ("rightsizing", "rerank"),
        ("faults", "h100-1"),
    ],
)
def test_summary_has_the_planted_problems_as_the_best_actions(
    month: Month, report: str, place: str
) -> None:
    actions = {row["report"]: row["headline"] for row in month.rows("summary") if row["action"]}
    assert place in actions[report]
    assert len(actions) == 4


def test_summary_recommends_nothing_for_a_healthy_fleet(healthy: Month) -> None:
    assert not any(row["action"] for row in healthy.rows("summary"))
