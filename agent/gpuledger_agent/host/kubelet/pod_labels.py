"""Selects the labels of the node's pods that are added to their series.

Labels are stored by pod UID and kept until the next response of the kubelet, so series do not
change while the kubelet is unavailable.
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from gpuledger.ledger.series import label_of
from gpuledger.records.bounds import MAX_LABEL_LENGTH
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.node_pods import MAX_NAMES

# The API server's rules for label values, so that no value is longer or has other characters.
_VALUE: Final = re.compile(rf"[A-Za-z0-9]([-A-Za-z0-9_.]{{0,{MAX_LABEL_LENGTH - 2}}}[A-Za-z0-9])?")

Labels = Sequence[tuple[str, str]]
"""Names and values of labels to add to a pod's series."""


def select_labels(pods: Sequence[ListedPod], names: Sequence[str]) -> dict[str, Labels]:
    """Return the labels to add to each pod's series, by pod UID.

    `names` are the names of these labels in Kubernetes; the returned names are those in series.
    Values that are not valid in Kubernetes are left out.
    """
    chosen = [(name, label_of(name)) for name in names]
    return {
        pod.metadata.uid: tuple(
            (label, value)
            for name, label in chosen
            if (value := (pod.metadata.labels or {}).get(name)) and _VALUE.fullmatch(value)
        )
        for pod in pods
    }


class PodLabels:
    """The labels of the node's pods in the last response; a `PodListReader`."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start without labels; `names` are the Kubernetes names of the labels to return."""
        self._names = names
        self._labels: Mapping[str, Labels] = {}
        self._wanted: set[str] = set()
        self._requested: AbstractSet[str] = frozenset()
        self._not_listed: AbstractSet[str] = frozenset()

    def labels_of(self, pod_uid: str) -> Labels:
        """Return the labels to add to a pod's series.

        If the pod is unknown, return no labels, and let the kubelet be queried soon.
        """
        known = self._labels.get(pod_uid)
        if known is not None:
            return known
        if pod_uid not in self._not_listed and len(self._wanted) < MAX_NAMES:
            self._wanted.add(pod_uid)
        return ()

    def wants_pods(self) -> bool:
        """Return whether labels of an unknown pod are needed."""
        return bool(self._wanted)

    def begin_query(self) -> None:
        """Take the unknown pods as requested."""
        self._requested, self._wanted = self._wanted, set()

    def take_pods(self, pods: Sequence[ListedPod]) -> None:
        """Replace the labels by those of the listed pods."""
        self._labels = select_labels(pods, self._names)
        # Pods that the kubelet does not list are not queried again before the next regular query.
        self._not_listed = self._requested - self._labels.keys()
