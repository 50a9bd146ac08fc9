"""Accesses the API server through kubernetes_asyncio: configuration, login and requests.

This is the only module of podwatch that imports kubernetes_asyncio. The library's exceptions do not
leave this module, and the library's models and watch are not used.

Credentials change while podwatch runs: tokens expire, certificates are renewed. The library reads
them when it loads the configuration, so the configuration is loaded again every minute, and sooner
if the server rejects the credentials or a connection fails. An open watch keeps the client with
which it began; this client is closed when its last reader ends.
"""

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

from kubernetes_asyncio.client.api_client import ApiClient
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config import load_incluster_config, load_kube_config
from typing_extensions import override

from gpuledger.errors import UserError
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.secret import shown_url
from gpuledger_enricher.podwatch.api import (
    USER_AGENT,
    Answer,
    Api,
    KubernetesError,
    Request,
    answered,
)
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings

REFRESH_SECONDS: Final = 60.0
_LOAD_SECONDS: Final = 30.0
"""Maximum time to load the configuration, which may call a credential plug-in or an identity
provider."""
_MIN_PAUSE_SECONDS: Final = 1.0
"""Minimum time between two loads, which limits the loads if many requests fail."""
_TLS_END_SECONDS: Final = 0.1
_LOGIN: Final = "BearerToken"
"""The key under which the library keeps the value of the `Authorization` header."""
# The library logs the standard error of credential plug-ins, which may contain secrets.
logging.getLogger("kubernetes_asyncio").setLevel(logging.CRITICAL)


@asynccontextmanager
async def open_client(
    settings: KubernetesSettings, check: Check, *, refresh_seconds: float = REFRESH_SECONDS
) -> AsyncIterator[Api]:
    """Yield a client of the API server; raise `UserError` if its configuration cannot be used.

    The configuration is reloaded periodically. The check fails while it cannot be used.
    """
    try:
        session = await _open_session(settings)
    except KubernetesError as error:
        remedy = (
            f"check the file named by kubernetes.kubeconfig: {settings.kubeconfig}"
            if settings.kubeconfig
            else "set kubernetes.kubeconfig or KUBECONFIG, or run in a pod with a service account"
        )
        raise UserError(f"{error}; {remedy}") from error
    check.ok()
    client = Client(settings, session=session, check=check)
    refreshing = asyncio.create_task(client.keep_fresh(refresh_seconds))
    try:
        yield client
    finally:
        await end_tasks(refreshing)
        await client.close()


async def _open_session(settings: KubernetesSettings) -> "_LoggedIn":
    """Load the configuration and open a client; raise `KubernetesError` if it cannot be used."""
    configuration = Configuration()
    in_cluster = not settings.kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        async with asyncio.timeout(_LOAD_SECONDS):
            if in_cluster:
                load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call]  # the library types only some of its functions
            else:
                _require_kubeconfig(settings.kubeconfig)
                await load_kube_config(
                    config_file=settings.kubeconfig or None,
                    context=settings.context or None,
                    client_configuration=configuration,
                    persist_config=False,
                )
        return _LoggedIn(ApiClient(configuration))
    except TimeoutError:
        why = f"a credential plug-in does not answer within {_LOAD_SECONDS:g} s"
    except Exception as error:  # noqa: BLE001  # the loaders raise whatever a malformed file makes them raise
        # Most messages about a kubeconfig quote the file, which may contain a secret.
        why = str(error) if in_cluster or isinstance(error, OSError) else type(error).__name__
    raise KubernetesError(f"the Kubernetes configuration cannot be used: {why}")


def _require_kubeconfig(names: str) -> None:
    """Raise `FileNotFoundError` if no file exists; the library's error would not name the files."""
    if names and not any(Path(name).expanduser().exists() for name in names.split(os.pathsep)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), names)


class _LoggedIn:
    """A client with one set of credentials; once retired, it is closed after its last reader.

    It is not closed earlier, because aiohttp does not wake a reader whose session is closed.
    """

    def __init__(self, client: ApiClient) -> None:
        client.user_agent = USER_AGENT
        self.client = client
        self._readers = 0
        self._is_retired = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[ApiClient]:
        """Keep the client open within this context."""
        self._readers += 1
        try:
            yield self.client
        finally:
            self._readers -= 1
            if self._is_retired:
                await self.retire()

    async def retire(self) -> None:
        """Close the client now, or after its last reader has ended."""
        self._is_retired = True
        if not self._readers:
            await self.client.close()


class Client(Api):
    """Sends requests to one API server, with credentials that are reloaded periodically."""

    def __init__(self, settings: KubernetesSettings, *, session: _LoggedIn, check: Check) -> None:
        super().__init__(settings)
        self._settings, self._session, self._check = settings, session, check
        self._has_failed = asyncio.Event()

    async def keep_fresh(self, refresh_seconds: float) -> None:
        """Reload the configuration periodically; keep the previous one if a reload fails."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(refresh_seconds):
                    await self._has_failed.wait()
            try:
                session = await _open_session(self._settings)
            except KubernetesError as error:
                self._check.failed(f"{error}; the previous credentials stay in use")
            else:
                former, self._session = self._session, session
                await former.retire()
                self._check.ok()
            self._has_failed.clear()
            await asyncio.sleep(min(_MIN_PAUSE_SECONDS, refresh_seconds))

    async def close(self) -> None:
        """Close all connections; wait briefly, because TLS sends a final message."""
        await self._session.retire()
        await asyncio.sleep(_TLS_END_SECONDS)

    @asynccontextmanager
    @override
    async def request(self, request: Request) -> AsyncIterator[Answer]:
        async with self._session.reading() as client:
            configuration = client.configuration
            host = configuration.host or ""
            token = configuration.api_key.get(_LOGIN, "").strip()
            try:
                headers = {"Accept": request.accept, **({"Authorization": token} if token else {})}
                sending = client.call_api(
                    request.path,
                    request.method,
                    query_params=dict(request.query),
                    header_params=headers,
                    body=request.body,
                    _preload_content=False,
                    _request_timeout=request.time_limits,
                )
                sent = BasicCredentials.sent(host, headers).secrets
                sent += BasicCredentials.sent(configuration.proxy or "", {}).secrets
                async with answered(
                    sending, server=shown_url(host), sent=BasicCredentials(sent)
                ) as answer:
                    yield answer
            except KubernetesError as error:
                if error.status in {None, HTTPStatus.UNAUTHORIZED}:
                    self._has_failed.set()
                raise
