"""Podwatch against the simulator's API server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typing_extensions import override

from gpuledger_simulator.kube import KubeApi, serve_kube_api, write_kubeconfig
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.podwatch_cluster import Cluster
from tests.podwatch_contract import PodwatchContract


class SimulatedCluster(Cluster):
    """The simulator's API server without the pods of its scenario."""

    def __init__(
        self, *, api: KubeApi, url: str, session: aiohttp.ClientSession, kubeconfig: Path
    ) -> None:
        super().__init__(kubeconfig=kubeconfig)
        self._api = api
        self._url = url
        self._session = session

    @override
    async def send(self, method: str, path: str, body: object, *, content_type: str) -> Any:
        headers = {"Content-Type": content_type}
        async with self._session.request(
            method, self._url + path, json=body, headers=headers
        ) as answer:
            assert answer.ok, await answer.text()
            return await answer.json()

    @override
    async def force_expired(self) -> None:
        self._api.compact()

    @override
    async def restart(self) -> None:
        self._api.cut_connections()


class TestPodwatchAgainstTheSimulator(PodwatchContract):
    @pytest.fixture
    async def cluster(self, tmp_path: Path) -> AsyncIterator[Cluster]:
        scenario = load_scenario("scenarios/quickstart.yaml")
        api = KubeApi(Simulation(scenario, epoch_ns=0), bookmark_seconds=0.01)
        kubeconfig = tmp_path / "kubeconfig"
        async with serve_kube_api(api, play=False) as url, aiohttp.ClientSession() as session:
            write_kubeconfig(kubeconfig, url)
            cluster = SimulatedCluster(api=api, url=url, session=session, kubeconfig=kubeconfig)
            await cluster.prepare()
            yield cluster

    @pytest.fixture
    def own_cluster(self, cluster: Cluster) -> Cluster:
        return cluster
