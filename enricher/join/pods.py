"""The pods of a worker's nodes, as the compacted pods topic tells them.

Here lives the cache: by UID, by container id and by the hash of static pods. It is filled record
by record and knows no bus. What an event says of a pod is made in `describe`.
"""

from gpuledger.records import PodRecord


class PodCache:
    """The pods known to a worker; memory is bounded by the pods of its partitions."""

    def __init__(self) -> None:
        self._by_uid: dict[str, PodRecord] = {}
        self._partition_of: dict[str, int] = {}
        self._uid_of: dict[str, str] = {}
        self.version = 0
        """Rises with each change: what was derived from the cache holds until then."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def put(self, pod: PodRecord, *, partition: int) -> None:
        """Take a pod's record in, in the place of an older one."""
        self.remove(pod.uid)
        self._by_uid[pod.uid] = pod
        self._partition_of[pod.uid] = partition
        for name in _other_names(pod):
            self._uid_of[name] = pod.uid

    def remove(self, uid: str) -> None:
        """Forget a pod; one that is not known is no error."""
        self.version += 1
        pod = self._by_uid.pop(uid, None)
        self._partition_of.pop(uid, None)
        for name in _other_names(pod) if pod else ():
            if self._uid_of.get(name) == uid:
                del self._uid_of[name]

    def remove_partition(self, partition: int) -> None:
        """Forget the pods of a partition that is no longer held."""
        gone = [uid for uid, place in self._partition_of.items() if place == partition]
        for uid in gone:
            self.remove(uid)

    def find(self, uid: str | None, container_id: str | None) -> PodRecord | None:
        """Look a pod up by what a cgroup shows: the container id first, for it is never reused.

        The UID of a cgroup path may also be a static pod's configuration hash.
        """
        by_container = self._uid_of.get(container_id) if container_id else None
        if by_container:
            return self._by_uid[by_container]
        if uid is None:
            return None
        return self._by_uid.get(uid) or self._by_uid.get(self._uid_of.get(uid, ""))


def _other_names(pod: PodRecord) -> list[str]:
    names = [each.container_id for each in pod.containers if each.container_id is not None]
    return names if pod.config_hash is None else [*names, pod.config_hash]
