"""Finds the container, the pod and the scheduler's job in a process's cgroup paths.

This module parses the lines of `/proc/<pid>/cgroup` with pure functions. It opens no files and does
not look up the names of pods.

A path is split into segments at `/` and at `:`, because containerd writes `slice:cri-containerd:id`
into one path element. Only whole segments are matched: `libpod-<64 hex>` contains `pod` and a
desktop's scope may contain a UUID, but neither is a pod.

If a path contains several pods, the outermost pod counts: the kubelet created that pod's cgroup,
but the pod itself may have created cgroups below, with another pod's UID in their names. If the
node is itself a container in a pod (kind in a cluster), all paths start with that pod. The agent's
own path reveals this prefix, which is then removed.

With cgroup version 2, a container usually has its own cgroup namespace. An agent in such a
namespace sees paths relative to its own cgroup: the node's root is a number of `/..` above it. The
path of the node's process 1 reveals the number; a path that starts with as many `/..` starts at the
node's root.

A job is recognized only by the cgroup that Slurm creates at the root of the node's hierarchy, where
only root can create cgroups. In version 1 that is `/slurm/uid_<uid>/job_<id>` of each controller;
in version 2, `/system.slice/slurmstepd.scope/job_<id>`. Since Slurm 26.05, version 2 has the job's
SLUID instead of `job_<id>`, unless `cgroup.conf` sets CgroupJobIdPaths; the SLUID then identifies
the job. If several slurmd run on a machine, each node's name is added: `slurm_<name>` and
`<name>_slurmstepd.scope`. A directory `job_7` anywhere else, such as in a user's slice, is not a
job. If a path contains both a pod and a job, the process belongs to the pod, because the kubelet's
information is more specific.

A newer Slurm or kubelet may name its cgroups in another form. A process below `slurmstepd.scope` or
`kubepods` without a pod, a job or a container is therefore not the host's: its job is the name of
the cgroup, after `unrecognized:`. Slurm's own processes are in `slurmstepd.scope/system`. If the
agent is in a pod with its own cgroup namespace, `kubepods` is not in the paths, but the agent is
below it. The same applies to a process whose path starts with `/..`, but with fewer than the node's
root.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import dropwhile, takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from gpuledger.records.bounds import MAX_JOB_ID_LENGTH
from gpuledger_agent.core.processes.table import Location

_HEX_ID: Final = "[0-9a-f]{64}"
_UUID: Final = "[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
# A static pod has a configuration hash of 32 digits instead of a UID.
_POD: Final = re.compile(rf"(?:.*-)?pod({_UUID}|[0-9a-f]{{32}})(?:\.slice)?")
# Other names with an id are not containers: `crio-conmon-<id>` is a container's monitor, and
# `<id>.mount` its file system.
_CONTAINER: Final = re.compile(
    rf"(?:(?:cri-containerd|crio|docker|libpod|libpod-payload|nerdctl)-)?({_HEX_ID})(?:\.scope)?"
)
# A node's name is a host name or a NodeName of `slurm.conf`, so it may contain many characters.
_SLURM_V1: Final = re.compile(r"slurm(?:_[^/]+)?")
_SLURM_V2: Final = re.compile(r"(?:[^/]+_)?slurmstepd\.scope")
_SLURM_USER: Final = re.compile(r"uid_\d{1,10}", re.ASCII)
_JOB: Final = re.compile(r"job_(\d{1,20})", re.ASCII)
_SLUID: Final = re.compile(r"(s[0-9A-Z]{13})", re.ASCII)
_SLURMS_OWN: Final = "system"
# The cgroups of all pods and of classes of pods. A kubelet with `--cgroup-root` adds a prefix.
_KUBEPODS: Final = re.compile(r"(?:.*-)?kubepods(?:\.slice)?")
_KUBEPODS_CLASS: Final = re.compile(r"(?:.*-)?(?:burstable|besteffort)(?:\.slice)?")
UNRECOGNIZED: Final = "unrecognized:"
"""Beginning of a job's id that is the name of an unrecognized cgroup."""
_PROC_LINE: Final = re.compile(r"\d+:([^:]*):(.*)", re.ASCII | re.DOTALL)
# The kernel appends this to the path if the process has outlived its cgroup.
_DELETED: Final = " (deleted)"
_UP: Final = ".."
_SYSTEM_SLICE: Final = "system.slice"
_CONTROLLERS: Final = ("name=systemd", "", "memory", "pids", "devices", "cpu,cpuacct")


class _CgroupLine(NamedTuple):
    text: str
    controllers: str
    path: str

    @property
    def segments(self) -> list[str]:
        """The path split at `/` and `:`."""
        return re.split("[/:]", self.path)


NodePaths = Mapping[str, tuple[str, ...]]
"""For each cgroup hierarchy, by its controllers: the segments of a path before the node's root.

If paths of a hierarchy start at the node's root, the hierarchy is left out. Paths have such a
prefix if the node is a container in a pod, or if the agent has its own cgroup namespace.
"""


class _Place(NamedTuple):
    """The container, pod and job in one cgroup path; `None` if the path does not contain them."""

    container_id: str | None = None
    pod_uid: str | None = None
    job_id: str | None = None


_NOWHERE: Final = _Place()


def locate(
    text: str, *, node_paths: NodePaths = MappingProxyType({}), is_in_pod: bool = False
) -> Location:
    """Return the container, pod or job of a process.

    `text` is the content of `/proc/<pid>/cgroup` or a single path, and `is_in_pod` whether the
    agent runs in a pod. If the lines differ, a line with a pod counts first, then a job, then a
    container. Lines can differ, because in a hybrid hierarchy the paths of some controllers end at
    an outer container or contain no job.
    """
    parsed = _parse(text)
    found = [
        (_locate_path(line.segments, node_paths.get(line.controllers, ()), is_in_pod), line)
        for line in parsed
    ]
    if not found:
        return Location()

    def rank(located: tuple[_Place, _CgroupLine]) -> tuple[bool, bool, bool, bool, int]:
        place, line = located
        known = line.controllers in _CONTROLLERS
        has_known_job = place.job_id is not None and not place.job_id.startswith(UNRECOGNIZED)
        preference = _CONTROLLERS.index(line.controllers) if known else len(_CONTROLLERS)
        return (
            place.pod_uid is None,
            not has_known_job,
            place.container_id is None,
            place.job_id is None,
            preference,
        )

    place, line = min(found, key=rank)
    # For a process of the host, show the first line.
    if place == _NOWHERE:
        line = parsed[0]
    return Location(
        container_id=place.container_id,
        pod_uid=place.pod_uid,
        job_id=place.job_id,
        line=line.text,
    )


def find_node_paths(agents_text: str, first_text: str = "") -> NodePaths:
    """Return the segments that precede the node's root in cgroup paths.

    `agents_text` and `first_text` are the contents of `/proc/<pid>/cgroup` of the agent and of the
    node's process 1. The node's kubelet created the agent's innermost pod, so the segments before
    that pod belong to the node. If the node is a machine, no other pod precedes the agent's pod,
    and there is no prefix. Process 1 is at the node's root or directly below it, so each `..` at
    the start of its path leads out of the agent's cgroup namespace.
    """
    paths = {}
    for line in _parse(first_text):
        _, *segments = line.segments
        if upwards := tuple(takewhile(_UP.__eq__, segments)):
            paths[line.controllers] = ("", *upwards)
    for line in _parse(agents_text):
        segments = line.segments
        pods = [index for index, segment in enumerate(segments) if _POD.fullmatch(segment)]
        # If there is only one pod, the node is a machine, not a container in a pod.
        if len(pods) > 1:
            # The node runs in the last pod or container before the agent's pod.
            last_of_node = max(
                index
                for index, segment in enumerate(segments[: pods[-1]])
                if _POD.fullmatch(segment) or _CONTAINER.fullmatch(segment)
            )
            paths[line.controllers] = tuple(segments[: last_of_node + 1])
    return paths


def _parse(text: str) -> list[_CgroupLine]:
    parsed = []
    # The kernel ends lines only with \n; a cgroup's name may contain other line separators.
    for line in text.split("\n"):
        if line.strip():
            matched = _PROC_LINE.fullmatch(line)
            # A bare path, for example typed by a person, is accepted too.
            controllers, path = matched.groups() if matched else ("", line)
            path = path.removesuffix(_DELETED)
            parsed.append(_CgroupLine(text=line, controllers=controllers, path=path))
    return parsed


def _locate_path(
    segments: Sequence[str],
    node_path: tuple[str, ...],
    is_in_pod: bool,  # noqa: FBT001
) -> _Place:
    """Return the outermost pod in a path, and the first container after it.

    If there is no pod, return the first container and the job instead. The first container counts,
    because a Docker container inside a pod still belongs to the pod's container. A job is
    recognized only directly below the node's root, which `node_path` leads to.
    """
    # An absolute path starts with a slash, so its first segment is empty.
    root = node_path or ("",)
    is_below = tuple(segments[: len(root)]) == root
    if is_below:
        segments = segments[len(root) :]
    elif is_in_pod and root[-1] == _UP and segments[1:2] == [_UP]:
        segments = ["kubepods", *dropwhile(_UP.__eq__, segments[1:])]
    elif root[-2:] == (_UP, _UP) and tuple(segments[: len(root) - 1]) == root[:-1]:
        # With one `..` less, the path is in the agent's own top-level slice, but does not name it.
        # With Docker and Slurm, that slice is system.slice. Only root can create cgroups directly
        # below a top-level slice.
        is_below, segments = True, [_SYSTEM_SLICE, *segments[len(root) - 1 :]]
    pods = ((index, found) for index, found in enumerate(map(_POD.fullmatch, segments)) if found)
    index, pod = next(pods, (-1, None))
    containers = (_CONTAINER.fullmatch(segment) for segment in segments[index + 1 :])
    container = next(filter(None, containers), None)
    job_id = _job_of(segments) if is_below and not pod else None
    if not (pod or container or job_id):
        name = (_unknown_job_of(segments) if is_below else None) or _unknown_pod_of(segments)
        job_id = name and f"{UNRECOGNIZED}{name}"[:MAX_JOB_ID_LENGTH]
    return _Place(
        container_id=container and container[1],
        pod_uid=pod and pod[1].replace("_", "-"),
        job_id=job_id,
    )


def _job_of(segments: Sequence[str]) -> str | None:
    """Return the job's id in a path that starts at the node's root; `None` if there is no job."""
    match segments:
        case [root, user, job, *_] if _SLURM_V1.fullmatch(root) and _SLURM_USER.fullmatch(user):
            found = _JOB.fullmatch(job)
        case ["system.slice", scope, job, *_] if _SLURM_V2.fullmatch(scope):
            found = _JOB.fullmatch(job) or _SLUID.fullmatch(job)
        case _:
            found = None
    return found and found[1]


def _unknown_job_of(segments: Sequence[str]) -> str | None:
    """Return the name of a cgroup in which Slurm runs a job, if the path has no job's id."""
    match segments:
        case ["system.slice", scope, name, *_] if _SLURM_V2.fullmatch(scope):
            return None if name == _SLURMS_OWN else f"{scope}/{name}"
    return None


def _unknown_pod_of(segments: Sequence[str]) -> str | None:
    """Return the path's `kubepods` cgroup and the next cgroup below it.

    The cgroups of classes of pods are left out, unless no other cgroup is below `kubepods`. Return
    `None` if the path contains no `kubepods`.
    """
    found = list(dropwhile(lambda segment: not _KUBEPODS.fullmatch(segment), segments))
    if not found:
        return None
    kubepods, *below = found
    # A process may be in the cgroup of a class itself.
    unknown = list(dropwhile(_KUBEPODS_CLASS.fullmatch, below)) or below
    return "/".join([kubepods, *unknown[:1]])
