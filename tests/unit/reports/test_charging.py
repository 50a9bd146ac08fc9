"""Every unit of a physical GPU's time is billed once, by the rules."""

from collections import Counter, defaultdict
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.entries import gpu_units_of
from gpuledger_reports.reading import charging_sql
from gpuledger_reports.reading.charging_sql import FACTOR, UNITS
from gpuledger_reports.reading.parties import PartyKey
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_day import days_of
from gpuledger_reports.reading.usage_sums import PartyBasis, UsageReader
from tests.examples import examples
from tests.unit.reports.oracle import Charged, Claim, charge_gpu_hour
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    allocated,
    inventory_row,
    usage_row,
    used,
    write_store,
)
from tests.unit.sinks.builders import books, reading

HOURS = 2
WINDOW = Window(BEGIN_US, BEGIN_US + HOURS * HOUR_US)
CLAIMS = {
    "uid-a": Claim("allocated"),
    "uid-b": Claim("used"),
    "uid-c": Claim("greater"),
    "uid-d": Claim("blended", 1, 3),
}
ALL_ALLOCATED: dict[str, Claim] = {}
# Lengths at the edges: zero, an hour, slightly more, and thirds that leave remainders.
lengths = st.one_of(
    st.sampled_from([0, 1, HOUR_NS // 3, HOUR_NS // 2, HOUR_NS, HOUR_NS + 7]),
    st.integers(0, HOUR_NS + HOUR_NS // 8),
)
pods = st.sampled_from("abcd")
SLICES = {"gpu_compute_slices": 7}
PART_OF_B: dict[str, Any] = {"parent_uuid": "GPU-b", **SLICES}
DEVICES: list[dict[str, Any]] = [
    {"gpu": "GPU-a"},
    {"gpu": "GPU-b", **SLICES, "compute_slices": 2},
    {"gpu": "MIG-b1", "mig_profile": "1g", **PART_OF_B, "compute_slices": 1},
    {"gpu": "MIG-b2", "mig_profile": "4g", **PART_OF_B, "compute_slices": 4},
]
# The same GPU within one hour: whole, then partitioned, and repartitioned with the same UUID.
RECUT: list[dict[str, Any]] = [
    {"gpu": "GPU-b"},
    {"gpu": "MIG-b1", "mig_profile": "2g", **PART_OF_B, "compute_slices": 2},
]

# Facts that a node could not read, or that differ from earlier ones.
mismatch: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {}, {}, {"model": None}, {"model": "A100"}, {"compute_slices": None}]
)


@st.composite
def rows_of_hours(draw: st.DrawFn) -> list[Row]:
    """Draw the rows of some hours of a whole GPU and of one partitioned into two instances."""
    rows: list[Row] = []
    for hour in range(HOURS):
        for device in [*DEVICES, *draw(st.sampled_from([[], [], RECUT]))]:
            where = {**device, **draw(mismatch)}
            if "parent_uuid" not in where:
                where |= {"compute_slices": device.get("compute_slices")}
            allocatees = st.one_of(st.sampled_from([None, UNKNOWN]), pods)
            for pod in draw(st.lists(allocatees, max_size=3, unique=True)):
                length = draw(lengths)
                unresponsive = draw(st.sampled_from([None, None, 0, length // 2, length]))
                rows.append(allocated(hour, pod, length, unresponsive_ns=unresponsive, **where))
            users = draw(st.lists(pods, max_size=2, unique=True))
            rows += [used(hour, pod, draw(lengths), **where) for pod in users]
            others = draw(st.lists(st.sampled_from(["host", "unattributed"]), max_size=1))
            rows += [
                usage_row(hour, category=other, busy_ns=draw(lengths), **where) for other in others
            ]
    return rows or [allocated(HOURS - 1, None, 1)]


inventories = st.sampled_from(
    [
        {},
        {"GPU-a": [(-24, True)], "GPU-b": [(-24, True)]},
        {"GPU-a": [(0.25, True)], "GPU-b": [(-1, True), (0.5, False), (1.5, True)]},
        {"GPU-a": [(1, True)], "GPU-b": [(-24, True), (1, False)]},
    ]
)


_IDLE = {"nobody": "idle", "unknown": "unknown"}


def charged_by_store(store: str, claims: dict[str, Claim]) -> Charged:
    """Return the units of both kinds, as SQL calculates them."""

    def basis_of(party: PartyKey, since_us: int) -> PartyBasis:
        claim = claims.get(party.uid or "", Claim())
        return PartyBasis(("pod", party.uid) if party.uid else (party.kind,), *claim)

    billed: Counter[str] = Counter()
    by_others: Counter[tuple[str, str]] = Counter()
    paid: Counter[tuple[str, str]] = Counter()
    for day in days_of(UsageReader(store), WINDOW, changes=[], basis_of=basis_of):
        for row in day.usage:
            if row.is_allocated:
                billed[row.party.uid or _IDLE[row.party.kind]] += row.allocated - row.unresponsive
                billed["overhead"] += row.unresponsive
        for charge in day.charges:
            who = charge.party.uid or _IDLE.get(charge.party.kind, "overhead")
            billed["overhead" if charge.is_unresponsive else who] += charge.units
        for idle in day.idle:
            billed["overhead"] += idle.unresponsive
            billed["unused"] += idle.unused
            billed["unknown"] += idle.unknown
            billed["idle"] += idle.idle
        for use in day.by_others:
            pair = (use.user.uid or "", use.allocatee.uid or "")
            by_others[pair] += use.units
            paid[pair] += use.billed
        for board in day.physical_gpus:
            billed["no_data"] += board.present - board.covered
    assert min(billed.values(), default=0) >= 0
    return Charged(+billed, +by_others, +paid)


def inventory_rows(boards: dict[str, list[tuple[float, bool]]]) -> list[Row]:
    times = sorted({hour for versions in boards.values() for hour, _ in versions})
    rows = []
    for hour in times:
        there = [
            gpu
            for gpu, versions in boards.items()
            if any(is_there for at, is_there in versions if at <= hour)
            and [is_there for at, is_there in versions if at <= hour][-1]
        ]
        rows += [inventory_row(gpu, hour=hour) for gpu in (there or (None,))]
    return rows


def time_there_ns(versions: list[tuple[float, bool]], hour: int) -> int:
    """Return the time for which a GPU was present in an hour."""
    edges = [*versions, (99.0, False)]
    return sum(
        max(0, round((min(until, hour + 1) - max(since, hour)) * HOUR_NS))
        for (since, is_there), (until, _) in pairwise(edges)
        if is_there
    )


def expected(
    rows: list[Row], boards: dict[str, list[tuple[float, bool]]], claims: dict[str, Claim]
) -> Charged:
    by_physical_gpu: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        by_physical_gpu[row.get("parent_uuid") or row["gpu_uuid"], row["hour"]].append(row)
    billed: Counter[str] = Counter()
    by_others: Counter[tuple[str, str]] = Counter()
    paid: Counter[tuple[str, str]] = Counter()
    for hour_us in range(*WINDOW, HOUR_US):
        hour = (hour_us - BEGIN_US) // HOUR_US
        for board in ("GPU-a", "GPU-b"):
            there = time_there_ns(boards[board], hour) if boards else 0
            charged = charge_gpu_hour(
                by_physical_gpu[board, hour_us], there, lambda who: claims.get(who, Claim())
            )
            billed += charged.billed
            by_others += charged.by_others
            paid += charged.paid
    return Charged(billed, by_others, paid)


def test_the_documented_example_has_the_documented_result(tmp_path: Path) -> None:
    (rows, charges) = _tables(charging_sql.__doc__ or "")
    minute_ns = HOUR_NS // 60
    written = [
        allocated(
            0, holder or None, int(held_) * minute_ns, unresponsive_ns=int(unresponsive) * minute_ns
        )
        if category == "idle"
        else used(0, user, int(used_) * minute_ns)
        for category, holder, user, held_, unresponsive, used_ in rows
    ]
    store = write_store(tmp_path, usage_hourly=written, inventory=[inventory_row()])
    names = {"a": "uid-a", "b": "uid-b", "c": "uid-c", "unresponsive": "overhead"}
    documented = {names.get(to, to): int(minutes) for to, minutes, _ in charges}
    billed = charged_by_store(store, {"uid-b": Claim("used")}).billed
    hour = {to: units // (minute_ns * UNITS) for to, units in billed.items()}
    assert hour == {**documented, "no_data": 60}  # the second hour has no usage
    assert len(rows) == 5


def _tables(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of the two tables of a docstring."""
    tables = [block.strip().splitlines() for block in text.split("\n\n") if block.startswith("|")]
    first, second = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
        for table in tables
    )
    return first, second


@pytest.mark.parametrize("claims", [ALL_ALLOCATED, CLAIMS], ids=["all by allocated time", "mixed"])
@examples(60)
@given(rows=rows_of_hours(), boards=inventories)
def test_the_result_for_each_gpu_and_hour_equals_that_of_the_rules(
    claims: dict[str, Claim], rows: list[Row], boards: dict[str, list[tuple[float, bool]]]
) -> None:
    with TemporaryDirectory() as folder:
        store = write_store(Path(folder), usage_hourly=rows, inventory=inventory_rows(boards))
        assert charged_by_store(store, claims) == expected(rows, boards, claims)


@examples(30)
@given(rows=rows_of_hours())
def test_minutes_are_billed_like_the_hour_that_they_sum_to(rows: list[Row]) -> None:
    minutes = [{**row, "hour": row["hour"] + 59 * 60_000_000} for row in rows]
    boards = {"GPU-a": [(-24.0, True)], "GPU-b": [(-24.0, True)]}
    with TemporaryDirectory() as folder, TemporaryDirectory() as other:
        inventory = inventory_rows(boards)
        hourly = write_store(Path(folder), usage_hourly=rows, inventory=inventory)
        by_minute = write_store(Path(other), usage=minutes, inventory=inventory)
        charged = charged_by_store(by_minute, ALL_ALLOCATED)
        assert charged == charged_by_store(hourly, ALL_ALLOCATED)
        assert sum(charged.billed.values()) == 2 * HOURS * HOUR_NS * UNITS


@pytest.mark.parametrize("parent", [None, "GPU-1"], ids=["a GPU", "an instance"])
def test_a_device_has_the_same_part_of_its_gpu_in_bills_and_in_counters(parent: str | None) -> None:
    """A part that counters do not know costs nothing."""
    known = [None, *range(1, 15)]
    cases = [*product(known, known)]
    device = reading(uuid="device", parent_uuid=parent, mig_enabled=parent is None)
    counted = [
        gpu_units_of(books(device, compute_slices=own, gpu_compute_slices=of_gpu)) or 0
        for own, of_gpu in cases
    ]
    with duckdb.connect() as connection:
        sql = f"SELECT {FACTOR} FROM (SELECT ? AS slices, ? AS gpu_slices, ? AS parent_uuid)"  # noqa: S608  # our own names
        billed = [connection.execute(sql, [*case, parent]).fetchall()[0][0] for case in cases]

    assert counted == billed
