"""The API server through kubernetes_asyncio: its configuration, authentication and requests only.

Here alone is that library imported, and its exceptions end here; no model of it and no watch of it
is used.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import aiohttp
from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from enricher.podwatch.api import Answer, Api, KubernetesError, Method
from enricher.podwatch.http import answered, limits
from enricher.podwatch.settings import KubernetesSettings
from gpuledger import __version__
from gpuledger.errors import UserError

_TOKEN_LIFE_SECONDS: Final = 60.0
_TLS_END_SECONDS: Final = 0.1
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


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
        self._client = _client(configuration)
        self._loaded_at = monotonic()
        self._refused = False

    @asynccontextmanager
    async def get(
        self, path: str, *, query: Mapping[str, str], silence_seconds: float, total_seconds: float
    ) -> AsyncIterator[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but 200."""
        patience = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            silence_seconds=silence_seconds,
            total_seconds=total_seconds,
        )
        async with self._answered(path, "GET", patience, query=query) as answer:
            yield answer

    @asynccontextmanager
    async def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AsyncIterator[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""
        patience = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            silence_seconds=total_seconds,
            total_seconds=total_seconds,
        )
        async with self._answered(path, method, patience, body=body) as answer:
            yield answer

    async def close(self) -> None:
        """Close all connections; TLS ends with a word to the other side, which takes a moment."""
        await self._client.close()
        await asyncio.sleep(_TLS_END_SECONDS)

    @asynccontextmanager
    async def _answered(
        self,
        path: str,
        method: str,
        patience: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str] = _NOTHING,
        body: Mapping[str, object] | None = None,
    ) -> AsyncIterator[Answer]:
        """Ask with fresh credentials, and remember where they were refused."""
        await self._refresh()
        request = self._request(path, method, patience, query=query, body=body)
        try:
            server = self._client.configuration.host or ""
            async with answered(request, server=server) as answer:
                yield answer
        except KubernetesError as error:
            self._refused = error.status == HTTPStatus.UNAUTHORIZED
            raise

    async def _request(
        self,
        path: str,
        method: str,
        patience: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str],
        body: Mapping[str, object] | None,
    ) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._client.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=patience,
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
            self._client = _client(configuration)
        else:
            self._client.configuration.api_key = configuration.api_key
        self._loaded_at = self._monotonic()
        self._refused = False


def _client(configuration: Configuration) -> ApiClient:
    client = ApiClient(configuration)
    client.user_agent = f"gpuledger-podwatch/{__version__}"
    return client


async def _load(settings: KubernetesSettings) -> Configuration:
    configuration = Configuration()
    try:
        if _in_cluster(settings):
            load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call]  # the library types only some of its functions
        else:
            await load_kube_config(
                config_file=settings.kubeconfig or os.environ.get("KUBECONFIG") or None,
                context=settings.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
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
