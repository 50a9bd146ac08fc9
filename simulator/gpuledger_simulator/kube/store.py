"""The API server's store: objects, their versions, and the changes that watchers can still read.

The module begins with the errors (`Status` objects) in the wording of a real API server. The rest
does what etcd does, and applies the rules of a write: the server assigns the UID, and a grace
period delays the deletion of a pod. Objects are replaced and never modified, so pages and watchers
may keep references to them. HTTP is not handled here.

All kinds share one version counter, as in etcd. The version of a list of pods may come from a write
to a node, and a watch of pods may start at a version that no pod ever had.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.kube_objects import Json, kube_time, scheduled_condition


class ApiError(Exception):
    """An error response of kind `Status`."""

    def __init__(self, *, code: int, reason: str, message: str, details: Any = None) -> None:  # noqa: ANN401  # any JSON
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            **({"details": details} if details else {}),
            "code": code,
        }


def not_found(plural: str, name: str) -> ApiError:
    """Return the error 404 for an object that does not exist."""
    message = f'{plural} "{name}" not found'
    details = {"name": name, "kind": plural}
    return ApiError(code=404, reason="NotFound", message=message, details=details)


def already_exists(plural: str, name: str) -> ApiError:
    """Return the error 409 for an object that already exists."""
    message = f'{plural} "{name}" already exists'
    details = {"name": name, "kind": plural}
    return ApiError(code=409, reason="AlreadyExists", message=message, details=details)


def expired(message: str) -> ApiError:
    """Return the error 410 for a version that is no longer available."""
    return ApiError(code=410, reason="Expired", message=message)


def too_new(version: int, current: int) -> ApiError:
    """Return the error 504 for a version that does not exist yet."""
    return ApiError(
        code=504,
        reason="Timeout",
        message=f"Timeout: Too large resource version: {version}, current: {current}",
        details={
            "causes": [
                {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            ],
            "retryAfterSeconds": 1,
        },
    )


def bad_request(message: str) -> ApiError:
    """Return the error 400 for an invalid parameter."""
    return ApiError(code=400, reason="BadRequest", message=message)


def unworded(message: str) -> ApiError:
    """Return the error 500 without a reason, as real servers do for unexpected input."""
    return ApiError(code=500, reason="", message=message)


def invalid(message: str) -> ApiError:
    """Return the error 422 for an object or options that break a rule."""
    return ApiError(code=422, reason="Invalid", message=message)


Key = tuple[str, str]

MAX_CHANGES: Final = 10_000
MAX_SNAPSHOTS: Final = 16


@dataclass(frozen=True, slots=True)
class StoredChange:
    """One write, with the object before and after it."""

    version: int
    before: Json | None
    after: Json | None


class Versions:
    """Counts the writes of a server and wakes tasks that wait for a write."""

    def __init__(self) -> None:
        self.current = 1000
        self._news = asyncio.Event()

    def next(self) -> int:
        """Count a write, wake all waiting tasks, and return the new version."""
        self.current += 1
        # Each write gets a new event. If one event were set and cleared, tasks that hold a ticket
        # but do not wait yet would miss the write.
        self._news.set()
        self._news = asyncio.Event()
        return self.current

    def ticket(self) -> asyncio.Event:
        """Return an event that the next write sets.

        Take it before reading, so that no write after the read is missed.
        """
        return self._news

    @staticmethod
    async def wait(ticket: asyncio.Event, seconds: float) -> None:
        """Wait for the first write after the ticket was taken, for at most `seconds`."""
        try:
            await asyncio.wait_for(ticket.wait(), seconds)
        except TimeoutError:
            return


class Collection:
    """All objects of one kind."""

    def __init__(self, plural: str, kind: str, api_version: str, versions: Versions) -> None:
        self.plural = plural
        self.kind = kind
        self.api_version = api_version
        self.versions = versions
        self._objects: dict[Key, Json] = {}
        self._changes: deque[StoredChange] = deque()
        self._snapshots: OrderedDict[int, list[Json]] = OrderedDict()
        self._compacted = versions.current

    def get(self, key: Key) -> Json:
        """Return an object; raise `ApiError` 404 if it does not exist."""
        if key not in self._objects:
            raise not_found(self.plural, key[1])
        return self._objects[key]

    def create(self, item: Json) -> Json:
        """Add an object; raise `ApiError` 409 if its name is taken."""
        key = key_of(item)
        if key in self._objects:
            raise already_exists(self.plural, key[1])
        return self._write(key, item)

    def replace(self, item: Json) -> Json:
        """Replace an object; raise `ApiError` 404 if it does not exist."""
        key = key_of(item)
        self.get(key)
        return self._write(key, item)

    def delete(self, key: Key) -> Json:
        """Remove an object and return its last state; raise `ApiError` 404 if it does not exist."""
        before = self.get(key)
        # A deletion is a write with its own version, which the last state contains.
        last = _with_version(before, self.versions.current + 1)
        del self._objects[key]
        self._log(before, None)
        return last

    def items(self) -> list[Json]:
        """Return all objects, ordered by key."""
        return [self._objects[key] for key in sorted(self._objects)]

    def snapshot(self) -> tuple[int, list[Json]]:
        """Return the current version and all objects, and keep the objects for later pages."""
        version = self.versions.current
        self._snapshots[version] = self.items()
        while len(self._snapshots) > MAX_SNAPSHOTS:
            self._snapshots.popitem(last=False)
        return version, self._snapshots[version]

    def snapshot_at(self, version: int) -> list[Json]:
        """Return the objects of an earlier snapshot; raise `ApiError` 410 if it was discarded."""
        if version not in self._snapshots:
            raise expired("The provided continue parameter is too old to display a "
                                   "consistent list result.")  # fmt: skip
        return self._snapshots[version]

    def is_kept(self, version: int) -> bool:
        """Return whether all changes after `version` are still available."""
        return version >= self._compacted

    def changes_after(self, version: int) -> Iterable[StoredChange]:
        """Return the changes after `version`; raise `ApiError` 410 if some were discarded."""
        if not self.is_kept(version):
            raise expired(f"too old resource version: {version} ({self._compacted})")
        return [change for change in self._changes if change.version > version]

    def compact(self) -> None:
        """Discard all changes up to now, and the snapshots of unfinished lists."""
        self._changes.clear()
        self._snapshots.clear()
        self._compacted = self.versions.current

    def _write(self, key: Key, item: Json) -> Json:
        before = self._objects.get(key)
        self._objects[key] = _with_version(item, self.versions.current + 1)
        self._log(before, self._objects[key])
        return self._objects[key]

    def _log(self, before: Json | None, after: Json | None) -> None:
        self._changes.append(StoredChange(self.versions.next(), before, after))
        while len(self._changes) > MAX_CHANGES:
            self._compacted = self._changes.popleft().version


def key_of(item: Json) -> Key:
    """Return an object's namespace, which is empty if it has none, and its name."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _with_version(item: Json, version: int) -> Json:
    return {**item, "metadata": {**item["metadata"], "resourceVersion": str(version)}}


def create_object(collection: Collection, item: Json, *, namespace: str = "") -> Json:
    """Create an object from a client; the server sets its UID and creation time.

    Raise `ApiError` 422 if the name is missing and 409 if it is taken.
    """
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        raise invalid("metadata.name: Required value: name or generateName is required")
    owned = {"uid": str(uuid4()), "creationTimestamp": kube_time(time.time_ns())}
    # The namespace in the path overrides the namespace in the body.
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
    """Merge a patch into an object's status; other parts of the patch are ignored.

    Raise `ApiError` 404 if the object does not exist.
    """
    before = collection.get(key)
    status = _merge(before.get("status", {}), patch.get("status", {}))
    return collection.replace({**before, "status": status})


def bind_pod(collection: Collection, key: Key, node: str, *, time_ns: int) -> Json:
    """Assign a pod to a node, like a scheduler.

    Raise `ApiError` 404 if the pod does not exist and 409 if it has a node.
    """
    pod = collection.get(key)
    if pod.get("spec", {}).get("nodeName"):
        message = f"pod {key[1]} is already assigned to node {pod['spec']['nodeName']!r}"
        raise ApiError(code=409, reason="Conflict", message=message)
    status = pod.get("status", {})
    conditions = merged_conditions(status.get("conditions"), [scheduled_condition(time_ns)])
    return collection.replace(
        {
            **pod,
            "spec": {**pod["spec"], "nodeName": node},
            "status": {**status, "conditions": conditions},
        }
    )


def merged_conditions(before: list[Json] | None, after: list[Json]) -> list[Json]:
    """Return the conditions of both lists; those of `after` replace others of the same type."""
    found = {each["type"]: each for each in [*(before or ()), *after]}
    return list(found.values())


def patch_object(collection: Collection, key: Key, patch: Json) -> Json:
    """Merge a patch into an object's metadata and spec; its status does not change.

    Raise `ApiError` 404 if the object does not exist.
    """
    before = collection.get(key)
    merged = _merge(before, {name: patch[name] for name in ("metadata", "spec") if name in patch})
    return collection.replace(merged)


def delete_object(collection: Collection, key: Key, *, grace_seconds: int | None) -> Json:
    """Delete an object; a pod on a node is only marked as terminating during its grace period.

    Return the object's last state. Raise `ApiError` 404 if the object does not exist.
    """
    item = collection.get(key)
    if collection.kind != "Pod":
        return collection.delete(key)
    spec = item.get("spec", {})
    # Without a node, no kubelet would wait for containers to end.
    if not spec.get("nodeName"):
        grace_seconds = 0
    elif grace_seconds is None:
        grace_seconds = int(spec.get("terminationGracePeriodSeconds", 30))
    marks = {
        "deletionTimestamp": kube_time(time.time_ns() + grace_seconds * NS_PER_SECOND),
        "deletionGracePeriodSeconds": grace_seconds,
    }
    marked = collection.replace({**item, "metadata": {**item["metadata"], **marks}})
    # As on a real server, a pod is first marked and then removed, even without a grace period.
    return marked if grace_seconds else collection.delete(key)


def _merge(before: Any, patch: Any) -> Any:  # noqa: ANN401  # any JSON
    """Return the merged value, as RFC 7386 defines: null removes, objects merge, others replace."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged
