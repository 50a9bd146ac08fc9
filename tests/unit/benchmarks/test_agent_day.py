"""The agent keeps nothing of what is over: processes, containers, ticks."""

from benchmarks.bench_agent_day import traced_growth
from benchmarks.day import Day


def test_hundreds_of_processes_that_came_and_went_leave_nothing_behind() -> None:
    # A dozen bytes for each process of the second half would be more than this.
    assert traced_growth(1_000) < 6_000


def test_the_day_that_is_measured_is_busy() -> None:
    day = Day()
    day.pass_seconds(60)
    assert day.ticks == 59
    assert day.started > 30
    assert day.bytes_told > 60 * 1_000
