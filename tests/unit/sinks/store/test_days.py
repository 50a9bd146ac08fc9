"""For which days the store sink writes rows, and how many days a commit covers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import DAYS_A_WAIT, MAX_DAYS, RowBuffer
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    dead_letters,
    entry,
    event,
    eventually,
    publish,
    running,
    settlement,
)
from tests.unit.sinks.store.storing import AT, commits_of_rows, is_committed, offsets, store


async def test_one_commit_covers_at_most_max_days(tmp_path: Path) -> None:
    """Each day is a directory and an open file."""
    on = bus()
    day = 86_400
    await publish(on, *(event(tick * day, entries=[entry()]) for tick in range(2 * MAX_DAYS + 1)))

    async with running(store(tmp_path, on, flush_seconds=3600.0)):
        await eventually(is_committed(on, 2 * MAX_DAYS))

    assert commits_of_rows(tmp_path) == [MAX_DAYS, MAX_DAYS, 1]


DEFAULTS = StoreSettings()


WINDOW: dict[str, Any] = {
    "max_age_seconds": DEFAULTS.max_age_seconds,
    "max_future_seconds": DEFAULTS.max_future_seconds,
}


async def test_events_of_impossible_days_become_dead_letters_and_create_no_file(
    tmp_path: Path,
) -> None:
    on, days = bus(), [-20_000, -32, -31, -1, 0, 1, 2, 80_000]
    await publish(on, *(event(seq=n + 1, time_ns=in_days(day)) for n, day in enumerate(days)))

    async with running(store(tmp_path, on, clock=ManualClock(), **WINDOW)):
        await eventually(is_committed(on, len(days)))

    assert sorted(set(offsets(tmp_path))) == [2, 3, 4, 5]
    assert [(dead_letter.offset, dead_letter.reason) for dead_letter in await dead_letters(on)] == [
        (0, "too_old"),
        (1, "too_old"),
        (6, "future"),
        (7, "future"),
    ]
    assert [dead_letter.detail for dead_letter in await dead_letters(on)] == [
        "time_ns: 1971-12-19 is too long ago; store.max_age_seconds is 2678400",
        "time_ns: 2026-08-20 is too long ago; store.max_age_seconds is 2678400",
        "time_ns: 2026-09-23 is too far ahead; store.max_future_seconds is 86400",
        "time_ns: 2245-10-03 is too far ahead; store.max_future_seconds is 86400",
    ]


async def test_a_late_adjustment_of_an_impossible_day_becomes_a_dead_letter_too(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(late_adjustments=[settlement(until_time_ns=in_days(-40))]), event(1))

    async with running(store(tmp_path, on, clock=ManualClock(), **WINDOW)):
        await eventually(is_committed(on, 2))

    assert set(offsets(tmp_path)) == {1}


async def test_older_days_are_stored_if_the_settings_include_them(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(seq=1, time_ns=in_days(-400)), event(seq=2))
    reach = {**WINDOW, "max_age_seconds": 401 * 86_400.0}

    async with running(store(tmp_path, on, clock=ManualClock(), **reach)):
        await eventually(is_committed(on, 2))

    assert set(offsets(tmp_path)) == {0, 1}


@pytest.mark.parametrize(("days", "waits"), [(1, 1), (DAYS_A_WAIT, 1), (5 * DAYS_A_WAIT, 5)])
def test_rows_of_many_days_wait_longer_so_that_files_are_not_created_more_often(
    days: int, waits: int
) -> None:
    rows = RowBuffer()
    for day in range(days):
        rows.add([(day,)], time_ns=in_days(day))
    rows.read_to(AT, days, now_ns=0)

    due = partial(rows.is_due, after_ns=30 * SECOND_NS, max_rows=100)
    assert not due(now_ns=30 * waits * SECOND_NS - 1)
    assert due(now_ns=30 * waits * SECOND_NS)
    assert due(now_ns=1, max_rows=days)


def test_days_within_the_limits_cannot_by_themselves_force_a_write() -> None:
    """In addition to the first and the last day, another one begins while rows wait."""
    assert sum(WINDOW.values()) / 86_400 + 2 < MAX_DAYS
    assert (
        MAX_DAYS / DAYS_A_WAIT * DEFAULTS.flush_seconds <= 300
    )  # the maximum that GpuledgerSinkLagging allows


def in_days(days: int) -> int:
    return START_NS + days * 86_400 * SECOND_NS
