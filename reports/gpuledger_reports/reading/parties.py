"""The parties to which usage rows belong, and the versions of pods. Pure."""

from typing import Final, Literal, NamedTuple

PartyKind = Literal["nobody", "unknown", "pod", "job", "host", "unattributed"]
NO_PARTIES: Final = frozenset({"nobody", "unknown"})
"""The kinds of rows without a party: their time was not allocated, or its allocation is unknown."""


class PartyKey(NamedTuple):
    """Identifies the party of a row: a pod, a job, the host, none of them, or unknown."""

    cluster: str
    node: str
    kind: PartyKind
    uid: str | None = None
    namespace: str | None = None
    pod: str | None = None
    job: str | None = None
    is_named_by_row: bool = False
    """Whether the row contains all names that are needed, so that the pod's record is not used."""


class PodVersion(NamedTuple):
    """The facts about a pod that hold from a given time on."""

    cluster: str
    node: str
    uid: str
    since_us: int
    namespace: str
    pod: str
    owner_kind: str | None
    owner_name: str | None
    labels: str
    created_us: int
    deleted_us: int | None
    resource_version: str
    kafka_offset: int
    config_hash: str | None = None
    annotations: str | None = None

    @property
    def described(self) -> tuple[str | None, ...]:
        """The facts that dimensions of a bill may use."""
        owner = (self.owner_kind, self.owner_name)
        return (self.namespace, self.pod, *owner, self.labels, self.annotations)
