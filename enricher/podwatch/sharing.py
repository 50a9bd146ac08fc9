"""Lets records from the topic hold what is equal once, as those read from the API do. Pure.

A decoder makes each string and dictionary anew; of a hundred thousand pods that is a fifth more.
"""

from sys import intern
from typing import Any, TypeVar, cast

import msgspec

from enricher.podwatch.interning import Shared, same
from gpuledger.records import PodContainer, PodRecord

T = TypeVar("T")


class PodSharing:
    """Replaces the parts of records by equal ones that others hold too."""

    def __init__(self) -> None:
        self._labels: Shared[str] = Shared()
        self._requests: Shared[int] = Shared()

    def share(self, pod: PodRecord) -> PodRecord:
        """Return an equal record that shares its parts."""
        return _replace(
            pod,
            namespace=intern(pod.namespace),
            node=intern(pod.node),
            owner_kind=_interned(pod.owner_kind),
            owner_name=_interned(pod.owner_name),
            labels=self._labels.of(pod.labels),
            annotations=self._labels.of(pod.annotations) if pod.annotations else pod.annotations,
            containers=[_share_container(one) for one in pod.containers],
            gpus_requested=self._requests.of(pod.gpus_requested),
            phase=intern(pod.phase),
            qos_class=_interned(pod.qos_class),
            priority_class=_interned(pod.priority_class),
            created_time_ns=same(pod.created_time_ns),
            started_time_ns=same(pod.started_time_ns),
        )


def _share_container(container: PodContainer) -> PodContainer:
    return _replace(container, name=intern(container.name))


def _interned(text: str | None) -> str | None:
    return None if text is None else intern(text)


def _replace(record: T, **changes: object) -> T:
    """Return a twin with some fields replaced; it is a msgspec Struct, which its type hides."""
    return cast("T", msgspec.structs.replace(cast("Any", record), **changes))
