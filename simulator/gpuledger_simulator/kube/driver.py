"""Drives a real API server with the scenario's pods, as their kubelets and controllers would.

Here live the requests to it. When which one is due is `PodDriver`'s business. A real API server
gives the pods their UIDs; they are written into a file for the simulated nodes, whose cgroup paths
need them.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes_asyncio import config
from kubernetes_asyncio.client import ApiClient, ApiException

from gpuledger.errors import UnavailableError, UserError
from gpuledger_simulator.identities import write_uids
from gpuledger_simulator.kube.server import PodDriver
from gpuledger_simulator.kube_objects import Json, node_object
from gpuledger_simulator.simulation import Simulation

_TIMEOUT_SECONDS: Final = 10.0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_OF_THE_SERVER: Final = ("uid", "creationTimestamp", "managedFields", "resourceVersion")


async def drive(simulation: Simulation, *, kubeconfig: Path, uids: Path | None = None) -> None:
    """Play the scenario's pods into the API server; returns after the last step.

    Raises UserError where the kubeconfig is wrong, UnavailableError where the server refuses.
    """
    async with _connect(kubeconfig) as client:
        cluster = RemoteCluster(simulation, client, uids=uids)
        await cluster.prepare()
        await PodDriver(simulation, cluster).play()


class RemoteCluster:
    """A real API server, into which pods are written."""

    def __init__(self, simulation: Simulation, client: ApiClient, *, uids: Path | None) -> None:
        self._simulation = simulation
        self._client = client
        self._uids_file = uids
        self._uids: dict[str, str] = {}

    async def prepare(self) -> None:
        """Create the nodes and namespaces that are not there yet."""
        scenario = self._simulation.scenario
        for node in scenario.nodes:
            item = node_object(self._simulation, node)
            await self._create("/api/v1/nodes", item)
        for name in sorted({pod.namespace for pod in scenario.pods}):
            item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await self._create("/api/v1/namespaces", item)
        self._publish_uids()

    async def create_pod(self, pod_key: str, item: Json) -> None:
        """Create a pod in place of one that an earlier run left, and publish its UID."""
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/pods"
        created = await self._create(path, item)
        if created is None:
            await self.delete_pod(namespace, name, grace_seconds=0)
            created = await self._create(path, item)
        if created is None:
            raise UnavailableError(f"pod {pod_key} is there already and does not go away")
        self._uids[pod_key] = created["metadata"]["uid"]
        self._publish_uids()

    async def patch_pod_status(self, namespace: str, name: str, status: Json) -> None:
        """Write a pod's status as its kubelet would."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        # Strategic: containers' states are merged by name, where JSON's merge replaces the list.
        kind = "application/strategic-merge-patch+json"
        await self._request("PATCH", path, {"status": status}, content_type=kind)

    async def delete_pod(self, namespace: str, name: str, *, grace_seconds: int) -> None:
        """Delete a pod, or begin its grace period."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            await self._request("DELETE", path, {"gracePeriodSeconds": grace_seconds})
        except ApiException as error:
            # Somebody was faster, as a garbage collector may be.
            if error.status != _NOT_FOUND:
                raise

    async def _create(self, path: str, item: Json) -> Any:  # noqa: ANN401  # any JSON
        """Create an object; None where its name is taken."""
        metadata = item["metadata"]
        # A real server refuses a `resourceVersion` in what is created, and overwrites the others.
        own = {name: value for name, value in metadata.items() if name not in _OF_THE_SERVER}
        try:
            return await self._request("POST", path, {**item, "metadata": own})
        except ApiException as error:
            if error.status == _CONFLICT:
                return None
            raise

    async def _request(
        self, method: str, path: str, body: Json, *, content_type: str = "application/json"
    ) -> Any:  # noqa: ANN401  # any JSON
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        response = await self._client.rest_client.request(
            method,
            f"{self._client.configuration.host}{path}",
            headers=headers,
            body=body,
            _request_timeout=_TIMEOUT_SECONDS,
        )
        return json.loads(response.data)

    def _publish_uids(self) -> None:
        if self._uids_file:
            write_uids(self._uids_file, epoch_ns=self._simulation.epoch_ns, uids=self._uids)


@asynccontextmanager
async def _connect(kubeconfig: Path) -> AsyncIterator[ApiClient]:
    try:
        client = await config.new_client_from_config(config_file=str(kubeconfig))
    except (config.ConfigException, OSError, TypeError) as error:
        raise UserError(f"{kubeconfig}: no usable kubeconfig: {error}") from error
    try:
        yield client
    except ApiException as error:
        message = " ".join(str(error.body or error.reason).split())
        raise UnavailableError(f"the API server answered {error.status}: {message}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        host = client.configuration.host
        raise UnavailableError(f"the API server {host} does not answer: {error}") from error
    finally:
        await client.close()
