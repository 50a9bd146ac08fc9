"""Closed bills: revisions that stay as they are, and corrections that sum to what changed.

The first revision of a period has its lines. What comes later, such as late usage or another price,
changes no line: a further revision has the difference for each line that changed. So the lines of
all revisions sum to the bill as it is by the last of them, and each revision to what it added.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import duckdb
import msgspec

from gpuledger.store.bill_table import BILL_LINES, append_revision
from gpuledger.store.object_files import open_object_files
from gpuledger.store.query import files_of, relation
from reports.bill_output import row_of
from reports.billing import Bill
from reports.money import text_of
from reports.usage_sums import Window

AMOUNTS: Final = ("held_gpu_seconds", "used_gpu_seconds", "charged_gpu_seconds", "cost")
CORRECTION: Final = "correction"


@dataclass(frozen=True, kw_only=True)
class ClosedLine:
    """A line of a revision, as it is stored; the amounts of a correction are differences."""

    line: str
    dimension_values: str
    """JSON."""
    idle_kind: str | None
    revision: int
    supersedes: int | None
    charge_class: str | None
    held_gpu_seconds: Decimal
    used_gpu_seconds: Decimal
    charged_gpu_seconds: Decimal
    cost: Decimal
    currency: str
    policy_name: str
    policy_sha256: str
    table_versions: str
    valid_through_us: int


def refusals_of(bill: Bill) -> list[str]:
    """Return why a bill cannot be closed; nothing where it can."""
    reasons = []
    if not bill.is_complete:
        reasons.append("there is no usage up to the end of the period yet")
    wanted = bill.policy.policy.close.min_covered_ratio
    if bill.covered_ratio is not None and bill.covered_ratio < wanted:
        covered = text_of(bill.covered_ratio, digits=6)
        reasons.append(f"ticks cover {covered} of the GPUs, close.min_covered_ratio is {wanted}")
    if bill.unpriced:
        reasons.append(f"no price for {', '.join(bill.unpriced)}")
    if not bill.lines:
        reasons.append("there is nothing to bill")
    return reasons


def closed_lines(
    store_uri: str, window: Window, by: Sequence[str], storage_options: dict[str, str] | None = None
) -> list[ClosedLine]:
    """Return the lines of all revisions of a bill, in the order of revisions and lines."""
    files = [
        file
        for of_day in files_of(store_uri, BILL_LINES.name, storage_options).values()
        for file in of_day
    ]
    if not files:
        return []
    with duckdb.connect() as connection:
        open_object_files(connection, store_uri, storage_options)
        connection.execute("SET TimeZone = 'UTC'")
        rows = connection.execute(
            "SELECT line, dimension_values, idle_kind, revision, supersedes, charge_class,"  # noqa: S608  # quoted files
            " held_gpu_seconds, used_gpu_seconds, charged_gpu_seconds, cost, currency, policy_name,"
            " policy_sha256, table_versions, epoch_us(valid_through) AS valid_through_us"
            f" FROM {relation(files)} WHERE epoch_us(period_begin) = $begin"
            " AND epoch_us(period_end) = $end AND dimensions = $by ORDER BY revision, line",
            {"begin": window.begin_us, "end": window.end_us, "by": _json(list(by))},
        )
        names = [column[0] for column in rows.description or ()]
        return [ClosedLine(**dict(zip(names, row, strict=True))) for row in rows.fetchall()]


def close(
    bill: Bill, store_uri: str, storage_options: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Append what a bill has that its earlier revisions have not; return the rows, if any.

    Raises UserError where somebody else closed the same bill meanwhile.
    """
    earlier = closed_lines(store_uri, bill.window, bill.by, storage_options)
    rows = revision_rows(bill, earlier, closed_time_us=time.time_ns() // 1000)
    if rows:
        stream = _json([*bill.window, *bill.by])
        append_revision(
            store_uri,
            rows,
            stream=f"bill|{stream}",
            revision=rows[0]["revision"],
            storage_options=storage_options,
        )
    return rows


def revision_rows(
    bill: Bill, earlier: Iterable[ClosedLine], *, closed_time_us: int
) -> list[dict[str, Any]]:
    """Return the rows of the next revision: all lines, or what changed since. Pure."""
    nothing = dict.fromkeys(AMOUNTS, Decimal(0))
    standing: dict[str, dict[str, Decimal]] = defaultdict(nothing.copy)
    known: dict[str, ClosedLine] = {}
    last = 0
    for closed in earlier:
        known.setdefault(closed.line, closed)
        last = max(last, closed.revision)
        for amount in AMOUNTS:
            standing[closed.line][amount] += getattr(closed, amount)
    # Amounts as they are shown: what was billed was rounded, and so are differences of it.
    now = {line.id: row_of(bill, line) for line in bill.lines}
    values: dict[str, tuple[str, str | None]] = {
        line.id: (_json(list(line.values)), line.idle_kind) for line in bill.lines
    }
    # A line that is gone is taken back whole.
    values |= {
        line: (closed.dimension_values, closed.idle_kind)
        for line, closed in known.items()
        if line not in values
    }
    rows = []
    for line, (dimension_values, idle_kind) in sorted(values.items()):
        amounts = {
            amount: now.get(line, {}).get(amount, Decimal(0)) - standing[line][amount]
            for amount in AMOUNTS
        }
        # The first revision has every line, also those of nothing.
        if last and not any(amounts.values()):
            continue
        rows.append(
            {
                "line": line,
                "dimension_values": dimension_values,
                "idle_kind": idle_kind,
                "charge_class": CORRECTION if last else None,
                **amounts,
                **_of_all(bill, revision=last + 1, closed_time_us=closed_time_us),
            }
        )
    return rows


def _of_all(bill: Bill, *, revision: int, closed_time_us: int) -> dict[str, Any]:
    ratio = bill.covered_ratio
    return {
        "period_begin": bill.window.begin_us,
        "period_end": bill.window.end_us,
        "dimensions": _json(list(bill.by)),
        "revision": revision,
        "supersedes": revision - 1 or None,
        "currency": bill.currency,
        "policy_name": bill.policy.name,
        "policy_sha256": bill.policy.sha256,
        "table_versions": _json(bill.versions),
        "covered_ratio": None if ratio is None else f"{ratio.numerator}/{ratio.denominator}",
        "valid_through": bill.end_us,
        "closed_time": closed_time_us,
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
