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
  In two cases this is uncertain, and the pod counts as running: the pod has no directory, or the
  node shows no pod cgroups and this pod's cgroup was never seen.
- `Namesakes` finds ended pods if the kubelet's list has several pods of one name, because a pod may
  be recreated with the same name while the kubelet still lists the former pod.
- `PodUids` finds a pod's UID by the pod's name, in the same directory names. If a name is reused,
  as by a StatefulSet, the former pod's directory exists for a while next to the new one. The UID
  that has a cgroup is then used; if several have a cgroup, the UID remains ambiguous.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# A static pod has a configuration hash instead of a UID, in its cgroup's name as well.
_FOLDER: Final = re.compile(
    r"(?P<namespace>[-a-z0-9]+)_(?P<pod>[-.a-z0-9]+)"
    r"_(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
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
        # systemd nests slices at dashes, so the dashes of a UID are written as underscores.
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
        self._checked_ns = now_ns
        self.shows_cgroups = any(True for _ in self._list_cgroups())
        self._uids = {}
        for pod, uid in read_folders(self._list_folders):
            self._uids.setdefault(pod, []).append(uid)

    def uids_of(self, pod: PodName) -> Sequence[str]:
        """Return the UIDs of all pods with this name that had a log directory at the last check."""
        return self._uids.get(pod, [])


class PodEnds:
    """Finds the pods that have ended although the kubelet still lists them; called in each tick."""

    def __init__(self, folders: PodFolders) -> None:
        """Start without pods; `folders` finds the pods' log directories and cgroups."""
        self._folders = folders
        self._uids: dict[PodName, dict[str, bool]] = {}
        """The UIDs of each pod name, each with whether its cgroup was ever seen."""

    def find_ended(self, pods: AbstractSet[PodName]) -> set[PodName]:
        """Return which of the given pods have certainly ended.

        `pods` contains the pods in the kubelet's list; all other pods are forgotten.
        """
        silent = {pod for pod in pods if not self.is_running(pod)}
        if not silent:
            return set()
        # These pods are new or have ended. If a pod has ended, its name may have been reused.
        self._folders.check()
        # Keep known UIDs: a pod's directory may be deleted before the kubelet's list changes.
        self._uids = {pod: self._uids.get(pod, {}) for pod in pods}
        for pod, uids in self._uids.items():
            for uid in self._folders.uids_of(pod):
                uids.setdefault(uid, False)
        return {pod for pod in silent if not self.is_running(pod) and self._is_over(pod)}

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
        # Try the newest UID first.
        for uid in reversed(uids):
            if self._folders.has_cgroup(uid):
                uids[uid] = True
                return True
        return False


class Namesakes:
    """Finds the ended ones among pods of one name, if the kubelet lists several such pods.

    The list contains no UIDs. If it has one pod of a name, and one pod of this name runs, they are
    the same pod, so the pod with this UID has these devices. If another pod of the name starts, its
    devices are those that no known pod has. A pod in the list whose UID remains unknown counts as
    running. UIDs remain unknown if the agent started later, or if several pods of the name started
    between two responses.
    """

    def __init__(self, folders: PodFolders) -> None:
        """Start without pods; `folders` finds the pods' log directories and cgroups."""
        self._folders = folders
        self._devices: dict[PodName, dict[str, AbstractSet[object]]] = {}
        """The devices of each pod whose UID is known, by the pod's name and UID."""
        self._running: dict[PodName, set[str]] = {}
        """The UIDs of the pods that ran at the previous response."""
        self._found: dict[PodName, set[str]] = {}
        """The UIDs of the pods that had a log directory at the previous response."""
        self._unlisted: dict[PodName, set[str]] = {}
        """The UIDs of ended pods that the kubelet no longer lists."""

    @property
    def shows_cgroups(self) -> bool:
        """Whether any pod's cgroup is visible; otherwise pods cannot be found to have ended."""
        return self._folders.shows_cgroups

    def learn(self, listed: Sequence[tuple[PodName, AbstractSet[object]]]) -> None:
        """Learn the UIDs of pods from a response; names that it does not contain are forgotten.

        `listed` contains the name and the devices of each pod.
        """
        self._folders.check()
        by_name: dict[PodName, list[AbstractSet[object]]] = {}
        for name, devices in listed:
            by_name.setdefault(name, []).append(devices)
        ran, self._running = self._running, {}
        found, self._found = self._found, {}
        unlisted, self._unlisted = self._unlisted, {}
        known, self._devices = self._devices, {}
        for name, lists in by_name.items():
            uids = set(self._folders.uids_of(name))
            running = {uid for uid in uids if self._folders.has_cgroup(uid)}
            before, gone = known.get(name, {}), unlisted.get(name, set()) & uids
            assigned = _assign(
                lists,
                before,
                # A pod that started after the request may be missing from the response.
                running=running & ran.get(name, running),
                may_be_listed=(uids | before.keys()) - gone,
            )
            ended = set(before)
            if len(lists) == 1 and assigned:
                # The kubelet lists only this pod, so it no longer lists the pods found before.
                ended |= uids & found.get(name, uids)
            self._running[name], self._found[name], self._devices[name] = running, uids, assigned
            self._unlisted[name] = gone | (ended - assigned.keys() - running)

    def find_ended_positions(
        self, listed: Sequence[tuple[PodName, AbstractSet[object]]]
    ) -> frozenset[int]:
        """Return the positions of the pods that have ended.

        A pod that is the only one of its name is not among them; `PodEnds` finds it. A running pod
        may have the devices of an ended one. Therefore, pods of a name count as ended only if the
        list still has a pod with devices for each other pod of this name that it may contain. Pods
        without devices do not count, because the kubelet may list an ended pod without devices.
        """
        self._folders.check()
        found: set[int] = set()
        if not self._folders.shows_cgroups:
            return frozenset()
        counts = Counter(name for name, _ in listed)
        for name in (name for name, count in counts.items() if count > 1):
            known = self._devices.get(name, {})
            ended_uids = {uid for uid in known if not self._folders.has_cgroup(uid)}
            may_be_listed = {*known, *self._folders.uids_of(name)} - self._unlisted.get(name, set())
            ended = [known[uid] for uid in ended_uids]
            of_ended: set[int] = set()
            others = 0
            for position, (other, devices) in enumerate(listed):
                if other == name and devices in ended:
                    ended.remove(devices)
                    of_ended.add(position)
                elif other == name and devices:
                    others += 1
            if others >= len(may_be_listed - ended_uids):
                found |= of_ended
        return frozenset(found)


def _assign(
    lists: Sequence[AbstractSet[object]],
    known: Mapping[str, AbstractSet[object]],
    *,
    running: AbstractSet[str],
    may_be_listed: AbstractSet[str],
) -> dict[str, AbstractSet[object]]:
    """Return the devices of the pods of one name, by UID.

    `lists` are the devices of the listed pods; `known` are those of pods known before. `running`
    are the running pods that must be in the list, and `may_be_listed` all pods that it may contain.
    A pod gets its devices only if they are certain.
    """
    if len(lists) == 1 and len(running) == 1:
        return dict.fromkeys(running, lists[0])
    left = list(lists)
    assigned: dict[str, AbstractSet[object]] = {}
    for uid, devices in known.items():
        if devices in left:
            left.remove(devices)
            assigned[uid] = devices
    new = may_be_listed - assigned.keys()
    is_certain = len(left) == len(new) == 1 and new <= running
    return assigned | dict.fromkeys(new, left[0]) if is_certain else assigned


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
