"""The settings of the store sink."""

from typing import Annotated, Final

import msgspec

_LONGEST_SECONDS: Final = 10_000_000_000
"""Three centuries: more than nanoseconds since 1970 go to."""


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the rows go and how often they are written."""

    uri: Annotated[str, msgspec.Meta(min_length=1)] = "/var/lib/gpuledger/store"
    """Folder or object-store URI of the store; the table `entries` lies under it."""
    storage_options: dict[str, str] = {}
    """Options for the object store, as deltalake names them; credentials come from the
    environment or the machine's role, not from here."""
    flush_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long rows wait at most before they are written."""
    flush_rows: Annotated[int, msgspec.Meta(ge=1)] = 100_000
    """How many rows are written at the latest."""
    flush_bytes: Annotated[int, msgspec.Meta(ge=1)] = 268_435_456
    """How many bytes the rows take in memory when they are written at the latest, about: the bound
    on memory. One event may be beyond it, by a few hundred megabytes where somebody makes it so."""
    max_age_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 2_678_400.0
    """How far back the days of rows go: 31 days, a day more than a node's disk may keep ticks. An
    event of an earlier day is put aside. Where older events are to be stored, as of a topic that is
    kept for longer, raise it for as long as that takes."""
    max_future_seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_SECONDS)] = 86_400.0
    """How far ahead of this machine's clock the days of rows go; an event of a later day is put
    aside."""
    generation: str = ""
    """Part of the name under which offsets are kept; give a new one after a topic was made anew."""
    maintenance_interval_seconds: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0
    """How often orphan files are looked for, first at the start; 0 is never."""
    orphan_age_hours: Annotated[int, msgspec.Meta(ge=1)] = 168
    """How old a file must be that no commit names before it is removed. Much longer than a write
    may take, or what another sink is about to commit would go; readers of old versions of the
    table (time travel) find what a compaction replaced for as long."""
    max_poll_records: Annotated[int, msgspec.Meta(ge=1)] = 500
    """The most events that one poll brings."""
