"""Marks every test by its folder, leaves the process's logging as it was, times no example.

Lets `tests.spreading` say how `-n` spreads them.

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
from tests.spreading import Spreading, count_processes

TESTS = Path(__file__).parent
# A law does not fail because the machine is busy: with the usual 200 ms for an example it would.
settings.register_profile("gpuledger", deadline=None)
settings.load_profile("gpuledger")


def pytest_report_header() -> str:
    """Report on which modules the tests run."""
    return describe_compiled()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--extended`."""
    parser.addoption(
        "--extended",
        action="store_true",
        help="run the tests marked extended instead of the others",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return count_processes()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Spreading:
    return Spreading(config, log)


def pytest_configure() -> None:
    """Run no test on sources that is meant for what was compiled of them."""
    if os.environ.get("TESTS_REQUIRE_COMPILED") == "1" and compiled_modules() != hot_modules():
        raise pytest.UsageError(
            f"{describe_compiled()}; `make test-compiled` compiles them and finds them"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its folder; deselect extended tests, or with `--extended` all others."""
    extended = bool(config.getoption("extended"))
    left_out = [
        item for item in items if (item.get_closest_marker("extended") is not None) != extended
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in ("lint", "unit", "wheel", "real"):
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
