"""The settings of `gpuledger-sink`: what all kinds have, and a section for each kind."""

from difflib import get_close_matches
from typing import Final

import msgspec

from gpuledger.settings import HttpSettings, KafkaSettings, LogSettings
from sinks.alerts.settings import AlertsSettings
from sinks.otlp.settings import OtlpSettings
from sinks.remote_write.settings import RemoteWriteSettings
from sinks.rows.settings import RowsSettings
from sinks.store.settings import StoreSettings

KINDS: Final = ("remote_write", "alerts", "store", "rows", "otlp")


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a sink can be told; sections of other kinds are checked and not used."""

    kind: str = ""
    """What to be: `remote_write`, `alerts`, `store`, `rows` or `otlp`."""
    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-sink")
    """How to reach the brokers."""
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9823")  # a pod's probes come from outside
    """Where health and metrics are served."""
    log: LogSettings = LogSettings()
    """What is written to standard error."""
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    """Where samples go."""
    alerts: AlertsSettings = AlertsSettings()
    """Where alerts go, and when they fire."""
    store: StoreSettings = StoreSettings()
    """Where rows go."""
    rows: RowsSettings = RowsSettings()
    """Where flat rows for SQL engines go."""
    otlp: OtlpSettings = OtlpSettings()
    """Where metrics for OpenTelemetry's collector go."""

    def __post_init__(self) -> None:
        """Refuse a kind that there is not; raises ValueError with the nearest right one."""
        if self.kind in KINDS:
            return
        if not self.kind:
            raise ValueError(f"kind: say which sink to run: gpuledger-sink {'|'.join(KINDS)}")
        nearest = get_close_matches(self.kind, KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(f"kind: there is no sink {self.kind!r}; did you mean {nearest!r}?")
