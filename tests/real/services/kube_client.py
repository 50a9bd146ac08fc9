"""Requests to a Kubernetes API server, without the client library that the project uses."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

from tests.real.services import web
from tests.real.services.kubeconfig import Cluster, Login, write_kubeconfig

CREATED_OR_THERE = frozenset({200, 201, 409})
TOKEN_SECONDS = 3600


class KubeApiError(Exception):
    """The API server rejected a request; the message contains its Status."""


class KubeApiClient:
    """An API server and its administrator's credentials, wherever it runs."""

    def __init__(self, *, cluster: Cluster, login: Login, kubeconfig: Path, folder: Path) -> None:
        self.cluster = cluster
        self.kubeconfig = kubeconfig
        self._login = login
        self._folder = folder

    @property
    def url(self) -> str:
        """Its address."""
        return self.cluster.url

    @property
    def ca_file(self) -> Path:
        """The certificate that signed the server's own."""
        return self.cluster.ca_file

    def fetch(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
    ) -> web.Answer:
        """Send a request and return the answer, whatever its status; raises OSError without one.

        Bytes are sent unchanged, anything else as JSON.
        """
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self._login.token:
            headers["Authorization"] = f"Bearer {self._login.token}"
        return web.fetch(
            self.url + path,
            method=method,
            body=body if body is None or isinstance(body, bytes) else json.dumps(body).encode(),
            headers=headers,
            context=self.tls_context(),
        )

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
    ) -> tuple[int, Any]:
        """Send a request and return status and JSON, whatever the status."""
        answer = self.fetch(method, path, body, content_type=content_type)
        return answer.status, answer.json()

    def tls_context(self) -> ssl.SSLContext:
        """Return a context from the files' current content, which may change."""
        context = ssl.create_default_context(cafile=str(self.cluster.ca_file))
        if self._login.pair:
            context.load_cert_chain(self._login.pair.certificate, self._login.pair.key)
        return context

    def create_namespace(self, name: str) -> None:
        """Create a namespace unless it exists."""
        self._create("/api/v1/namespaces", {"metadata": {"name": name}})

    def apply(self, manifest: dict[str, Any]) -> Any:  # noqa: ANN401 - any kind of object
        """Apply a manifest on the server, as `kubectl apply --server-side` does."""
        path = self.path_of(manifest) + "?fieldManager=tests&force=true"
        status, found = self.request(
            "PATCH", path, manifest, content_type="application/apply-patch+yaml"
        )
        if status >= 400:
            raise KubeApiError(f"{path}: {status} {found}")
        return found

    def service_account_kubeconfig(self, *, namespace: str, name: str) -> Path:
        """Write a kubeconfig with a fresh token for a service account, created if missing."""
        self.create_namespace(namespace)
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self._create(accounts, {"metadata": {"name": name}})
        return self.kubeconfig_of(namespace=namespace, name=name)

    def kubeconfig_of(self, *, namespace: str, name: str) -> Path:
        """Write a kubeconfig with a fresh token for an existing service account."""
        token = self.token_of(namespace=namespace, name=name)
        path = self._folder / f"{namespace}-{name}.kubeconfig"
        return write_kubeconfig(path, cluster=self.cluster, login=Login(token=token))

    def token_of(self, *, namespace: str, name: str) -> str:
        """Return a fresh token for an existing service account."""
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
        wanted = {"spec": {"expirationSeconds": TOKEN_SECONDS}}
        token: str = self._create(f"{account}/token", wanted)["status"]["token"]
        return token

    def _create(self, path: str, body: object) -> Any:  # noqa: ANN401 - any kind of object
        status, found = self.request("POST", path, body)
        if status not in CREATED_OR_THERE:
            raise KubeApiError(f"{path}: {status} {found}")
        return found

    def path_of(self, manifest: dict[str, Any]) -> str:
        """Return the path of an object; raises KubeApiError for an unknown kind."""
        version = manifest["apiVersion"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        _, listing = self.request("GET", base)
        for resource in listing.get("resources", []):
            if resource["kind"] == manifest["kind"] and "/" not in resource["name"]:
                metadata = manifest["metadata"]
                if resource["namespaced"]:
                    base += f"/namespaces/{metadata.get('namespace', 'default')}"
                return f"{base}/{resource['name']}/{metadata['name']}"
        raise KubeApiError(f"the server knows no {version} {manifest['kind']}")
