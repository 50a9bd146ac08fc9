"""Writes of the API server: creating, patching a status and deleting, as far as a driver needs it.

Here live the rules of a write, such as who gives the UID and what a grace period does. No sockets.
"""

import time
from typing import Any, Final
from uuid import uuid4

from simulator.kube import failures
from simulator.kube.objects import kube_time
from simulator.kube.store import Collection, Json, Key

_NS: Final = 1_000_000_000


def create_object(collection: Collection, item: Json, *, namespace: str = "") -> Json:
    """Create what a client sent; the UID and the time of creation are the server's alone."""
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise failures.invalid("metadata.name: Required value: name or generateName is required")
    owned = {"uid": str(uuid4()), "creationTimestamp": kube_time(time.time_ns())}
    placed = {"namespace": namespace} if namespace else {}
    status = {"phase": "Pending"} if collection.kind == "Pod" else {}
    return collection.create(
        {
            **item,
            "kind": collection.kind,
            "apiVersion": collection.api_version,
            "metadata": {**metadata, **placed, **owned},
            "status": status,
        }
    )


def patch_status(collection: Collection, key: Key, patch: Json) -> Json:
    """Merge a patch into an object's status; other parts of the patch are ignored."""
    before = collection.get(key)
    status = _merge(before.get("status", {}), patch.get("status", {}))
    return collection.replace({**before, "status": status})


def patch_object(collection: Collection, key: Key, patch: Json) -> Json:
    """Merge a patch into an object's metadata and spec; its status stays."""
    before = collection.get(key)
    merged = _merge(before, {name: patch[name] for name in ("metadata", "spec") if name in patch})
    return collection.replace(merged)


def delete_object(collection: Collection, key: Key, *, grace_seconds: int | None) -> Json:
    """Delete; a pod on a node is only marked as terminating while its grace period lasts."""
    item = collection.get(key)
    if collection.kind != "Pod":
        return collection.delete(key)
    spec = item.get("spec", {})
    if not spec.get("nodeName"):
        grace_seconds = 0
    elif grace_seconds is None:
        grace_seconds = int(spec.get("terminationGracePeriodSeconds", 30))
    marks = {
        "deletionTimestamp": kube_time(time.time_ns() + grace_seconds * _NS),
        "deletionGracePeriodSeconds": grace_seconds,
    }
    marked = collection.replace({**item, "metadata": {**item["metadata"], **marks}})
    # A pod is first marked and then removed, as on a real server, even without a grace period.
    return marked if grace_seconds else collection.delete(key)


def _merge(before: Any, patch: Any) -> Any:  # noqa: ANN401  # any JSON
    """Merge as RFC 7386 says: null removes, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged
