"""Selects the labels of the node's pods that are added to their series.

Labels are stored by pod UID and kept until the next response of the kubelet, so series do not
change while the kubelet is unavailable.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from gpuledger.ledger.series import label_of, to_label
from gpuledger.records.bounds import MAX_LABEL_LENGTH
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.node_pods import MAX_NAMES

# The API server's rules for label values, so that no value is longer or has other characters.
_VALUE: Final = re.compile(rf"[A-Za-z0-9]([-A-Za-z0-9_.]{{0,{MAX_LABEL_LENGTH - 2}}}[A-Za-z0-9])?")

# The start of a valid name, because names of Prometheus labels do not begin with a digit.
_NAME: Final = re.compile(r"[A-Za-z]")
MAX_DCGM_LABELS: Final = 64
"""Maximum number of labels that DCGM's metrics get from one pod."""
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


def select_dcgm_labels(
    pods: Sequence[ListedPod], patterns: Sequence[re.Pattern[str]]
) -> dict[str, Labels]:
    """Return the labels that dcgm-exporter adds to each pod's series, by pod UID.

    With patterns, a label is selected only if one of them matches a part of its Kubernetes name. If
    several names become the same Prometheus name, only the first one in alphabetical order is used.
    A pod has at most `MAX_DCGM_LABELS`.
    """

    def choose(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name in sorted(labels, reverse=True):
            is_chosen = not patterns or any(pattern.search(name) for pattern in patterns)
            if is_chosen and _NAME.match(name) and _VALUE.fullmatch(labels[name]):
                yield to_label(name), labels[name]

    return {
        pod.metadata.uid: tuple(sorted(dict(choose(pod.metadata.labels or {})).items()))[
            :MAX_DCGM_LABELS
        ]
        for pod in pods
    }


class PodLabels:
    """The labels of the node's pods in the last response; a `PodListReader`."""

    def __init__(self, names: Sequence[str], *, dcgm_patterns: Sequence[str] | None = None) -> None:
        """Start without labels.

        `names` are the Kubernetes names of the labels to return. `dcgm_patterns` select the labels
        of `dcgm_labels_of`; `None` means no labels.
        """
        self._names = names
        self._patterns = None if dcgm_patterns is None else [re.compile(p) for p in dcgm_patterns]
        self._dcgm_labels: Mapping[str, Labels] = {}
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

    def dcgm_labels_of(self, pod_uid: str) -> Labels:
        """Return the labels that dcgm-exporter adds to a pod's series; none for unknown pods."""
        return self._dcgm_labels.get(pod_uid, ())

    def wants_pods(self) -> bool:
        """Return whether labels of an unknown pod are needed."""
        return bool(self._wanted)

    def begin_query(self) -> None:
        """Record that the unknown pods were requested."""
        self._requested, self._wanted = self._wanted, set()

    def take_pods(self, pods: Sequence[ListedPod]) -> None:
        """Replace the labels by those of the listed pods."""
        self._labels = select_labels(pods, self._names)
        if self._patterns is not None:
            self._dcgm_labels = select_dcgm_labels(pods, self._patterns)
        # Pods that the kubelet does not list are not queried again before the next regular query.
        self._not_listed = self._requested - self._labels.keys()
