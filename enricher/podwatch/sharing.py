"""Lets records from the topic hold what is equal once, as those read from the API do. Pure.

A decoder makes each string and dictionary anew; of a hundred thousand pods that is a fifth more.
"""

from sys import intern

from msgspec.structs import replace

from enricher.podwatch.interning import Shared, same
from gpuledger.records import PodRecord


class PodSharing:
    """Replaces the parts of records by equal ones that others hold too."""

    def __init__(self) -> None:
        self._labels: Shared[str] = Shared()
        self._requests: Shared[int] = Shared()

    def share(self, pod: PodRecord) -> PodRecord:
        """Return an equal record that shares its parts."""
        return replace(
            pod,
            namespace=intern(pod.namespace),
            node=intern(pod.node),
            owner_kind=_interned(pod.owner_kind),
            owner_name=_interned(pod.owner_name),
            labels=self._labels.of(pod.labels),
            annotations=self._labels.of(pod.annotations) if pod.annotations else pod.annotations,
            containers=[replace(one, name=intern(one.name)) for one in pod.containers],
            gpus_requested=self._requests.of(pod.gpus_requested),
            phase=intern(pod.phase),
            qos_class=_interned(pod.qos_class),
            priority_class=_interned(pod.priority_class),
            created_time_ns=same(pod.created_time_ns),
            started_time_ns=same(pod.started_time_ns),
        )


def _interned(text: str | None) -> str | None:
    return None if text is None else intern(text)
