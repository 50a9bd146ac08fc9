"""Waste: the SQL, compared with a model that checks each minute of each device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Final

import duckdb
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.store.distributions import BUSY, MEMORY
from gpuledger.store.views import create_views
from gpuledger_reports.capacity.idle_time import LIMITS
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.capacity.waste import read_rows
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import parse_policy
from gpuledger_reports.reading.times import Window
from tests.tables import for_each
from tests.unit.reports.capacity.views import sum_up_days, view_usage
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    Value,
    allocated,
    namespace_row,
    node_row,
    pod_row,
    usage_row,
    used,
    write_store,
)

MINUTE_NS: Final = HOUR_NS // 60
GIB: Final = 1 << 30
PRICE: Final = 2.0
POLICY: Final = parse_policy(f"prices: [{{name: all, per_gpu_hour: {PRICE}}}]")
POLICY_BY_MODEL: Final = parse_policy("""
prices:
  - {name: old, model: H100, per_gpu_hour: 4, to: 2026-10-02}
  - {name: new, model: H100, per_gpu_hour: 3}
  - {name: slice, model: A100, mig_profile: 1g.10gb, per_gpu_hour: 1}
teams:
  - {team: platform, match: {namespace: ns, owner_name: cron}}
""")
FIRST_HOUR: Final = 117
"""The hour of the window at which a world begins, shortly before the end of a slice."""
Minutes = frozenset[int]


def waste_of(
    connection: duckdb.DuckDBPyConnection,
    hours: int,
    *,
    by: str = "workload",
    policy: BillPolicy = POLICY,
    limit: int = 60,
    slice_hours: int = 1000,
) -> Answer:
    question = Question(
        window=Window(BEGIN_US, BEGIN_US + hours * HOUR_US),
        by=(*by.split(","),),
        policy=policy,
        options={"idle_minutes": str(limit)},
    )
    return read_rows(connection, question, slice_hours=slice_hours)


def bits(minutes: Sequence[int] | range) -> int:
    return sum(1 << minute for minute in minutes)


def idle_hour(hour: int, pod: str, minutes: range = range(60), **fields: Value) -> Row:
    """Return the row of an hour in which a GPU was allocated to a pod in these minutes."""
    ns = len(minutes) * MINUTE_NS
    return allocated(hour, pod, ns, **{"allocated_minutes": bits(minutes), **fields})


def busy_hour(hour: int, pod: str, minutes: range, **fields: Value) -> Row:
    """Return the row of an hour in which a pod used a GPU in these minutes."""
    of_minutes = {"used_minutes": bits(minutes), BUSY.columns[0]: 60 - len(minutes)}
    return used(hour, pod, len(minutes) * MINUTE_NS, **{**of_minutes, **fields})


@dataclass(frozen=True)
class Pod:
    """A pod that has devices from one minute to another, and uses each in some minutes."""

    name: str
    minutes: range
    used: dict[str, Minutes]


@dataclass(frozen=True)
class World:
    """Some devices, each with the minutes whose use is unknown or by an unknown process."""

    hours: int
    pods: list[Pod]
    unknown: dict[str, Minutes]
    unattributed: dict[str, Minutes]
    parts: dict[str, float] = field(
        default_factory=lambda: {"GPU-a": 1.0, "GPU-b": 1.0, "MIG-c": 2 / 7, "GPU-shared": 1 / 4}
    )
    """The part of a GPU that a pod has."""

    def is_idle(self, pod: Pod, device: str, minute: int) -> bool:
        return minute not in (pod.used[device] | self.unknown[device] | self.unattributed[device])

    def stretches(self, pod: Pod) -> Iterator[range]:
        idle = [
            minute
            for minute in pod.minutes
            if all(self.is_idle(pod, device, minute) for device in pod.used)
        ]
        for _, run in groupby(enumerate(idle), key=lambda each: each[1] - each[0]):
            found = [minute for _, minute in run]
            yield range(found[0], found[-1] + 1)

    def reclaimed(self, pod: Pod, limit: int) -> float:
        gpus = sum(self.parts[device] for device in pod.used)
        return gpus * sum(max(0, len(each) - limit) for each in self.stretches(pod)) / 60

    def rows(self) -> Iterator[Row]:
        for hour in range(self.hours):
            minutes = range(hour * 60, hour * 60 + 60)
            for pod in self.pods:
                for device in pod.used:
                    yield from self._of_pod(pod, device, [m for m in minutes if m in pod.minutes])
            for device, unattributed in self.unattributed.items():
                if found := unattributed.intersection(minutes):
                    yield usage_row(
                        FIRST_HOUR + hour,
                        gpu=device,
                        category="unattributed",
                        busy_ns=len(found) * MINUTE_NS,
                        used_minutes=bits([minute % 60 for minute in found]),
                    )

    def _is_used(self, device: str, minute: int) -> bool:
        return minute in self.unattributed[device] or any(
            minute in pod.minutes and minute in pod.used.get(device, ()) for pod in self.pods
        )

    def _of_pod(self, pod: Pod, device: str, minutes: Sequence[int]) -> Iterator[Row]:
        known = [minute for minute in minutes if minute not in self.unknown[device]]
        working = [minute % 60 for minute in known if minute in pod.used[device]]
        of_any = [minute % 60 for minute in known if self._is_used(device, minute)]
        if not minutes:
            return
        hour, share = FIRST_HOUR + minutes[0] // 60, 1 / 4 if device == "GPU-shared" else 1
        slices = {"compute_slices": 2, "gpu_compute_slices": 7} if device[:3] == "MIG" else {}
        yield allocated(
            hour,
            pod.name,
            round(len(minutes) * MINUTE_NS * share),
            gpu=device,
            busy_ns=round((len(known) - len(of_any)) * MINUTE_NS * share) if known else None,
            allocated_minutes=bits([minute % 60 for minute in known]),
            used_minutes=bits(of_any),
            **{BUSY.columns[0]: len(known) - len(of_any), BUSY.columns[-1]: len(of_any)}
            if known
            else {},
            **slices,
        )
        yield used(
            hour,
            pod.name,
            len(working) * MINUTE_NS,
            gpu=device,
            memory_byte_ns=len(known) * MINUTE_NS * GIB * 3,
            used_minutes=bits(working),
            **dict.fromkeys(MEMORY.columns, 0) | {MEMORY.columns[2]: len(known)},
            **{BUSY.columns[0]: len(known) - len(working)},
            **slices,
        )


def runs(until: int) -> st.SearchStrategy[Minutes]:
    """Draw a few sequences of minutes, with lengths below and above the limits."""
    run = st.tuples(st.integers(0, until - 1), st.sampled_from([1, 7, 30, 61, 130]))
    return st.lists(run, max_size=3).map(
        lambda found: frozenset(m for at, n in found for m in range(at, min(until, at + n)))
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    hours = draw(st.integers(1, 6))
    until = hours * 60
    unknown = {name: draw(runs(until)) for name in ("GPU-a", "GPU-b", "MIG-c")}
    unknown["GPU-shared"] = frozenset()
    taken: dict[str, set[int]] = {name: set() for name in unknown}
    pods = []
    for name in ("one", "two", "three"):
        begin = draw(st.integers(0, until - 1))
        minutes = range(begin, draw(st.integers(begin + 1, until)))
        devices = [
            device
            for device in draw(st.sets(st.sampled_from(sorted(taken)), min_size=1))
            if device == "GPU-shared" or taken[device].isdisjoint(minutes)
        ]
        for device in devices:
            taken[device].update(minutes)
        if devices:
            pods.append(Pod(name, minutes, {device: draw(runs(until)) for device in devices}))
    unattributed = {name: draw(runs(until)) - unknown[name] for name in unknown}
    return World(hours, pods, unknown, unattributed)


NEVER: Final = dict.fromkeys(("GPU-a", "GPU-b", "MIG-c", "GPU-shared"), frozenset[int]())
BUSY_NEIGHBOUR: Final = World(
    hours=2,
    pods=[
        Pod("one", range(120), {"GPU-shared": frozenset()}),
        Pod("two", range(120), {"GPU-shared": frozenset(range(120))}),
    ],
    unknown=NEVER,
    unattributed=NEVER,
)


@example(BUSY_NEIGHBOUR, 1000)
@given(worlds(), st.sampled_from([1, 1000]))
def test_stretches_and_what_limits_reclaim_are_those_of_each_minute(
    world: World, slice_hours: int
) -> None:
    with duckdb.connect() as connection:
        view_usage(connection, "usage_hourly", [*world.rows()])
        sum_up_days(connection)
        found = waste_of(connection, FIRST_HOUR + world.hours, slice_hours=slice_hours)
    rows = {row["workload"].removeprefix("Pod/"): row for row in found.rows}
    for pod in world.pods:
        row, stretches = rows.get(pod.name), [*world.stretches(pod)]
        if row is None:
            assert world.reclaimed(pod, min(LIMITS)) == pytest.approx(0, abs=0.0051)
            continue
        gpus = sum(world.parts[device] for device in pod.used)
        hours = pytest.approx(gpus * len(pod.minutes) / 60, abs=0.0051)
        assert row["allocated_gpu_hours"] == hours
        longest = max(stretches, key=len, default=range(0))
        assert row["longest_idle_hours"] == (round(len(longest) / 60, 2) or None)
        if longest:
            begin = next(each.start for each in stretches if len(each) == len(longest))
            at = datetime.fromtimestamp(BEGIN_US // 10**6 + FIRST_HOUR * 3600 + begin * 60, tz=UTC)
            assert row["longest_idle_begin"] == at.strftime("%Y-%m-%dT%H:%M:%SZ")
            assert row["longest_idle_pod"] == pod.name
        for limit in LIMITS:
            hours = pytest.approx(world.reclaimed(pod, limit), abs=0.0051)
            assert row[f"reclaimed_{limit}_gpu_hours"] == hours
            cost = pytest.approx(world.reclaimed(pod, limit) * PRICE, abs=0.0051)
            assert row[f"reclaimed_{limit}_cost"] == cost
        idle = {
            device: sum(world.is_idle(pod, device, minute) for minute in pod.minutes)
            for device in pod.used
        }
        held = sum(minutes * world.parts[device] for device, minutes in idle.items()) / 60
        assert row["idle_memory_gpu_hours"] == pytest.approx(held, abs=0.0051)
        assert row["idle_memory_gib"] == (3.0 if any(idle.values()) else None)


def waste_in(store: Path, hours: int, by: str = "workload", **tables: Value) -> Answer:
    with duckdb.connect() as connection:
        create_views(connection, write_store(store, **tables))
        return waste_of(connection, hours, by=by, policy=POLICY_BY_MODEL)


MIG: Final[Row] = {
    "gpu": "MIG-1",
    "model": "A100",
    "mig_profile": "1g.10gb",
    "compute_slices": 1,
    "gpu_compute_slices": 7,
}


def test_unused_time_costs_what_a_bill_charges_at_its_time(tmp_path: Path) -> None:
    hours = [idle_hour(hour, "notebook") for hour in (22, 23, 24)]
    mig = [idle_hour(hour, "small", **MIG) for hour in (22, 23)]
    found = waste_in(tmp_path, 48, usage_hourly=[*hours, *mig])
    costs = {
        row["workload"]: (row["unused_cost"], row["reclaimed_60_cost"], row["reclaimed_120_cost"])
        for row in found.rows
    }
    assert costs == {"Pod/notebook": (11.0, 7.0, 3.0), "Pod/small": (2.0, 1.0, 0.0)}
    assert found.notes == ["45 of 48 hours have no samples.", "Costs are in USD."]


def test_gpus_without_a_price_have_no_cost_and_are_named(tmp_path: Path) -> None:
    usage = [idle_hour(0, "notebook"), idle_hour(0, "chat", gpu="GPU-b", model="L4")]
    found = waste_in(tmp_path, 1, usage_hourly=usage)
    assert [(row["workload"], row["unused_cost"]) for row in found.rows] == [
        ("Pod/notebook", 4.0),
        ("Pod/chat", None),
    ]
    assert found.rows[1]["unused_gpu_hours"] == 1.0
    assert found.notes[-1] == "1.0 GPU-hours have no cost, because no price matches: L4."


def test_teams_are_those_of_bills(tmp_path: Path) -> None:
    usage = [idle_hour(0, pod, gpu=f"GPU-{pod}") for pod in ("labelled", "owned", "other")]
    pods = [
        pod_row("labelled", labels='{"team": "search"}'),
        pod_row("owned", owner_kind="CronJob", owner_name="cron"),
        pod_row("other"),
    ]
    named = [namespace_row("ns", labels='{"team": "research"}')]
    found = waste_in(tmp_path, 1, "team", usage_hourly=usage, pods=pods, namespaces=named)
    assert {row["team"] for row in found.rows} == {"search", "platform", "research"}


@for_each("summed_days", [0, 3])
def test_sums_are_split_on_the_day_after_a_change_of_a_node_or_namespace(
    summed_days: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    known: Row = {BUSY.columns[0]: 24 * 60}
    changes: dict[str, Sequence[Row]] = {
        "usage_hourly": [idle_hour(hour, "notebook") for hour in range(74)],
        "usage_daily": [
            allocated(day * 24, "notebook", 24 * HOUR_NS, **known) for day in range(summed_days)
        ],
        "nodes": [
            node_row(node_pool="small"),
            node_row(hour=3, node_pool="small", resource_version="2"),
            node_row(hour=24, node_pool="large", resource_version="3"),
            node_row(hour=51, node_pool="small", resource_version="4"),
        ],
        "namespaces": [
            namespace_row("ns", labels='{"team": "search"}'),
            namespace_row("ns", hour=30, labels='{"team": "ads"}', resource_version="2"),
        ],
    }
    store = tmp_path_factory.mktemp("store")
    found = waste_in(store, 74, "pool,team", **changes)
    assert {
        (row["pool"], row["team"]): (row["unused_gpu_hours"], row["reclaimed_60_gpu_hours"])
        for row in found.rows
    } == {
        ("small", "search"): (24.0, 23.0),
        ("large", "search"): (24.0, 24.0),
        ("large", "ads"): (24.0, 24.0),
        ("small", "ads"): (2.0, 2.0),
    }


@for_each(
    "by, value",
    [
        ("workload", "CronJob/cron"),
        ("namespace", "ns"),
        ("pool", "gpus"),
        ("cluster,model", "H100"),
        ("team", "platform"),
    ],
)
def test_rows_have_the_values_of_their_dimensions(
    by: str, value: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = waste_in(
        tmp_path_factory.mktemp("store"),
        1,
        by,
        usage_hourly=[idle_hour(0, "a")],
        pods=[pod_row("a", owner_kind="CronJob", owner_name="cron")],
        nodes=[node_row(node_pool="gpus")],
    )
    assert [row[by.rsplit(",", maxsplit=1)[-1]] for row in found.rows] == [value]


def test_a_job_is_idle_if_all_its_nodes_are(tmp_path: Path) -> None:
    def of_job(node: str, minutes: range) -> list[Row]:
        held: Row = {"allocated_job_id": "77", "allocated_minutes": bits(range(60))}
        working: Row = {"job_id": "77", "used_minutes": bits(minutes), "node": node, "gpu": node}
        return [
            allocated(0, None, gpu=node, node=node, **held),
            usage_row(0, category="job", busy_ns=len(minutes) * MINUTE_NS, **working),
        ]

    usage = [*of_job("n", range(5)), *of_job("m", range(30, 40))]
    (found,) = waste_in(tmp_path, 1, usage_hourly=usage).rows
    assert (found["workload"], found["longest_idle_hours"]) == ("job/77", round(25 / 60, 2))
    assert found["longest_idle_begin"] == "2026-10-01T00:05:00Z"


def test_unknown_time_is_not_waste_and_is_noted(tmp_path: Path) -> None:
    usage = [
        allocated(0, UNKNOWN, allocated_minutes=bits(range(60))),
        idle_hour(0, "lost", gpu="GPU-b", busy_ns=None, allocated_minutes=0),
        idle_hour(1, "old", gpu="GPU-b", allocated_minutes=None),
        idle_hour(1, "shadowed", gpu="GPU-c"),
        used(1, "stranger", MINUTE_NS, gpu="GPU-c", pod_state="pending", used_minutes=1 << 30),
    ]
    found = waste_in(tmp_path, 2, usage_hourly=usage)
    shown = ("workload", "unused_gpu_hours", "longest_idle_hours", "reclaimed_30_gpu_hours")
    assert [tuple(row[name] for name in shown) for row in found.rows] == [
        ("Pod/old", 1.0, None, None),
        ("Pod/shadowed", 1.0, 0.5, 0.0),
    ]
    assert [note.partition(" GPU-hours ")[2][:30] for note in found.notes[:3]] == [
        "may be allocated, but the kube",
        "are allocated, but their use i",
        "are from hours that an earlier",
    ]


def test_the_rest_of_a_device_that_nobody_holds_is_not_noted_as_unknown_use(tmp_path: Path) -> None:
    usage = [idle_hour(0, "notebook"), allocated(0, None, gpu="GPU-b", busy_ns=None)]
    found = waste_in(tmp_path, 1, usage_hourly=usage)
    assert found.notes == ["Costs are in USD."]


@for_each(
    "between, longest",
    [
        ([], 1.0),
        ([allocated(1, UNKNOWN, gpu="GPU-b")], 1.0),
        ([idle_hour(1, "other", gpu="GPU-b")], 3.0),
        ([allocated(1, None, gpu="GPU-b")], 3.0),
    ],
)
def test_a_pod_is_not_idle_while_one_of_its_devices_is_not_seen(
    between: list[Row], longest: float
) -> None:
    usage = [idle_hour(hour, "train", gpu="GPU-a") for hour in range(3)]
    usage += [idle_hour(hour, "train", gpu="GPU-b") for hour in (0, 2)]
    with duckdb.connect() as connection:
        view_usage(connection, "usage_hourly", [*usage, *between])
        rows = {row["workload"]: row for row in waste_of(connection, 3).rows}
    assert rows["Pod/train"]["longest_idle_hours"] == longest


def test_a_pod_is_not_idle_while_one_of_its_devices_is_not_seen_for_days() -> None:
    usage = [idle_hour(hour, "train", gpu="GPU-a") for hour in range(121)]
    usage += [idle_hour(hour, "train", gpu="GPU-b") for hour in (0, 120)]
    with duckdb.connect() as connection:
        view_usage(connection, "usage_hourly", usage)
        (row,) = waste_of(connection, 121).rows
    assert row["longest_idle_hours"] == 1.0


def test_another_pods_use_does_not_hide_an_idle_pod(tmp_path: Path) -> None:
    usage = [idle_hour(0, "idler"), busy_hour(0, "thief", range(60), pod_uid="uid-thief")]
    (found,) = waste_in(tmp_path, 1, usage_hourly=usage).rows
    assert found["longest_idle_hours"] == 1.0


@for_each("damaged", [{"allocated_minutes": -1}, {"allocated_ns": 2**63 - 1}])
def test_values_out_of_their_range_do_not_prevent_the_report(damaged: Row) -> None:
    usage = [{**idle_hour(0, "damaged"), "unresponsive_ns": -5, **damaged}]
    with duckdb.connect() as connection:
        view_usage(connection, "usage_hourly", usage)
        (row,) = waste_of(connection, 1).rows
    assert row["longest_idle_hours"] == 1.0


def test_the_limit_determines_the_order_and_used_time_is_not_listed() -> None:
    usage = [
        *(idle_hour(hour, "nights", gpu="GPU-a") for hour in range(3)),
        *(idle_hour(0, f"short-{gpu}", gpu=gpu) for gpu in "bcd"),
        *(
            idle_hour(hour, "half", gpu="GPU-e", busy_ns=HOUR_NS // 2, allocated_minutes=0)
            for hour in range(5)
        ),
        allocated(0, "busy", busy_ns=0, gpu="GPU-f"),
    ]
    orders = []
    for limit in (30, 120):
        with duckdb.connect() as connection:
            view_usage(connection, "usage_hourly", usage)
            rows = waste_of(connection, 3, limit=limit).rows
            orders.append([row["workload"].removeprefix("Pod/") for row in rows])
    assert orders == [
        ["nights", "short-b", "short-c", "short-d", "half"],
        ["nights", "half", "short-b", "short-c", "short-d"],
    ]
