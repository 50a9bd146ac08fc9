"""Parties: who a row of usage is of, as the row says it, and what is known of pods. Pure."""

from typing import Literal, NamedTuple

PartyKind = Literal["nobody", "pod", "job", "host", "unattributed"]


class PartyKey(NamedTuple):
    """Whose a row is, as the row says it."""

    cluster: str
    node: str
    kind: PartyKind
    uid: str | None = None
    namespace: str | None = None
    pod: str | None = None
    job: str | None = None
    is_named_by_row: bool = False
    """Whether the names are enough: nothing is asked that pods' records say."""


class PodVersion(NamedTuple):
    """What is known of a pod from a time on."""

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
        """What a bill may be made by."""
        owner = (self.owner_kind, self.owner_name)
        return (self.namespace, self.pod, *owner, self.labels, self.annotations)
