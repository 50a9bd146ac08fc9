"""Marks every test by its folder. Fixtures live beside the tests that use them."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/unit as `unit` and tests/real as `real`, so that `-m` chooses by kind."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            kind = item.path.relative_to(TESTS).parts[0]
            if kind in ("unit", "real"):
                item.add_marker(kind)
