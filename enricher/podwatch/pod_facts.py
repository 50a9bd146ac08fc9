"""What is read of one pod: its containers, the workload it belongs to, its annotations. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from typing import Final, cast

import msgspec

from enricher.podwatch.objects import (
    Annotations,
    ApiContainer,
    ContainerState,
    ContainerStatus,
    OwnerReference,
    PodSpec,
    PodStatus,
    Running,
    Terminated,
)
from gpuledger.records import PodContainer

Nanoseconds = Callable[[str | None], int | None]
_NO_STATE: Final = ContainerState()
_CONTAINER_ID: Final = re.compile(r"(?:[a-z0-9.+-]+://)?([0-9a-f]{64})")


def containers_of(spec: PodSpec, status: PodStatus, nanoseconds: Nanoseconds) -> list[PodContainer]:
    """Return the containers of all three kinds: as their status names them, else as asked for."""
    found = [
        *_of_one_kind(spec.init_containers, status.init_container_statuses, nanoseconds),
        *_of_one_kind(spec.containers, status.container_statuses, nanoseconds),
        *_of_one_kind(spec.ephemeral_containers, status.ephemeral_container_statuses, nanoseconds),
    ]
    # A list that grew has room for more; of a hundred thousand pods that is 3 MB for nothing.
    return found.copy()


def last_end_ns(containers: Sequence[PodContainer]) -> int | None:
    """Return when the last of the containers ended; `None` where one that was started has not."""
    last = None
    for one in containers:
        if one.ended_time_ns is not None:
            last = max(last or 0, one.ended_time_ns)
        elif one.container_id or one.started_time_ns is not None:
            return None
    return last


def _of_one_kind(
    asked: Sequence[ApiContainer] | None,
    running: Sequence[ContainerStatus] | None,
    nanoseconds: Nanoseconds,
) -> list[PodContainer]:
    if not (asked or running):
        return []
    by_name = {one.name: one for one in running or ()}
    names = dict.fromkeys(one.name for one in asked or ()) | dict.fromkeys(by_name)
    return [_container(name, by_name.get(name), nanoseconds) for name in names]


def _container(name: str, status: ContainerStatus | None, nanoseconds: Nanoseconds) -> PodContainer:
    if status is None:
        return PodContainer(name=intern(name), restarts=0)
    container_id = _id_of(status.container_id)
    last = (status.last_state or _NO_STATE).terminated
    last_id = _id_of(last.container_id) if last else None
    life = _life(status.state or _NO_STATE, last if last_id == container_id else None)
    return PodContainer(
        name=intern(name),
        container_id=container_id,
        restarts=status.restart_count,
        started_time_ns=nanoseconds(life.started_at) if life else None,
        ended_time_ns=nanoseconds(life.finished_at) if isinstance(life, Terminated) else None,
        previous_container_id=None if last_id == container_id else last_id,
    )


def _life(state: ContainerState, last: Terminated | None) -> Running | Terminated | None:
    """Return the life of the container that the status names.

    One that waits for its restart is named by the id of its last life, and only `lastState` tells
    of that.
    """
    return state.running or state.terminated or last


def _id_of(container_id: str | None) -> str | None:
    """Return the id alone: `containerd://4f…` becomes `4f…`; none where nothing was started.

    A status is written by the pod's kubelet, which may write any text there. What is not of the
    form that runtimes give their containers, and cgroups show, is none.
    """
    found = _CONTAINER_ID.fullmatch(container_id) if container_id else None
    return found[1] if found else None


# From who made a pod to the workload that people know it by. Pure; nothing is looked up.
#
# The controlling owner names the workload, by its own kind and name: StatefulSet, DaemonSet, Job,
# PyTorchJob, RayCluster, Workflow, whatever made the pod itself. Where it is only the means of
# another, what the pod tells of itself leads there. Each rule asks for both, the kind of the maker
# and the mark that the project documents, because people copy labels onto pods of all sorts:
#
# * a workload that lets others make its pods writes its name into a label of theirs:
#   `_LABELS_OF_MAKERS` has them; KubeRay writes kind and name of whom it made a cluster or Job for;
# * a ReplicaSet whose name ends with the pod's `pod-template-hash` is a Deployment's, with its
#   `rollouts-pod-template-hash` an Argo Rollout's;
# * a Job whose name ends with minutes since the epoch that were shortly before the pod was made,
#   two years at most, is a CronJob's, whose controller names Jobs so. One that was made from a
#   CronJob by hand is named by whoever did it, and stays a Job.
#
# What the pod does not tell is not known: a RayJob's cluster may be no more than a RayCluster here.

Owner = tuple[str, str]
_NS_PER_MINUTE: Final = 60_000_000_000
_MAX_MINUTES_LATE: Final = 2 * 366 * 24 * 60
# The two times are of two clocks.
_MAX_MINUTES_EARLY: Final = 5
_RAY_NAME: Final = "ray.io/originated-from-cr-name"
_RAY_KIND: Final = "ray.io/originated-from-crd"
_MADE_BY_RAY: Final = frozenset({"Job", "RayCluster"})

# By kind of the maker: the label with the workload's name, and the workload's kind.
_LABELS_OF_MAKERS: Final[Mapping[str, Sequence[Owner]]] = {
    "Job": (
        ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
        # Of an MPIJob's pods only the launcher is a Job's.
        ("training.kubeflow.org/job-name", "MPIJob"),
    ),
    "StatefulSet": (("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),),
    "ReplicaSet": (("serving.kserve.io/inferenceservice", "InferenceService"),),
    # Spark's driver makes the executors.
    "Pod": (("sparkoperator.k8s.io/app-name", "SparkApplication"),),
}
_LABELS_WITH_A_HASH: Final[Sequence[Owner]] = (
    ("rollouts-pod-template-hash", "Rollout"),
    ("pod-template-hash", "Deployment"),
)


def known_owner(
    references: Sequence[OwnerReference] | None, labels: Mapping[str, str], *, created_time_ns: int
) -> Owner | tuple[None, None]:
    """Return kind and name of the workload; `created_time_ns` is when the pod was made."""
    maker = next((one for one in references or () if one.controller), None)
    if maker is None:
        return None, None
    return (
        _by_label(maker.kind, labels)
        or _by_name(maker, labels, created_time_ns)
        or (maker.kind, maker.name)
    )


def _by_label(maker: str, labels: Mapping[str, str]) -> Owner | None:
    if maker in _MADE_BY_RAY and (kind := labels.get(_RAY_KIND)) and (ray := labels.get(_RAY_NAME)):
        return kind, ray
    for label, kind in _LABELS_OF_MAKERS.get(maker, ()):
        if name := labels.get(label):
            return kind, name
    return None


def _by_name(
    maker: OwnerReference, labels: Mapping[str, str], created_time_ns: int
) -> Owner | None:
    match maker.kind:
        case "ReplicaSet":
            return _by_hash(maker.name, labels)
        case "Job":
            return _by_minute(maker.name, created_time_ns)
        case _:
            return None


def _by_hash(replica_set: str, labels: Mapping[str, str]) -> Owner | None:
    for label, kind in _LABELS_WITH_A_HASH:
        if (template := labels.get(label)) and replica_set.endswith(f"-{template}"):
            return kind, replica_set.removesuffix(f"-{template}")
    return None


def _by_minute(job: str, created_time_ns: int) -> Owner | None:
    name, _, minute = job.rpartition("-")
    if not (name and minute.isascii() and minute.isdigit()):
        return None
    late = created_time_ns // _NS_PER_MINUTE - int(minute)
    return ("CronJob", name) if -_MAX_MINUTES_EARLY <= late <= _MAX_MINUTES_LATE else None


# Which annotations are read of a pod. Pure.
#
# The others are stepped over where they stand: they can be long, up to 256 KiB for all of a pod's.

_FIXED: Final = {field.encode_name: field.name for field in msgspec.structs.fields(Annotations)}


class ChosenAnnotations:
    """The annotations that the settings ask for, as a struct to decode and as a dictionary."""

    def __init__(self, names: Iterable[str]) -> None:
        wanted = dict.fromkeys(names)
        self._attributes = {
            intern(name): _FIXED.get(name, f"chosen_{number}") for number, name in enumerate(wanted)
        }
        self.struct = _struct(
            {name: attribute for name, attribute in self._attributes.items() if name not in _FIXED}
        )

    def of(self, annotations: Annotations) -> dict[str, str]:
        """Return those that a pod has."""
        found: dict[str, str] = {}
        for name, attribute in self._attributes.items():
            value = getattr(annotations, attribute)
            if value is not None:
                found[name] = value
        return found


def _struct(attributes: dict[str, str]) -> type[Annotations]:
    """Make the struct that has a field for each name, besides those that are always read."""
    made = msgspec.defstruct(
        "ChosenAnnotations",
        [
            (attribute, str | None, msgspec.field(default=None, name=name))
            for name, attribute in attributes.items()
        ],
        bases=(Annotations,),
        gc=False,
    )
    return cast("type[Annotations]", made)
