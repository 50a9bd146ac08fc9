"""The settings of the join. Loading them is `gpuledger.settings`' business."""

from typing import Annotated

import msgspec

from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings


class JoinTuning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the join works through its partitions."""

    records_per_poll: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 500
    """The most records taken at once: what is booked, published and committed together. At 0.15 ms
    a tick the default keeps the event loop busy for less than 100 ms, so that heartbeats live."""
    poll_timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    """How long to wait for records before looking around again."""


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `gpuledger-join` can be told."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-join")
    """The brokers."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9822")
    """Health and metrics."""
    log: LogSettings = LogSettings()
    """Logs."""
    join: JoinTuning = JoinTuning()
    """The work itself."""
