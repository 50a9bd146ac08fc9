"""How `-n` spreads the tests: a file to a process; those on real parts to three, side by side.

Brokers and API servers have deadlines of their own, which four of them on a busy machine miss.
Three lanes leave a core for all else, which takes less time than each of them.
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
    """Return what a test must share its process with: its file, or its third of the real tests."""
    file = PurePosixPath(nodeid.partition("::")[0])
    if not file.is_relative_to(_REAL):
        return str(file)
    if file.parent != _REAL:
        return f"{_REAL} folders"
    return f"{_REAL} {'a to i' if file.name < 'test_j' else 'j to z'}"


class Spreading(LoadFileScheduling):  # type: ignore[misc]  # xdist publishes no types
    """Gives each lane to one process."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)
