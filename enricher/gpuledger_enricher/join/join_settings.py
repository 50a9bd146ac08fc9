"""The settings of the join. `gpuledger.settings` loads them."""

from typing import Annotated, Final

import msgspec

from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.groups import require_group_name

GROUP: Final = "gpuledger-join"


class JoinTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the join works through its partitions."""

    group: str = GROUP
    """Consumer group of all workers and prefix of their transactional ids. Joins with different
    groups on the same topics write every event twice."""
    max_poll_records: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    """Maximum number of records per poll. The default blocks the event loop and so heartbeats for
    less than 100 ms, at 0.15 ms per sample."""
    records_per_commit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2_000
    """Maximum number of records that are processed before their results are published and
    committed."""
    commit_interval_seconds: Annotated[float, msgspec.Meta(gt=0, le=5)] = 0.25
    """Maximum time between publishing and committing results, in seconds. Short intervals increase
    the load on workers and brokers, which delays events when they are busy."""
    poll_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """Maximum time that one poll waits for records, in seconds."""
    podwatch_timeout_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0
    """Time to wait at start for podwatch to report the pods topic complete, in seconds. Earlier
    events may lack pod names. 0 disables the wait."""
    pending_pod_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Time after which a pod without a record counts as unknown, in seconds. Events are published
    without waiting."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the group name is invalid."""
        require_group_name(self.group)


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `gpuledger join`."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-join")
    """Connection to Kafka."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9822")
    """HTTP endpoint for health and metrics."""
    log: LogSettings = LogSettings()
    """Log output."""
    join: JoinTuning = JoinTuning()
    """Join parameters."""
