"""Which pods are the mirrors of static pods, and by which hash cgroup paths call those. Pure.

A static pod is the kubelet's own: it runs under a UID that the kubelet made of its manifest, and in
the API server it has a mirror, which says that UID in two annotations. Whoever may create pods may
write those annotations on any pod, and so would get the name of another one's use. A mirror is
known by all that a kubelet makes it with: both annotations, alike; the Node as its owner; and no
service account, which the API server gives to every pod but a mirror. What that leaves to somebody
hostile is said in docs/security.md.
"""

from collections.abc import Sequence
from typing import Final

from enricher.podwatch.objects import Annotations, OwnerReference, PodSpec

MAX_HASH_LENGTH: Final = 64
"""A kubelet's hash has 32 characters, and a UID that a manifest gives 36."""


def mirrored_hash(
    notes: Annotations, spec: PodSpec, owners: Sequence[OwnerReference] | None
) -> str | None:
    """Return the hash of the static pod whose mirror this is; `None` where it is none."""
    name = notes.config_hash
    if not name or name != notes.config_mirror or len(name) > MAX_HASH_LENGTH:
        return None
    if spec.service_account_name or not owners or len(owners) != 1:
        return None
    (owner,) = owners
    is_node = owner.kind == "Node" and owner.api_version == "v1"
    return name if is_node and owner.name == spec.node_name else None
