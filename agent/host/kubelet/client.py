"""The seam to the node's kubelet: one question, answered with bytes or one kind of error."""

import asyncio
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from gpuledger.errors import UnavailableError

_EXPLAINED: Final[Mapping[str, str]] = {
    "missing": "there is no socket",
    "refused": "nobody listens",
    "forbidden": "the socket is root's: run the agent as user 0, without capabilities",
    "unimplemented": "the kubelet does not know pod-resources v1: Kubernetes 1.20 brought it",
}


class KubeletError(UnavailableError):
    """The kubelet did not say which container holds what; `reason` is a word for a metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(_EXPLAINED.get(reason) or detail or reason)
        self.reason = reason


MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Some ten times what the kubelet of a node with 250 pods answers, and gRPC's own default."""

_REASONS: Final[Mapping[int, str]] = {
    errno.ENOENT: "missing",
    errno.ECONNREFUSED: "refused",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class Kubelet(Protocol):
    """Who says which container holds which device."""

    async def list_pods(self) -> bytes:
        """Return a `v1.ListPodResourcesResponse`; raises KubeletError."""


class SocketKubelet:
    """The kubelet behind its Unix socket."""

    def __init__(self, socket: Path, *, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds

    async def list_pods(self) -> bytes:
        """Ask, on a connection for this one question: a kubelet that restarts leaves none behind.

        Raises KubeletError.
        """
        try:
            self._socket.stat()
            # Many a node has no kubelet to ask, and there the library would only take memory.
            from agent.host.kubelet.grpc import ask  # noqa: PLC0415  # see above

            async with asyncio.timeout(self._timeout_seconds):
                return await ask(
                    self._socket,
                    timeout_seconds=self._timeout_seconds,
                    max_bytes=MAX_ANSWER_BYTES,
                )
        except TimeoutError as error:
            detail = f"no answer within {self._timeout_seconds:g} s"
            raise KubeletError("deadline", detail) from error
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, "broken")
            raise KubeletError(reason, str(error)) from error
