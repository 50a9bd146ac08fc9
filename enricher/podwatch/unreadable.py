"""The pods whose newest state cannot be read, as a check. What is known of them stays known."""

from typing import Final

from enricher.podwatch.watch_events import Skipped
from gpuledger.runtime.readiness import Check

MAX_NAMED: Final = 1000


class UnreadablePods:
    """Remembers each until it can be read or is gone."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._pods: dict[str, Skipped] = {}
        check.ok()

    def begin_list(self) -> None:
        """Record that all pods are told anew."""
        self._pods.clear()

    def add(self, pod: Skipped) -> None:
        """Record that a pod cannot be read."""
        if pod.is_deleted:
            self.discard(pod.uid)
        elif len(self._pods) < MAX_NAMED:
            self._pods[pod.uid] = pod
            self._check.failed(self._told)

    def discard(self, uid: str) -> None:
        """Record that a pod was read, or is gone."""
        if self._pods.pop(uid, None):
            self.tell()

    def tell(self) -> None:
        """Show how it stands: after a list, and when one is read again."""
        if not self._pods:
            self._check.ok()

    def _told(self) -> str:
        some = next(iter(self._pods.values()), None)
        if some is None:
            return "the pods are listed again"
        others = len(self._pods) - 1
        return f"pod {some.name} cannot be read, and {others} others: {some.error}"
