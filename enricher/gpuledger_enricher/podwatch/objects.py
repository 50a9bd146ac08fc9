"""The parts of the API server's objects that podwatch reads, as structs.

Fields have the server's names. A field may be absent or null, because servers leave out empty
values. `decode` turns the structs into records.
"""

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Raw, Struct, field

from gpuledger.records.base import MAX_NODE_NAME_LENGTH, NODE_NAME_PATTERN, Integer, Natural
from gpuledger.records.bounds import Id, Label, Subdomain, Word

Quantity = str | int | float
Time = str
# Texts must meet the rules for texts in records, because a record that consumers would reject must
# not be published.
NodeOrNone = Annotated[
    str, Meta(max_length=MAX_NODE_NAME_LENGTH, pattern=f"^$(?!\\n)|{NODE_NAME_PATTERN}")
]


class _Object(Struct, rename="camel", gc=False):
    """Base of all structs here; they have no reference cycles and need no garbage collection."""


class OwnerReference(_Object):
    """The owner of an object."""

    kind: Word
    name: Subdomain
    api_version: str = ""
    controller: bool | None = None


class Annotations(_Object):
    """The annotations to read; all other annotations, which may be long, are skipped."""


class PodAnnotations(Annotations):
    """The two annotations of a static pod's mirror.

    Users may write them to any pod, so they do not prove that a pod is a mirror. `pod_facts` has
    the full rule.
    """

    config_hash: str | None = field(default=None, name="kubernetes.io/config.hash")
    config_mirror: str | None = field(default=None, name="kubernetes.io/config.mirror")


class QueueAnnotations(Annotations):
    """The annotations with the queue of Volcano, and with the partition of Slurm's slurm-bridge."""

    of_job: str | None = field(default=None, name="volcano.sh/queue-name")
    of_pod: str | None = field(default=None, name="scheduling.volcano.sh/queue-name")
    of_slurm: str | None = field(default=None, name="slurmjob.slinky.slurm.net/partition")


NotesT = TypeVar("NotesT", bound=Annotations)


class ObjectMeta(_Object, Generic[NotesT]):
    """The metadata of an object; the reader of the object chooses the annotations."""

    uid: Id = ""
    name: Subdomain = ""
    namespace: Label = ""
    resource_version: Word = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] | None = None
    annotations: NotesT | None = None
    owner_references: list[OwnerReference] | None = None


class ClaimInUse(_Object):
    """A reference from a container to one of its pod's claims."""

    name: str


class Resources(_Object):
    """The resources that a container requests."""

    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None
    claims: list[ClaimInUse] | None = None


class Variable(_Object):
    """An environment variable of a container; without a value if it has a `valueFrom`."""

    name: str
    value: str | None = None


class ApiContainer(_Object):
    """A container in the pod's spec."""

    name: Label
    restart_policy: str | None = None
    resources: Resources | None = None
    # Not decoded: a container may have tens of variables, and very few containers have the variable
    # that podwatch reads.
    env: Raw = Raw(b"null")


class ClaimOfPod(_Object):
    """A ResourceClaim, by the name that it has in the pod."""

    name: str
    resource_claim_name: Subdomain | None = None


class SchedulingGate(_Object):
    """A gate that keeps schedulers from placing a pod."""

    name: str


class PodSpec(_Object):
    """The spec of a pod."""

    node_name: NodeOrNone | None = None
    service_account_name: str | None = None
    priority: Integer | None = None
    priority_class_name: Subdomain | None = None
    containers: list[ApiContainer] | None = None
    init_containers: list[ApiContainer] | None = None
    ephemeral_containers: list[ApiContainer] | None = None
    resource_claims: list[ClaimOfPod] | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    # Replaces the sums of the containers' requests.
    resources: Resources | None = None
    overhead: dict[str, Quantity] | None = None


class Running(_Object):
    """The state of a running container."""

    started_at: Time | None = None


class Terminated(_Object):
    """The state of a container that has ended."""

    started_at: Time | None = None
    finished_at: Time | None = None
    container_id: str | None = field(default=None, name="containerID")


class ContainerState(_Object):
    """The state of a container; both fields are absent while the container waits."""

    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Object):
    """The kubelet's status of a container."""

    name: Label
    container_id: str | None = field(default=None, name="containerID")
    restart_count: Natural = 0
    state: ContainerState | None = None
    last_state: ContainerState | None = None


class PodCondition(_Object):
    """A condition of a pod; the scheduler writes `PodScheduled`."""

    type: str = ""
    status: str = ""
    last_transition_time: Time | None = None
    reason: str | None = None
    message: str | None = None


class PodStatus(_Object):
    """The status of a pod, which the kubelet and the scheduler write."""

    phase: Word | None = None
    qos_class: Word | None = None
    start_time: Time | None = None
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    ephemeral_container_statuses: list[ContainerStatus] | None = None
    resource_claim_statuses: list[ClaimOfPod] | None = None


class MetadataOnly(_Object, Generic[NotesT]):
    """The metadata of any object."""

    metadata: ObjectMeta[NotesT]


class ApiPod(MetadataOnly[NotesT], Generic[NotesT]):
    """A pod."""

    spec: PodSpec | None = None
    status: PodStatus | None = None


class NodeSpec(_Object):
    """The spec of a node."""

    # The server omits it unless the node is cordoned.
    unschedulable: bool = False


class NodeStatus(_Object):
    """The status of a node, which the kubelet writes."""

    allocatable: dict[str, Quantity] | None = None


class ApiNode(MetadataOnly[NotesT], Generic[NotesT]):
    """A node."""

    spec: NodeSpec | None = None
    status: NodeStatus | None = None


ObjectT = TypeVar("ObjectT")


class ListMeta(_Object):
    """The version of a list, and the token of its next page."""

    resource_version: str = ""
    continue_token: str | None = field(default=None, name="continue")


class ObjectPage(_Object):
    """One page of a list. Items are not decoded here, so an invalid item does not affect others."""

    metadata: ListMeta
    items: list[Raw] | None = None


class BookmarkAnnotations(_Object):
    """The annotations of a bookmark, which may mark the end of a list."""

    initial_events_end: str | None = field(default=None, name="k8s.io/initial-events-end")


class VersionMeta(_Object):
    """The version of an object."""

    resource_version: str = ""
    annotations: BookmarkAnnotations | None = None


class VersionOnly(_Object):
    """Any object, reduced to its version."""

    metadata: VersionMeta


class IdentityMeta(_Object):
    """The identity of an object."""

    uid: str = ""
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class IdentityOnly(_Object):
    """Any object, reduced to its identity."""

    metadata: IdentityMeta


class Cause(_Object):
    """One cause of an error."""

    reason: str | None = None


class StatusDetails(_Object):
    """Details of an error."""

    causes: list[Cause] | None = None
    retry_after_seconds: int | None = None


class Status(_Object):
    """An error of the API server."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: StatusDetails | None = None

    @property
    def why(self) -> str:
        """The reason in one word: from the first cause that has one, otherwise the general one."""
        causes = (self.details.causes if self.details else None) or []
        return next((cause.reason for cause in causes if cause.reason), self.reason or "")


# The lines of a watch, by their `type`.


class AddedEvent(_Object, Generic[ObjectT], tag_field="type", tag="ADDED"):
    """An object is new, or existed when the watch began."""

    object: ObjectT


class ModifiedEvent(_Object, Generic[ObjectT], tag_field="type", tag="MODIFIED"):
    """An object changed."""

    object: ObjectT


class DeletedEvent(_Object, Generic[ObjectT], tag_field="type", tag="DELETED"):
    """An object was deleted; this is its last state."""

    object: ObjectT


class BookmarkEvent(_Object, tag_field="type", tag="BOOKMARK"):
    """A version from which a watch can resume."""

    object: VersionOnly


class ErrorEvent(_Object, tag_field="type", tag="ERROR"):
    """The error that ends a watch."""

    object: Status


class OtherEvent(_Object):
    """A line whose type is unknown, or whose object cannot be read."""

    type: str = ""
    object: Raw = Raw(b"null")
