"""Finds information about a node's pods in the names of files and directories.

Only the names are read; the files' contents belong to root and are not needed.

- `ContainerNames` finds a container's name by its id: the kubelet links each container's log as
  `<pod>_<namespace>_<container>-<64 hex>.log`.
- `PodChanges` detects new and deleted pods by the names of pods' cgroups and log directories. The
  kubelet creates the cgroup after it has allocated the device plugins' devices, and the log
  directory after it has also allocated the claims' devices. It creates both before it starts a
  container. The kubelet is therefore queried when names change; listing the names in each tick
  costs less than a query.
- `PodEnds` finds pods that have ended, because the kubelet lists a pod's devices until the pod is
  removed, long after its processes and its cgroup are gone (kubernetes#119423). The directory names
  in `/var/log/pods` contain a pod's name and UID, and the name of a pod's cgroup contains the UID
  (`PodCgroups`). The kubelet creates the cgroup before the directory. If a pod has a directory, but
  no cgroup for any of its UIDs, it has therefore ended, even if it ended before the agent started.
  If this is uncertain, the pod counts as running. It is uncertain if the pod has no directory, if
  its name may have been reused, or if the node shows no pod cgroups and this pod's cgroup was never
  seen.
- `PodUids` finds a pod's UID by the pod's name, in the same directory names. If a name is reused,
  as by a StatefulSet, the former pod's directory exists for a while next to the new one. The UID
  that has a cgroup is then used; if several have a cgroup, the UID remains ambiguous.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from gpuledger.clock import NS_PER_SECOND, Clock

MAX_NAMES: Final = 4096
"""Maximum number of names to read. A node runs a few hundred containers, and the logs of earlier
containers remain for a while."""
_FIRST_WAIT_NS: Final = NS_PER_SECOND
_MAX_WAIT_NS: Final = 64 * _FIRST_WAIT_NS
# Kubernetes names consist of these characters; other file names need not even be UTF-8.
_LOG_NAME: Final = re.compile(
    r"(?P<pod>[-.a-z0-9]+)_(?P<namespace>[-a-z0-9]+)_(?P<container>[-a-z0-9]+)"
    r"-(?P<id>[0-9a-f]{64})\.log"
)

ListNames = Callable[[], Iterable[str]]
"""Returns names of files or directories."""


class ContainerName(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a container and of its pod."""

    namespace: str
    """The pod's namespace."""
    pod: str
    """The pod's name."""
    container: str
    """The container's name in the pod."""
    pod_uid: str | None = None
    """The pod's UID; `None` if it is unknown, because the file names of logs do not contain it."""


def list_folder(folder: Path) -> ListNames:
    """Return a function that returns the names in a directory.

    The function returns no names if the directory cannot be read.
    """

    def names() -> list[str]:
        try:
            return os.listdir(folder)  # noqa: PTH208  # only names, without a Path for each
        except OSError:
            return []

    return names


class ContainerNames:
    """Finds containers' names by id; for an unknown id, it reads the log directory again."""

    def __init__(self, *, list_names: ListNames, clock: Clock) -> None:
        self._list_names = list_names
        self._clock = clock
        self._names: dict[str, ContainerName] = {}
        self._checked_ns: int | None = None
        self._missing: dict[str, tuple[int, int]] = {}

    def name_of(self, container_id: str) -> ContainerName | None:
        """Return the names of a container and its pod; `None` if they are unknown.

        They are unknown if the container is not in a pod or has no log yet.
        """
        if known := self._names.get(container_id):
            return known
        # Read the directory at most once a second, and at increasing intervals for the same id.
        now_ns = self._clock.monotonic_ns()
        due_ns, wait_ns = self._missing.get(container_id, (0, 0))
        is_rested = self._checked_ns is None or now_ns - self._checked_ns >= _FIRST_WAIT_NS
        if not is_rested or now_ns < due_ns:
            return None
        self._check()
        self._missing.pop(container_id, None)
        known = self._names.get(container_id)
        if known is None:
            if len(self._missing) >= MAX_NAMES:
                # Limit the memory. Each of the forgotten ids is looked up once more.
                self._missing.clear()
            wait_ns = min(2 * wait_ns, _MAX_WAIT_NS) or _FIRST_WAIT_NS
            self._missing[container_id] = (self._clock.monotonic_ns() + wait_ns, wait_ns)
        return known

    def _check(self) -> None:
        self._checked_ns = self._clock.monotonic_ns()
        found: dict[str, ContainerName] = {}
        for name in self._list_names():
            match = _LOG_NAME.fullmatch(name)
            if match:
                container_id = match["id"]
                found[container_id] = self._names.get(container_id) or ContainerName(
                    namespace=match["namespace"], pod=match["pod"], container=match["container"]
                )
            # Limit the memory, whatever other programs write to the directory.
            if len(found) >= MAX_NAMES:
                break
        self._names = found


# A static pod has a configuration hash instead of a UID, in its cgroup's name as well. In the name
# of a slice, a UID has underscores, because systemd nests slices at dashes.
_UID: Final = re.compile(r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}")
_FOLDER: Final = re.compile(
    rf"(?P<namespace>[-a-z0-9]+)_(?P<pod>[-.a-z0-9]+)_(?P<uid>{_UID.pattern})"
)
# Shorter than a sampling interval of 1 s, because two ticks may be slightly closer than that.
_CHECK_NS: Final = NS_PER_SECOND // 2
# The hierarchy of version 2, and those of version 1 in which each pod has a cgroup.
_HIERARCHIES: Final = ("", "memory", "pids", "systemd")
# Guaranteed pods are directly in the root of all pods.
_CLASSES: Final = ("burstable", "besteffort")
_SLICES: Final = ("", *(f"/kubepods-{qos}.slice" for qos in _CLASSES))
_PLAIN: Final = ("", *(f"/{qos}" for qos in _CLASSES))

HasCgroup = Callable[[str], bool]
"""Takes a pod's UID and returns whether the pod has a cgroup now."""
PodName = tuple[str, str]
"""A pod's namespace and name."""


def read_folders(list_folders: ListNames) -> Iterator[tuple[PodName, str]]:
    """Yield the name and UID of each pod that has a log directory."""
    # Limit the time, whatever other programs write to the directory.
    for name in islice(list_folders(), MAX_NAMES):
        if match := _FOLDER.fullmatch(name):
            yield (match["namespace"], match["pod"]), match["uid"]


class PodCgroups:
    """Finds the cgroup directories of a node's pods."""

    def __init__(self, root: Path) -> None:
        """Find the parent directories of pods' cgroups below `root`.

        The kubelet creates them before it starts the first pod, so they exist when an agent starts.
        """
        roots = [root / hierarchy for hierarchy in _HIERARCHIES]
        self._slices = [str(root) for root in roots if (root / "kubepods.slice").is_dir()]
        self._plain = [str(root) for root in roots if (root / "kubepods").is_dir()]
        self._folders: dict[str, str] = {}
        # List only one hierarchy, because each hierarchy contains a cgroup for every pod.
        parents = [
            *(f"{root}/kubepods.slice{under}" for root in self._slices[:1] for under in _SLICES),
            *(f"{root}/kubepods{under}" for root in self._plain[:1] for under in _PLAIN),
        ]
        self._list_parents = [list_folder(Path(parent)) for parent in parents]

    def has_cgroup(self, uid: str) -> bool:
        """Return whether the pod with this UID has a cgroup now."""
        folder = self._folders.get(uid)
        if folder is not None:
            return os.path.exists(folder)  # noqa: PTH110  # called in each tick, so without a Path
        for found in self._candidates(uid):
            if os.path.exists(found):  # noqa: PTH110  # as above
                if len(self._folders) >= MAX_NAMES:
                    self._folders.clear()
                self._folders[uid] = found
                return True
        return False

    def list_names(self) -> list[str]:
        """Return the names of the pods' cgroups; the result may contain other names with `pod`."""
        return [name for list_names in self._list_parents for name in list_names() if "pod" in name]

    def _candidates(self, uid: str) -> list[str]:
        pod = f"pod{uid.replace('-', '_')}.slice"
        slices = [f"kubepods.slice/kubepods-{pod}"]
        slices += [f"kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-{pod}" for qos in _CLASSES]
        plain = [f"kubepods/pod{uid}", *(f"kubepods/{qos}/pod{uid}" for qos in _CLASSES)]
        return [
            *(f"{root}/{folder}" for root in self._slices for folder in slices),
            *(f"{root}/{folder}" for root in self._plain for folder in plain),
        ]


class PodChanges:
    """Detects in each tick whether pods were created or deleted."""

    def __init__(self, *listers: ListNames) -> None:
        """Watch the names that these functions return, such as those of pods' log directories."""
        self._listers = listers
        self._names: AbstractSet[str] = frozenset()

    def have_changed(self) -> bool:
        """List the names; return whether they have changed since the last call."""
        names = {name for lister in self._listers for name in islice(lister(), MAX_NAMES)}
        has_changed, self._names = names != self._names, names
        return has_changed


class PodFolders:
    """Finds pods' UIDs in the names of log directories, which are listed twice a second at most."""

    def __init__(
        self,
        *,
        list_folders: ListNames,
        list_cgroups: ListNames,
        has_cgroup: HasCgroup,
        clock: Clock,
    ) -> None:
        """Start without UIDs; `list_folders` lists log directories, and `list_cgroups` cgroups."""
        self._list_folders = list_folders
        self._list_cgroups = list_cgroups
        self.has_cgroup = has_cgroup
        """Takes a pod's UID and returns whether the pod has a cgroup now."""
        self._clock = clock
        self._uids: dict[PodName, list[str]] = {}
        self._cgroups: Sequence[str] = ()
        self._checked_ns: int | None = None
        self.shows_cgroups = False
        """Whether any pod's cgroup is visible; a pod without a cgroup has then ended. If cgroups
        work, at least the agent's own pod has one. If no cgroup is visible, cgroups are not mounted
        or not created."""

    def check(self) -> None:
        """Read the names again, unless they were read less than half a second ago."""
        now_ns = self._clock.monotonic_ns()
        if self._checked_ns is not None and now_ns - self._checked_ns < _CHECK_NS:
            return
        self.read()

    def read(self) -> None:
        """Read the names again."""
        self._checked_ns = self._clock.monotonic_ns()
        self._cgroups = list(islice(self._list_cgroups(), MAX_NAMES))
        self.shows_cgroups = bool(self._cgroups)
        self._uids = {}
        for pod, uid in read_folders(self._list_folders):
            self._uids.setdefault(pod, []).append(uid)

    def uids_of(self, pod: PodName) -> Sequence[str]:
        """Return the UIDs of all pods with this name that had a log directory at the last check."""
        return self._uids.get(pod, [])

    def names(self) -> Iterable[PodName]:
        """Return the names of all pods that had a log directory at the last check."""
        return self._uids.keys()

    def uids_with_cgroup(self) -> set[str]:
        """Return the UIDs of all pods that had a cgroup at the last check."""
        found = (_UID.search(name) for name in self._cgroups)
        return {match[0].replace("_", "-") for match in found if match}

    def uids_with_folder(self) -> set[str]:
        """Return the UIDs of all pods that had a log directory at the last check."""
        return {uid for uids in self._uids.values() for uid in uids}


class PodEnds:
    """Finds the pods that have ended although the kubelet still lists them; called in each tick.

    The kubelet lists at most one pod of a name, without its UID. If a name is reused, as by a
    StatefulSet, the listed pod may be the next one, which has a cgroup, but no directory before its
    volumes are mounted. A name therefore does not count as ended while such a cgroup may belong to
    it. If a response has at least as many new names as there are new UIDs, the new UIDs belong to
    these names. Otherwise, they may belong to any name, because the list does not show that a name
    is reused.

    After a forced deletion, the former pod of a name may still run while the kubelet lists the next
    one. The kubelet creates the next pod's cgroup later, so the pod whose UID was found last is the
    listed one. If several UIDs were found at the same time, each of them may be the listed one.
    """

    def __init__(self, folders: PodFolders) -> None:
        """Start without pods; `folders` finds the pods' log directories and cgroups."""
        self._folders = folders
        self._uids: dict[PodName, dict[str, bool]] = {}
        """The UIDs of each pod name, each with whether its cgroup was ever seen."""
        self._queries = 0
        """Number of queries so far."""
        self._found_at: dict[str, int] = {}
        """The number of the query before which each UID was first found."""
        self._listed: AbstractSet[PodName] | None = None
        """The pods in the last response; `None` before the first one."""
        self._names: dict[str, AbstractSet[PodName]] = {}
        """The names that each pod without a directory may have, by UID."""
        self._found: set[str] = set()
        """All UIDs when the query of the last response began."""
        self._found_now: set[str] = set()
        """All UIDs when the last query began."""
        self._without_folder: set[str] = set()
        """Those of them without a directory."""
        self.is_complete = False
        """Whether a response has contained all running pods. A kubelet that starts responds before
        it has read its pods from the API server."""

    @property
    def shows_cgroups(self) -> bool:
        """Whether any pod's cgroup is visible; otherwise few pods can be found to have ended."""
        return self._folders.shows_cgroups

    def begin_query(self) -> None:
        """Record that a query begins. Its response contains every pod that has a cgroup now."""
        self._folders.read()
        with_folder = self._folders.uids_with_folder()
        self._found_now = self._folders.uids_with_cgroup() | with_folder
        self._without_folder = self._found_now - with_folder
        self._queries += 1
        kept = self._found_now.union(*self._uids.values())
        self._found_at = {uid: self._found_at.get(uid, self._queries) for uid in kept}
        if self._listed is None:
            self._found = with_folder

    def learn(self, listed: AbstractSet[PodName]) -> None:
        """Learn from a response which names new pods may have; `listed` contains all its pods."""
        before = self._listed
        if before is None:
            # When the agent starts, all pods without a running UID may be new.
            before = {pod for pod in listed if self._has_cgroup(pod)}
        new_pods = listed - before
        new_uids = self._found_now - self._found
        names = new_pods if len(new_uids) <= len(new_pods) else listed
        self._names = {uid: self._names.get(uid, names) for uid in self._without_folder}
        self._listed, self._found = listed, self._found_now
        self._learn_uids(listed)
        self.is_complete = self.is_complete or all(
            pod in listed or not self._has_cgroup(pod) for pod in self._folders.names()
        )

    def find_ended(self, pods: AbstractSet[PodName]) -> set[PodName]:
        """Return which of the given pods have certainly ended.

        `pods` contains pods in the kubelet's list; pods that are not in the list are forgotten.
        """
        silent = {pod for pod in pods if not self.is_running(pod)}
        if not silent:
            return set()
        # These pods are new or have ended. If a pod has ended, its name may have been reused.
        self._folders.check()
        self._learn_uids(pods | (self._listed or set()))
        silent = silent.difference(*self._names.values())
        return {pod for pod in silent if not self.is_running(pod) and self._is_over(pod)}

    def _learn_uids(self, pods: AbstractSet[PodName]) -> None:
        # Keep known UIDs: a pod's directory may be deleted before the kubelet's list changes.
        self._uids = {pod: self._uids.get(pod, {}) for pod in pods}
        for pod, uids in self._uids.items():
            for uid in self._folders.uids_of(pod):
                uids.setdefault(uid, False)
                self._found_at.setdefault(uid, self._queries + 1)

    def _has_cgroup(self, pod: PodName) -> bool:
        return any(map(self._folders.has_cgroup, self._folders.uids_of(pod)))

    def _is_over(self, pod: PodName) -> bool:
        """Return whether a pod that has no cgroup now certainly had one before, so that it ended.

        If pods' cgroups are visible, it had one if it has a log directory. Otherwise its cgroup
        must have been seen.
        """
        uids = self._uids.get(pod, {})
        return bool(uids) and (self._folders.shows_cgroups or all(uids.values()))

    def is_running(self, pod: PodName) -> bool:
        """Return whether a pod of the last list certainly runs, because it has a cgroup."""
        uids = self._uids.get(pod, {})
        last = max((self._found_at[uid] for uid in uids), default=0)
        for uid in uids:
            if self._found_at[uid] == last and self._folders.has_cgroup(uid):
                uids[uid] = True
                return True
        return False


class PodUids:
    """Finds the UIDs of the node's running pods by name."""

    def __init__(self, folders: PodFolders) -> None:
        """Keep `folders`, which finds UIDs in the names of log directories."""
        self._folders = folders

    def find(self, namespace: str, pod: str) -> Sequence[str]:
        """Return the possible UIDs of the pod with this name; empty if the pod is unknown.

        If pods' cgroups are visible, only UIDs that have a cgroup are returned, because a log
        directory remains after its pod has ended.
        """
        folders = self._folders
        folders.check()
        uids = folders.uids_of((namespace, pod))
        return [uid for uid in uids if folders.has_cgroup(uid)] if folders.shows_cgroups else uids
