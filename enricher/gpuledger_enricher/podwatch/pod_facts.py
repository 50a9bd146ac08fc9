"""Reads the facts of one pod. Pure.

These are its containers, its workload, its annotations, the static pod that it mirrors, and the
GPUs that its containers request. A comment above each part describes the rules.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from sys import intern
from typing import Final, Generic, NamedTuple, cast

import msgspec
from msgspec import Raw

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.pod_requests import amounts_together
from gpuledger.records import ContainerRequest, PodContainer
from gpuledger_enricher.podwatch.objects import (
    ApiContainer,
    ContainerState,
    ContainerStatus,
    NotesT,
    OwnerReference,
    PodAnnotations,
    PodCondition,
    PodSpec,
    PodStatus,
    Quantity,
    QueueAnnotations,
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
    """Reads the containers of pods, with their requests for GPU resources."""

    def __init__(self, *, nanoseconds: Nanoseconds, gpu_resource_prefixes: Iterable[str]) -> None:
        self._nanoseconds = nanoseconds
        self._requests = RequestReader(gpu_resource_prefixes)

    def read(self, spec: PodSpec, status: PodStatus) -> list[PodContainer]:
        """Return the containers of all kinds, from spec and status."""
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
        # The copy has no spare room, unlike a list that grew; this saves 3 MB for 100,000 pods.
        return found.copy()

    def _of_one_kind(
        self,
        kind: str | None,
        specs: Sequence[ApiContainer] | None,
        statuses: Sequence[ContainerStatus] | None,
        claims: Mapping[str, str],
    ) -> Iterator[PodContainer]:
        # Most pods have only one of the three kinds.
        if not (specs or statuses):
            return
        by_name = {status.name: status for status in statuses or ()}
        # In the order of the spec, followed by containers that are only in the status.
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
    """Return when the last container ended; `None` if a started container has not ended."""
    last = None
    for container in containers:
        if container.ended_time_ns is not None:
            last = max(last or 0, container.ended_time_ns)
        elif container.container_id or container.started_time_ns is not None:
            return None
        # Otherwise the container never ran: for example, its image could not be pulled.
    return last


def pod_scheduled(status: PodStatus) -> PodCondition | None:
    """Return the condition with which the scheduler reports whether the pod has a node."""
    return next((each for each in status.conditions or () if each.type == "PodScheduled"), None)


_QUEUE_LABELS: Final = (
    # kueue.sigs.k8s.io/docs/tasks/run/plain_pods
    "kueue.x-k8s.io/queue-name",
    # KAI Scheduler, and Run:ai before it.
    "kai.scheduler/queue",
    "runai/queue",
    # Volcano's jobs have this name as a label and as an annotation of their pods.
    "volcano.sh/queue-name",
)


def queue_of(labels: Mapping[str, str], notes: QueueAnnotations | None) -> str | None:
    """Return the queue to which a pod was submitted; `None` if it names no queue."""
    named = [labels.get(name) for name in _QUEUE_LABELS]
    named += [notes.of_job, notes.of_pod, notes.of_slurm] if notes else []
    return next(filter(None, named), None)


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
    # While a container waits for its restart, its id is the id of its last run, and only
    # `lastState` has the times of this run.
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
    """Return only the id: `containerd://4f…` becomes `4f…`; `None` if no container was started.

    The kubelet writes the status, and may write any text as the id. Return `None` if the text does
    not have the form of container ids in cgroup paths.
    """
    found = _CONTAINER_ID.fullmatch(container_id) if container_id else None
    return found[1] if found else None


# The workload of a pod, derived from the pod's controlling owner; no other object is read.
#
# The controlling owner is the workload, with its own kind and name: StatefulSet, DaemonSet, Job,
# PyTorchJob, RayCluster, Workflow, or another kind that created the pod. If the owner only acts for
# another object, the pod's own labels lead to that object. Each rule requires both the owner's kind
# and the label that the project documents, because users copy labels onto pods of all kinds.
#
# * A workload whose pods are created by other controllers writes its name into a label of the pods:
#   `_LABELS_OF_MAKERS` lists these labels. KubeRay writes the kind and the name of the object for
#   which it created a cluster or a Job.
# * A ReplicaSet whose name ends with the pod's `pod-template-hash` belongs to a Deployment; if it
#   ends with the pod's `rollouts-pod-template-hash`, it belongs to an Argo Rollout.
# * A Job whose name ends with a time in minutes since the epoch, up to two years before the pod was
#   created, belongs to a CronJob, whose controller names Jobs in this way. A Job that was created
#   by hand from a CronJob has a name chosen by a person, and counts as a Job.
#
# Relations without a label on the pod are unknown: the cluster of a RayJob may appear only as a
# RayCluster.

Owner = tuple[str, str]
_MAX_MINUTES_LATE: Final = 2 * 366 * 24 * 60
# The minute in the name and the creation time come from two clocks.
_MAX_MINUTES_EARLY: Final = 5
_RAY_NAME: Final = "ray.io/originated-from-cr-name"
_RAY_KIND: Final = "ray.io/originated-from-crd"
_MADE_BY_RAY: Final = frozenset({"Job", "RayCluster"})

# By the controlling owner's kind: the label with the workload's name, and the workload's kind.
_LABELS_OF_MAKERS: Final[Mapping[str, Sequence[Owner]]] = {
    "Job": (
        ("jobset.sigs.k8s.io/jobset-name", "JobSet"),
        # Only the launcher among an MPIJob's pods belongs to a Job.
        ("training.kubeflow.org/job-name", "MPIJob"),
    ),
    "StatefulSet": (("leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),),
    "ReplicaSet": (("serving.kserve.io/inferenceservice", "InferenceService"),),
    # Spark's driver creates the executors.
    "Pod": (("sparkoperator.k8s.io/app-name", "SparkApplication"),),
}
_LABELS_WITH_A_HASH: Final[Sequence[Owner]] = (
    ("rollouts-pod-template-hash", "Rollout"),
    ("pod-template-hash", "Deployment"),
)


def known_owner(
    references: Sequence[OwnerReference] | None, labels: Mapping[str, str], *, created_time_ns: int
) -> Owner | tuple[None, None]:
    """Return kind and name of a pod's workload; `None` and `None` without a controlling owner.

    `created_time_ns` is the time of the pod's creation.
    """
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


# The annotations of an object.
#
# Only chosen annotations are decoded, because all annotations of an object can have 256 KiB.


class ChosenAnnotations(Generic[NotesT]):
    """Reads the annotations that the settings name.

    `struct` is the type that decodes them, and `of` returns them as a dictionary.
    """

    def __init__(self, names: Iterable[str], *, base: type[NotesT]) -> None:
        """Choose `names`; `base` is the struct with the annotations that are always read."""
        fixed = {field.encode_name: field.name for field in msgspec.structs.fields(base)}
        # Attributes are numbered, because an annotation's name is not an identifier. Annotations in
        # `base` already have a field, and a second field with the same encoded name is an error.
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
        """Return the chosen annotations that an object has."""
        found: dict[str, str] = {}
        for name, attribute in self._attributes.items():
            value = getattr(annotations, attribute)
            if value is not None:
                found[name] = value
        return found


# Mirrors of static pods, and the hashes by which cgroup paths name static pods.
#
# A static pod belongs to the kubelet: it runs under a UID that the kubelet derives from its
# manifest. In the API server, it has a mirror, which contains this UID in two annotations. A person
# who may create pods may write these annotations on any pod, and could have the use of another pod
# attributed to this pod. So a mirror must have everything that a kubelet gives it: both annotations
# with the same value, the Node as its owner, and no service account. The API server gives a service
# account to every pod except mirrors. docs/concepts/security.md describes the remaining attacks.

MAX_HASH_LENGTH: Final = 64
"""Maximum length of a static pod's hash. A kubelet's hash has 32 characters, and a UID from a
manifest 36."""


def mirrored_hash(
    notes: PodAnnotations, spec: PodSpec, owners: Sequence[OwnerReference] | None
) -> str | None:
    """Return the hash of the static pod that this pod mirrors; `None` if it is not a mirror."""
    name = notes.config_hash
    if not name or name != notes.config_mirror or len(name) > MAX_HASH_LENGTH:
        return None
    if spec.service_account_name or not owners or len(owners) != 1:
        return None
    (owner,) = owners
    is_node = owner.kind == "Node" and owner.api_version == "v1"
    return name if is_node and owner.name == spec.node_name else None


# The GPUs that a container requests.
#
# Amounts are the amounts in the spec, in the unit of each resource. `nvidia.com/gpu` counts GPUs or
# replicas. HAMi's `nvidia.com/gpumem` and Volcano's `volcano.sh/vgpu-memory` are in MiB, Alibaba's
# `aliyun.com/gpu-mem` in GiB, `nvidia.com/gpucores` and similar ones in percent of a GPU. The MPS
# limit is in an environment variable. A claim has the name of its ResourceClaim: from the pod's
# spec, or from its status if the claim was created from a template.

_MAX_AMOUNT: Final = 2**63 - 1
_MAX_AMOUNTS: Final = 10_000
"""Quantities whose amounts are remembered, because pods of a workload have the same."""
_QUANTITY: Final = re.compile(
    r"\+?([0-9]{1,20}\.?[0-9]{0,20}|\.[0-9]{1,20})(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_SCALES: Final = {
    **{unit: Decimal(1000) ** power for power, unit in enumerate("num", start=-3)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}
_MPS_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_BYTES: Final = _MPS_VARIABLE.encode()
_PERCENTAGE: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]+)?")
_decode_variables: Final = msgspec.json.Decoder(list[Variable] | None).decode


class RequestReader:
    """Reads the GPU resources, claims and MPS limit that containers request."""

    def __init__(self, gpu_resource_prefixes: Iterable[str]) -> None:
        self._prefixes = tuple(gpu_resource_prefixes)
        self._shared = SharedRequests()

    def read(
        self, container: ApiContainer, claim_names: Mapping[str, str]
    ) -> ContainerRequest | None:
        """Return a container's request; `None` if the container does not request GPUs.

        `claim_names` maps names in the pod's spec to the names of ResourceClaims. Raise
        `msgspec.ValidationError` if the container's `env` is invalid.
        """
        resources = container.resources or _NO_RESOURCES
        amounts = {}
        # Devices cannot be overcommitted, so a limit without a request is a request as well.
        for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
            if name.startswith(self._prefixes) and (amount := parse_amount(str(quantity))):
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


class Amounts(NamedTuple):
    """CPU and memory."""

    cpu_millicores: int
    memory_bytes: int


def amounts_of(quantities: Mapping[str, Quantity] | None) -> Amounts | None:
    """Return the CPU and memory of a list of resources; `None` if one of them is invalid.

    A resource that is not in the list is zero.
    """
    found = quantities or {}
    cpu = parse_amount(str(found.get("cpu", 0)), 1_000)
    memory = parse_amount(str(found.get("memory", 0)))
    return None if cpu is None or memory is None else Amounts(cpu, memory)


def requested_of(spec: PodSpec) -> Amounts | None:
    """Return the CPU and memory that must be free on a node, by the scheduler's rules.

    Return `None` if an amount is invalid.
    """
    kinds = [
        ("sidecar" if each.restart_policy == "Always" else "init", each)
        for each in spec.init_containers or ()
    ]
    kinds += [("", each) for each in spec.containers or ()]
    requested = [
        (kind, amounts_of((each.resources or _NO_RESOURCES).requests)) for kind, each in kinds
    ]
    of_pod = (spec.resources or _NO_RESOURCES).requests or {}
    total, overhead = amounts_of(of_pod), amounts_of(spec.overhead)
    known = [(kind, amounts._asdict()) for kind, amounts in requested if amounts]
    if total is None or overhead is None or len(known) < len(requested):
        return None
    sums = amounts_together(known)
    cpu = total.cpu_millicores if "cpu" in of_pod else sums.get("cpu_millicores", 0)
    memory = total.memory_bytes if "memory" in of_pod else sums.get("memory_bytes", 0)
    return Amounts(
        min(cpu + overhead.cpu_millicores, _MAX_AMOUNT),
        min(memory + overhead.memory_bytes, _MAX_AMOUNT),
    )


def claim_names(spec: PodSpec, status: PodStatus) -> Mapping[str, str]:
    """Return the names of a pod's ResourceClaims by their names in the pod's spec.

    Claims that have not been created from their templates yet are omitted.
    """
    claims = [*(spec.resource_claims or ()), *(status.resource_claim_statuses or ())]
    return {claim.name: claim.resource_claim_name for claim in claims if claim.resource_claim_name}


def mps_ratio(env: Raw) -> float | None:
    """Return the part of a GPU's threads that a container may use under MPS, from 0 to 1.

    Return `None` if the container's variables do not set it or if the value is not a percentage: a
    value may refer to another variable or come from a ConfigMap. Raise `msgspec.ValidationError` if
    `env` is not a list of variables.
    """
    if _MPS_BYTES not in bytes(env):
        return None
    # If a name occurs twice, the last value counts.
    values = [each.value for each in _decode_variables(env) or () if each.name == _MPS_VARIABLE]
    if not values or not values[-1] or not _PERCENTAGE.fullmatch(values[-1]):
        return None
    ratio = round(float(values[-1]) / 100, 6)
    return ratio if ratio <= 1 else None


@lru_cache(maxsize=_MAX_AMOUNTS)
def parse_amount(text: str, per_unit: int = 1) -> int | None:
    """Return a Kubernetes quantity such as `63770m` or `1.5Gi`, multiplied by `per_unit`.

    Fractions are rounded up, as schedulers do. Return `None` if the text is not a quantity; the
    result is at most the maximum of a record's field.
    """
    found = _QUANTITY.fullmatch(text)
    if not found:
        return None
    digits, suffix, exponent = found.groups()
    amount = Decimal(digits) * per_unit * _SCALES.get(suffix or "", 1)
    amount = amount.scaleb(int(exponent or 0)).to_integral_value(ROUND_CEILING)
    return min(int(amount), _MAX_AMOUNT)
