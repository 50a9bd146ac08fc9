"""The agent keeps nothing of the past: processes, containers, ticks."""

import subprocess
import sys
from pathlib import Path

from benchmarks.day import Day

ROOT = Path(__file__).parents[3]
# In a process of its own, because leftovers of other tests would count as well.
GROWTH = "from benchmarks.bench_agent_day import traced_growth; print(*traced_growth(1_000))"
# An integer and a reference to it: a leak cannot be smaller for a process, not even of its pid.
# Memory that comes and goes (tables that grow, caches) is a third of that over so many.
MIN_BYTES_KEPT = sys.getsizeof(4_000) + 8


def test_hundreds_of_processes_that_came_and_went_leave_nothing_behind() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROWTH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    grown_bytes, processes = map(int, run.stdout.split())
    assert processes > 400
    assert grown_bytes < processes * MIN_BYTES_KEPT


def test_the_measured_day_is_busy() -> None:
    day = Day()
    day.pass_seconds(60)
    assert day.ticks == 59
    assert day.started > 30
    assert day.bytes_reported > 60 * 1_000
