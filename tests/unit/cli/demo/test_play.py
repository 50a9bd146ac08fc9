"""A played fleet: its store has the plan's times to the nanosecond, and can be billed."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.errors import UserError
from gpuledger.store.views import create_views
from gpuledger_cli.command import main
from gpuledger_cli.demo.play import play
from gpuledger_cli.demo.play_command import FLEET, check_play, price_file
from gpuledger_reports.capacity import idle_time, rightsizing, waste
from gpuledger_reports.capacity.report import Answer, Question, Report
from gpuledger_reports.pricing.billing import Bill, BillMaker
from gpuledger_reports.pricing.closing import refusals_of
from gpuledger_reports.pricing.policy_file import ReadPolicy, read_policy
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from gpuledger_simulator.fleet.load import load_fleet, parse_fleet
from gpuledger_simulator.fleet.plan import FleetNode, FleetPlan, plan_fleet
from tests.errors import has_words
from tests.hanging import HANG_SECONDS

BEGIN_NS = 1_790_812_800 * 10**9
"""2026-10-01T00:00:00Z."""


@dataclass(frozen=True)
class PlayedStore:
    """A store that was written from a plan."""

    plan: FleetPlan
    folder: Path
    connection: duckdb.DuckDBPyConnection
    advanced: list[int]

    def rows(self, query: str) -> list[Any]:
        return self.connection.execute(query).fetchall()

    @property
    def window(self) -> Window:
        return Window(self.plan.begin_ns // 1000, self.plan.time_ns(self.plan.minutes) // 1000)

    @property
    def prices(self) -> ReadPolicy:
        return read_policy(self.folder.parent / "prices.yaml")

    def bill(self, *by: str) -> Bill:
        reader = UsageReader(str(self.folder))
        return BillMaker(reader, self.prices, by=by).make(self.window)

    def answer(self, report: Report, **options: str | int | None) -> Answer:
        question = Question(
            window=self.window,
            by=(*report.default_by.split(","),),
            policy=self.prices.policy,
            options=options,
        )
        return report.read(self.connection, question)


@pytest.fixture(scope="module", params=[2, pytest.param(30, marks=pytest.mark.extended)])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlayedStore]:
    """Play the fleet that ships with the command."""
    folder = tmp_path_factory.mktemp("play") / "store"
    plan = plan_fleet(load_fleet(FLEET), begin_ns=BEGIN_NS, days=request.param)
    (folder.parent / "prices.yaml").write_text(price_file(plan))
    advanced: list[int] = []
    asyncio.run(play(plan, str(folder), advance=advanced.append))
    with duckdb.connect() as connection:
        create_views(connection, str(folder))
        yield PlayedStore(plan, folder, connection, advanced)


def test_each_pod_has_its_true_times(store: PlayedStore) -> None:
    allocated = {
        uid: (ns, unresponsive_ns)
        for uid, ns, unresponsive_ns in store.rows(
            "SELECT allocated_pod_uid, sum(allocated_ns), sum(unresponsive_ns) FROM usage"
            " WHERE allocated_pod_uid IS NOT NULL GROUP BY ALL"
        )
    }
    used = dict(
        store.rows("SELECT pod_uid, sum(busy_ns) FROM usage WHERE category = 'pod' GROUP BY ALL")
    )
    truths = {pod.uid: store.plan.truth(pod) for pod in store.plan.pods}
    assert allocated == {
        uid: (truth.allocated_ns, truth.unresponsive_ns) for uid, truth in truths.items()
    }
    assert {uid: used.get(uid, 0) for uid in truths} == {
        uid: truth.used_ns for uid, truth in truths.items()
    }
    assert used.keys() <= truths.keys()


def test_each_device_has_every_minute_except_those_of_its_nodes_restart(
    store: PlayedStore,
) -> None:
    """For each device, the allocated and unallocated times sum to the minutes, and so do uses."""
    expected = {
        uuid: (
            (store.plan.minutes - down_minutes(node)) * NS_PER_MINUTE,
            (store.plan.minutes - down_minutes(node) - lost_minutes(node, index)) * NS_PER_MINUTE,
        )
        for node in store.plan.nodes
        for index, gpu in enumerate(node.gpus)
        for uuid in ([each.uuid for each in gpu.cuts[0].instances] if gpu.cuts else [gpu.uuid])
    }
    found = {
        uuid: (allocated_ns, busy_ns)
        for uuid, allocated_ns, busy_ns in store.rows(
            "SELECT gpu_uuid, sum(allocated_ns), sum(busy_ns) FROM usage"
            " WHERE busy_ns IS NOT NULL OR unresponsive_ns > 0 GROUP BY ALL"
        )
    }
    assert found == expected
    assert any(down_minutes(node) for node in store.plan.nodes)


@pytest.mark.parametrize("table", ["usage_hourly", "usage_daily"])
def test_the_sums_by_hour_and_day_are_those_by_minute(store: PlayedStore, table: str) -> None:
    sums = "SELECT sum(allocated_ns), sum(busy_ns), sum(energy_millijoules), sum(memory_byte_ns)"
    assert store.rows(f"{sums} FROM {table}") == store.rows(f"{sums} FROM usage")


def test_every_pod_has_its_names_and_workload(store: PlayedStore) -> None:
    found = set(
        store.rows(
            "SELECT allocated_pod_uid, allocated_namespace, allocated_pod, allocated_owner_kind,"
            " allocated_owner_name, allocated_labels->>'team' FROM usage_hourly"
            " WHERE allocated_pod_uid IS NOT NULL"
        )
    )
    assert found == {
        (pod.uid, of.namespace, pod.name, of.kind, of.name, of.team)
        for pod in store.plan.pods
        for of in [pod.workload]
    }


def test_each_pod_waits_for_its_node_as_long_as_in_truth(store: PlayedStore) -> None:
    def minutes_in(table: str, *times: str) -> dict[str, list[Any]]:
        columns = ", ".join(f"epoch_ns({time})" for time in times)
        return {
            uid: [ns if ns is None else (ns - store.plan.begin_ns) // NS_PER_MINUTE for ns in times]
            for uid, *times in store.rows(
                f"SELECT pod_uid, {columns} FROM {table} WHERE valid_to IS NULL"  # noqa: S608  # the test's own names
            )
        }

    assert minutes_in("pods", "created_time", "scheduled_time", "ended_time") == {
        pod.uid: [pod.created, pod.start, None if pod.end == store.plan.minutes else pod.end]
        for pod in store.plan.pods
    }
    assert minutes_in("pending_pods", "created_time", "left_time") == {
        **{pod.uid: [pod.created, pod.start] for pod in store.plan.pods if pod.waited},
        **{pod.uid: [pod.created, None] for pod in store.plan.waiting},
    }


def test_incidents_name_the_flaky_node_and_the_lost_gpu(store: PlayedStore) -> None:
    rows = store.rows("SELECT node, kind, xid, epoch_us(time), pods FROM incidents")
    assert len(rows) == len(store.plan.xids) + 3
    for xid in store.plan.xids:
        assert any(
            row[:4] == (xid.node.name, "xid", xid.xid, store.plan.time_ns(xid.minute) // 1000)
            and all(pod.uid in row[4] for pod in xid.pods)
            for row in rows
        )
    of_lost = {row[1] for row in rows if row[0] == "l4-0"}
    assert of_lost == {"xid", "gpu_lost", "gpu_recovered"}


def test_the_bill_is_complete_balances_and_lacks_only_the_restart(store: PlayedStore) -> None:
    bill = store.bill("owner")
    present = sum(len(node.gpus) * store.plan.minutes for node in store.plan.nodes)
    down = sum(len(node.gpus) * down_minutes(node) for node in store.plan.nodes)
    assert bill.data_coverage_ratio == 1 - Fraction(down, present)
    assert bill.line_cost == bill.asset_cost
    assert not refusals_of(bill)
    assert not bill.unpriced


def test_the_price_changes_within_the_days(store: PlayedStore) -> None:
    """The GPUs of a model cost their time at the price of the day, whoever has them."""
    half = round(0.5 * store.plan.days)
    hours = [24 * half, 24 * (store.plan.days - half)]
    cost = sum(line.exact_cost for line in store.bill("model").lines if "H100" in line.values[0])
    assert cost == 16 * (hours[0] * Fraction("3.6") + hours[1] * Fraction("3.1"))


def test_the_unused_notebook_is_the_first_waste_with_the_hours_of_the_plan(
    store: PlayedStore,
) -> None:
    first, *others = store.answer(waste.REPORT, idle_minutes="60").rows
    assert (first["cluster"], first["namespace"]) == ("prod", "notebooks")
    assert first["workload"] == "StatefulSet/notebook-ada"
    pods = [pod for pod in store.plan.pods if pod.workload.name == "notebook-ada"]
    units = pods[0].workload.units
    minutes = [pod.end - pod.start for pod in pods]
    hours = round(units * sum(minutes) / 60, 2)
    assert first["allocated_gpu_hours"] == first["unused_gpu_hours"] == hours
    for limit in idle_time.LIMITS:
        reclaimed = units * sum(max(0, each - limit) for each in minutes) / 60
        assert first[f"reclaimed_{limit}_gpu_hours"] == pytest.approx(reclaimed, abs=0.0051)
    longest = max(pods, key=lambda pod: pod.end - pod.start)
    assert first["longest_idle_pod"] == longest.name
    assert first["longest_idle_hours"] == round((longest.end - longest.start) / 60, 2)
    assert first["idle_memory_gib"] == 21.0
    # All others work in every hour, except one with idle hours.
    idle = [row["workload"] for row in others if row["reclaimed_30_gpu_hours"]]
    assert idle == ["Deployment/course"]


def test_unused_time_costs_as_much_as_on_the_bill(store: PlayedStore) -> None:
    found = store.answer(waste.REPORT, idle_minutes="60").rows
    of_bill = {
        line.values: float(line.unused_cost)
        for line in store.bill("namespace", "owner").lines
        if line.unused_cost
    }
    costs = {(row["namespace"], row["workload"]): row["unused_cost"] for row in found}
    assert costs == {key: pytest.approx(cost, abs=0.0051) for key, cost in of_bill.items()}


def test_only_the_oversized_workload_is_recommended_to_shrink(store: PlayedStore) -> None:
    first, *others = store.answer(rightsizing.REPORT, minimum_history=2, explain=None).rows
    assert (first["workload"], first["gpus"], first["used_gpus"]) == ("Deployment/rerank", 2, 1)
    assert first["recommendation"] == "1 x NVIDIA H100 80GB HBM3 2g.20gb"
    minutes = sum(
        2 * (pod.end - pod.start) for pod in store.plan.pods if pod.workload.name == "rerank"
    )
    assert first["saved_gpu_hours"] == pytest.approx(minutes / 60 * (1 - 1 / 7), abs=0.0051)
    assert {row["recommendation"] for row in others} == {None}
    notes = {row["workload"]: row["note"] for row in others}
    assert notes["StatefulSet/notebook-ada"] == "never used; see the report `waste`"


def test_progress_is_reported_for_each_day(store: PlayedStore) -> None:
    assert store.advanced == [1] * store.plan.days


def down_minutes(node: FleetNode) -> int:
    return sum(loss.back - loss.restart for loss in node.losses)


def lost_minutes(node: FleetNode, gpu: int) -> int:
    return sum(loss.restart - loss.start for loss in node.losses if loss.gpu == gpu)


OPTIONS: dict[str, Any] = {"play": "30d", "until": None, "scenario": None}
NOW_NS = BEGIN_NS + NS_PER_DAY // 2


def test_the_days_end_with_the_last_complete_day(tmp_path: Path) -> None:
    playing = check_play(**OPTIONS, store=tmp_path / "store", now_ns=NOW_NS)
    assert playing.begin_ns + playing.days * NS_PER_DAY == BEGIN_NS
    assert playing.days == 30


def test_until_selects_another_end(tmp_path: Path) -> None:
    options = OPTIONS | {"play": "2d", "until": "2026-09-11"}
    playing = check_play(**options, store=tmp_path / "store", now_ns=NOW_NS)
    assert playing.begin_ns == BEGIN_NS - 22 * NS_PER_DAY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"play": "a month"}, ("--play", "a month", "7d or 2w")),
        ({"play": "36h"}, ("--play", "36h", "whole days")),
        ({"play": "0d"}, ("--play", "0d", "at least 1")),
        ({"play": "365d"}, ("--play", "365d", "92d")),
        ({"until": "tomorrow"}, ("--until", "tomorrow")),
        ({"until": "2026-10-02"}, ("--until", "2026-10-02", "2026-10-01")),
        ({"until": "1970-01-01"}, ("--until", "1970-01-01", "30d")),
        ({"until": "2026-09-10T12:00:00Z"}, ("--until", "start of a past day")),
        ({"scenario": Path("absent.yaml")}, ("absent.yaml",)),
        ({"store": None}, ("--store", "missing", "--play")),
    ],
)
def test_an_invalid_option_is_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    options = OPTIONS | {"store": tmp_path / "store"} | changes
    with pytest.raises(UserError, check=has_words(*words)):
        check_play(**options, now_ns=NOW_NS)


def test_a_directory_with_content_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "usage").mkdir()
    with pytest.raises(UserError, check=has_words("--store", "not empty")):
        check_play(**OPTIONS, store=tmp_path, now_ns=NOW_NS)


def test_the_fleet_that_ships_has_what_its_comments_promise() -> None:
    """Facts that a report on the capacity of the fleet must find."""
    plan = plan_fleet(load_fleet(FLEET), begin_ns=BEGIN_NS, days=7)
    names = {pod.workload.name: pod for pod in plan.pods}
    oversized, unused = names["rerank"], names["notebook-ada"]
    assert len(oversized.used_slots) < len(oversized.slots)
    assert oversized.workload.memory_gib < 10
    assert plan.truth(unused).used_ns == 0
    assert unused.workload.memory_gib > 20
    course = [plan.busy_ppm(names["course"], hour) for hour in range(24 * plan.days)]
    assert 0.6 < course.count(0) / len(course) < 0.75
    # Those who come later wait longer.
    waits = [pod.waited for pod in plan.pods if pod.workload.name == "sweep"]
    quarter = len(waits) // 4
    assert sum(waits[:quarter]) == 0
    assert min(waits[-quarter:]) > 60
    assert any(pod.workload.name == "sweep" for pod in plan.waiting)
    # At most times, enough GPUs for a pod of four are free, but not on one node.
    fragmented = [node for node in plan.nodes if node.pool.name == "a100"]
    free = [
        [
            len(node.gpus)
            - sum(len(pod.slots) for pod in plan.pods_of[node] if pod.start <= minute < pod.end)
            for node in fragmented
        ]
        for minute in range(0, plan.minutes, 60)
    ]
    assert sum(sum(each) >= 4 > max(each) for each in free) > len(free) // 2
    assert any(pod.waited > 600 for pod in plan.pods if pod.workload.name == "mesh")
    assert {xid.node.name for xid in plan.xids} == {"h100-1"}
    assert any(xid.pods for xid in plan.xids)
    assert len({pool.cluster for pool in plan.fleet.pools}) == 2
    assert len(plan.pods) > 20 * plan.days


SMALL = """
name: small
prices:
  - {name: l4, product: L4, per_gpu_hour: 0.5}
pools:
  - {name: l4, cluster: prod, nodes: 1, model: NVIDIA L4, gpus: 2}
workloads:
  - {name: chat, namespace: a, kind: Deployment, team: x, pool: l4, busy: [0.5, 0.5], memory_gib: 4}
"""


def test_a_store_that_cannot_be_written_ends_the_play_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file where the table should be")
    plan = plan_fleet(parse_fleet(yaml.safe_load(SMALL)), begin_ns=BEGIN_NS, days=1)
    with pytest.raises(UserError, check=has_words("--store", "usage")):
        asyncio.run(play(plan, str(tmp_path), advance=lambda _: None))


def test_the_command_prints_the_truth_and_a_bill_that_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, store = tmp_path / "small.yaml", tmp_path / "store"
    fleet.write_text(SMALL)
    options = ["--play", "1d", "--until", "2020-01-02", "--scenario", str(fleet)]
    assert main(["demo", *options, "--store", str(store), "--format", "json"]) == 0
    played = json.loads(capsys.readouterr().out)
    (workload,) = played["workloads"]
    assert workload["owner"] == "Deployment/chat"
    assert (workload["allocated_gpu_seconds"], workload["used_gpu_seconds"]) == (86_400, 43_200)
    period = ["--from", played["begin"], "--to", played["end"], "--prices", played["prices"]]
    bill = ["bill", "--store", played["store"], "--by", "owner", *period, "--format", "json"]
    assert main(bill) == 0
    lines = {line["owner"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["Deployment/chat"]["allocated_gpu_seconds"] == 86_400
    assert lines["Deployment/chat"]["cost"] == "12.00"
    assert main(["bill", "close", *bill[1:-2]]) == 0


def test_the_commands_to_try_next_run_on_the_played_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, store = tmp_path / "small.yaml", tmp_path / "my store"
    fleet.write_text(SMALL)
    options = ["--play", "1d", "--until", "2020-01-02", "--scenario", str(fleet)]
    assert main(["demo", *options, "--store", str(store), "--format", "table"]) == 0
    _, shown = capsys.readouterr().out.split("Next:\n")
    commands = [shlex.split(line)[1:] for line in shown.splitlines() if line]
    assert [command[0] for command in commands] == ["bill", "bill", "capacity"]
    assert [main(command) for command in commands] == [0, 0, 0]


def test_an_interrupted_play_reports_that_its_store_is_incomplete(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = ["demo", "--play", "60d", "--store", str(store)]
    with subprocess.Popen(
        [sys.executable, "-m", "gpuledger_cli", *command], stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            end_seconds = time.monotonic() + HANG_SECONDS
            while not (store / "usage").exists() and time.monotonic() < end_seconds:
                time.sleep(0.05)  # the other process writes
            running.send_signal(signal.SIGTERM)
            _, error = running.communicate(timeout=HANG_SECONDS)
        finally:
            running.kill()
    assert running.returncode == 130
    assert error.splitlines()[-1:] == [
        f"gpuledger: interrupted; the store at {store} is incomplete: delete it"
    ]
