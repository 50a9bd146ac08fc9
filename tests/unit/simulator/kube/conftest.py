"""A served API and its client."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from gpuledger_simulator.kube import KubeApi, serve_kube_api
from gpuledger_simulator.simulation import Simulation
from tests.unit.simulator.kube.api_client import Client


@pytest.fixture
def api(simulation: Simulation) -> KubeApi:
    return KubeApi(simulation, bookmark_seconds=0.05)


@pytest.fixture
async def client(api: KubeApi) -> AsyncIterator[Client]:
    """Return a client for an API with the scenario's pods of second 0; tests play later steps."""
    await api.pod_driver.play_due()
    async with serve_kube_api(api, play=False) as url, aiohttp.ClientSession() as session:
        yield Client(session, url)
