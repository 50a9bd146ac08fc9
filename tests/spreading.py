"""How `-n` distributes test files: real tests run in one process per core.

Real tests wait most of their time, and those of brokers and API servers miss their deadlines on a
machine that is too busy. So one process per core runs real tests first, and one more runs all
others. Files start slowest first, because a long file that starts last makes the whole run longer.
"""

import os
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

CORES: Final = len(os.sched_getaffinity(0))
MAX_PROCESSES: Final = 4
MAX_REAL_PROCESSES: Final = min(MAX_PROCESSES - 1, CORES)
MAX_PENDING: Final = 1
"""A process with this many tests left gets another file: xdist starts a test once it has the next.
"""
SLOWEST: Final = frozenset(
    {
        "tests/real/compose/test_compose.py",
        "tests/real/deployment/test_cluster.py",
        "tests/real/end_to_end/test_end_to_end.py",
        "tests/real/end_to_end/test_logs.py",
        "tests/real/sinks/test_hostile_batches.py",
        "tests/real/sinks/test_hostile_receivers.py",
        "tests/real/sinks/test_object_store.py",
        "tests/real/test_demo.py",
        "tests/real/test_dcgm_exporter.py",
        "tests/real/test_images.py",
        "tests/real/test_join_exactly_once.py",
        "tests/real/test_join_hostile.py",
        "tests/real/test_podwatch.py",
        "tests/real/test_replay.py",
        "tests/real/test_rotation.py",
        "tests/unit/attribution/test_month.py",
        "tests/unit/attribution/test_short_processes.py",
        "tests/unit/benchmarks/test_agent_day.py",
        "tests/unit/enricher/laws/test_same_books.py",
        "tests/unit/enricher/laws/test_window.py",
        "tests/unit/reports/test_bill.py",
        "tests/unit/reports/test_charging.py",
        "tests/unit/reports/test_one_rule_of_names.py",
    }
)
"""Files that take longest; xdist sorts the others by their number of tests."""
_REAL: Final = PurePosixPath("tests/real")


def count_processes() -> int:
    """Return the processes of `-n auto`: PYTEST_XDIST_AUTO_NUM_WORKERS, or one more than cores."""
    wanted = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(wanted) if wanted else min(MAX_PROCESSES, CORES + 1)


def is_real(file: str) -> bool:
    """Return whether a file's tests talk to real parts."""
    return PurePosixPath(file).is_relative_to(_REAL)


def next_file(files: Iterable[str], *, takes_real: bool) -> str | None:
    """Return the next file for a process: a real one if it takes them, otherwise another."""
    others: str | None = None
    for file in sorted(files, key=lambda file: file not in SLOWEST):
        if not is_real(file):
            others = others or file
        elif takes_real:
            return file
    return others


class Spreading(LoadFileScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Gives each file to one process, and real tests to at most one process per core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # xdist's, passed on
        super().__init__(*args, **kwargs)
        self._real_nodes: set[WorkerController] = set()

    @override
    def remove_node(self, node: "WorkerController") -> str | None:
        self._real_nodes.discard(node)  # a process that died frees its place
        crashed: str | None = super().remove_node(node)
        return crashed

    @override
    def _reschedule(self, node: "WorkerController") -> None:
        # A file that waits behind a long test could run in another process.
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= MAX_PENDING:
            super()._reschedule(node)

    @override
    def _assign_work_unit(self, node: "WorkerController") -> None:
        file = self._next_for(node)
        if file is None:
            node.shutdown()  # the remaining real files belong to the other processes
            return
        if is_real(file):
            self._real_nodes.add(node)
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: "WorkerController") -> str | None:
        has_place = node in self._real_nodes or len(self._real_nodes) < MAX_REAL_PROCESSES
        return next_file(self.workqueue, takes_real=has_place)
