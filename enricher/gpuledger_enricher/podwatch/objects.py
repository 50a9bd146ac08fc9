"""What is read of the API server's objects: the few fields that matter, all else is stepped over.

Here live partial structs in the server's own words. Each field may be absent or null, because a
server leaves out what is empty; `decode` says what they mean for the ledger.
"""

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Raw, Struct, field

from gpuledger.records.base import MAX_NODE_NAME_LENGTH, NODE_NAME_PATTERN, Integer, Natural
from gpuledger.records.bounds import Id, Label, Subdomain, Word

Quantity = str | int | float
Time = str
# Texts are held to the rule of the record that is made of them: one that nobody can read must not
# be published.
NodeOrNone = Annotated[
    str, Meta(max_length=MAX_NODE_NAME_LENGTH, pattern=f"^$(?!\\n)|{NODE_NAME_PATTERN}")
]


class _Object(Struct, rename="camel", gc=False):
    """Never part of a reference cycle, so the garbage collector need not look at any."""


class OwnerReference(_Object):
    """Who made an object."""

    kind: Word
    name: Subdomain
    api_version: str = ""
    controller: bool | None = None


class Annotations(_Object):
    """The annotations that are read; others can be long, and are stepped over."""


class PodAnnotations(Annotations):
    """The two annotations of a static pod's mirror.

    What a mirror is stands in `pod_facts`: these two alone anybody may write.
    """

    config_hash: str | None = field(default=None, name="kubernetes.io/config.hash")
    config_mirror: str | None = field(default=None, name="kubernetes.io/config.mirror")


NotesT = TypeVar("NotesT", bound=Annotations)


class ObjectMeta(_Object, Generic[NotesT]):
    """Who an object is; which annotations are read of it is for who reads it to say."""

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
    """Which of its pod's claims a container uses."""

    name: str


class Resources(_Object):
    """What a container requests."""

    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None
    claims: list[ClaimInUse] | None = None


class Variable(_Object):
    """A variable of a container's environment; without a value where that stands elsewhere."""

    name: str
    value: str | None = None


class ApiContainer(_Object):
    """A container as its pod specifies it."""

    name: Label
    restart_policy: str | None = None
    resources: Resources | None = None
    # Undecoded: tens of variables, of which one is wanted and nearly no container has it.
    env: Raw = Raw(b"null")


class ClaimOfPod(_Object):
    """A ResourceClaim by the name that a pod gives it."""

    name: str
    resource_claim_name: Subdomain | None = None


class PodSpec(_Object):
    """What a pod specifies."""

    node_name: NodeOrNone | None = None
    service_account_name: str | None = None
    priority: Integer | None = None
    priority_class_name: Subdomain | None = None
    containers: list[ApiContainer] | None = None
    init_containers: list[ApiContainer] | None = None
    ephemeral_containers: list[ApiContainer] | None = None
    resource_claims: list[ClaimOfPod] | None = None


class Running(_Object):
    """Since when a container runs."""

    started_at: Time | None = None


class Terminated(_Object):
    """From when until when a container ran."""

    started_at: Time | None = None
    finished_at: Time | None = None
    container_id: str | None = field(default=None, name="containerID")


class ContainerState(_Object):
    """How it stands with a container; neither of these while it waits."""

    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Object):
    """A container as the kubelet runs it."""

    name: Label
    container_id: str | None = field(default=None, name="containerID")
    restart_count: Natural = 0
    state: ContainerState | None = None
    last_state: ContainerState | None = None


class PodStatus(_Object):
    """What the kubelet says of a pod."""

    phase: Word | None = None
    qos_class: Word | None = None
    start_time: Time | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    ephemeral_container_statuses: list[ContainerStatus] | None = None
    resource_claim_statuses: list[ClaimOfPod] | None = None


class MetadataOnly(_Object, Generic[NotesT]):
    """Any object, of which only the metadata is wanted."""

    metadata: ObjectMeta[NotesT]


class ApiPod(MetadataOnly[NotesT], Generic[NotesT]):
    """A pod."""

    spec: PodSpec | None = None
    status: PodStatus | None = None


ObjectT = TypeVar("ObjectT")


class ListMeta(_Object):
    """Where a list ends, and how to get the rest of it."""

    resource_version: str = ""
    continue_token: str | None = field(default=None, name="continue")


class ObjectPage(_Object):
    """One page of a list, its items undecoded, so that a strange one does not spoil the others."""

    metadata: ListMeta
    items: list[Raw] | None = None


class BookmarkAnnotations(_Object):
    """What a bookmark says of the list that it may end."""

    initial_events_end: str | None = field(default=None, name="k8s.io/initial-events-end")


class VersionMeta(_Object):
    """At which version an object is."""

    resource_version: str = ""
    annotations: BookmarkAnnotations | None = None


class VersionOnly(_Object):
    """Any object, of which only the version is wanted."""

    metadata: VersionMeta


class IdentityMeta(_Object):
    """Which object it is."""

    uid: str = ""
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class IdentityOnly(_Object):
    """An object of which only the identity is wanted."""

    metadata: IdentityMeta


class Cause(_Object):
    """One detail of a refusal."""

    reason: str | None = None


class StatusDetails(_Object):
    """Details of a refusal."""

    causes: list[Cause] | None = None
    retry_after_seconds: int | None = None


class Status(_Object):
    """Why the server refused."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: StatusDetails | None = None

    @property
    def why(self) -> str:
        """The reason in one word; that of the first cause says more than the general one."""
        causes = (self.details.causes if self.details else None) or []
        return next((cause.reason for cause in causes if cause.reason), self.reason or "")


# A line of a watch, by its `type`.


class AddedEvent(_Object, Generic[ObjectT], tag_field="type", tag="ADDED"):
    """An object is new, or is there at the begin of a watch."""

    object: ObjectT


class ModifiedEvent(_Object, Generic[ObjectT], tag_field="type", tag="MODIFIED"):
    """An object changed."""

    object: ObjectT


class DeletedEvent(_Object, Generic[ObjectT], tag_field="type", tag="DELETED"):
    """An object is gone; it has its last state."""

    object: ObjectT


class BookmarkEvent(_Object, tag_field="type", tag="BOOKMARK"):
    """A version from which to go on."""

    object: VersionOnly


class ErrorEvent(_Object, tag_field="type", tag="ERROR"):
    """The watch ends with an error."""

    object: Status


class OtherEvent(_Object):
    """A line that is none of these: of a later type, or about an object that cannot be read."""

    type: str = ""
    object: Raw = Raw(b"null")
