"""Marks every test by its folder, leaves the process's logging as it was, times no example.

Says how many processes `-n auto` means: real parts want memory, so not as many as there are cores.

Says whether the join's hot modules are compiled, and with TESTS_REQUIRE_COMPILED=1 insists on it.

Other fixtures live beside the tests that use them.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.compiled import compiled_modules, describe_compiled, hot_modules

MAX_PROCESSES = 4
TESTS = Path(__file__).parent
# A law does not fail because the machine is busy: with the usual 200 ms for an example it would.
settings.register_profile("gpuledger", deadline=None)
settings.load_profile("gpuledger")


def pytest_report_header() -> str:
    """Say on which modules the tests run."""
    return describe_compiled()


def pytest_xdist_auto_num_workers() -> int:
    """Return for `-n auto` what PYTEST_XDIST_AUTO_NUM_WORKERS says, else a process a core, to 4."""
    wanted = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(wanted) if wanted else min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def pytest_configure() -> None:
    """Run no test on sources that is meant for what was compiled of them."""
    if os.environ.get("TESTS_REQUIRE_COMPILED") == "1" and compiled_modules() != hot_modules():
        raise pytest.UsageError(
            f"{describe_compiled()}; `make test-compiled` compiles them and finds them"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, so that `-m` chooses by kind."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in ("unit", "wheel", "real"):
                item.add_marker(kind)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a deployable that ran in the test's own process has set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
