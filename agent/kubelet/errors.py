"""The one error of the kubelet's seam, and what its reasons mean to the node's administrator."""

from collections.abc import Mapping
from typing import Final

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
