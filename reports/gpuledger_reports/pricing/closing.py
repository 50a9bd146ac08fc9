"""Closed bills: revisions that never change, and corrections.

The first revision of a period contains all lines. Later changes, such as late usage or a new price,
do not alter it. Instead, a further revision contains the difference for each line that changed. The
lines of all revisions therefore sum to the current bill.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import duckdb
import msgspec

from gpuledger.errors import UserError
from gpuledger.store.bill_table import BILL_LINES, append_revision
from gpuledger.store.object_files import open_object_files
from gpuledger.store.query import files_of, relation
from gpuledger_reports.pricing.billing import Approval, Bill, BillLine, Revision, gpu_count
from gpuledger_reports.pricing.line_parts import encode_parts, parts_of
from gpuledger_reports.pricing.lookup import CellKey
from gpuledger_reports.pricing.money import fraction_of, minor_digits, rounded, text_of
from gpuledger_reports.pricing.policy import BillPolicy, IdleKind
from gpuledger_reports.pricing.policy_file import ReadPolicy
from gpuledger_reports.pricing.rates import MILLIJOULES_PER_KILOWATT_HOUR
from gpuledger_reports.pricing.rows import COSTS, NUMBERS, memory_byte_seconds, row_of
from gpuledger_reports.pricing.totals import UnbalancedBillError
from gpuledger_reports.reading.charging_sql import UNITS
from gpuledger_reports.reading.times import Window, time_text
from gpuledger_reports.reading.usage_sums import memory_bound, reading_files

# Memory in exact units, which no other format has, because they need more than 64 bits.
_STORED: Final = {"memory_gibibyte_hours": "memory_byte_seconds"}
_NUMBERS: Final = tuple(_STORED.get(name, name) for name in NUMBERS)
AMOUNTS: Final = (*_NUMBERS, *COSTS)
CORRECTION: Final = "correction"
_NO_REMARKS: Final = Approval()
# Older tables lack these columns.
_NO_ROWS: Final = (
    "SELECT NULL::DECIMAL(28, 3) AS used_by_others_gpu_seconds, NULL::VARCHAR AS note,"
    " NULL::VARCHAR AS approved_by WHERE false"
)
_NS_PER_SECOND: Final = 10**9
_MILLISECONDS: Final = 1000
_MILLISECOND_UNITS: Final = UNITS * 10**6


@dataclass(frozen=True, kw_only=True)
class ClosedLine:
    """A stored line of a revision; a correction's amounts are differences."""

    line: str
    dimension_values: str
    """JSON."""
    idle_kind: str | None
    revision: int
    supersedes: int | None
    charge_class: str | None
    allocated_gpu_seconds: Decimal
    used_gpu_seconds: Decimal
    used_by_others_gpu_seconds: Decimal
    billed_gpu_seconds: Decimal
    memory_byte_seconds: Decimal
    energy_kilowatt_hours: Decimal
    gpu_cost: Decimal
    energy_cost: Decimal
    shared_cost: Decimal
    unused_cost: Decimal
    cost: Decimal
    parts: str | None
    """The line's parts by price, as JSON; `None` in corrections."""
    currency: str
    policy_name: str
    policy_sha256: str
    table_versions: str
    data_coverage_ratio: str | None
    measured_ratio: str | None
    valid_through_us: int
    closed_time_us: int
    note: str | None
    approved_by: str | None

    @property
    def approval(self) -> Approval:
        """The remarks on the line's revision."""
        return Approval(self.note, self.approved_by)

    @property
    def key(self) -> CellKey:
        """The line's unique key, like `BillLine.key`."""
        values = tuple(msgspec.json.decode(self.dimension_values, type=list[str]))
        return CellKey(values, msgspec.convert(self.idle_kind, IdleKind | None))


def refusals_of(bill: Bill) -> list[str]:
    """Return the reasons why a bill cannot be closed; empty if it can be closed."""
    reasons = []
    if not bill.is_complete:
        reasons.append("there is no usage up to the end of the period yet; close it later")
    if bill.removed_until_us is not None:
        # The removed usage may have been billed before, and a correction would refund it.
        removed = time_text(bill.removed_until_us)
        reasons.append(f"the store's retention removed usage before {removed}")
    wanted = bill.policy.policy.close.min_data_coverage_ratio
    if bill.data_coverage_ratio is not None and bill.data_coverage_ratio < wanted:
        covered = text_of(bill.data_coverage_ratio, digits=6)
        count = gpu_count(bill.unlisted_gpus)
        lacking = f"; GPUs with samples that the inventory lacks: {count}" if count else ""
        reasons.append(
            f"data coverage is {covered}, below close.min_data_coverage_ratio of {wanted}{lacking}"
        )
    if bill.unpriced:
        reasons.append(f"no price for {', '.join(bill.unpriced)}")
    if not bill.lines:
        reasons.append("there is nothing to bill")
    return reasons


def closed_lines(
    store_uri: str,
    window: Window,
    by: Sequence[str],
    storage_options: dict[str, str] | None = None,
    *,
    memory_bytes: int | None = None,
) -> list[ClosedLine]:
    """Return the lines of all revisions of a bill, ordered by revision and line.

    DuckDB uses at most `memory_bytes`, or by default most of the machine's memory. Raises
    StoreReadError if a file cannot be read.
    """
    files = [
        file
        for of_day in files_of(store_uri, BILL_LINES.name, storage_options).values()
        for file in of_day
    ]
    if not files:
        return []
    with duckdb.connect() as connection, reading_files():
        open_object_files(connection, store_uri, storage_options)
        connection.execute("SET TimeZone = 'UTC'")
        if memory_bytes is not None:
            connection.execute(memory_bound(memory_bytes))
        columns = ", ".join(
            f"epoch_us({field.name.removesuffix('_us')}) AS {field.name}"
            if field.name.endswith("_us")
            else f"coalesce({field.name}, 0) AS {field.name}"
            if field.name in _NUMBERS
            else field.name
            for field in fields(ClosedLine)
        )
        rows = connection.execute(
            f"SELECT {columns} FROM ({_NO_ROWS} UNION ALL BY NAME FROM {relation(files)})"  # noqa: S608  # quoted files
            " WHERE epoch_us(period_begin) = $begin"
            " AND epoch_us(period_end) = $end AND dimensions = $by ORDER BY revision, line",
            {"begin": window.begin_us, "end": window.end_us, "by": _json(list(by))},
        )
        names = [column[0] for column in rows.description or ()]
        return [ClosedLine(**dict(zip(names, row, strict=True))) for row in rows.fetchall()]


def close(
    bill: Bill,
    store_uri: str,
    storage_options: dict[str, str] | None = None,
    *,
    approval: Approval = _NO_REMARKS,
) -> list[dict[str, Any]]:
    """Append a revision with the differences from earlier revisions, and return its rows.

    If nothing has changed, appends and returns no rows. Raises UserError if another process closed
    the same bill meanwhile, or if the bill was closed in another currency.
    """
    earlier = closed_lines(store_uri, bill.window, bill.by, storage_options)
    if earlier and earlier[-1].currency != bill.currency:
        raise UserError(
            f"the bill was closed in {earlier[-1].currency}, but the prices are in"
            f" {bill.currency}; keep `currency: {earlier[-1].currency}`, so that corrections sum"
            f" with the bill, and add a rate for {bill.currency} to `exchange_rates`"
        )
    rows = revision_rows(bill, earlier, closed_time_us=time.time_ns() // 1000, approval=approval)
    # Earlier lines never change. Together with the new rows, they must sum to the bill.
    stands = sum((row["cost"] for row in rows), sum((line.cost for line in earlier), Decimal(0)))
    if stands != bill.line_cost:
        raise UnbalancedBillError(f"revisions sum to {stands}, lines to {bill.line_cost}")
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


@dataclass(frozen=True, kw_only=True)
class ChangeSinceClose:
    """The difference between a bill calculated now and its closed revisions."""

    revision: int
    """The last revision."""
    other_currency: str | None
    """The currency of the closed bill if it differs; `more` and `line_count` are then 0."""
    more: Decimal
    """The increase of the total cost, in the bill's currency; negative if it decreased."""
    line_count: int
    """The number of lines that changed."""


def change_since_close(bill: Bill, closed: Sequence[ClosedLine]) -> ChangeSinceClose | None:
    """Return the change from the closed revisions to a bill calculated now. Pure.

    Returns `None` if there are no revisions, or if the bill itself shows closed revisions.
    """
    if not closed or bill.revision is not None:
        return None
    last, more, count = closed[-1], Decimal(0), 0
    is_other = bill.currency != last.currency
    if not is_other:
        more = bill.line_cost - sum((line.cost for line in closed), Decimal(0))
        count = len(revision_rows(bill, closed, closed_time_us=0))
    return ChangeSinceClose(
        revision=last.revision,
        other_currency=last.currency if is_other else None,
        more=rounded(fraction_of(more), digits=minor_digits(bill.currency)),
        line_count=count,
    )


def revision_rows(
    bill: Bill,
    earlier: Iterable[ClosedLine],
    *,
    closed_time_us: int,
    approval: Approval = _NO_REMARKS,
) -> list[dict[str, Any]]:
    """Return the rows of the next revision. Pure.

    The first revision has a row for each line, a later one for each line that changed.
    """
    nothing = dict.fromkeys(AMOUNTS, Decimal(0))
    standing: dict[CellKey, dict[str, Decimal]] = defaultdict(nothing.copy)
    ids: dict[CellKey, str] = {}
    last = 0
    for closed in earlier:
        ids[closed.key] = closed.line
        last = max(last, closed.revision)
        for amount in AMOUNTS:
            standing[closed.key][amount] += getattr(closed, amount)
    # Rounded amounts, because the differences must match the amounts that were billed.
    now = {
        line.key: {**row_of(bill, line), "memory_byte_seconds": memory_byte_seconds(line)}
        for line in bill.lines
    }
    parts = {} if last else parts_of(bill)
    # A line that no longer exists is reversed in full.
    ids |= {line.key: line.id for line in bill.lines}
    rows = []
    for key, line in sorted(ids.items(), key=lambda item: (item[1], str(item[0]))):
        amounts = {
            amount: now.get(key, {}).get(amount, Decimal(0)) - standing[key][amount]
            for amount in AMOUNTS
        }
        # The first revision has every line, even if its amounts are zero.
        if last and not any(amounts.values()):
            continue
        rows.append(
            {
                "line": line,
                "dimension_values": _json(list(key.values)),
                "idle_kind": key.kind,
                "charge_class": CORRECTION if last else None,
                **amounts,
                # A correction may have several causes, so it has no price or quantity.
                "parts": None if last else encode_parts(parts[key]),
                **_of_all(bill, revision=last + 1, closed_time_us=closed_time_us),
                **approval._asdict(),
            }
        )
    return rows


def _of_all(bill: Bill, *, revision: int, closed_time_us: int) -> dict[str, Any]:
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
        "data_coverage_ratio": _fraction_text(bill.data_coverage_ratio),
        "measured_ratio": _fraction_text(bill.measured_ratio),
        "valid_through": bill.end_us,
        "closed_time": closed_time_us,
    }


def standing_bill(
    closed: Sequence[ClosedLine], *, window: Window, by: Sequence[str], policy: BillPolicy
) -> Bill:
    """Return a closed bill: the sum of its revisions.

    `closed` contains the lines of all revisions, at least one. `policy` provides only names for
    exports, such as `focus`; the costs do not depend on it.
    """
    summed: dict[CellKey, dict[str, Decimal]] = defaultdict(
        lambda: dict.fromkeys(AMOUNTS, Decimal(0))
    )
    named = {}
    for each in closed:
        named[each.key] = each
        for amount in AMOUNTS:
            summed[each.key][amount] += getattr(each, amount)
    lines = [_standing_line(named[key], amounts) for key, amounts in summed.items()]
    # Lines that were reversed in full are left out.
    lines = [line for line in lines if line.has_amounts]
    total = sum((line.cost for line in lines), Decimal(0))
    last = closed[-1]
    return Bill(
        window=window,
        end_us=last.valid_through_us,
        by=tuple(by),
        currency=last.currency,
        lines=sorted(lines, key=lambda line: (line.values, line.idle_kind or "")),
        # Equal, because an unbalanced bill cannot be closed.
        asset_cost=total,
        line_cost=total,
        exact_asset_cost=fraction_of(total),
        data_coverage_ratio=None
        if last.data_coverage_ratio is None
        else Fraction(last.data_coverage_ratio),
        measured_ratio=None if last.measured_ratio is None else Fraction(last.measured_ratio),
        excess_units=0,
        unlisted_units=0,
        unlisted_gpus=frozenset(),
        scaled_gpus=frozenset(),
        duplicate_gpus=frozenset(),
        unknown_units=0,
        unpriced={},
        budgets=[],
        gaps=[],
        policy=ReadPolicy(policy, last.policy_sha256, last.policy_name),
        versions=msgspec.json.decode(last.table_versions, type=dict[str, int | None]),
        cells={},
        shown=len(by),
        revision=last.revision,
        revisions=[
            Revision(*each)
            for each in dict.fromkeys((c.revision, c.closed_time_us, c.approval) for c in closed)
        ],
    )


def taken_back(closed: ClosedLine) -> BillLine:
    """Return the line that remains after a closed line was reversed: all its amounts are zero."""
    return _standing_line(closed, dict.fromkeys(AMOUNTS, Decimal(0)))


def _standing_line(closed: ClosedLine, amounts: dict[str, Decimal]) -> BillLine:
    allocated, used, by_others, billed = (
        int(amounts[f"{name}_gpu_seconds"] * _MILLISECONDS) * _MILLISECOND_UNITS
        for name in ("allocated", "used", "used_by_others", "billed")
    )
    return BillLine(
        id=closed.line,
        values=closed.key.values,
        idle_kind=closed.key.kind,
        allocated=allocated,
        used=used,
        by_others=by_others,
        billed=billed,
        energy_millijoules=int(amounts["energy_kilowatt_hours"] * MILLIJOULES_PER_KILOWATT_HOUR),
        memory_byte_ns=int(amounts["memory_byte_seconds"]) * _NS_PER_SECOND,
        gpu_cost=fraction_of(amounts["gpu_cost"]),
        energy_cost=fraction_of(amounts["energy_cost"]),
        shared_cost=fraction_of(amounts["shared_cost"]),
        unused_cost=fraction_of(amounts["unused_cost"]),
        cost=amounts["cost"].quantize(Decimal(1).scaleb(-minor_digits(closed.currency))),
    )


def _fraction_text(ratio: Fraction | None) -> str | None:
    return None if ratio is None else f"{ratio.numerator}/{ratio.denominator}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
