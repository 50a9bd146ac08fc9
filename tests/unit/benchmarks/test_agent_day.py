"""The agent keeps nothing of what is over: processes, containers, ticks."""

import subprocess
import sys
from pathlib import Path

from benchmarks.day import Day

ROOT = Path(__file__).parents[3]
# In a process of its own: what other tests have left to be tidied up would count as well.
GROWTH = "from benchmarks.bench_agent_day import traced_growth; print(traced_growth(1_000))"


def test_hundreds_of_processes_that_came_and_went_leave_nothing_behind() -> None:
    run = subprocess.run(
        [sys.executable, "-c", GROWTH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # A dozen bytes for each process of the second half would be more than this.
    assert float(run.stdout) < 6_000


def test_the_day_that_is_measured_is_busy() -> None:
    day = Day()
    day.pass_seconds(60)
    assert day.ticks == 59
    assert day.started > 30
    assert day.bytes_told > 60 * 1_000
