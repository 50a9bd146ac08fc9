"""An event to rows of the table `entries`: one row an entry, values in the order of its columns.

Here lives how the values of `gpuledger.ledger.rows` are written to the store. Pure; no Arrow, no
table.
"""

from collections.abc import Iterator
from itertools import starmap
from typing import Any, Final

import orjson

from gpuledger.ledger.entries import Origin, booked_entries
from gpuledger.ledger.rows import ColumnType, row_maker, store_columns
from gpuledger.records import GpuEvent

Row = tuple[Any, ...]


def rows_of(event: GpuEvent, origin: Origin) -> Iterator[Row]:
    """Return one row for each entry of each GPU of the event, and of each settlement.

    Raises ValueError where `booked_entries` does.
    """
    return starmap(_make_row, booked_entries(event, origin))


def _as_json(labels: dict[str, str]) -> str:
    return orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()


_make_row: Final = row_maker(
    store_columns(),
    {
        ColumnType.DAY: "{} // 86_400_000_000_000",
        ColumnType.TIME: "{} // 1000",
        ColumnType.DURATION: "{} / 1e9",
        ColumnType.FLAG: "bool({})",
        # The text, not the word, which is of a class of its own.
        ColumnType.CODE: "{}.value",
        ColumnType.LABELS: "as_json({})",
    },
    {"as_json": _as_json},
)
