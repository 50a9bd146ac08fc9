"""A run's pods on a real API server: one on each node that works, and some that come and go.

This module makes the requests of a kubelet and a controller. `published_pods` checks whether
podwatch published the pods.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from tests.real.services.kube_client import KubeApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.real.services.kube_client import KubeApiClient

NAMESPACE: Final = "research"
_PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
_MERGE: Final = "application/merge-patch+json"
_REFUSED: Final = 400
_NOT_FOUND: Final = 404
_CHANGE_SECONDS: Final = 0.25
_THREADS: Final = 4


class Pods:
    """Creates, changes and deletes pods as a cluster does."""

    def __init__(self, api: KubeApiClient) -> None:
        self._api = api
        self._names: list[str] = []
        self._chance = random.Random(1)  # noqa: S311 - any change will do

    def create(self, nodes: Sequence[str], containers: Sequence[Sequence[str]]) -> list[str]:
        """Create a running pod on each node with these container ids; return their UIDs."""
        self._api.create_namespace(NAMESPACE)
        with ThreadPoolExecutor(_THREADS) as pool:
            uids = list(pool.map(self._create_running, nodes, containers))
        self._names = [_name(node) for node in nodes]
        return uids

    async def keep_changing(self) -> None:
        """Change labels, create and delete pods until cancelled; retry while the server is away."""
        number = 0
        while True:
            number += 1
            try:
                await asyncio.to_thread(self._change, number)
            except (OSError, KubeApiError):
                await asyncio.sleep(_CHANGE_SECONDS)
            await asyncio.sleep(_CHANGE_SECONDS)

    def versions(self) -> dict[str, str]:
        """Return the resource version of every existing pod, by UID."""
        found = self._send("GET", _PATH, None)
        return {
            each["metadata"]["uid"]: each["metadata"]["resourceVersion"] for each in found["items"]
        }

    def _change(self, number: int) -> None:
        if number % 4:
            patch = {"metadata": {"labels": {"team": f"team-{number}"}}}
            path = f"{_PATH}/{self._chance.choice(self._names)}"
            self._send("PATCH", path, patch, content_type=_MERGE)
        elif number % 8:
            self._create(f"visitor-{number}", node="gpu-node-00000", containers=["main"])
        else:
            self._send("DELETE", f"{_PATH}/visitor-{number - 4}", {"gracePeriodSeconds": 0})

    def _create_running(self, node: str, containers: Sequence[str]) -> str:
        names = [f"worker-{place}" for place in range(len(containers))]
        uid = self._create(_name(node), node=node, containers=names)
        statuses = [
            {
                "name": name,
                "containerID": f"containerd://{container}",
                "restartCount": 0,
                "image": "cuda",
                "imageID": "",
                "ready": True,
            }
            for name, container in zip(names, containers, strict=True)
        ]
        patch = {"status": {"phase": "Running", "containerStatuses": statuses}}
        self._send("PATCH", f"{_PATH}/{_name(node)}/status", patch, content_type=_MERGE)
        return uid

    def _create(self, name: str, *, node: str, containers: Sequence[str]) -> str:
        limits = {"limits": {"nvidia.com/gpu": "1"}}
        listed = [{"name": each, "image": "cuda", "resources": limits} for each in containers]
        body = {
            "metadata": {"name": name, "labels": {"app": "train", "team": "vision"}},
            "spec": {"nodeName": node, "containers": listed},
        }
        made = self._send("POST", _PATH, body)
        uid: str = made["metadata"]["uid"]
        return uid

    def _send(
        self, method: str, path: str, body: object, *, content_type: str = "application/json"
    ) -> Any:  # noqa: ANN401 - any JSON
        status, found = self._api.request(method, path, body, content_type=content_type)
        if status >= _REFUSED and status != _NOT_FOUND:
            raise KubeApiError(f"{method} {path}: {status} {found}")
        return found


def _name(node: str) -> str:
    return f"train-on-{node}"
