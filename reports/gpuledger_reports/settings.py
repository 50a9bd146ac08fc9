"""The settings of `gpuledger reports`. Loading them is `gpuledger.settings`' business."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from gpuledger.settings import HttpSettings, LogSettings

Pause = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]
_MEBIBYTE: Final = 1_048_576


class ReadStoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store that is read."""

    uri: Annotated[str, msgspec.Meta(min_length=1)] = "/var/lib/gpuledger/store"
    """Folder or object-store URI of the store: the `store.uri` of `gpuledger sink store`."""
    storage_options: dict[str, str] = {}
    """Options for the object store, as deltalake names them; credentials come from the environment
    or the machine's role, not from here."""


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests may cost."""

    max_concurrent: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Maximum number of bills made at the same time, each in a process of its own."""
    max_waiting: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 8
    """How many requests wait for their turn; one more is answered 503."""
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=600)] = 30.0
    """How long a request may take, with what it waits; then it is answered 504, and its work
    ended."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MEBIBYTE)] = 1024 * _MEBIBYTE
    """The most memory that DuckDB takes for one bill; what needs more is answered 400."""
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * _MEBIBYTE
    """The most memory of answers that are kept for as long as the store and the prices are the
    same; 0 keeps none."""
    store_poll_interval_seconds: Pause = 15.0
    """How often is looked whether the store or the prices have changed: so old an answer may be,
    and three times as old where the store cannot be looked at."""


class ReportsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `gpuledger reports` can be told."""

    http: HttpSettings = HttpSettings(listen="0.0.0.0:9824")
    """Reports, health and metrics."""
    log: LogSettings = LogSettings()
    """Logs."""
    store: ReadStoreSettings = ReadStoreSettings()
    """The store."""
    prices: Path | None = None
    """File of prices and policies (`gpuledger bill check`); absent means built-in examples."""
    requests: RequestSettings = RequestSettings()
    """What requests may cost."""
