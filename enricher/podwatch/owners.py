"""From who made a pod to the workload that people know it by. Pure; nothing is looked up.

The controlling owner names the workload, by its own kind and name: StatefulSet, DaemonSet, Job,
PyTorchJob, RayCluster, Workflow, whatever made the pod itself. Where it is only the means of
another, what the pod tells of itself leads there. Each rule asks for both, the kind of the maker
and the mark that the project documents, because people copy labels onto pods of all sorts:

* a workload that lets others make its pods writes its name into a label of theirs:
  `_LABELS_OF_MAKERS` has them; KubeRay writes kind and name of whom it made a cluster or Job for;
* a ReplicaSet whose name ends with the pod's `pod-template-hash` is a Deployment's, with its
  `rollouts-pod-template-hash` an Argo Rollout's;
* a Job whose name ends with minutes since the epoch that were shortly before the pod was made, two
  years at most, is a CronJob's, whose controller names Jobs so. One that was made from a CronJob
  by hand is named by whoever did it, and stays a Job.

What the pod does not tell is not known: a RayJob's cluster may be no more than a RayCluster here.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from enricher.podwatch.objects import OwnerReference

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
