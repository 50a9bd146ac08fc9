"""How `-n` spreads the tests: a file to a process; those on real parts to two, side by side.

Brokers and API servers have deadlines of their own, which four of them on a busy machine miss; and
in two halves they take no longer than all else does on the other processes.
"""

import os
from pathlib import PurePosixPath
from typing import Final

from typing_extensions import override
from xdist.scheduler import LoadFileScheduling

MAX_PROCESSES: Final = 4
_REAL: Final = PurePosixPath("tests/real")


def count_processes() -> int:
    """Return for `-n auto` what PYTEST_XDIST_AUTO_NUM_WORKERS says, else one a core, at most 4."""
    wanted = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(wanted) if wanted else min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def lane_of(nodeid: str) -> str:
    """Return what a test must share its process with: its file, or its half of the real tests."""
    file = PurePosixPath(nodeid.partition("::")[0])
    if not file.is_relative_to(_REAL):
        return str(file)
    is_first = file.parent != _REAL or file.name < "test_j"
    return f"{_REAL} {'1' if is_first else '2'}"


class Spreading(LoadFileScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Gives each lane to one process."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)
