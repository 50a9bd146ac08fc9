"""`gpuledger capacity`: what a fleet of GPUs will need, from the store."""

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TextIO

import duckdb
import orjson
from cyclopts import App, Parameter

from gpuledger.errors import UserError
from gpuledger.store.views import create_views
from gpuledger.texts import find_near, shorten
from gpuledger_cli.long_work import printing_progress
from gpuledger_cli.option_help import DAYS, duration_option, epilogue, parse_whole
from gpuledger_cli.query import print_rows
from gpuledger_cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)
from gpuledger_reports.capacity.demand import DIMENSIONS, Demand, read_demand
from gpuledger_reports.capacity.outlook import COLUMNS, find_outlook
from gpuledger_reports.presenting.output import as_csv

_NOTHING: Final = 4
_MAX_DAYS: Final = 366
Format = Literal["table", "csv", "json"]
app = App(
    name="capacity",
    help="Plan capacity: what the fleet will need, from past usage in the store.",
    help_format="plaintext",
)
_HEADINGS: Final[Mapping[str, str]] = {
    "gpus": "GPUs",
    "demand": "Demand",
    "expected": "Expected",
    "low_80": "80 % from",
    "high_80": "to",
    "full_days_p10": "Full in days: P10",
    "full_days_p50": "P50",
    "full_days_p90": "P90",
    "method": "Method",
    "error": "Error",
    "coverage_80": "80 % held",
    "note": "Note",
}
"""The columns of the table, with their headings. Files have all columns under their names."""


@app.command(
    name="forecast",
    help_format="plaintext",
    help_epilogue=epilogue(
        "Demand is the mean number of GPUs that are allocated to pods and jobs. Pods that wait for"
        " GPUs are not included. Each group of GPUs is forecast by the method"
        " that was better in its past: `weekly_profile` (the usual week, and how the last day"
        " differs from it) or `seasonal_naive` (the last week again). Expected demand and bands are"
        " means of the last seven days of the horizon. `Full in days` is when demand reaches the"
        " GPUs of the last day: with P10, one of ten possible futures is full by then. `Error` is"
        " the mean absolute error of past forecasts in GPUs, and `80 % held` the share of hours"
        " that lay within past bands of 80 %.",
        examples={
            "The next four weeks by model": "gpuledger capacity forecast --store gpuledger-store",
            "The next quarter by cluster and node pool": (
                "gpuledger capacity forecast --store gpuledger-store --by cluster,pool \\\n"
                "    --horizon 90d"
            ),
            "With 64 GPUs fewer for this demand": (
                "gpuledger capacity forecast --store gpuledger-store --added -64"
            ),
        },
        codes={0: "at least one group is forecast", 4: "no group has enough history"},
    ),
)
def forecast_command(
    *,
    store: StoreUri,
    by: Annotated[
        str, Parameter(help=f"Dimensions, separated by commas: {', '.join(DIMENSIONS)}.")
    ] = "model",
    horizon: Annotated[
        str,
        duration_option(
            "How far to forecast; the history must be 27 days longer", forms=DAYS.forms
        ),
    ] = "28d",
    added: Annotated[
        float,
        Parameter(
            help="GPUs to add to each group's own before they are compared with demand; negative"
            " for GPUs that others will use.",
            allow_leading_hyphen=True,
        ),
    ] = 0.0,
    format: Annotated[Format, Parameter(help="Format of the result.")] = "table",  # noqa: A002  # the option's name
    output: Annotated[
        Path | None, Parameter(help="File to write to instead of standard output.")
    ] = None,
    storage_option: StorageOption = (),
) -> int:
    """Forecast the demand for GPUs, and when all GPUs will be allocated."""
    dimensions = _dimensions(by)
    days = parse_whole(horizon, option="--horizon", unit=DAYS, minimum=1)
    if days > _MAX_DAYS:
        raise UserError(f"--horizon: {horizon!r} is longer than {_MAX_DAYS} days")
    require_writable(output)
    with duckdb.connect() as connection:
        try:
            create_views(connection, store, storage_options_of(storage_option))
            groups = read_demand(connection, dimensions)
        except duckdb.Error as error:
            raise UserError(f"cannot read the store: {error}") from error
    rows = _outlooks(groups, dimensions, days=days, added=added)
    text = io.StringIO()
    _write(text if output else sys.stdout, format, dimensions, rows)
    if output:
        with written(output) as path:
            path.write_text(text.getvalue(), encoding="utf-8")
    return 0 if any(row["method"] for row in rows) else _NOTHING


def _dimensions(by: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in by.split(",") if name.strip()))
    if unknown := [name for name in names if name not in DIMENSIONS]:
        near = find_near(unknown[0], DIMENSIONS)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(DIMENSIONS)}"
        raise UserError(f"--by: unknown dimension {shorten(unknown[0], 40)!r}; {hint}")
    if not names:
        raise UserError(f"--by: empty; choose from {', '.join(DIMENSIONS)}")
    return names


def _outlooks(
    groups: Sequence[Demand], dimensions: Sequence[str], *, days: int, added: float
) -> list[dict[str, Any]]:
    rows = []
    with printing_progress(len(groups), what="groups of GPUs", done="forecast") as advance:
        for group in groups:
            rows.append(find_outlook(group, dimensions, days=days, added_gpus=added))
            advance(1)
    return rows


def _write(
    file: TextIO,
    format: Format,  # noqa: A002  # the option's name
    dimensions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    if format == "json":
        file.write(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif format == "csv":
        file.write(as_csv([*dimensions, *COLUMNS], map(dict, rows)))
    else:
        headings = {**{name: name.replace("_", " ").capitalize() for name in dimensions}}
        headings |= _HEADINGS
        cells = [[_cell(name, row) for name in headings] for row in rows]
        print_rows(file, [*headings.values()], cells, expanded=None)


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if name.startswith("full_days_") and row["method"]:
        return f"> {row['horizon_days']}" if value is None else f"{value:g}"
    if name == "coverage_80" and value is not None:
        return f"{value:.0%}"
    return "" if value is None else str(value)
