"""A Lease of the API server, read and written. Who may hold it is judged elsewhere."""

import socket
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec

from enricher.podwatch.api import Answer, Api, KubernetesError
from enricher.podwatch.decode import decode_cut
from enricher.podwatch.settings import LeaseSettings
from gpuledger.errors import UserError

OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MAX_LEASE_BYTES: Final = 32 * 2**20  # as of any object: etcd refuses far less
_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}


class LeaseSpec(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """Who holds it, in the server's own words."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Document(msgspec.Struct):
    """The whole object; what others wrote on it is written again as it was."""

    metadata: dict[str, Any]
    spec: LeaseSpec = LeaseSpec()


_decode: Final = msgspec.json.Decoder(_Document).decode


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A Lease as the server has it."""

    metadata: Mapping[str, Any]
    """With the version that a write must name, or it is refused."""
    spec: LeaseSpec


class LeaseClient:
    """Reads and writes one Lease; `KubernetesError` where the server does not answer or refuses."""

    def __init__(self, *, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._name = name
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self, *, within_seconds: float) -> Lease | None:
        """Return the Lease, `None` where there is none."""
        path = f"{self._folder}/{self._name}"
        asked = self._api.get(
            path, query={}, idle_timeout_seconds=within_seconds, total_seconds=within_seconds
        )
        return await _unless(HTTPStatus.NOT_FOUND, asked)

    async def write(
        self, spec: LeaseSpec, *, after: Lease | None, within_seconds: float
    ) -> Lease | None:
        """Write it, where it is as it was read; `None` where somebody else was faster."""
        metadata = dict(after.metadata) if after else {"name": self._name}
        body = {**_KIND, "metadata": metadata, "spec": msgspec.to_builtins(spec)}
        if after is None:
            sent = self._api.send("POST", self._folder, body=body, total_seconds=within_seconds)
        else:
            path = f"{self._folder}/{self._name}"
            sent = self._api.send("PUT", path, body=body, total_seconds=within_seconds)
        return await _unless(HTTPStatus.CONFLICT, sent)


async def _unless(status: HTTPStatus, asked: AbstractAsyncContextManager[Answer]) -> Lease | None:
    """Return the Lease of an answer, `None` for a refusal with that status."""
    try:
        async with asked as answer:
            body = await answer.read(max_bytes=_MAX_LEASE_BYTES)
    except KubernetesError as error:
        if error.status == status:
            return None
        raise
    try:
        document = decode_cut(_decode, body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubernetesError(f"the API server sent no Lease: {error}") from error
    return Lease(metadata=document.metadata, spec=document.spec)


def namespace_of(settings: LeaseSettings, *, own: Path = OWN_NAMESPACE) -> str:
    """Return the Lease's namespace; `UserError` where nothing names it."""
    if settings.namespace:
        return settings.namespace
    try:
        return own.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(
            f"set lease.namespace: there is no service account to take it from ({own}:"
            f" {error.strerror})"
        ) from error


def identity_of(settings: LeaseSettings) -> str:
    """Return the name under which the Lease is held; by default one of this process alone."""
    return settings.identity or f"{socket.gethostname()}_{uuid4()}"
