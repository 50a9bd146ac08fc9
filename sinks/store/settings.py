"""The settings of the store sink."""

import msgspec


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the rows go and how often they are written."""

    uri: str = "/var/lib/gpuledger/store"
    """Folder or object-store URI of the store; the table `entries` lies under it."""
    storage_options: dict[str, str] = {}
    """Options for the object store, as deltalake names them; credentials come from the
    environment or the machine's role, not from here."""
    flush_seconds: float = 30.0
    """How long rows wait at most before they are written."""
    flush_rows: int = 100_000
    """How many rows are written at the latest: the bound on memory."""
    generation: str = ""
    """Part of the name under which offsets are kept; give a new one after a topic was made anew."""
    poll_records: int = 500
    """The most events that one poll brings."""
