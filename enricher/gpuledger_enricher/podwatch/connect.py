"""Which client reaches the API server: one without credentials, or the Kubernetes library's."""

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
    """Open the API server that the settings, the cluster or the user's kubeconfig name.

    The check reports credentials that change and cannot be read then. Raises `UserError` where no
    configuration is found or it cannot be read.
    """
    if settings.url:
        async with open_anonymous_client(settings, check or Check()) as api:
            yield api
        return
    # In a thread: the import takes seconds, in which the loop goes on and a signal is not held up.
    client = await in_daemon_thread(
        lambda: importlib.import_module("gpuledger_enricher.podwatch.client")
    )
    async with client.open_client(settings, check or Check()) as api:
        yield api
