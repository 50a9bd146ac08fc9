"""What a cgroup path tells of a process: which container, which pod, which scheduler's job.

Here lives the reading of the lines of `/proc/<pid>/cgroup`, as pure functions over text. Nothing
here opens a file, and nothing here knows a pod by name.

A path is cut into segments at `/` and at `:` (containerd writes `slice:cri-containerd:id` into one
path element), and a segment means something only as a whole: `libpod-<64 hex>` holds the letters
`pod`, a desktop's scope holds a UUID, and neither is a pod.

Of several pods in a path the outermost counts: the kubelet made that one, and what lies below it
may be of the pod's own making, with another pod's UID in its name. Where the node is itself a
container in a pod (kind in a cluster), all paths begin with that pod; how a path of such a node
begins is taken from the agent's own, and left out.

An agent in a cgroup namespace of its own, as containers have on version 2, reads paths from its own
cgroup on: the node's root is some `/..` above it. How many shows the path of the node's process 1,
and a path that begins with just as many is one from the node's root.

A job is named by Slurm's own cgroup, and only where Slurm makes it: at the root of the node's
hierarchy, where nobody but root can make one. In version 1 that is `/slurm/uid_<uid>/job_<id>` of
each controller, with the node's name behind `slurm_` where several slurmd run on a machine; in
version 2 `/system.slice/slurmstepd.scope/job_<id>`, with the node's name before it likewise. A
folder called `job_7` anywhere else, such as in a user's own slice, is a user's, and no job. A job
in a pod is the pod's, and a pod in a job as well: the kubelet's word is the more particular one.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from gpuledger_agent.core.processes.table import Location

_HEX_ID: Final = "[0-9a-f]{64}"
_UUID: Final = "[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
# The 32 digits are the configuration hash that a kubelet gives a static pod in place of a UID.
_POD: Final = re.compile(rf"(?:.*-)?pod({_UUID}|[0-9a-f]{{32}})(?:\.slice)?")
# A closed list: `crio-conmon-<id>` is the container's monitor, `<id>.mount` its file system.
_CONTAINER: Final = re.compile(
    rf"(?:(?:cri-containerd|crio|docker|libpod|libpod-payload|nerdctl)-)?({_HEX_ID})(?:\.scope)?"
)
# Names of nodes are hosts' names or NodeName's of `slurm.conf`, and may hold what these may.
_SLURM_V1: Final = re.compile(r"slurm(?:_[^/]+)?")
_SLURM_V2: Final = re.compile(r"(?:[^/]+_)?slurmstepd\.scope")
_SLURM_USER: Final = re.compile(r"uid_\d{1,10}", re.ASCII)
_JOB: Final = re.compile(r"job_(\d{1,20})", re.ASCII)
_PROC_LINE: Final = re.compile(r"\d+:([^:]*):(.*)", re.ASCII | re.DOTALL)
# The kernel adds this to the path of a process that outlived its cgroup.
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
        """The parts of the path that mean something as a whole."""
        return re.split("[/:]", self.path)


NodePaths = Mapping[str, tuple[str, ...]]
"""By controllers, the segments that lead to the node's root, where they are not a slash alone: of a
node that is itself in a pod, or as an agent in a cgroup namespace of its own reads them."""


class _Place(NamedTuple):
    """What one path names."""

    container_id: str | None = None
    pod_uid: str | None = None
    job_id: str | None = None


_NOWHERE: Final = _Place()


def locate(text: str, *, node_paths: NodePaths = MappingProxyType({})) -> Location:
    """Return where the process of one `/proc/<pid>/cgroup`, or of one bare path, runs.

    Of several lines one with a pod wins, then one with a job, then one with a container: in a
    hybrid hierarchy some controllers may stop at an outer container, or know no job.
    """
    parsed = _parse(text)
    found = [
        (_locate_path(line.segments, node_paths.get(line.controllers, ())), line) for line in parsed
    ]
    if not found:
        return Location()

    def rank(located: tuple[_Place, _CgroupLine]) -> tuple[bool, bool, bool, int]:
        place, line = located
        known = line.controllers in _CONTROLLERS
        preference = _CONTROLLERS.index(line.controllers) if known else len(_CONTROLLERS)
        return (
            place.pod_uid is None,
            place.job_id is None,
            place.container_id is None,
            preference,
        )

    place, line = min(found, key=rank)
    # A host's process is shown by its first line, as a person would name it.
    if place == _NOWHERE:
        line = parsed[0]
    return Location(
        container_id=place.container_id,
        pod_uid=place.pod_uid,
        job_id=place.job_id,
        line=line.text,
    )


def find_node_paths(agents_text: str, first_text: str = "") -> NodePaths:
    """Return how the node's paths begin, from the cgroups of the agent and of the node's process 1.

    The agent's innermost pod is the one that the node's kubelet made; what stands before it is the
    node's. A node on its own machine has no pod there, and nothing is left out. Process 1 is at the
    node's root or in a cgroup directly below it: each `..` before that leads out of the agent's
    cgroup namespace.
    """
    paths = {}
    for line in _parse(first_text):
        _, *segments = line.segments
        if upwards := tuple(takewhile(_UP.__eq__, segments)):
            paths[line.controllers] = ("", *upwards)
    for line in _parse(agents_text):
        segments = line.segments
        pods = [index for index, segment in enumerate(segments) if _POD.fullmatch(segment)]
        # With one pod alone the path is that of an agent on a node that is a machine.
        if len(pods) > 1:
            # The last pod or container before it: the node is in that, with all its slices.
            last_of_node = max(
                index
                for index, segment in enumerate(segments[: pods[-1]])
                if _POD.fullmatch(segment) or _CONTAINER.fullmatch(segment)
            )
            paths[line.controllers] = tuple(segments[: last_of_node + 1])
    return paths


def _parse(text: str) -> list[_CgroupLine]:
    parsed = []
    # The kernel ends lines with \n alone; any other separator can stand in a cgroup's name.
    for line in text.split("\n"):
        if line.strip():
            matched = _PROC_LINE.fullmatch(line)
            # A bare path, such as a person gives, is taken for the path of any hierarchy.
            controllers, path = matched.groups() if matched else ("", line)
            path = path.removesuffix(_DELETED)
            parsed.append(_CgroupLine(text=line, controllers=controllers, path=path))
    return parsed


def _locate_path(segments: Sequence[str], node_path: tuple[str, ...]) -> _Place:
    """Return the container and the pod: the outermost pod, and the first container within it.

    The first container, because Docker in a pod is still that pod's container. Without a pod it is
    the job's where the path begins with one.
    """
    # A whole path begins with a slash, before which there is nothing.
    root = node_path or ("",)
    is_below = tuple(segments[: len(root)]) == root
    if is_below:
        segments = segments[len(root) :]
    elif root[-2:] == (_UP, _UP) and tuple(segments[: len(root) - 1]) == root[:-1]:
        # One less leads into the slice at the root in which the agent is too, without its name.
        # With Docker that is Slurm's; what is directly below any of them is made by root alone.
        is_below, segments = True, [_SYSTEM_SLICE, *segments[len(root) - 1 :]]
    pods = ((index, found) for index, found in enumerate(map(_POD.fullmatch, segments)) if found)
    index, pod = next(pods, (-1, None))
    containers = (_CONTAINER.fullmatch(segment) for segment in segments[index + 1 :])
    container = next(filter(None, containers), None)
    return _Place(
        container_id=container and container[1],
        pod_uid=pod and pod[1].replace("_", "-"),
        job_id=_job_of(segments) if is_below and not pod else None,
    )


def _job_of(segments: Sequence[str]) -> str | None:
    """Return the job of a path from the root of the node's hierarchy on; `None` outside of jobs."""
    match segments:
        case [root, user, job, *_] if _SLURM_V1.fullmatch(root) and _SLURM_USER.fullmatch(user):
            found = _JOB.fullmatch(job)
        case ["system.slice", scope, job, *_] if _SLURM_V2.fullmatch(scope):
            found = _JOB.fullmatch(job)
        case _:
            found = None
    return found and found[1]
