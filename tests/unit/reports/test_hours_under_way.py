"""Bills of hours that are not over, and the time through which there is usage."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.store.commits import describe
from gpuledger.store.usage_schema import USAGE, USAGE_HOURLY
from gpuledger_reports.pricing.closing import refusals_of
from gpuledger_reports.reading.snapshot import StoreSnapshot
from gpuledger_reports.reading.times import DAY_US
from gpuledger_reports.reading.usage_sums import UsageReader
from gpuledger_sinks.store.rollups import DAILY, HOURLY, Rollup
from tests.examples import examples
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_US,
    Row,
    allocated,
    inventory_row,
    minute_row,
    write_store,
)
from tests.unit.reports.test_bill import bill_of, costs

MINUTE_NS = 60 * 10**9
MINUTE_US = 60_000_000
HOURS = 4


def minutes_of(hour: int, minutes: Sequence[int], pod: str = "a", **fields: object) -> list[Row]:
    return [minute_row(allocated(hour, pod, MINUTE_NS, **fields), minute) for minute in minutes]


def hours_of_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Return the properties of a commit of these rows."""
    return describe(hours={row["hour"] // HOUR_US for row in rows})


def roll_up(store: Path) -> None:
    Rollup(HOURLY, store_uri=str(store)).run(time_ms=0)


def test_the_current_hour_is_billed_by_all_its_minutes(tmp_path: Path) -> None:
    """The rollup may have run up to ten minutes before."""
    store = write_store(tmp_path, inventory=[inventory_row()])
    for rows in (minutes_of(0, range(60)), minutes_of(1, range(10))):
        write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
    roll_up(tmp_path)
    rows = minutes_of(1, range(10, 30))
    write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
    bill = bill_of(store, hours=2)
    assert costs(bill) == {"a": "10.50"}
    assert bill.data_coverage_ratio == 1


def test_usage_ends_with_its_newest_minute_if_older_ones_were_purged(
    tmp_path: Path,
) -> None:
    rows = minutes_of(0, range(60))
    store = write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
    roll_up(tmp_path)
    later = 30 * 24
    Rollup(HOURLY, store_uri=store).purge(BEGIN_US // (24 * HOUR_US) + 30, time_ms=0)
    rows = minutes_of(later, range(10))
    write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
    assert UsageReader(store).usage_end_us == BEGIN_US + later * HOUR_US + 10 * MINUTE_US


def test_sums_without_a_version_do_not_hide_minutes(tmp_path: Path) -> None:
    store = write_store(
        tmp_path,
        inventory=[inventory_row()],
        usage_hourly=[allocated(0, "a"), allocated(1, "a", 10 * MINUTE_NS)],
        usage=minutes_of(1, range(30)),
    )
    assert costs(bill_of(store, hours=2)) == {"a": "10.50"}


def test_hours_whose_minutes_were_purged_are_those_of_the_sums(tmp_path: Path) -> None:
    rows = minutes_of(0, range(60))
    write_store(tmp_path, properties=hours_of_rows(rows), usage=rows, inventory=[inventory_row()])
    roll_up(tmp_path)
    purged = Rollup(HOURLY, store_uri=str(tmp_path)).purge(
        BEGIN_US // (24 * HOUR_US) + 1, time_ms=0
    )
    assert purged == 1
    late = minutes_of(0, [5], "b", gpu="GPU-b")
    store = write_store(tmp_path, properties=hours_of_rows(late), usage=late)
    assert costs(bill_of(store, hours=1))["a"] == "7.00"


def test_commits_after_a_store_was_opened_do_not_change_its_snapshot(
    tmp_path: Path,
) -> None:
    for hour in (0, 1):
        rows = minutes_of(hour, [0])
        write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
        if hour == 0:
            roll_up(tmp_path)
    opened = StoreSnapshot(str(tmp_path), [USAGE, USAGE_HOURLY])
    later = minutes_of(2, [0])
    write_store(tmp_path, properties=hours_of_rows(later), usage=later)
    assert opened.changed_hours_us == frozenset({BEGIN_US + HOUR_US})


def test_sums_of_a_table_that_was_repaired_since_do_not_hide_minutes(tmp_path: Path) -> None:
    """Its commit with the number that was summed up is another one."""
    store = write_store(tmp_path, inventory=[inventory_row()])
    lost = minutes_of(0, range(10))
    write_store(tmp_path, properties=hours_of_rows(lost), usage=lost)
    roll_up(tmp_path)
    shutil.rmtree(tmp_path / USAGE.name)
    rows = minutes_of(0, range(60))
    write_store(tmp_path, properties=hours_of_rows(rows), usage=rows)
    assert costs(bill_of(store, hours=1)) == {"a": "7.00"}


@pytest.mark.parametrize(
    ("complete", "usage_end", "refused"),
    [
        pytest.param({}, 4 * HOUR_US - MINUTE_US, True, id="unknown: the newest minute's end"),
        pytest.param({"3": 4 * HOUR_US + 7}, 4 * HOUR_US, False, id="complete"),
        pytest.param(
            {"3": 3 * HOUR_US + 90 * 10**6}, 3 * HOUR_US + MINUTE_US, True, id="incomplete"
        ),
        pytest.param(
            {"3": 9 * HOUR_US, "4": 2 * HOUR_US}, 2 * HOUR_US, True, id="one partition behind"
        ),
    ],
)
def test_usage_is_billed_through_the_time_for_which_it_is_complete(
    tmp_path: Path, complete: dict[str, int], usage_end: int, *, refused: bool
) -> None:
    """Even if rows of some nodes are later: for the other nodes nothing is known yet."""
    rows = [
        row
        for hour in range(HOURS)
        for row in minutes_of(hour, range(59 if hour + 1 == HOURS else 60))
    ]
    properties = describe(
        hours={row["hour"] // HOUR_US for row in rows},
        valid_through={partition: BEGIN_US + until for partition, until in complete.items()},
    )
    store = write_store(tmp_path, properties=properties, usage=rows, inventory=[inventory_row()])
    roll_up(tmp_path)
    bill = bill_of(store, hours=HOURS)
    assert bill.end_us == BEGIN_US + usage_end
    assert (refusals_of(bill) != []) is refused
    assert {line.idle_kind for line in bill.lines} <= {None, "no_data"}
    assert bill.excess_units == 0


@examples(15)
@given(
    commits=st.lists(
        st.tuples(
            st.integers(0, 1), st.lists(st.integers(0, 59), max_size=6, unique=True), st.booleans()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_bill_equals_that_of_the_minutes_whenever_hours_were_summed_up(
    commits: list[tuple[int, list[int], bool]],
) -> None:
    with TemporaryDirectory() as summed, TemporaryDirectory() as plain:
        last = minutes_of(1, [59], "z")
        for folder in (summed, plain):
            write_store(
                Path(folder),
                inventory=[inventory_row()],
                properties=hours_of_rows(last),
                usage=last,
            )
        for number, (hour, minutes, is_summed) in enumerate(commits):
            rows = minutes_of(hour, minutes, f"p{number}")
            write_store(Path(plain), usage=rows)
            write_store(Path(summed), properties=hours_of_rows(rows), usage=rows)
            if is_summed:
                roll_up(Path(summed))
        assert costs(bill_of(summed, hours=2)) == costs(bill_of(plain, hours=2))


def test_a_bill_with_usage_removed_by_retention_reports_this_and_cannot_be_closed(
    tmp_path: Path,
) -> None:
    """Minutes may be removed if their hours still exist."""
    rows = minutes_of(0, range(60))
    store = write_store(
        tmp_path, properties=hours_of_rows(rows), usage=rows, inventory=[inventory_row()]
    )
    roll_up(tmp_path)
    rollups = [Rollup(rollup, store_uri=store) for rollup in (HOURLY, DAILY)]
    rollups[1].run(time_ms=0)
    day_after = BEGIN_US // DAY_US + 1
    rollups[0].purge(day_after, time_ms=0)
    assert bill_of(store, hours=1).removed_until_us is None
    rollups[1].purge(day_after, time_ms=0)
    write_store(tmp_path, usage_hourly=[allocated(30, "a")])
    bill = bill_of(store, hours=1)
    assert bill.removed_until_us == BEGIN_US + HOUR_US
    assert any("removed" in reason for reason in refusals_of(bill))
