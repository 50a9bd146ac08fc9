"""The settings of the OTLP sink."""

from typing import Annotated, Literal

import msgspec

from sinks.otlp.naming import OF_RESOURCES

Encoding = Literal["otlp_proto", "otlp_json"]


class OtlpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the metrics go, and how they are written."""

    topic: Annotated[str, msgspec.Meta(min_length=1)] = "otlp_metrics"
    """The topic to write to; the default is the one that the collector's Kafka receiver reads. It
    is none of gpuledger's own: make it with Kafka's tools."""
    encoding: Encoding = "otlp_proto"
    """`otlp_proto` or `otlp_json`, as the receiver's own setting calls it."""
    resource_attributes: dict[str, str] = {}
    """Further attributes of every resource, such as `k8s.cluster.name`."""
    commit_interval_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """How long more is waited for after a transaction, unless a poll was full: each transaction
    costs something, however little is in it."""
    max_future_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Ticks further in the future are put aside: they would block their series at a receiver."""
    max_poll_records: Annotated[int, msgspec.Meta(ge=1)] = 200
    """The most events that one poll brings, and so the bound on a transaction."""

    def __post_init__(self) -> None:
        """Refuse an attribute that would come twice; raises ValueError naming it."""
        taken = sorted(OF_RESOURCES & self.resource_attributes.keys())
        if taken:
            raise ValueError(f"resource_attributes: {taken[0]} is the sink's own; take it out")
