"""The API server through kubernetes_asyncio: its configuration, authentication and requests only.

Here and in `kubeconfig` alone is that library imported, and its exceptions end here; no model of it
and no watch of it is used.

Credentials change while podwatch runs: the kubelet replaces a service account's token every hour,
plug-ins give tokens of minutes, certificates are renewed. They are read again when their files
change, after a 401, and every minute. A new token is put into the client in use. A new certificate
needs a new client, as the TLS context holds it; the former one is closed when its last reader ends.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import aiohttp
import structlog
from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from typing_extensions import override

from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FileWatch
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.settings.secret import shown_url
from gpuledger.small_files import MAX_PEM_BYTES, read_small_file
from gpuledger_enricher.podwatch.api import (
    JSON,
    USER_AGENT,
    Answer,
    Api,
    HttpApi,
    KubernetesError,
    answered,
)
from gpuledger_enricher.podwatch.kubeconfig import (
    LOAD_SECONDS,
    LOGIN,
    ConfigurationSource,
    files_named_by,
    has_login,
)
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings

# Tokens of plug-ins, and of files that a kubeconfig names, change without notice.
_TOKEN_LIFE_SECONDS: Final = 60.0
_TLS_END_SECONDS: Final = 0.1
REFRESH_TIMEOUT_SECONDS: Final = 2.0
"""How long requests wait for new credentials before they go on with the former: far less than the
holder of a Lease has to renew it."""
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_client(settings: KubernetesSettings, check: Check) -> AsyncIterator[Api]:
    """Open the API server; `UserError` where its configuration cannot be read.

    The check reports a configuration that cannot be read later.
    """
    try:
        client = await Client.open(settings, check=check)
    except KubernetesError as error:
        remedy = (
            f"check the file kubernetes.kubeconfig names: {settings.kubeconfig}"
            if settings.kubeconfig
            else "set kubernetes.kubeconfig or KUBECONFIG, or run in a pod with a service account"
        )
        raise UserError(f"{error}; {remedy}") from error
    try:
        yield client
    finally:
        await client.close()


class _Login:
    """A client with one set of credentials, closed when it is retired and nobody reads from it.

    aiohttp does not wake a reader when the session under its response is closed: there is neither
    data, nor an end, nor a time-out any more.
    """

    def __init__(self, configuration: Configuration) -> None:
        """Raise `KubernetesError` where a certificate or an authority cannot be used."""
        files = files_named_by(configuration)
        try:
            # OpenSSL would read a file of any size, or wait for a FIFO.
            for file in files:
                read_small_file(file, max_bytes=MAX_PEM_BYTES)
            self.client = ApiClient(configuration)
        except OSError as error:  # OpenSSL's own errors are such
            named = ", ".join(map(str, files))
            raise KubernetesError(
                f"a certificate of the Kubernetes configuration cannot be used ({named}): {error}"
            ) from error
        self.client.user_agent = USER_AGENT
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
            if self._is_retired:
                await self.retire()

    async def retire(self) -> None:
        """Close the client now, or behind its last reader."""
        self._is_retired = True
        if not self._readers:
            await self.client.close()


class Client(HttpApi):
    """Requests to one API server, with credentials that are kept fresh.

    New credentials leave the answers to other requests alone: a watch stays open on the client
    that it began with, until it ends by itself.
    """

    def __init__(
        self,
        *,
        settings: KubernetesSettings,
        source: ConfigurationSource,
        configuration: Configuration,
        watch: FileWatch,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
        refresh_timeout_seconds: float = REFRESH_TIMEOUT_SECONDS,
    ) -> None:
        """Use what was read, and the watch of its files; raises `KubernetesError`."""
        super().__init__(settings)
        self._source = source
        self._monotonic, self._refresh_timeout_seconds = monotonic, refresh_timeout_seconds
        # Before they are read, so that no change in between is lost.
        watch.follow([*source.files, *files_named_by(configuration)])
        self._login = _Login(configuration)
        self._refreshing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The last reading of the credentials, which may be under way."""
        self._refreshing.set_result(None)
        self._refreshing_since = self._loaded_at = monotonic()
        self._watch, self._check = watch, check
        self._is_outdated = False
        """Whether the files have changed, or the credentials were refused, since they were read."""
        self._has_changed = False
        check.ok(", ".join(map(str, watch.files)))

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
        source = ConfigurationSource.of(settings)
        watch = FileWatch(source.files, monotonic=monotonic)
        return cls(
            settings=settings,
            source=source,
            configuration=await source.load(),
            watch=watch,
            check=check,
            monotonic=monotonic,
            refresh_timeout_seconds=refresh_timeout_seconds,
        )

    async def close(self) -> None:
        """Close all connections; TLS ends with a message to the server, which takes a moment."""
        self._refreshing.cancel()
        await asyncio.wait({self._refreshing})
        await self._login.retire()
        await asyncio.sleep(_TLS_END_SECONDS)

    @asynccontextmanager
    @override
    async def request(
        self,
        method: str,
        path: str,
        *,
        time_limits: aiohttp.ClientTimeout,
        query: Mapping[str, str] = MappingProxyType({}),
        body: Mapping[str, object] | None = None,
        accept: str = JSON,
    ) -> AsyncIterator[Answer]:
        login = await self._fresh_login()
        configuration = login.client.configuration
        rest = login.client.rest_client
        headers = {"Accept": accept, **login.client.default_headers}
        token = configuration.api_key.get(LOGIN, "")
        if token:
            headers["Authorization"] = token
        # What the server is sent, and a proxy in between: either may quote it in an error.
        host, proxy = configuration.host or "", configuration.proxy or ""
        to_server = BasicCredentials.sent(host, {"Authorization": token})
        to_proxy = BasicCredentials.sent(proxy, configuration.proxy_headers or {})
        try:
            async with (
                login.reading(),
                answered(
                    # Over the library's session and not by its own call, which follows redirects,
                    # and would take the token with it.
                    rest.pool_manager.request(
                        method,
                        f"{configuration.host}{path}",
                        params=query,
                        json=body,
                        headers=headers,
                        timeout=time_limits,
                        allow_redirects=False,
                        proxy=rest.proxy,
                        proxy_headers=rest.proxy_headers,
                        server_hostname=rest.server_hostname,
                    ),
                    server=shown_url(host),
                    time_limits=time_limits,
                    sent=BasicCredentials((*to_server.secrets, *to_proxy.secrets)),
                ) as answer,
            ):
                yield answer
        except KubernetesError as error:
            # A refusal of credentials that were replaced meanwhile says nothing of the new ones.
            if error.status == HTTPStatus.UNAUTHORIZED and login is self._login:
                self._is_outdated = True
            raise

    async def _fresh_login(self) -> _Login:
        """Return the credentials, read again where that is due and does not take too long.

        Not all requests may wait for that: while a plug-in hangs they go on with the former ones.
        """
        if self._refreshing.done():
            self._has_changed = self._watch.has_changed()
            self._is_outdated |= self._has_changed
            is_fresh = self._monotonic() - self._loaded_at < _TOKEN_LIFE_SECONDS
            if not self._is_outdated and is_fresh:
                self._refreshing.result()
                return self._login
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing_since = self._monotonic()

        def refreshing_seconds() -> float:
            return self._monotonic() - self._refreshing_since

        # All requests together wait once for so long, not each of them anew.
        left_seconds = self._refresh_timeout_seconds - refreshing_seconds()
        await asyncio.wait({self._refreshing}, timeout=max(0.0, left_seconds))
        if self._refreshing.done():
            self._refreshing.result()
        else:
            self._check.failed(
                lambda: (
                    f"the credentials are being read for {refreshing_seconds():.0f} s: a credential"
                    " plug-in, an identity provider or a storage does not answer; it is given up"
                    f" after {LOAD_SECONDS:g} s, and the former credentials stay in force"
                )
            )
        return self._login

    async def _refresh(self) -> None:
        """Read the credentials again.

        What cannot be read or used leaves the former credentials in force, and is read again with
        the next request.
        """
        try:
            await self._use(await self._source.load())
        except KubernetesError as error:
            self._check.failed(f"{error}; the former credentials stay in force")
        else:
            self._loaded_at = self._monotonic()
            self._is_outdated = False
            self._check.ok(", ".join(map(str, self._watch.files)))
            if self._has_changed:
                _log.info("kubernetes_credentials_read", files=list(map(str, self._watch.files)))

    async def _use(self, configuration: Configuration) -> None:
        """Let the next requests be sent with it; raises `KubernetesError` where that cannot be."""
        if has_login(self._login.client.configuration) and not has_login(configuration):
            # The file is being written, or was emptied. As an anonymous user podwatch would be
            # refused, and the former credentials may be good for a while.
            raise KubernetesError(
                "the Kubernetes configuration has no login any more, neither a token nor a"
                " certificate, which needs a restart"
            )
        self._watch.follow([*self._source.files, *files_named_by(configuration)])
        if not self._is_outdated:
            # The minute is over and no file has changed: at most the token is another one.
            self._login.client.configuration.api_key = configuration.api_key
            return
        former, self._login = self._login, _Login(configuration)
        await former.retire()
