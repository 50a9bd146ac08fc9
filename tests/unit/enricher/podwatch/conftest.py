"""Fixtures of several podwatch tests."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.enricher.podwatch.builders import PatientClock
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer, misbehaving_server


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with misbehaving_server() as server:
        yield server


@pytest.fixture
def clock() -> PatientClock:
    return PatientClock()
