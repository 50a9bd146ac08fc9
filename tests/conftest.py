"""Marks every test by its folder, leaves the process's logging as it was, times no example.

Other fixtures live beside the tests that use them.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

TESTS = Path(__file__).parent
# A law does not fail because the machine is busy: with the usual 200 ms for an example it would.
settings.register_profile("gpuledger", deadline=None)
settings.load_profile("gpuledger")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/unit as `unit` and tests/real as `real`, so that `-m` chooses by kind."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in ("unit", "real"):
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
