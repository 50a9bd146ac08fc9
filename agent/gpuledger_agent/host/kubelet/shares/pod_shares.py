"""Keeps the shares that annotations of the node's pods state, and reports their problems."""

from collections.abc import Sequence
from typing import Final

from gpuledger.runtime import Check
from gpuledger.texts import readable, shorten
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.find import SOURCES, StatedPods, find_shares
from gpuledger_agent.host.kubelet.shares.merge import Merged
from gpuledger_agent.settings import AllocationsSettings

_SHOWN_PROBLEMS: Final = 3
_SHOWN_CHARACTERS: Final = 300


class PodShares:
    """The shares of the node's pods in the last response; a `PodListReader`."""

    def __init__(
        self, settings: AllocationsSettings, *, check: Check, pod_list_check: Check | None
    ) -> None:
        """Start without shares.

        `pod_list_check` has the state of the queries; `None` if the kubelet's list is not queried.
        """
        self._settings = settings
        self._check = check
        self._pod_list_check = pod_list_check
        self._sources = [
            source
            for source in SOURCES
            if settings.sources == "auto" or source.source.value in settings.sources
        ]
        self._is_wanted = False
        self._is_pending = pod_list_check is not None
        """Whether the pods have changed since the last response."""
        self.stated: StatedPods | None = None
        """The shares; `None` before the first response. The object changes with its content."""

    @property
    def placeholder_namespaces(self) -> Sequence[str]:
        """The namespaces of reservation pods."""
        return self._settings.placeholder_namespaces

    def request_soon(self) -> None:
        """Let the kubelet be queried soon, because pods have changed."""
        self._is_wanted = True
        self._is_pending = self._pod_list_check is not None

    def wants_pods(self) -> bool:
        """Return whether pods have changed since the last query."""
        return self._is_wanted

    def begin_query(self) -> None:
        """Record that the pods were requested."""
        self._is_wanted = False

    def take_pods(self, pods: Sequence[ListedPod]) -> None:
        """Replace the shares by those of the listed pods."""
        self._is_pending = self._is_wanted
        stated = find_shares(
            pods, self._sources, placeholder_namespaces=self._settings.placeholder_namespaces
        )
        if stated != self.stated:
            self.stated = stated

    def are_unknown(self, merged: Merged) -> bool:
        """Return whether pods may have shares in annotations that were not read.

        If queries fail or pods have changed since the last response, it may lack such shares. They
        matter only if the node has a container whose share is unknown, or a reserved GPU.
        """
        may_lack = self.stated is None or self._is_pending or self._is_failing
        return bool(self._sources and may_lack and (merged.unnamed or merged.reserved))

    def report(self, merged: Merged) -> None:
        """Set the check; call it in each tick, because the state of the queries changes too."""
        # Devices and annotations of a new pod do not arrive at the same time.
        if self._is_pending and not self._is_failing:
            return
        if problems := [*self._missing(merged), *merged.problems]:
            shown = "; ".join(
                shorten(readable(problem), _SHOWN_CHARACTERS)
                for problem in problems[:_SHOWN_PROBLEMS]
            )
            more = len(problems) - _SHOWN_PROBLEMS
            self._check.failed(f"{shown}; and {more} more" if more > 0 else shown)
        else:
            self._check.ok(f"{merged.stated_count} allocations are stated by annotations of pods")

    @property
    def _is_failing(self) -> bool:
        return self._pod_list_check is not None and self._pod_list_check.has_failed

    def _missing(self, merged: Merged) -> list[str]:
        """Return why annotations that the node needs are unknown; empty if none are missing."""
        if not self._sources:
            return []
        needs = []
        if merged.unnamed:
            namespace, pod, _ = merged.unnamed[0]
            needs.append(
                f"the device ids of {len(merged.unnamed)} containers, such as one in pod"
                f" {namespace}/{pod}, do not name their GPU or share"
            )
        if merged.reserved and self.stated is None:
            needs.append(f"pods reserve {merged.reserved} GPUs for other pods")
        if self._pod_list_check is not None and self._pod_list_check.has_failed:
            is_used = self._settings.sources != "auto" or (self.stated and self.stated.shares)
            if needs or is_used:
                return [self._pod_list_check.detail]
        if not needs:
            return []
        if self._pod_list_check is None:
            remedy = (
                "set agent.readKubelet of the Helm chart, so that the agent can read the"
                " annotations with the shares, or set allocations.sources to an empty list"
            )
        else:
            remedy = "no annotation of the products in allocations.sources states their shares"
        return [f"{' and '.join(needs)}; {remedy}"]
