"""What is read of one pod. Pure.

Its containers, the workload it belongs to, its annotations, the static pod that it mirrors, and
what its containers ask for of GPUs; each part has its rules above it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import intern
from typing import Final, Generic, cast

import msgspec
from msgspec import Raw

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.records import ContainerRequest, PodContainer
from gpuledger_enricher.podwatch.objects import (
    ApiContainer,
    ContainerState,
    ContainerStatus,
    NotesT,
    OwnerReference,
    PodAnnotations,
    PodSpec,
    PodStatus,
    Quantity,
    Resources,
    Terminated,
    Variable,
)
from gpuledger_enricher.watched_records import SharedRequests

Nanoseconds = Callable[[str | None], int | None]
_NO_STATE: Final = ContainerState()
_NO_RESOURCES: Final = Resources()
_CONTAINER_ID: Final = re.compile(r"(?:[a-z0-9.+-]+://)?([0-9a-f]{64})")


class ContainerReader:
    """Reads the containers of pods."""

    def __init__(self, *, nanoseconds: Nanoseconds, gpu_resource_prefixes: Iterable[str]) -> None:
        self._nanoseconds = nanoseconds
        self._requests = RequestReader(gpu_resource_prefixes)

    def read(self, spec: PodSpec, status: PodStatus) -> list[PodContainer]:
        """Return those of all kinds: as their status names them, else as specified."""
        claims = claim_names(spec, status)
        found = [
            *self._of_one_kind(
                "init", spec.init_containers, status.init_container_statuses, claims
            ),
            *self._of_one_kind(None, spec.containers, status.container_statuses, claims),
            *self._of_one_kind(
                "ephemeral", spec.ephemeral_containers, status.ephemeral_container_statuses, claims
            ),
        ]
        # A list that grew has room for more; of a hundred thousand pods that is 3 MB for nothing.
        return found.copy()

    def _of_one_kind(
        self,
        kind: str | None,
        specs: Sequence[ApiContainer] | None,
        statuses: Sequence[ContainerStatus] | None,
        claims: Mapping[str, str],
    ) -> Iterator[PodContainer]:
        # Two of three kinds are absent in most pods.
        if not (specs or statuses):
            return
        by_name = {status.name: status for status in statuses or ()}
        # In the order of the spec; those that only the status has come last.
        for spec in specs or ():
            is_sidecar = kind == "init" and spec.restart_policy == "Always"
            yield _container(
                spec.name,
                by_name.pop(spec.name, None),
                self._nanoseconds,
                kind="sidecar" if is_sidecar else kind,
                requested=self._requests.read(spec, claims),
            )
        for status in by_name.values():
            yield _container(status.name, status, self._nanoseconds, kind=kind)


def last_end_ns(containers: Sequence[PodContainer]) -> int | None:
    """Return when the last of the containers ended; `None` where one that was started has not."""
    last = None
    for container in containers:
        if container.ended_time_ns is not None:
            last = max(last or 0, container.ended_time_ns)
        elif container.container_id or container.started_time_ns is not None:
            return None
        # Else it never ran: an image that could not be pulled, or a pod that was evicted before.
    return last


def _container(
    name: str,
    status: ContainerStatus | None,
    nanoseconds: Nanoseconds,
    *,
    kind: str | None,
    requested: ContainerRequest | None = None,
) -> PodContainer:
    if status is None:
        return PodContainer(name=intern(name), kind=kind, requested=requested, restarts=0)
    container_id = _id_of(status.container_id)
    last = (status.last_state or _NO_STATE).terminated
    last_id = _id_of(last.container_id) if last else None
    state = status.state or _NO_STATE
    # One that waits for its restart is named by the id of its last life, and only `lastState` has
    # the times of that.
    life = state.running or state.terminated or (last if last_id == container_id else None)
    return PodContainer(
        name=intern(name),
        kind=kind,
        requested=requested,
        container_id=container_id,
        restarts=status.restart_count,
        started_time_ns=nanoseconds(life.started_at) if life else None,
        ended_time_ns=nanoseconds(life.finished_at) if isinstance(life, Terminated) else None,
        previous_container_id=None if last_id == container_id else last_id,
    )


def _id_of(container_id: str | None) -> str | None:
    """Return the id alone: `containerd://4f…` becomes `4f…`; none where nothing was started.

    A status is written by the pod's kubelet, which may write any text there. What is not of the
    form that runtimes give their containers, and cgroups show, is none.
    """
    found = _CONTAINER_ID.fullmatch(container_id) if container_id else None
    return found[1] if found else None


# From who made a pod to the workload that people know it by; nothing is looked up.
#
# The controlling owner names the workload, by its own kind and name: StatefulSet, DaemonSet, Job,
# PyTorchJob, RayCluster, Workflow, whatever made the pod itself. Where it is only the means of
# another, the pod's own labels lead there. Each rule needs both, the kind of the maker
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
# What the pod has no label of is not known: a RayJob's cluster may be no more than a RayCluster
# here.

Owner = tuple[str, str]
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
    maker = next((reference for reference in references or () if reference.controller), None)
    if maker is None:
        return None, None
    if owner := _by_label(maker.kind, labels):
        return owner
    if maker.kind == "ReplicaSet":
        for label, kind in _LABELS_WITH_A_HASH:
            template_hash = labels.get(label)
            if template_hash and maker.name.endswith(f"-{template_hash}"):
                return kind, maker.name.removesuffix(f"-{template_hash}")
    if maker.kind == "Job" and (owner := _by_minute(maker.name, created_time_ns)):
        return owner
    return maker.kind, maker.name


def _by_label(maker: str, labels: Mapping[str, str]) -> Owner | None:
    if maker in _MADE_BY_RAY and (kind := labels.get(_RAY_KIND)) and (ray := labels.get(_RAY_NAME)):
        return kind, ray
    for label, kind in _LABELS_OF_MAKERS.get(maker, ()):
        if name := labels.get(label):
            return kind, name
    return None


def _by_minute(job: str, created_time_ns: int) -> Owner | None:
    name, _, minute = job.rpartition("-")
    if not (name and minute.isascii() and minute.isdigit()):
        return None
    late = created_time_ns // NS_PER_MINUTE - int(minute)
    return ("CronJob", name) if -_MAX_MINUTES_EARLY <= late <= _MAX_MINUTES_LATE else None


# Which annotations are read of an object.
#
# The others are stepped over where they stand: they can be long, 256 KiB for all of an object's.


class ChosenAnnotations(Generic[NotesT]):
    """The annotations that the settings name, as a struct to decode and as a dictionary."""

    def __init__(self, names: Iterable[str], *, base: type[NotesT]) -> None:
        """Take the names, and the struct with the annotations that are read in any case."""
        fixed = {field.encode_name: field.name for field in msgspec.structs.fields(base)}
        # Attributes by number, as an annotation's name is no identifier. Fixed ones have a field
        # already, and a second one of the same encoded name is an error.
        self._attributes = {
            intern(name): fixed.get(name, f"chosen_{index}")
            for index, name in enumerate(dict.fromkeys(names))
        }
        struct = msgspec.defstruct(
            "ChosenAnnotations",
            [
                (attribute, str | None, msgspec.field(default=None, name=name))
                for name, attribute in self._attributes.items()
                if name not in fixed
            ],
            bases=(base,),
            gc=False,
        )
        self.struct = cast("type[NotesT]", struct)

    def of(self, annotations: NotesT) -> dict[str, str]:
        """Return those that an object has."""
        found: dict[str, str] = {}
        for name, attribute in self._attributes.items():
            value = getattr(annotations, attribute)
            if value is not None:
                found[name] = value
        return found


# Which pods are the mirrors of static pods, and by which hash cgroup paths call those.
#
# A static pod is the kubelet's own: it runs under a UID that the kubelet made of its manifest, and
# in the API server it has a mirror, which says that UID in two annotations. Whoever may create pods
# may write those annotations on any pod, and so would get the name of another one's use. A mirror
# is known by all that a kubelet makes it with: both annotations, alike; the Node as its owner; and
# no service account, which the API server gives to every pod but a mirror. docs/security.md
# says what that leaves to somebody hostile.

MAX_HASH_LENGTH: Final = 64
"""A kubelet's hash has 32 characters, and a UID of a manifest 36."""


def mirrored_hash(
    notes: PodAnnotations, spec: PodSpec, owners: Sequence[OwnerReference] | None
) -> str | None:
    """Return the hash of the static pod whose mirror this is; `None` where it is none."""
    name = notes.config_hash
    if not name or name != notes.config_mirror or len(name) > MAX_HASH_LENGTH:
        return None
    if spec.service_account_name or not owners or len(owners) != 1:
        return None
    (owner,) = owners
    is_node = owner.kind == "Node" and owner.api_version == "v1"
    return name if is_node and owner.name == spec.node_name else None


# What a container asks for of GPUs.
#
# Amounts stand as the spec has them, in each resource's own unit: `nvidia.com/gpu` counts GPUs or
# replicas, HAMi's `nvidia.com/gpumem` and Volcano's `volcano.sh/vgpu-memory` MiB, Alibaba's
# `aliyun.com/gpu-mem` GiB, `nvidia.com/gpucores` and the like percent of a GPU. MPS is told by a
# variable. A claim is named as the ResourceClaim is: by the pod's spec, or, of one that was made
# for the pod from a template, by its status.

_SUFFIXES: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_MAX_AMOUNT: Final = 2**63 - 1
_MAX_DIGITS: Final = 30
_MPS_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_BYTES: Final = _MPS_VARIABLE.encode()
_PERCENTAGE: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]+)?")
_decode_variables: Final = msgspec.json.Decoder(list[Variable] | None).decode


class RequestReader:
    """Reads what containers ask for of GPUs."""

    def __init__(self, gpu_resource_prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(gpu_resource_prefixes)
        self._shared = SharedRequests()

    def read(
        self, container: ApiContainer, claim_names: Mapping[str, str]
    ) -> ContainerRequest | None:
        """Return what it asks for, `None` for nothing; `claim_names` are those of its pod."""
        resources = container.resources or _NO_RESOURCES
        amounts = {}
        # Devices cannot be overcommitted, so a limit without a request is a request as well.
        for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
            if name.startswith(self._prefixes) and (amount := parse_quantity(quantity)):
                amounts[intern(name)] = amount
        used = [
            claim_names[claim.name] for claim in resources.claims or () if claim.name in claim_names
        ]
        ratio = mps_ratio(container.env)
        if not (amounts or used or ratio is not None):
            return None
        return self._shared.of(
            ContainerRequest(
                resources=amounts,
                mps_active_thread_ratio=ratio,
                claims=list(dict.fromkeys(used)) or None,
            )
        )


def claim_names(spec: PodSpec, status: PodStatus) -> Mapping[str, str]:
    """Return the names of a pod's ResourceClaims by those that its spec gives them.

    A claim that is still to be made from its template has none.
    """
    claims = [*(spec.resource_claims or ()), *(status.resource_claim_statuses or ())]
    return {claim.name: claim.resource_claim_name for claim in claims if claim.resource_claim_name}


def mps_ratio(env: Raw) -> float | None:
    """Return the part of a GPU's threads that a container's variables allow it under MPS.

    `None` where they say nothing, or nothing that is a percentage: a value may refer to another
    variable, or stand in a ConfigMap. Raises `msgspec.ValidationError` for what are no variables.
    """
    if _MPS_BYTES not in bytes(env):
        return None
    # Of two of one name the last one is the container's.
    values = [each.value for each in _decode_variables(env) or () if each.name == _MPS_VARIABLE]
    if not values or not values[-1] or not _PERCENTAGE.fullmatch(values[-1]):
        return None
    ratio = round(float(values[-1]) / 100, 6)
    return ratio if ratio <= 1 else None


def parse_quantity(quantity: Quantity) -> int:
    """Return a whole Kubernetes quantity such as `2` or `1k`; 0 for what is none.

    One that a record cannot hold is the largest that it can.
    """
    text = str(quantity)
    digits = text.rstrip("kMGi")
    # `isdigit` alone is true of digits of other scripts, which `int` reads too.
    if not (digits.isascii() and digits.isdigit()):
        return 0
    suffix = text[len(digits) :]
    # Of more digits than any amount has Python makes no number.
    amount = int(digits.lstrip("0")[:_MAX_DIGITS] or 0) * (
        _SUFFIXES.get(suffix, 0) if suffix else 1
    )
    return min(amount, _MAX_AMOUNT)
