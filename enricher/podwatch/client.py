"""The API server through kubernetes_asyncio: its configuration, authentication and requests only.

Here alone is that library imported; no model of it and no watch of it is used. Its exceptions and
aiohttp's end here.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec
from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from enricher.podwatch.api import Answer, Api, KubernetesError
from enricher.podwatch.objects import Status
from enricher.podwatch.settings import KubernetesSettings
from gpuledger.errors import UserError

_TOKEN_LIFE_SECONDS: Final = 60.0
_MOST_ERROR_BYTES: Final = 64 * 1024
_BROKEN: Final = (aiohttp.ClientError, TimeoutError, OSError)
_decode_status: Final = msgspec.json.Decoder(Status).decode


@asynccontextmanager
async def open_client(settings: KubernetesSettings) -> AsyncIterator[Api]:
    """Open the API server; `UserError` where its configuration cannot be read."""
    try:
        configuration = await _load(settings)
    except KubernetesError as error:
        raise UserError(f"{error}; {_remedy(settings)}") from error
    client = Client(settings=settings, configuration=configuration)
    try:
        yield client
    finally:
        await client.close()


class Client:
    """Asks one API server, with credentials that it keeps fresh."""

    def __init__(
        self,
        *,
        settings: KubernetesSettings,
        configuration: Configuration,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._monotonic = monotonic
        self._client = ApiClient(configuration)
        self._loaded_at = monotonic()
        self._refused = False

    @asynccontextmanager
    async def get(
        self, path: str, *, query: Mapping[str, str], silence_seconds: float, total_seconds: float
    ) -> AsyncIterator[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but 200."""
        await self._refresh()
        limits = aiohttp.ClientTimeout(
            total=total_seconds,
            sock_connect=self._settings.connect_timeout_seconds,
            sock_read=silence_seconds,
        )
        try:
            response = await self._request(path, query, limits)
        except _BROKEN as error:
            raise _unreachable(error, host=self._client.configuration.host) from error
        async with response:
            if response.status != HTTPStatus.OK:
                self._refused = response.status == HTTPStatus.UNAUTHORIZED
                raise await _refusal(response)
            yield _HttpAnswer(response)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _request(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._client.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "User-Agent": "gpuledger-podwatch"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limits,
        )
        return response

    async def _refresh(self) -> None:
        """Read the credentials again when they are old; all of the configuration after a refusal.

        Tokens of files and of plug-ins change without notice; a changed certificate needs a client
        of its own, because the TLS context holds it.
        """
        if not self._refused and self._monotonic() - self._loaded_at < _TOKEN_LIFE_SECONDS:
            return
        configuration = await _load(self._settings)
        if self._refused:
            await self._client.close()
            self._client = ApiClient(configuration)
        else:
            self._client.configuration.api_key = configuration.api_key
        self._loaded_at = self._monotonic()
        self._refused = False


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except _BROKEN as error:
            raise _unreachable(error, host=str(self._response.url.origin())) from error

    async def chunks(self) -> AsyncGenerator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except _BROKEN as error:
            raise _unreachable(error, host=str(self._response.url.origin())) from error


async def _load(settings: KubernetesSettings) -> Configuration:
    configuration = Configuration()
    try:
        if _in_cluster(settings):
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # the library types only some of its functions
        else:
            await load_kube_config(
                config_file=settings.kubeconfig or os.environ.get("KUBECONFIG") or None,
                context=settings.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
    except asyncio.CancelledError:
        raise
    except ConfigException as error:
        raise KubernetesError(f"no Kubernetes configuration: {error}") from error
    except Exception as error:
        # The loaders raise whatever a malformed file or a credential plug-in makes them raise.
        what = f"{type(error).__name__} {error}".rstrip()
        raise KubernetesError(f"the Kubernetes configuration cannot be read: {what}") from error
    return configuration


def _in_cluster(settings: KubernetesSettings) -> bool:
    return not settings.kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ


def _remedy(settings: KubernetesSettings) -> str:
    if settings.kubeconfig:
        return f"check the file kubernetes.kubeconfig names: {settings.kubeconfig}"
    return "set kubernetes.kubeconfig or KUBECONFIG, or run in a pod with a service account"


async def _refusal(response: aiohttp.ClientResponse) -> KubernetesError:
    """Make the error of an answer that is none of 200: the server's own words where it has any."""
    try:
        body = await response.content.read(_MOST_ERROR_BYTES)
    except _BROKEN:
        body = b""
    status = _status_of(body)
    return KubernetesError(
        f"the API server answered {response.status}: {status.message or response.reason or ''}",
        status=response.status,
        reason=status.why,
        retry_after_seconds=_seconds(response.headers.get("Retry-After", "")),
    )


def _status_of(body: bytes) -> Status:
    try:
        return _decode_status(body)
    except msgspec.MsgspecError:
        return Status(message=body[:200].decode(errors="replace").strip())


def _seconds(header: str) -> float | None:
    """Read `Retry-After`; the API server gives seconds, and a date is no reason to wait longer."""
    return float(header) if header.isascii() and header.isdigit() else None


def _unreachable(error: BaseException, *, host: str | None) -> KubernetesError:
    what = "silent for too long" if isinstance(error, TimeoutError) else str(error)
    return KubernetesError(f"the API server {host} cannot be read: {what or type(error).__name__}")
