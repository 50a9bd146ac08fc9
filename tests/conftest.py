"""Marks each test by its directory, restores logging after it, and sets Hypothesis' profiles.

Sets up `tests.spreading`, which distributes the tests over the processes of `-n`.

Reports whether the join's hot modules are compiled, and fails without them if
TESTS_REQUIRE_COMPILED=1.

Other fixtures are defined next to the tests that use them.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import is_hypothesis_test, settings

from tests.compiled import compiled_modules, describe_compiled, hot_modules
from tests.examples import ALL, register_profiles
from tests.spreading import Spreading, count_processes

TESTS = Path(__file__).parent
register_profiles()


def pytest_report_header() -> str:
    """Report which modules the tests run on: compiled ones or sources."""
    return describe_compiled()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`."""
    parser.addoption(
        "--extended",
        action="store_true",
        help="run only the tests marked extended, and the laws with all their examples",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return count_processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Spreading:
    return Spreading(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Fail if compiled modules are required but missing; register Hypothesis' profiles."""
    if config.getoption("extended"):
        settings.load_profile(ALL)
    if os.environ.get("TESTS_REQUIRE_COMPILED") == "1" and compiled_modules() != hot_modules():
        raise pytest.UsageError(
            f"{describe_compiled()}; `make test-compiled` compiles them and finds them"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its directory; deselect the tests that belong to the other kind of run."""
    extended = bool(config.getoption("extended"))
    left_out = [item for item in items if not _belongs(item, extended=extended)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in ("lint", "unit", "wheel", "real"):
                item.add_marker(kind)


def _belongs(item: pytest.Item, *, extended: bool) -> bool:
    is_marked = item.get_closest_marker("extended") is not None
    # Without `--extended` a law gets only part of its examples.
    return is_marked == extended or (extended and is_hypothesis_test(getattr(item, "obj", None)))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo the logging set-up of a component that ran in the test's process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
