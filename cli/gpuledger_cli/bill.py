"""`gpuledger bill`: bills GPU usage from the store, and explains, checks and closes bills."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from gpuledger.clock import NS_PER_US
from gpuledger.errors import ArgumentError, UserError
from gpuledger.programs import describe_missing
from gpuledger.texts import counted
from gpuledger_cli.bill_table import Sort, bill_table
from gpuledger_cli.long_work import printing_progress
from gpuledger_cli.option_help import epilogue, range_option, time_option
from gpuledger_cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)
from gpuledger_reports.presenting.explanation import (
    conditions_text,
    explanation_of,
    match_text,
    price_text,
)
from gpuledger_reports.presenting.focus import focus_columns, focus_rows
from gpuledger_reports.presenting.output import (
    as_csv,
    as_json,
    dimensions_without_value,
    file_columns,
    file_rows,
    hours_text,
    notes_of,
    usage_text,
    write_parquet,
)
from gpuledger_reports.pricing.billing import Approval, Bill, BillMaker
from gpuledger_reports.pricing.closing import (
    ClosedLine,
    change_since_close,
    closed_lines,
    refusals_of,
    standing_bill,
)
from gpuledger_reports.pricing.closing import close as close_bill
from gpuledger_reports.pricing.money import money_text
from gpuledger_reports.pricing.periods import bill_window, month_of
from gpuledger_reports.pricing.policy import dimension_names
from gpuledger_reports.pricing.policy_file import PolicyError, read_policy
from gpuledger_reports.pricing.tenants import UNALLOCATED
from gpuledger_reports.reading.times import DAY_US, Window, time_text
from gpuledger_reports.reading.usage_sums import UsageReader

MADE: Final = 0
WRONG: Final = 1
UNPRICED: Final = 3
NOTHING: Final = 4
_WIDTH_IN_FILES: Final = 160
_HTML_MODULES: Final = frozenset({"jinja2", "markupsafe", "vl_convert"})
_CODES: Final = {
    0: "the bill is made",
    3: "the bill is made, and some GPUs have no price",
    4: "the period has nothing to bill",
}
app = App(
    name="bill",
    help_format="plaintext",
    help_epilogue=epilogue(
        "Some lines have no tenant. __idle__ is time in which a GPU was not allocated."
        " __unused__ is allocated time that its tenant does not pay for. __host__ is use by"
        " processes outside pods and jobs, and __unattributed__ is use by unknown processes."
        " __unresponsive__ is time in which a GPU did not respond, and __no_data__ is time"
        " without samples. __unknown__ is unused time in which the kubelet did not report"
        " allocations. In these lines, the column Idle shows the kind: idle, unused, overhead"
        " or no_data. __unallocated__ replaces a missing value, such as a label that a pod"
        " does not have. All lines sum to the cost of the GPUs.",
        examples={
            "The newest month, by namespace, at example prices": (
                "gpuledger bill --store gpuledger-store"
            ),
            "Last month by team and model at your own prices": (
                "gpuledger bill --store gpuledger-store --period lastmonth \\\n"
                "    --by team,model --prices prices.yaml"
            ),
            "As an HTML page": (
                "gpuledger bill --store gpuledger-store --format html --output bill.html"
            ),
        },
        codes=_CODES,
    ),
)
Format = Literal["table", "json", "csv", "parquet", "focus", "html"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BillOf:
    """The options that select a bill."""

    store: StoreUri
    period: Annotated[
        str | None,
        range_option(
            "Billing period, by default the month of the newest usage; the bill ends with the usage"
        ),
    ] = None
    from_: Annotated[
        str | None,
        time_option(
            "Start of the period instead of --period, a whole hour; -12h counts from the end of"
            " this hour",
            name="--from",
        ),
    ] = None
    to: Annotated[
        str | None,
        time_option(
            "End of the period (exclusive), a whole hour; by default the end of complete usage"
        ),
    ] = None
    by: Annotated[
        str,
        Parameter(
            help=f"Dimensions, separated by commas: {dimension_names()}. The price file may"
            " define others. The owner is the workload that created the pod."
        ),
    ] = "namespace"
    prices: Annotated[
        Path | None,
        Parameter(
            help="File of prices and policies (YAML), see `gpuledger bill check --help`; by default"
            " built-in example prices."
        ),
    ] = None
    storage_option: StorageOption = ()

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The requested dimensions, without duplicates."""
        return tuple(dict.fromkeys(name.strip() for name in self.by.split(",") if name.strip()))

    def closed(self) -> list[ClosedLine]:
        """Return the lines of all revisions of the bill; empty if it was never closed."""
        options = storage_options_of(self.storage_option)
        return closed_lines(self.store, self._window, self.dimensions, options)

    def standing(self, closed: Sequence[ClosedLine]) -> Bill:
        """Return the bill as it was closed: the sum of the lines of all its revisions."""
        policy = read_policy(self.prices).policy
        return standing_bill(closed, window=self._window, by=self.dimensions, policy=policy)

    def check_is_named(self) -> None:
        """Raise UserError if the period or the prices are missing."""
        missing = []
        if not (self.period or self.from_ or self.to):
            missing.append("--period: missing; give the period to close, such as 2026-10")
        if self.prices is None:
            missing.append(
                "--prices: missing; give the file of your prices, because the built-in ones are"
                " only examples"
            )
        if missing:
            raise UserError("; ".join(missing))

    def make(
        self, *, with_days: bool = False, with_budgets: bool = False
    ) -> tuple[Bill, BillMaker]:
        """Return the bill and its maker; raises UserError for invalid input."""
        read = read_policy(self.prices)
        with _naming_options():
            maker = BillMaker(self._reader, read, by=self.dimensions)
        window = self._window
        # Days in the future also count as progress, although they take no time.
        days = -(-(window.end_us - window.begin_us) // DAY_US)
        with printing_progress(days, what="days", done="billed") as advance:
            made = maker.make(
                window, advance=advance, with_days=with_days, with_budgets=with_budgets
            )
            return made, maker

    def arguments(self, made: Bill) -> list[str]:
        """Return the arguments that make the same bill; values of storage options become `...`."""
        times = (time_text(made.window.begin_us), "--to", time_text(made.window.end_us))
        # As absolute times, because `lastmonth` would later mean another month.
        found = ["--store", self.store, "--from", *times, "--by", ",".join(made.by)]
        found += ["--prices", str(self.prices)] if self.prices else []
        # The values of storage options may be access keys, and bills are sent to others.
        for key in storage_options_of(self.storage_option):
            found += ["--storage-option", f"{key}=..."]
        return found

    @cached_property
    def _reader(self) -> UsageReader:
        # Opened once, because it reads the log of each table, possibly from an object store.
        return UsageReader(
            self.store,
            storage_options=storage_options_of(self.storage_option),
            distinguishes_gpus="gpu" in self.dimensions,
        )

    @cached_property
    def _window(self) -> Window:
        given = {"period": self.period, "from": self.from_, "to": self.to}
        with _naming_options():
            window = bill_window(
                {name: text for name, text in given.items() if text is not None},
                now_us=time.time_ns() // NS_PER_US,
                complete_until_us=lambda: self._reader.usage_end_us,
            )
        return window or month_of(self._reader.usage_end_us)


@contextmanager
def _naming_options() -> Iterator[None]:
    """Convert an ArgumentError raised in the context to a UserError that names the option."""
    try:
        yield
    except ArgumentError as error:
        raise UserError(f"--{error.name}: {error.problem}") from error


Output = Annotated[
    Path | None,
    Parameter(help="File to write to instead of standard output; required for parquet."),
]


@app.default
def bill(
    bill_of: BillOf,
    *,
    format: Annotated[Format, Parameter(help="Format of the bill.")] = "table",  # noqa: A002  # the option's name
    output: Output = None,
    sort: Annotated[
        Sort | None,
        Parameter(
            help="With --format table: the column by which line items are sorted, highest first;"
            " by default the cost."
        ),
    ] = None,
    top: Annotated[
        int | None,
        Parameter(
            help="With --format table: number of line items to show; the row `others` is the sum of"
            " the rest.",
            validator=Number(gte=1),
        ),
    ] = None,
    focus_allocations: Annotated[
        bool,
        Parameter(help="With --format focus: the allocation columns of FOCUS 1.3.", negative=()),
    ] = False,
    recompute: Annotated[
        bool,
        Parameter(
            help="Calculate a closed period again from the current usage and prices, and show the"
            " difference.",
            negative=(),
        ),
    ] = False,
) -> int:
    """Calculate what GPUs cost and for whom; the line items sum to the cost of the GPUs.

    A closed period is shown as it was closed, with its corrections, unless --recompute is given.
    """
    # Checked before anything is read, because a bill may take a while.
    if format == "parquet" and output is None:
        raise UserError("--format parquet: missing --output; give the file to write")
    for option, given, only in (
        ("focus-allocations", focus_allocations, "focus"),
        ("sort", sort, "table"),
        ("top", top, "table"),
    ):
        if given and format != only:
            raise UserError(f"--{option}: invalid with --format {format}; add --format {only}")
    require_writable(output)
    as_html = _html_writer() if format == "html" else None
    closed = bill_of.closed()
    stands = bool(closed) and not recompute
    if stands:
        made = bill_of.standing(closed)
    else:
        made, _ = bill_of.make(
            with_days=bool(as_html), with_budgets=format in ("table", "json", "html")
        )
    if as_html:
        _write(as_html(made, closed=closed, arguments=bill_of.arguments(made)), output)
    elif format == "parquet" and output is not None:
        with written(output) as file:
            write_parquet(file_columns(made), file_rows(made), file=file)
    elif format == "focus":
        columns = [column.name for column in focus_columns(allocations=focus_allocations)]
        focus = focus_rows(made, allocations=focus_allocations, closed=closed if stands else ())
        _write(as_csv(columns, focus), output)
    elif format == "table":
        _print_table(made, output, sort or "cost", top)
    else:
        text = as_json(made) if format == "json" else as_csv([*file_columns(made)], file_rows(made))
        _write(text, output)
    _warn(made, closed)
    # Scripts check the code, so each outcome has its own.
    if not made.lines:
        return NOTHING
    return UNPRICED if made.unpriced else MADE


_PRICE_FILE: Final = """A file of prices:
  currency: EUR
  prices:
    - {name: h100, product: H100, per_gpu_hour: 3.20}
    - {name: rest, per_gpu_hour: 1.50}

The first row that matches a GPU applies. All words of `product` must be in the
GPU's model, such as NVIDIA H100 80GB HBM3. `model` is a pattern for the whole
model, case included; * matches any text."""


@app.command(
    help_epilogue=epilogue(
        _PRICE_FILE,
        examples={"Before you use it for a bill": "gpuledger bill check prices.yaml"},
        codes={0: "the file is valid", 1: "the file has errors; each is printed with its line"},
    )
)
def check(file: Annotated[Path, Parameter(help="File of prices and policies (YAML).")], /) -> int:
    """Check a file of prices and policies; list prices, teams and budgets with their conditions."""
    try:
        read = read_policy(file)
    except PolicyError as error:
        # Finding mistakes is a result of this command, not a failure, so the code is not 2.
        for mistake in error.mistakes:
            sys.stdout.write(f"{file}: {mistake}\n")
        return WRONG
    policy = read.policy
    if not (policy.prices or policy.energy):
        sys.stdout.write(f"{file}: line 1: prices: missing; without any, GPUs cost nothing\n")
        return WRONG
    counts = (
        f"{counted(len(policy.prices), 'price')} in {policy.currency}",
        counted(len(policy.energy), "energy price"),
        counted(len(policy.teams), "team row"),
        counted(len(policy.budgets), "budget"),
    )
    sys.stdout.write(f"{file}: ok: {', '.join(counts)}, sha256 {read.sha256[:12]}\n")
    for at, price in enumerate(policy.prices):
        amount = price_text(price, policy.currency)
        covering = next((each for each in policy.prices[:at] if each.covers(price)), None)
        note = f"; never applies, because {covering.name} precedes it" if covering else ""
        sys.stdout.write(f"  {price.name}: {conditions_text(price)}: {amount}{note}\n")
    for row in policy.teams:
        sys.stdout.write(f"  team {row.team}: {match_text(row)}\n")
    for budget in policy.budgets:
        amount = f"{budget.amount:f} {policy.currency}"
        sys.stdout.write(f"  budget {budget.name}: {match_text(budget)}: {amount}\n")
    return MADE


@app.command(
    help_epilogue=epilogue(
        examples={
            "Last month": (
                "gpuledger bill close --store gpuledger-store --period lastmonth \\\n"
                "    --prices prices.yaml"
            ),
            "A month by team and model": (
                "gpuledger bill close --store gpuledger-store --period 2026-10 \\\n"
                "    --prices prices.yaml --by team,model"
            ),
            "A correction with its reason": (
                "gpuledger bill close --store gpuledger-store --period 2026-10 \\\n"
                '    --prices prices.yaml --note "late usage" --approved-by "Ada, ticket 17"'
            ),
        },
        codes={
            0: "closed, or unchanged since it was closed",
            1: "not closed: usage is missing, data coverage is too low, or GPUs have no price",
        },
    )
)
def close(
    bill_of: BillOf,
    *,
    note: Annotated[
        str | None,
        Parameter(help="Note on the revision, such as the reason for a correction."),
    ] = None,
    approved_by: Annotated[
        str | None, Parameter(help="Person or document that approved the revision.")
    ] = None,
) -> int:
    """Close a period: store its line items permanently, or later changes as corrections.

    --prices and --period (or --from and --to) are required.
    """
    # Closed bills are permanent, so this command has no defaults for period and prices.
    bill_of.check_is_named()
    for option, text in (("note", note), ("approved-by", approved_by)):
        if text is not None and not text.isprintable():
            raise UserError(f"--{option}: invalid character in {text!r}; give one line of text")
    made, _ = bill_of.make()
    begin, end = map(time_text, made.window)
    what = f"{begin} to {end} by {','.join(made.by)}"
    if reasons := refusals_of(made):
        for reason in reasons:
            sys.stderr.write(f"gpuledger: {what}: not closed: {reason}\n")
        return WRONG
    rows = close_bill(
        made,
        bill_of.store,
        storage_options_of(bill_of.storage_option),
        approval=Approval(note or None, approved_by or None),
    )
    stands = f"{money_text(made.line_cost, made.currency)} {made.currency}"
    revision = rows[0]["revision"] if rows else None
    # Differences from the stored lines, with more digits than the currency has.
    net, gross = (
        f"{money_text(Fraction(sum(costs)), made.currency)} {made.currency}"
        for costs in ([row["cost"] for row in rows], [abs(row["cost"]) for row in rows])
    )
    if revision is None:
        message = f"nothing has changed since it was closed: {stands}"
        if note or approved_by:
            message += "; without a new revision, --note and --approved-by are not stored"
    elif revision == 1:
        message = f"closed as revision 1: {len(rows)} lines, {stands}"
    else:
        # The net change hides costs that move from one line to another.
        added = f"{len(rows)} correction lines, net {net}, gross {gross}"
        message = f"closed as revision {revision}: {added}; new total {stands}"
    sys.stdout.write(f"{what}: {message}\n")
    return MADE


@app.command(
    help_epilogue=epilogue(
        examples={
            "A line of October's bill by namespace": (
                "gpuledger bill explain kbe1c0d2aa17 --store gpuledger-store --period 2026-10"
            )
        },
        codes={0: "the calculation is printed"},
    )
)
def explain(
    line: Annotated[str, Parameter(help="Id of the line item, from the column Line of the bill.")],
    /,
    bill_of: BillOf,
    *,
    rows: Annotated[
        int,
        Parameter(
            help="Maximum number of usage rows to show; 0 shows all.", validator=Number(gte=0)
        ),
    ] = 20,
) -> int:
    """Show how a line item was calculated: prices, times, usage rows and their events.

    Give the same --period, --by and --prices as for the bill.
    """
    made, maker = bill_of.make()
    closed = closed_lines(
        bill_of.store, made.window, made.by, storage_options_of(bill_of.storage_option)
    )
    try:
        found = explanation_of(made, line, maker=maker, closed=closed, max_rows=rows)
    except ArgumentError as error:
        raise UserError(
            f"{error.problem}; give the `line` from `gpuledger bill … --format json`, with the same"
            " --period, --by and --prices"
        ) from error
    for text in found.texts:
        sys.stdout.write(f"{text}\n")
    return MADE


def _html_writer() -> Callable[..., str]:
    """Return the writer of HTML pages; raises UserError if its libraries are not installed."""
    try:
        # Imported only for HTML, because the library for charts takes 88 MB of memory.
        from gpuledger_reports.presenting.bill_html import as_html  # noqa: PLC0415  # see above
    except ModuleNotFoundError as error:
        if error.name not in _HTML_MODULES:
            raise
        raise UserError(f"--format html: {describe_missing(error, 'html')}") from error
    return as_html


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    with written(output) as file:
        file.write_text(text, encoding="utf-8")


def _print_table(made: Bill, output: Path | None, sort: Sort, top: int | None) -> None:
    is_terminal = output is None and sys.stdout.isatty()
    width = Console().width if is_terminal else _WIDTH_IN_FILES
    table, width = bill_table(made, width=width, sort=sort, top=top)
    if output is not None:
        with written(output) as file, file.open("w", encoding="utf-8") as text:
            Console(file=text, width=width).print(table)
        return
    Console(width=width).print(table)


def _closed_text(made: Bill, closed: Sequence[ClosedLine]) -> str:
    change = change_since_close(made, closed)
    if change is None:
        closed_at = time_text(closed[-1].closed_time_us)
        return (
            f"closed as revision {made.revision} at {closed_at};"
            " --recompute calculates it from the current usage and prices"
        )
    revision = f"closed as revision {change.revision}"
    if change.other_currency:
        return f"{revision} in {change.other_currency}, but these prices use another currency"
    if not change.line_count:
        return f"{revision}; the cost has not changed"
    more = f"{money_text(change.more, made.currency)} {made.currency}"
    return (
        f"{revision}; the cost has changed by {more} in {change.line_count} lines;"
        " `gpuledger bill close` adds correction lines"
    )


def _warn(made: Bill, closed: Sequence[ClosedLine]) -> None:
    """Write warnings about the bill to standard error."""
    if closed:
        sys.stderr.write(f"gpuledger: {_closed_text(made, closed)}\n")
    for model, units in made.unpriced.items():
        # Only a price without `model` matches GPUs whose model is unknown.
        match = "" if model == UNALLOCATED else f"model: {json.dumps(model)}, "
        sys.stderr.write(
            f"gpuledger: no price for {model}: {hours_text(units)} GPU-hours cost"
            " nothing; add a last price to the file given with --prices, such as"
            f" {{name: other, {match}per_gpu_hour: 2.50}}; patterns may have *\n"
        )
    for name in dimensions_without_value(made):
        sys.stderr.write(
            f"gpuledger: --by {name}: no line item has a value; check the spelling, and whether"
            " podwatch keeps this label\n"
        )
    for note in filter(None, (usage_text(made), *notes_of(made))):
        sys.stderr.write(f"gpuledger: {note}\n")
    if made.removed_until_us is not None:
        sys.stderr.write(
            f"gpuledger: retention has removed usage before {time_text(made.removed_until_us)};"
            " that time is billed as time without data\n"
        )
    for topic, partition, reason, missed in made.gaps:
        missing = "" if missed is None else f", {missed} offsets"
        sys.stderr.write(
            f"gpuledger: events are missing: {topic}[{partition}]: {reason}{missing}\n"
        )
