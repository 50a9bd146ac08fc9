"""The settings of the join. Loading them is `gpuledger.settings`' business."""

from typing import Annotated, Final

import msgspec

from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_group_name

GROUP: Final = "gpuledger-join"


class JoinTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the join works through its partitions."""

    group: str = GROUP
    """The consumer group of all workers, and the beginning of the names of their transactions: two
    joins that write the same topics under different names would each write every event."""
    max_poll_records: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    """The most records taken at once. At 0.15 ms a tick the default keeps the event loop busy for
    less than 100 ms, so that heartbeats live."""
    records_per_commit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2_000
    """The most records whose work is gathered before it is published and committed."""
    commit_interval_seconds: Annotated[float, msgspec.Meta(gt=0, le=5)] = 0.25
    """How long work is gathered before it is published and committed. More often costs workers and
    brokers more, and so makes events later where they are busy."""
    poll_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """How long to wait for records before looking around again."""
    podwatch_timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0
    """How long ticks wait after a start for podwatch to say that the topic of pods is complete: an
    event that leaves before stays without its pod's name. It says so every few seconds while it
    runs; where it does not, work begins without it after that time. 0 waits for nothing."""
    pending_pod_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long the record of a pod that a tick names is waited for, before it counts as unknown.
    Events wait for nothing."""

    def __post_init__(self) -> None:
        """Refuse what names no group; raises ValueError."""
        require_group_name(self.group)


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `gpuledger join` can be told."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-join")
    """The brokers."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9822")
    """Health and metrics."""
    log: LogSettings = LogSettings()
    """Logs."""
    join: JoinTuning = JoinTuning()
    """The work itself."""
