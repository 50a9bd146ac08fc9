"""Bills as JSON, CSV and Parquet, with the same columns. Pure, except for the Parquet file.

In CSV and Parquet, each line also has the period and the state of its bill.

Times are in seconds of whole physical GPUs, with three decimals. Costs in JSON are decimal strings,
so that readers do not convert them to floats.
"""

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from gpuledger.store.query import quoted, quoted_name
from gpuledger_reports.pricing.billing import Bill, gpu_count, gpu_seconds
from gpuledger_reports.pricing.money import minor_digits, rounded
from gpuledger_reports.pricing.rows import COSTS, NUMBERS, columns_of, row_of
from gpuledger_reports.pricing.tenants import UNALLOCATED, UNKNOWN
from gpuledger_reports.reading.charging_sql import HOUR_UNITS
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.times import time_text

_SECONDS: Final = "DECIMAL(28, 3)"


def state_of(bill: Bill) -> str:
    """Return the bill's state: `open`, `provisional` once the period is over, or `closed`.

    `closed` means that the bill shows closed revisions. A closed period that is calculated again is
    `provisional`.
    """
    if bill.revision is not None:
        return "closed"
    return "provisional" if bill.is_complete else "open"


def dimensions_without_value(bill: Bill) -> list[str]:
    """Return the dimensions with a key, such as labels, for which no tenant has a value."""
    tenants = [line.values for line in bill.lines if line.idle_kind is None]
    return [
        name
        for at, name in enumerate(bill.by)
        if bill.policy.policy.may_be_misspelt(name)
        and tenants
        and all(values[at] == UNALLOCATED for values in tenants)
    ]


def usage_text(bill: Bill) -> str | None:
    """Return a note if usage does not cover the whole period, otherwise `None`."""
    if bill.usage is None:
        until = time_text(bill.end_us)
        return (
            None
            if bill.is_complete
            else f"usage is complete up to {until} only; the bill goes no further"
        )
    begin, end = map(time_text, bill.usage)
    # The oldest row of a new store is newer than the time through which usage is complete.
    if bill.usage.end_us <= bill.usage.begin_us:
        return "nothing to bill: no minute is complete yet; try again in about two minutes"
    if bill.window.end_us <= bill.usage.begin_us:
        return f"nothing to bill: usage begins at {begin}"
    if bill.usage.end_us <= bill.window.begin_us:
        return f"nothing to bill: usage is complete up to {end} only"
    return f"nothing to bill: there is usage from {begin} to {end}, but none in the period"


def notes_of(bill: Bill) -> list[str]:
    """Return the notes on GPUs that are billed in an unusual way."""
    texts = (unlisted_text, unknown_text, scaled_text, duplicate_text)
    return [note for text in texts if (note := text(bill))]


def unlisted_text(bill: Bill) -> str | None:
    """Return a note if GPUs have usage in hours without them in the inventory, otherwise `None`."""
    if not bill.unlisted_gpus:
        return None
    count = gpu_count(bill.unlisted_gpus)
    return (
        f"the inventory lacks {count} {'GPU' if count == 1 else 'GPUs'} for"
        f" {hours_text(bill.unlisted_units)} GPU-hours with samples:"
        f" {_gpus_text(bill.unlisted_gpus, at='on')}; only this time is billed for them, and it"
        " does not count as covered; restart their agents, which publish the inventory again, and"
        " check the dead-letter records"
    )


def unknown_text(bill: Bill) -> str | None:
    """Return a note if it is unknown to whom some time was allocated, otherwise `None`."""
    if not bill.unknown_units:
        return None
    return (
        f"the kubelet did not report to whom {hours_text(bill.unknown_units)} GPU-hours were"
        f" allocated; they are billed to {UNKNOWN}, not to tenants and not as idle; check the"
        " agents' check `kubelet`"
    )


def scaled_text(bill: Bill) -> str | None:
    """Return a note if more than the whole of some GPUs was allocated, otherwise `None`."""
    if not bill.scaled_gpus:
        return None
    gpus = _gpus_text(bill.scaled_gpus, at="on", of="of ")
    return (
        f"more than all of {gpus} was allocated, so each pod or job pays only for a"
        " part; see the alert GpuAllocatedTwice"
    )


def duplicate_text(bill: Bill) -> str | None:
    """Return a note if samples of some GPUs are not billed, otherwise `None`."""
    if not bill.duplicate_gpus:
        return None
    gpus = _gpus_text(bill.duplicate_gpus, at="from", of="of ")
    return (
        f"samples of {gpus} are not billed in hours in which the GPU is in the inventory of another"
        " node; see the alert GpuledgerGpuOnTwoNodes"
    )


def _gpus_text(gpus: Collection[tuple[Node, str]], *, at: str, of: str = "") -> str:
    """Return text that names one of the GPUs with its nodes, and counts the others."""
    _, first = min(gpus)
    nodes = " and ".join(sorted({node for (_, node), gpu in gpus if gpu == first}))
    others = gpu_count(gpus) - 1
    also = f" and {of}{others} other {'GPU' if others == 1 else 'GPUs'}" if others else ""
    return f"{first} {at} {nodes}{also}"


def as_json(bill: Bill) -> str:
    """Return a bill as one JSON object, with a newline at the end."""
    digits = minor_digits(bill.currency)
    content = {
        "currency": bill.currency,
        "from": time_text(bill.window.begin_us),
        "to": time_text(bill.window.end_us),
        "usage_until": time_text(bill.usage_until_us),
        "removed_until": None
        if bill.removed_until_us is None
        else time_text(bill.removed_until_us),
        "state": state_of(bill),
        "revision": bill.revision,
        "revisions": [
            {
                "revision": each.number,
                "closed_time": time_text(each.closed_time_us),
                **each.approval._asdict(),
            }
            for each in bill.revisions
        ],
        "by": bill.by,
        "lines": [
            {name: f"{value:f}" if name in COSTS else value for name, value in row.items()}
            for row in (row_of(bill, line) for line in bill.lines)
        ],
        "asset_cost": f"{rounded(Fraction(bill.asset_cost), digits=digits):f}",
        "line_cost": f"{rounded(Fraction(bill.line_cost), digits=digits):f}",
        "data_coverage_ratio": _ratio(bill.data_coverage_ratio),
        "measured_ratio": _ratio(bill.measured_ratio),
        "excess_gpu_seconds": gpu_seconds(bill.excess_units),
        "unlisted_gpus": gpu_count(bill.unlisted_gpus),
        "unlisted_gpu_seconds": gpu_seconds(bill.unlisted_units),
        "unknown_gpu_seconds": gpu_seconds(bill.unknown_units),
        "scaled_gpus": gpu_count(bill.scaled_gpus),
        "duplicate_gpus": gpu_count(bill.duplicate_gpus),
        "unpriced_gpu_seconds": {
            model: gpu_seconds(units) for model, units in bill.unpriced.items()
        },
        "budgets": [
            {
                "name": state.name,
                "amount": f"{state.amount:f}",
                "spent": f"{rounded(state.spent, digits=digits):f}",
                "elapsed_ratio": _ratio(state.elapsed),
                "forecast": None
                if state.forecast is None
                else f"{rounded(state.forecast, digits=digits):f}",
            }
            for state in bill.budgets
        ],
        "gaps": [
            dict(zip(("topic", "kafka_partition", "reason", "missed_offsets"), gap, strict=True))
            for gap in bill.gaps
        ],
        "prices": {"name": bill.policy.name, "sha256": bill.policy.sha256},
        "tables": bill.versions,
    }
    # Decimals become JSON numbers with all digits, never floats.
    encoder = msgspec.json.Encoder(decimal_format="number")
    return msgspec.json.format(encoder.encode(content), indent=2).decode() + "\n"


def file_rows(bill: Bill) -> Iterator[dict[str, Any]]:
    """Yield the lines of a bill with the columns of CSV and Parquet."""
    begin, end = map(time_text, bill.window)
    of_bill = {
        "period_begin": begin,
        "period_end": end,
        "state": state_of(bill),
        "revision": bill.revision,
    }
    for line in bill.lines:
        yield row_of(bill, line) | of_bill


def as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: f"{v:f}" if isinstance(v, Decimal) else v for name, v in row.items()}
        )
    return text.getvalue()


def write_parquet(columns: dict[str, str], rows: Iterable[dict[str, Any]], *, file: Path) -> None:
    """Write rows to a Parquet file; `columns` maps each column to its DuckDB type."""
    shape = msgspec.json.encode([dict.fromkeys(columns, "VARCHAR")]).decode()
    # Values are passed as strings and cast, because JSON has no decimals.
    texts = [
        {name: None if row[name] is None else str(row[name]) for name in columns} for row in rows
    ]
    casts = ", ".join(
        f"CAST({quoted_name(name)} AS {kind}) AS {quoted_name(name)}"
        for name, kind in columns.items()
    )
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(
            f"COPY (SELECT {casts} FROM (SELECT"  # noqa: S608  # our own names
            " unnest(from_json($rows, $shape), recursive := true)))"
            f" TO {quoted(str(file))} (FORMAT parquet, USE_TMP_FILE false)",
            {"rows": msgspec.json.encode(texts).decode(), "shape": shape},
        )


def file_columns(bill: Bill) -> dict[str, str]:
    """Return the DuckDB type of each column of `file_rows`."""
    cost = f"DECIMAL(38, {minor_digits(bill.currency)})"
    kinds = dict.fromkeys(NUMBERS, _SECONDS) | dict.fromkeys(COSTS, cost)
    kinds |= dict.fromkeys(("memory_gibibyte_hours", "energy_kilowatt_hours"), "DECIMAL(28, 6)")
    of_lines = {name: kinds.get(name, "VARCHAR") for name in columns_of(bill)}
    times = dict.fromkeys(("period_begin", "period_end"), "TIMESTAMP WITH TIME ZONE")
    return {**of_lines, **times, "state": "VARCHAR", "revision": "INTEGER"}


def hours_text(units: int, *, digits: int = 1) -> str:
    """Return GPU-hours for display, with at least `digits` decimals.

    Small numbers get more decimals, so that hours with a cost are never shown as zero.
    """
    hours = Fraction(units, HOUR_UNITS)
    while hours and abs(hours) * 10 ** (digits - 1) < 1:
        digits += 1
    return f"{rounded(hours, digits=digits):,f}"


def efficiency_text(used: Fraction | float, allocated: Fraction | float) -> str:
    """Return used over allocated time in percent for display; empty if nothing was allocated.

    Rounded down, so that incomplete use is never shown as 100 %.
    """
    return f"{int(Fraction(used) * 1000 / Fraction(allocated)) / 10:.1f} %" if allocated else ""


def _ratio(ratio: Fraction | None) -> Decimal | None:
    # Rounded down, so that incomplete coverage never shows as 1.
    if ratio is None:
        return None
    return Decimal(ratio.numerator * 10**6 // ratio.denominator).scaleb(-6)
