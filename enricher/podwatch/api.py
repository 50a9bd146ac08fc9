"""The seam to the Kubernetes API server: requests that answer in bytes, and their one error.

Here live the protocol, its error and the choice of credentials. What the bytes mean is decoded
elsewhere; how often to ask is the reflector's business.
"""

import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Final, Literal, Protocol

from enricher.podwatch.settings import KubernetesSettings
from gpuledger.errors import UnavailableError
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.threads import in_daemon_thread

Method = Literal["POST", "PUT"]
_NO_CREDENTIALS: Final = ": its credentials were refused; check the service account's token"
_NO_PERMISSION: Final = ": grant its account get, list and watch on pods in a ClusterRole"
_REMEDIES: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: _NO_CREDENTIALS,
    HTTPStatus.FORBIDDEN: _NO_PERMISSION,
}
_EXPIRED_REASONS: Final = frozenset({"Expired", "Gone", "ResourceVersionTooLarge"})


class KubernetesError(UnavailableError):
    """The API server did not answer, or did not answer with what was asked for."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message + _REMEDIES.get(status or 0, ""))
        self.said = message
        """What happened, without the remedy, which is for who reads pods."""
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    @property
    def expired(self) -> bool:
        """Whether the version asked for is no longer, or not, known: only a new list helps."""
        return self.status == HTTPStatus.GONE or self.reason in _EXPIRED_REASONS


class AnswerTooLargeError(KubernetesError):
    """The API server's answer is larger than what may be held at once."""


class SilentError(KubernetesError):
    """An answer that the API server had begun said nothing for as long as it was waited for."""


class Answer(Protocol):
    """The body of a successful answer."""

    async def read(self, *, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises `AnswerTooLargeError` for more than `max_bytes`, `KubernetesError` where the
        connection breaks first.
        """

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes.

        Raises `KubernetesError` where the connection breaks, `SilentError` where nothing comes.
        """


class Api(Protocol):
    """An API server that lets itself be asked."""

    def get(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_seconds: float,
        total_seconds: float,
    ) -> AbstractAsyncContextManager[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but success.

        `idle_timeout_seconds` is the longest time without a byte, `total_seconds` that of it all.
        """

    def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""


@asynccontextmanager
async def open_api(
    settings: KubernetesSettings, *, check: Check | None = None
) -> AsyncIterator[Api]:
    """Open the API server that the settings, the cluster or the user's kubeconfig name.

    The check tells of credentials that change and cannot be read then. Raises `UserError` where no
    configuration is found or it cannot be read.
    """
    # The client library takes seconds to import: nobody who does not need it pays for that, whoever
    # runs this loop goes on meanwhile, and a signal does not wait for it.
    module = f"enricher.podwatch.{'anonymous_client' if settings.url else 'client'}"
    seam = await in_daemon_thread(lambda: importlib.import_module(module))
    opening = seam.open_plain if settings.url else seam.open_client
    async with opening(settings, check or Check()) as api:
        yield api
