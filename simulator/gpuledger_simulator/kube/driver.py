"""Plays the scenario's pods into a real API server, as kubelets and controllers would.

This module sends the requests; `PodDriver` decides when each request is due. A real API server
assigns the pods' UIDs. They are written to a file for the simulated nodes, because cgroup paths
contain UIDs.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
    """Play the scenario's pods into the API server; return after the last step.

    Raise `UserError` if the kubeconfig is invalid, and `UnavailableError` if the server cannot be
    reached or rejects a request.
    """
    async with _connect(kubeconfig) as client:
        cluster = RemoteCluster(simulation, client, uids=uids)
        await cluster.prepare()
        await PodDriver(simulation, cluster).play()


class RemoteCluster:
    """A real API server to which the scenario's objects are written."""

    def __init__(self, simulation: Simulation, client: ApiClient, *, uids: Path | None) -> None:
        self._simulation = simulation
        self._client = client
        self._uids_file = uids
        self._uids: dict[str, str] = {}

    async def prepare(self) -> None:
        """Create the nodes and namespaces that do not exist yet."""
        scenario = self._simulation.scenario
        for node in scenario.nodes:
            item = node_object(self._simulation, node)
            await self._create("/api/v1/nodes", item)
        for name in sorted({pod.namespace for pod in scenario.pods}):
            item = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            await self._create("/api/v1/namespaces", item)
        self._publish_uids()

    async def create_pod(self, pod_key: str, item: Json) -> None:
        """Create a pod and publish its UID; replace a pod of that name from an earlier run.

        Raise `UnavailableError` if the earlier pod could not be deleted.
        """
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        path = f"/api/v1/namespaces/{namespace}/pods"
        created = await self._create(path, item)
        if created is None:
            await self.delete_pod(namespace, name, grace_seconds=0)
            created = await self._create(path, item)
        if created is None:
            raise UnavailableError(f"pod {pod_key} already exists and could not be deleted")
        self._uids[pod_key] = created["metadata"]["uid"]
        self._publish_uids()

    async def bind_pod(self, namespace: str, name: str, node: str) -> None:
        """Assign a pod to its node like a scheduler."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        await self._request("POST", path, {**binding, "target": target})

    async def patch_pod_status(self, namespace: str, name: str, status: Json) -> None:
        """Write the status that a pod's kubelet would write."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        # A strategic merge patch merges container states by name; a JSON merge patch would replace
        # the list.
        kind = "application/strategic-merge-patch+json"
        await self._request("PATCH", path, {"status": status}, content_type=kind)

    async def delete_pod(self, namespace: str, name: str, *, grace_seconds: int) -> None:
        """Delete a pod after a grace period in seconds; do nothing if the pod does not exist."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            await self._request("DELETE", path, {"gracePeriodSeconds": grace_seconds})
        except ApiException as error:
            # Another client, such as a garbage collector, may have deleted the pod already.
            if error.status != _NOT_FOUND:
                raise

    async def _create(self, path: str, item: Json) -> Any:  # noqa: ANN401  # any JSON
        """Create an object; return `None` if the name is taken."""
        metadata = item["metadata"]
        # A real server rejects a `resourceVersion` in a new object. It overwrites the other fields
        # that are removed here.
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
        raise UserError(f"{kubeconfig}: invalid kubeconfig: {error}") from error
    try:
        yield client
    except ApiException as error:
        raise UnavailableError(
            f"the API server returned {error.status}: {_message(error)}"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        host = client.configuration.host
        raise UnavailableError(f"cannot connect to the API server {host}: {error}") from error
    finally:
        await client.close()


def _message(error: ApiException) -> str:
    """Return the message of the Status in a response, or the text of another response."""
    body = error.body or ""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["message"]
    return " ".join(str(text or error.reason).split())
