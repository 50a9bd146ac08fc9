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
from pathlib import Path
from types import MappingProxyType
from typing import Final

import aiohttp
import structlog
from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes_asyncio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

from enricher.podwatch.api import Answer, Api, KubernetesError, Method, answered, limits
from enricher.podwatch.kubeconfig import LOAD_SECONDS, LOGIN, has_login, load_configuration
from enricher.podwatch.settings import KubernetesSettings
from gpuledger import __version__
from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FileWatch
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.settings.secret import shown_url
from gpuledger.small_files import MAX_PEM_BYTES, read_small_file

_TOKEN_LIFE_SECONDS: Final = 60.0
_TLS_END_SECONDS: Final = 0.1
REFRESH_TIMEOUT_SECONDS: Final = 2.0
"""How long requests wait for new credentials before they go on with the former: far less than the
holder of a Lease has to renew it."""
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_client(settings: KubernetesSettings, check: Check) -> AsyncIterator[Api]:
    """Open the API server; `UserError` where its configuration cannot be read.

    The check tells of a configuration that cannot be read later.
    """
    try:
        client = await Client.open(settings, check=check)
    except KubernetesError as error:
        raise UserError(f"{error}; {_remedy(settings)}") from error
    try:
        yield client
    finally:
        await client.close()


class _Login:
    """A client with one set of credentials, closed when it is retired and nobody reads from it.

    aiohttp tells a reader nothing when the session under its response is closed: there is neither
    data, nor an end, nor a time-out any more.
    """

    def __init__(self, configuration: Configuration) -> None:
        """Raise `KubernetesError` where a certificate or an authority cannot be used."""
        try:
            for file in _files_named_by(configuration):
                read_small_file(file, max_bytes=MAX_PEM_BYTES)
            self.client = ApiClient(configuration)
        except OSError as error:  # OpenSSL's own errors are such
            named = ", ".join(map(str, _files_named_by(configuration)))
            raise KubernetesError(
                f"a certificate of the Kubernetes configuration cannot be used ({named}): {error}"
            ) from error
        self.client.user_agent = f"gpuledger-podwatch/{__version__}"
        self._readers = 0
        self._is_retired = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[ApiClient]:
        """Keep the client open while the context is."""
        self._readers += 1
        try:
            yield self.client
        finally:
            self._readers -= 1
            await self._close_if_idle()

    async def retire(self) -> None:
        """Close the client now, or behind its last reader."""
        self._is_retired = True
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._is_retired and not self._readers:
            await self.client.close()


class Client:
    """Asks one API server, with credentials that it keeps fresh.

    New credentials leave the answers to other requests alone: a watch stays open on the client
    that it began with, until it ends by itself.
    """

    def __init__(
        self,
        *,
        settings: KubernetesSettings,
        configuration: Configuration,
        watch: FileWatch,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
        refresh_timeout_seconds: float = REFRESH_TIMEOUT_SECONDS,
    ) -> None:
        """Take what was read, and the watch of its files; raises `KubernetesError`."""
        self._settings = settings
        self._monotonic, self._refresh_timeout_seconds = monotonic, refresh_timeout_seconds
        # Before they are read, so that no change in between is lost.
        watch.follow(_files_of(settings, configuration))
        self._login = _Login(configuration)
        self._refreshing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The last reading of the credentials, which may be under way."""
        self._refreshing.set_result(None)
        self._refreshing_since = self._loaded_at = monotonic()
        self._watch, self._check = watch, check
        self._is_outdated = False
        """Whether the files have changed, or the credentials were refused, since they were read."""
        self._has_changed = False
        self._pass_check()

    @classmethod
    async def open(
        cls,
        settings: KubernetesSettings,
        *,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
        refresh_timeout_seconds: float = REFRESH_TIMEOUT_SECONDS,
    ) -> "Client":
        """Read the configuration and open a client with it; raises `KubernetesError`."""
        watch = FileWatch(_files_of(settings), monotonic=monotonic)
        return cls(
            settings=settings,
            configuration=await _load(settings),
            watch=watch,
            check=check,
            monotonic=monotonic,
            refresh_timeout_seconds=refresh_timeout_seconds,
        )

    @asynccontextmanager
    async def get(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_seconds: float,
        total_seconds: float,
    ) -> AsyncIterator[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but 200."""
        time_limits = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            idle_timeout_seconds=idle_timeout_seconds,
            total_seconds=total_seconds,
        )
        async with self._answered(path, "GET", time_limits, query=query) as answer:
            yield answer

    @asynccontextmanager
    async def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AsyncIterator[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""
        time_limits = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            idle_timeout_seconds=total_seconds,
            total_seconds=total_seconds,
        )
        async with self._answered(path, method, time_limits, body=body) as answer:
            yield answer

    async def close(self) -> None:
        """Close all connections; TLS ends with a word to the other side, which takes a moment."""
        self._refreshing.cancel()
        await asyncio.wait({self._refreshing})
        await self._login.retire()
        await asyncio.sleep(_TLS_END_SECONDS)

    @asynccontextmanager
    async def _answered(
        self,
        path: str,
        method: str,
        time_limits: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str] = _NOTHING,
        body: Mapping[str, object] | None = None,
    ) -> AsyncIterator[Answer]:
        """Ask with fresh credentials, and remember where they were refused."""
        login = await self._refreshed()
        try:
            async with login.reading() as client:
                request = self._request(client, path, method, time_limits, query=query, body=body)
                server = shown_url(client.configuration.host or "")
                sent = _sent_with(client.configuration)
                async with answered(
                    request, server=server, time_limits=time_limits, sent=sent
                ) as answer:
                    yield answer
        except KubernetesError as error:
            # A refusal of credentials that were replaced meanwhile says nothing of the new ones.
            if error.status == HTTPStatus.UNAUTHORIZED and login is self._login:
                self._is_outdated = True
            raise

    async def _request(
        self,
        client: ApiClient,
        path: str,
        method: str,
        time_limits: aiohttp.ClientTimeout,
        *,
        query: Mapping[str, str],
        body: Mapping[str, object] | None,
    ) -> aiohttp.ClientResponse:
        """Send a request over the library's session; not by its own call, as that is redirected."""
        rest = client.rest_client
        session: aiohttp.ClientSession = rest.pool_manager
        headers = {"Accept": "application/json", **client.default_headers}
        if login := client.configuration.api_key.get(LOGIN):
            headers["Authorization"] = login
        return await session.request(
            method,
            f"{client.configuration.host}{path}",
            params=query,
            json=body,
            headers=headers,
            timeout=time_limits,
            allow_redirects=False,
            proxy=rest.proxy,
            proxy_headers=rest.proxy_headers,
            server_hostname=rest.server_hostname,
        )

    async def _refreshed(self) -> _Login:
        """Return the credentials, read again where that is due and does not take too long.

        It is nothing that all requests may wait for: whoever asks while a plug-in hangs goes on
        with the former ones.
        """
        if self._refreshing.done() and self._is_due():
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing_since = self._monotonic()
            await asyncio.wait({self._refreshing}, timeout=self._refresh_timeout_seconds)
        elif not self._refreshing.done():
            await asyncio.wait({self._refreshing}, timeout=self._seconds_to_wait())
        if self._refreshing.done():
            self._refreshing.result()
        else:
            self._check.failed(self._late)
        return self._login

    def _seconds_to_wait(self) -> float:
        passed_seconds = self._monotonic() - self._refreshing_since
        return max(0.0, self._refresh_timeout_seconds - passed_seconds)

    def _late(self) -> str:
        passed_seconds = self._monotonic() - self._refreshing_since
        return (
            f"the credentials are being read for {passed_seconds:.0f} s: a credential plug-in, an"
            f" identity provider or a storage does not answer; it is given up after"
            f" {LOAD_SECONDS:g} s, and the former credentials stay in force"
        )

    def _is_due(self) -> bool:
        """Return whether to read the credentials again: when they are outdated, and every minute.

        Tokens of plug-ins, and of files that a kubeconfig names, change without notice.
        """
        self._has_changed = self._watch.has_changed()
        self._is_outdated |= self._has_changed
        is_fresh = self._monotonic() - self._loaded_at < _TOKEN_LIFE_SECONDS
        return self._is_outdated or not is_fresh

    async def _refresh(self) -> None:
        """Read the credentials again.

        A changed certificate needs a client of its own, because the TLS context holds it. What
        cannot be read or used leaves the former credentials in force, and is read again with the
        next request.
        """
        try:
            await self._take(await _load(self._settings))
        except KubernetesError as error:
            self._check.failed(f"{error}; the former credentials stay in force")
        else:
            self._loaded_at = self._monotonic()
            self._is_outdated = False
            self._pass_check()
            if self._has_changed:
                _log.info("kubernetes_credentials_read", files=list(map(str, self._watch.files)))

    async def _take(self, configuration: Configuration) -> None:
        if has_login(self._login.client.configuration) and not has_login(configuration):
            raise KubernetesError(
                "the Kubernetes configuration has no login any more, neither a token nor a"
                " certificate, which needs a restart"
            )
        self._watch.follow(_files_of(self._settings, configuration))
        if not self._is_outdated:
            self._login.client.configuration.api_key = configuration.api_key
            return
        old, self._login = self._login, _Login(configuration)
        await old.retire()

    def _pass_check(self) -> None:
        self._check.ok(", ".join(map(str, self._watch.files)))


def _sent_with(configuration: Configuration) -> BasicCredentials:
    """Return what a request with this configuration tells its server, and a proxy in between."""
    headers = {"Authorization": configuration.api_key.get(LOGIN, "")}
    to_server = BasicCredentials.sent(configuration.host or "", headers)
    to_proxy = BasicCredentials.sent(configuration.proxy or "", configuration.proxy_headers or {})
    return BasicCredentials((*to_server.secrets, *to_proxy.secrets))


def _files_of(
    settings: KubernetesSettings, configuration: Configuration | None = None
) -> list[Path]:
    """Return the files that the configuration is read from, and those that it names."""
    if _in_cluster(settings):
        read = SERVICE_TOKEN_FILENAME
    else:
        read = settings.kubeconfig or os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
    files = [Path(file).expanduser() for file in read.split(os.pathsep) if file]
    return [*files, *_files_named_by(configuration)] if configuration else files


def _files_named_by(configuration: Configuration) -> list[Path]:
    """Return the authorities, the certificate and its key."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return [Path(file) for file in files if file]


async def _load(settings: KubernetesSettings) -> Configuration:
    return await load_configuration(
        files=_files_of(settings), context=settings.context, in_cluster=_in_cluster(settings)
    )


def _in_cluster(settings: KubernetesSettings) -> bool:
    return not settings.kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ


def _remedy(settings: KubernetesSettings) -> str:
    if settings.kubeconfig:
        return f"check the file kubernetes.kubeconfig names: {settings.kubeconfig}"
    return "set kubernetes.kubeconfig or KUBECONFIG, or run in a pod with a service account"
