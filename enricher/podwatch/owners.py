"""From who made a pod to the workload that people know it by. Pure; nothing is looked up."""

from collections.abc import Mapping, Sequence
from typing import Final

from enricher.podwatch.objects import OwnerReference

_TEMPLATE_HASH: Final = "pod-template-hash"


def known_owner(
    references: Sequence[OwnerReference] | None, labels: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Give kind and name of the controlling owner, a Deployment in place of its ReplicaSet."""
    maker = next((one for one in references or () if one.controller), None)
    if maker is None:
        return None, None
    if maker.kind == "ReplicaSet" and (deployment := _deployment(maker.name, labels)):
        return "Deployment", deployment
    return maker.kind, maker.name


def _deployment(replica_set: str, labels: Mapping[str, str]) -> str | None:
    """Give the Deployment of a ReplicaSet; none where someone made the ReplicaSet by hand."""
    template = labels.get(_TEMPLATE_HASH)
    name = replica_set.removesuffix(f"-{template}")
    return name if template and name != replica_set else None
