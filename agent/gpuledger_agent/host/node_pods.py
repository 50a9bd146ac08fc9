"""What the names in a node's folders say of its pods: names of containers, and who came and ended.

Only names of files and folders are read: their contents are root's, and none of our business.

- `ContainerNames`: the kubelet links each container's log as
  `<pod>_<namespace>_<container>-<64 hex>.log`, which leads from the runtime's id to the name.
- `PodChanges`: a pod that comes is seen by the names of its cgroup and of the folder of its logs.
  The kubelet makes the cgroup once it has given out the devices of plugins, the folder once it has
  those of claims too, and both before it starts a container. So names that changed are worth a
  question to the kubelet; listing them in each tick costs less than one question.
- `PodEnds`: the kubelet lists a pod's devices until the pod is removed, long after its processes
  and its cgroup are gone (kubernetes#119423). The names of the folders in `/var/log/pods` lead from
  a pod's name to its UID, and the UID to its cgroup (`PodCgroups`). The kubelet makes the cgroup
  first and the folder after it, so a pod that has a folder and no cgroup has ended, also before the
  agent started: under every UID that goes by its name. A pod of which that cannot be said counts as
  there: one without a folder, or any on a node that shows no pod's cgroup, unless its own was seen.
- `PodUids`: the same names say which UID a pod's name has now. A name that comes again, as a
  StatefulSet's, has the folder of the former pod beside its own for a while; then the one that has
  a cgroup is meant, and where that is not one alone, nobody says.
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
"""A node runs some hundreds of containers; their predecessors' logs are linked too."""
_FIRST_WAIT_NS: Final = NS_PER_SECOND
_MAX_WAIT_NS: Final = 64 * _FIRST_WAIT_NS
# Kubernetes' names are of these characters; other files may have any, and need not be UTF-8.
_LOG_NAME: Final = re.compile(
    r"(?P<pod>[-.a-z0-9]+)_(?P<namespace>[-a-z0-9]+)_(?P<container>[-a-z0-9]+)"
    r"-(?P<id>[0-9a-f]{64})\.log"
)

ListNames = Callable[[], Iterable[str]]
"""Returns names of files or folders."""


class ContainerName(msgspec.Struct, frozen=True, kw_only=True):
    """What people call a container."""

    namespace: str
    """Namespace of its pod."""
    pod: str
    """Name of its pod."""
    container: str
    """Its name in the pod."""
    pod_uid: str | None = None
    """The pod's UID; the names of logs do not tell it."""


def list_folder(folder: Path) -> ListNames:
    """Return what lists the names in a folder; none where the folder does not exist."""

    def names() -> list[str]:
        try:
            return os.listdir(folder)  # noqa: PTH208  # names alone, without a Path for each
        except OSError:
            return []

    return names


class ContainerNames:
    """Names by container id, read again when an unknown id is asked for."""

    def __init__(self, *, list_names: ListNames, clock: Clock) -> None:
        self._list_names = list_names
        self._clock = clock
        self._names: dict[str, ContainerName] = {}
        self._checked_ns: int | None = None
        self._missing: dict[str, tuple[int, int]] = {}

    def name_of(self, container_id: str) -> ContainerName | None:
        """Return the name of a container; `None` where it is no pod's, or has no log yet."""
        if known := self._names.get(container_id):
            return known
        # At most once a second for all, and ever more seldom for one that is never found.
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
                # Bounded, whatever ids are asked for; each is looked for once more then.
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
            # Whoever can write into the folder cannot make the agent's memory grow.
            if len(found) >= MAX_NAMES:
                break
        self._names = found


# A static pod has the hash of its configuration in place of a UID, in its cgroup's name as well.
_FOLDER: Final = re.compile(
    r"(?P<namespace>[-a-z0-9]+)_(?P<pod>[-.a-z0-9]+)"
    r"_(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
)
# Less than a tick of a second, as two ticks may be a little less than that apart.
_CHECK_NS: Final = NS_PER_SECOND // 2
# A hierarchy of the second version, and of the first those of which each pod has a cgroup.
_HIERARCHIES: Final = ("", "memory", "pids", "systemd")
# A guaranteed pod lies in the root of all pods.
_CLASSES: Final = ("burstable", "besteffort")
_SLICES: Final = ("", *(f"/kubepods-{qos}.slice" for qos in _CLASSES))
_PLAIN: Final = ("", *(f"/{qos}" for qos in _CLASSES))

HasCgroup = Callable[[str], bool]
"""Takes a pod's UID, and says whether it has a cgroup now."""
PodName = tuple[str, str]
"""Namespace and name of a pod."""


def read_folders(list_folders: ListNames) -> Iterator[tuple[PodName, str]]:
    """Yield name and UID of each pod that has a folder for its logs."""
    # Whoever can write there cannot make the agent slow.
    for name in islice(list_folders(), MAX_NAMES):
        if match := _FOLDER.fullmatch(name):
            yield (match["namespace"], match["pod"]), match["uid"]


class PodCgroups:
    """The pods' cgroups as folders of a node."""

    def __init__(self, root: Path) -> None:
        """Look where the node has pods: the kubelet's own folder is there before any agent is."""
        roots = [root / hierarchy for hierarchy in _HIERARCHIES]
        self._slices = [str(root) for root in roots if (root / "kubepods.slice").is_dir()]
        self._plain = [str(root) for root in roots if (root / "kubepods").is_dir()]
        self._folders: dict[str, str] = {}
        # Of one hierarchy, as each has a cgroup of every pod.
        parents = [
            *(f"{root}/kubepods.slice{under}" for root in self._slices[:1] for under in _SLICES),
            *(f"{root}/kubepods{under}" for root in self._plain[:1] for under in _PLAIN),
        ]
        self._list_parents = [list_folder(Path(parent)) for parent in parents]

    def has_cgroup(self, uid: str) -> bool:
        """Return whether a pod has a cgroup now."""
        folder = self._folders.get(uid)
        if folder is not None:
            return os.path.exists(folder)  # noqa: PTH110  # asked each tick, without a Path
        for found in self._candidates(uid):
            if os.path.exists(found):  # noqa: PTH110  # as above
                if len(self._folders) >= MAX_NAMES:
                    self._folders.clear()
                self._folders[uid] = found
                return True
        return False

    def list_names(self) -> list[str]:
        """Return the names of the pods' cgroups, and of others beside them."""
        return [name for list_names in self._list_parents for name in list_names() if "pod" in name]

    def _candidates(self, uid: str) -> list[str]:
        # systemd nests slices by the dashes of their names, so a UID's own become underscores.
        pod = f"pod{uid.replace('-', '_')}.slice"
        slices = [f"kubepods.slice/kubepods-{pod}"]
        slices += [f"kubepods.slice/kubepods-{qos}.slice/kubepods-{qos}-{pod}" for qos in _CLASSES]
        plain = [f"kubepods/pod{uid}", *(f"kubepods/{qos}/pod{uid}" for qos in _CLASSES)]
        return [
            *(f"{root}/{folder}" for root in self._slices for folder in slices),
            *(f"{root}/{folder}" for root in self._plain for folder in plain),
        ]


class PodChanges:
    """Whether pods have come or gone, asked for each tick."""

    def __init__(self, *listers: ListNames) -> None:
        """Watch the names from these listers, each of something that every pod has."""
        self._listers = listers
        self._names: AbstractSet[str] = frozenset()

    def have_changed(self) -> bool:
        """Return whether the names are others than at the last call."""
        names = {name for lister in self._listers for name in islice(lister(), MAX_NAMES)}
        has_changed, self._names = names != self._names, names
        return has_changed


class PodFolders:
    """The pods that have a folder for their logs, by name, read twice a second at most."""

    def __init__(
        self,
        *,
        list_folders: ListNames,
        list_cgroups: ListNames,
        has_cgroup: HasCgroup,
        clock: Clock,
    ) -> None:
        """Take what returns the names of the folders of the pods' logs, and of their cgroups."""
        self._list_folders = list_folders
        self._list_cgroups = list_cgroups
        self.has_cgroup = has_cgroup
        """Whether the pod of a UID has a cgroup now."""
        self._clock = clock
        self._uids: dict[PodName, list[str]] = {}
        self._checked_ns: int | None = None
        self.shows_cgroups = False
        """Whether the node's cgroups of pods are to be seen: then a pod without one has ended. The
        agent's own pod has one, so where none shows they are not mounted, or not made."""

    def check(self) -> None:
        """Read the names, where that is not just done."""
        now_ns = self._clock.monotonic_ns()
        if self._checked_ns is not None and now_ns - self._checked_ns < _CHECK_NS:
            return
        self._checked_ns = now_ns
        self.shows_cgroups = any(True for _ in self._list_cgroups())
        self._uids = {}
        for pod, uid in read_folders(self._list_folders):
            self._uids.setdefault(pod, []).append(uid)

    def uids_of(self, pod: PodName) -> Sequence[str]:
        """Return the UIDs of the folders of a pod's name, at the last look."""
        return self._uids.get(pod, [])


class PodEnds:
    """The ends of pods, asked for each tick."""

    def __init__(self, folders: PodFolders) -> None:
        """Follow pods by the names of their folders and by their cgroups."""
        self._folders = folders
        self._uids: dict[PodName, dict[str, bool]] = {}
        """By pod, its UIDs, and whether the cgroup of each was seen."""

    def find_ended(self, pods: AbstractSet[PodName]) -> set[PodName]:
        """Return which of the pods that the kubelet lists have certainly ended.

        What is known of the others is forgotten.
        """
        silent = {pod for pod in pods if not self._is_alive(pod)}
        if not silent:
            return set()
        # Not known yet, or over: then another pod may have come under its name.
        self._folders.check()
        # The folder of a pod that is over may go before the kubelet's answer does.
        self._uids = {pod: self._uids.get(pod, {}) for pod in pods}
        for pod, uids in self._uids.items():
            for uid in self._folders.uids_of(pod):
                uids.setdefault(uid, False)
        return {pod for pod in silent if not self._is_alive(pod) and self._is_over(pod)}

    def _is_over(self, pod: PodName) -> bool:
        """Return whether one that has no cgroup had one: its folder says so where cgroups show."""
        uids = self._uids.get(pod, {})
        return bool(uids) and (self._folders.shows_cgroups or all(uids.values()))

    def _is_alive(self, pod: PodName) -> bool:
        uids = self._uids.get(pod, {})
        # The newest is the last.
        for uid in reversed(uids):
            if self._folders.has_cgroup(uid):
                uids[uid] = True
                return True
        return False


class PodUids:
    """The UIDs of the pods that are on the node now, by their names."""

    def __init__(self, folders: PodFolders) -> None:
        """Find them by the names of their folders."""
        self._folders = folders

    def find(self, namespace: str, pod: str) -> Sequence[str]:
        """Return the UIDs that a pod's name may mean: none where it is not known, else one or more.

        Those with a cgroup, where the node's cgroups are to be seen: a folder outlives its pod, and
        the folder of the pod that comes next under that name is made after its cgroup.
        """
        folders = self._folders
        folders.check()
        uids = folders.uids_of((namespace, pod))
        return [uid for uid in uids if folders.has_cgroup(uid)] if folders.shows_cgroups else uids
