"""The settings of the rows sink."""

from typing import Annotated

import msgspec

from gpuledger.topics import ROWS


class RowsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the flat rows go."""

    topic: Annotated[str, msgspec.Meta(min_length=1)] = ROWS.name
    """The topic to write to; a node's rows lie in the partition of its events, modulo its own."""
    commit_interval_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """How long more is waited for after a transaction, unless a poll was full: each transaction
    costs something, however little is in it."""
    max_future_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Ticks further in the future are put aside: an engine that goes by event time would take all
    that comes after them for late."""
    max_poll_records: Annotated[int, msgspec.Meta(ge=1)] = 500
    """The most events that one poll brings, and so the bound on a transaction."""
