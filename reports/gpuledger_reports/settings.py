"""The settings of `gpuledger reports`; `gpuledger.settings` loads them."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from gpuledger.settings import HttpSettings, LogSettings

Pause = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]
_MEBIBYTE: Final = 1_048_576


class ReadStoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store to read."""

    uri: Annotated[str, msgspec.Meta(min_length=1)] = "/var/lib/gpuledger/store"
    """Directory or object-store URI of the store: `store.uri` of `gpuledger sink store`."""
    storage_options: dict[str, str] = {}
    """Object-store options, as deltalake names them; credentials come from the environment or the
    machine's role, not from here."""


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of requests."""

    max_concurrent: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Maximum number of bills made at the same time, each in its own process."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 8
    """Maximum number of requests that wait for a process; further requests fail with status 503."""
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 30.0
    """Maximum time of a request in seconds, including its wait; it then fails with status 504."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MEBIBYTE)] = 1024 * _MEBIBYTE
    """Maximum memory of DuckDB for one bill, in bytes; requests that need more fail with status
    400."""
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * _MEBIBYTE
    """Maximum size of cached answers, in bytes; they are valid until the store or the prices
    change. 0 disables the cache."""
    store_poll_interval_seconds: Pause = 15.0
    """Seconds between checks for changes of the store or the prices. Answers may be this old, or
    three times as old if checks fail."""


class CapacitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metrics `gpuledger_reports_capacity_*`."""

    metrics_interval_hours: Annotated[int, msgspec.Meta(ge=0, le=168)] = 1
    """Hours between calculations of the metrics `gpuledger_reports_capacity_*`. 0 disables them."""


class ReportsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `gpuledger reports`."""

    http: HttpSettings = HttpSettings(listen="0.0.0.0:9824")
    """The endpoints for reports, health and metrics."""
    log: LogSettings = LogSettings()
    """Logs."""
    store: ReadStoreSettings = ReadStoreSettings()
    """The store."""
    prices: Path | None = None
    """Price file (see `gpuledger bill check`); absent: built-in example prices."""
    requests: RequestSettings = RequestSettings()
    """Limits of requests."""
    capacity: CapacitySettings = CapacitySettings()
    """The metrics `gpuledger_reports_capacity_*`."""
