"""Chooses the client for the API server: without credentials, or with kubernetes_asyncio."""

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpuledger.runtime.readiness import Check
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger_enricher.podwatch.api import Api, open_anonymous_client
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings


@asynccontextmanager
async def open_api(
    settings: KubernetesSettings, *, check: Check | None = None
) -> AsyncIterator[Api]:
    """Yield a client of the API server that the settings, the cluster or a kubeconfig define.

    The check fails if the credentials cannot be reloaded later. Raise `UserError` if the
    configuration is not found or cannot be read.
    """
    if settings.url:
        async with open_anonymous_client(settings, check or Check()) as api:
            yield api
        return
    # The import takes seconds. In a thread, it does not block the event loop or signals.
    client = await in_daemon_thread(
        lambda: importlib.import_module("gpuledger_enricher.podwatch.client")
    )
    async with client.open_client(settings, check or Check()) as api:
        yield api
