"""24 h of a busy node's ticks, without waiting in between: growth of memory, and a tick's CPU.

Every few seconds processes end and others start, each in a new container.
"""

import gc
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.day import Day
from benchmarks.figure import Figure

NAME = "agent_day"
_DAY_SECONDS: Final = 86_400
_WARM_UP_SECONDS: Final = 7_200
_TRACED_SECONDS: Final = 3_600
_KIB: Final = 1024


def run(*, seconds: float = _DAY_SECONDS) -> Iterator[Figure]:
    """Play the day, then trace the allocations of another one, because tracing slows it down."""
    day = Day()
    warm_up = min(_WARM_UP_SECONDS, int(seconds) // 4)
    day.pass_seconds(warm_up)
    early_bytes, began = _resident_bytes(), time.process_time()
    day.pass_seconds(int(seconds) - warm_up)
    spent = time.process_time() - began
    grown = _resident_bytes() - early_bytes
    yield Figure(name="agent_day_rss_growth_bytes", value=grown, unit="bytes")
    yield Figure(
        name="agent_day_traced_growth_bytes", value=traced_growth().size_bytes, unit="bytes"
    )
    per_tick = spent / (seconds - warm_up)
    yield Figure(name="agent_day_cpu_seconds", value=per_tick, unit="seconds/tick")
    yield Figure(name="agent_day_processes", value=day.started, unit="processes")


class Growth(NamedTuple):
    """The growth of memory, and the number of processes that it can be compared with."""

    size_bytes: int
    """Growth of the live Python objects."""
    processes: int
    """Number of processes that started and ended in this time."""


def traced_growth(seconds: int = _TRACED_SECONDS) -> Growth:
    """Return the growth in the second half of another day."""
    tracemalloc.start()
    try:
        day = Day()
        day.pass_seconds(seconds // 2)
        gc.collect()
        started = day.started
        before, _ = tracemalloc.get_traced_memory()
        day.pass_seconds(seconds // 2)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Growth(size_bytes=after - before, processes=day.started - started)


def _resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * _KIB
