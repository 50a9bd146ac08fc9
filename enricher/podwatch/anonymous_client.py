"""An API server that asks for no credentials, such as `kubectl proxy` or the simulator's.

Without the Kubernetes client library, which takes seconds and a hundred megabytes to import.
"""

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp

from enricher.podwatch.api import Answer, Api, Method, answered, limits
from enricher.podwatch.settings import KubernetesSettings
from gpuledger import __version__
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.settings.secret import shown_url


@asynccontextmanager
async def open_plain(settings: KubernetesSettings, check: Check) -> AsyncIterator[Api]:
    """Open the API server at `settings.url`; the check of credentials passes, as there are none."""
    check.ok("none are needed")
    headers = {"Accept": "application/json", "User-Agent": f"gpuledger-podwatch/{__version__}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield _Plain(settings=settings, session=session)


class _Plain:
    def __init__(self, *, settings: KubernetesSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session

    def get(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_seconds: float,
        total_seconds: float,
    ) -> AbstractAsyncContextManager[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but 200."""
        server = self._settings.url.rstrip("/")
        time_limits = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            idle_timeout_seconds=idle_timeout_seconds,
            total_seconds=total_seconds,
        )
        request = self._session.get(
            server + path, params=query, timeout=time_limits, allow_redirects=False
        )
        return self._answered(request, server=server, time_limits=time_limits)

    def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""
        server = self._settings.url.rstrip("/")
        time_limits = limits(
            connect_seconds=self._settings.connect_timeout_seconds,
            idle_timeout_seconds=total_seconds,
            total_seconds=total_seconds,
        )
        request = self._session.request(
            method, server + path, json=body, timeout=time_limits, allow_redirects=False
        )
        return self._answered(request, server=server, time_limits=time_limits)

    def _answered(
        self,
        request: Awaitable[aiohttp.ClientResponse],
        *,
        server: str,
        time_limits: aiohttp.ClientTimeout,
    ) -> AbstractAsyncContextManager[Answer]:
        sent = BasicCredentials.sent(server, {})  # a user in the address is one all the same
        return answered(request, server=shown_url(server), time_limits=time_limits, sent=sent)
