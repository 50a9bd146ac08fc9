"""`gpuledger compare`: scrapes dcgm-exporter and the agent for some minutes and prints differences.

`comparison` compares the pages, and `gpuledger_agent.dcgm_differences` has the known reasons.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import groupby
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuledger import __version__
from gpuledger.errors import ArgumentError, UserError
from gpuledger.runtime.http.client import HttpClient, open_http
from gpuledger.settings.groups import require_http_url
from gpuledger.settings.secret import shown_url
from gpuledger_cli.compare.comparison import Comparison, Result, Row
from gpuledger_cli.compare.dcgm_page import DcgmPage, parse_page
from gpuledger_cli.long_work import Advance, printing_progress, run_cancellable
from gpuledger_cli.option_help import duration_option, epilogue, limits, parse_seconds

Format = Literal["table", "json"]
_AGENT: Final = "http://localhost:9820"
_MAX_PAGE_BYTES: Final = 64 * 1024 * 1024
_SCRAPE_SECONDS: Final = 30.0
_WIDTH_IN_FILES: Final = 200
_ACCEPT: Final = "text/plain; version=0.0.4"
app = App(
    name="compare",
    help_format="plaintext",
    help_epilogue=epilogue(
        "Run the agent next to dcgm-exporter, on the same node and another port. The values of a"
        " series are the same if the mean on each page is between the lowest and the highest value"
        " on the other. The tolerance is 5 %, but at least 2, or 0.02 for ratios. Codes and counts"
        " are the same if both pages had the same values and end with the same one.",
        examples={
            "The agent next to dcgm-exporter, on a node": (
                "gpuledger compare http://localhost:9400 --with http://localhost:9820"
            ),
            "For ten minutes, as JSON": (
                "gpuledger compare http://localhost:9400 --for 10m --format json > rows.jsonl"
            ),
        },
        codes={
            0: "no difference without a known reason",
            1: "at least one difference without a known reason",
        },
    ),
)


@app.default
def compare(
    url: Annotated[
        str, Parameter(help="Address of dcgm-exporter; without a path, /metrics is added.")
    ],
    /,
    *,
    with_: Annotated[str, Parameter(name="--with", help="Address of the agent.")] = _AGENT,
    for_: Annotated[
        str, duration_option("How long to compare", name="--for", forms=limits(1))
    ] = "2m",
    interval: Annotated[
        str, duration_option("Time between two scrapes", forms=limits(0.1, 600))
    ] = "5s",
    format: Annotated[  # noqa: A002  # the option's name
        Format,
        Parameter(help="table: only differences. json: one object for each series and label."),
    ] = "table",
) -> int:
    """Compare the metrics of a running dcgm-exporter with those of the agent next to it."""
    theirs, ours = _page_url(url, option="URL"), _page_url(with_, option="--with")
    seconds = parse_seconds(for_, option="--for", minimum=1)
    interval_seconds = parse_seconds(interval, option="--interval", minimum=0.1, maximum=600)
    count = max(1, round(seconds / interval_seconds))
    with printing_progress(count, what="scrapes", done="compared") as advance:
        comparison = run_cancellable(
            scrape(theirs, ours, count=count, interval_seconds=interval_seconds, advance=advance)
        )
    if not comparison.common_gpus:
        raise UserError(
            f"{shown_url(theirs)} and {shown_url(ours)} have no GPU in common; give two addresses"
            " on the same node"
        )
    rows = list(comparison.rows())
    if format == "json":
        for row in rows:
            sys.stdout.write(f"{msgspec.json.encode(row).decode()}\n")
    else:
        print_table(rows, scrapes=count)
    return 1 if any(row.is_unexplained for row in rows) else 0


def _page_url(url: str, *, option: str) -> str:
    try:
        require_http_url(url)
    except ValueError as error:
        raise ArgumentError(option, str(error)) from error
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/metrics"


async def scrape(
    theirs: str, ours: str, *, count: int, interval_seconds: float, advance: Advance
) -> Comparison:
    """Scrape both pages `count` times; raises `UnavailableError` or `UserError`."""
    comparison = Comparison()
    async with open_http(
        headers={"User-Agent": f"gpuledger/{__version__}", "Accept": _ACCEPT},
        timeout_seconds=_SCRAPE_SECONDS,
    ) as http:
        for number in range(count):
            if number:
                await asyncio.sleep(interval_seconds)
            comparison.add(*await asyncio.gather(_fetch(http, theirs), _fetch(http, ours)))
            advance(1)
    return comparison


async def _fetch(http: HttpClient, url: str) -> DcgmPage:
    status, body = await http.get(url, max_bytes=_MAX_PAGE_BYTES)
    if status != HTTPStatus.OK:
        raise UserError(f"{shown_url(url)}: answered {status}; give the address of the metrics")
    page = parse_page(body.decode(errors="replace"), url=shown_url(url))
    if not page.gpus:
        raise UserError(
            f"{shown_url(url)}: no DCGM metrics of a GPU; give the address of the metrics, and"
            " check the exporter's list of metrics"
        )
    return page


def print_table(rows: Sequence[Row], *, scrapes: int) -> None:
    """Print the differences, those without a reason first, and the number of equal series."""
    table = Table(
        "metric", "GPU", "result", "dcgm-exporter", "gpuledger", "reason", box=None, pad_edge=False
    )
    differing = [row for row in rows if row.result is not Result.SAME]
    for cells in merge_rows(differing):
        table.add_row(*map(Text, cells))
    if differing:
        Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES).print(table)
    series = sum(1 for row in rows if row.result is not Result.LABEL)
    same = sum(1 for row in rows if row.result is Result.SAME)
    unexplained = sum(1 for row in differing if row.is_unexplained)
    sys.stdout.write(
        f"{same} of {series} series have the same values in {scrapes} scrapes; {len(differing)}"
        f" differences, {unexplained} without a known reason\n"
    )


def merge_rows(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each line, with similar differences in one line.

    A missing metric has one line for all GPUs, and a label has one line for all series.
    """

    def group_key(row: Row) -> tuple[bool, str, str, str]:
        metric = "" if row.result is Result.LABEL else row.metric
        device = f"{row.gpu} {row.part}" if row.result is Result.VALUE else ""
        return not row.is_unexplained, row.result, metric or row.label, device

    for _, group in groupby(sorted(rows, key=group_key), key=group_key):
        alike = list(group)
        first = alike[0]
        gpus = {row.gpu for row in alike}
        metrics = {row.metric for row in alike}
        yield (
            first.metric if len(metrics) == 1 else f"{len(metrics)} metrics",
            f"{first.gpu} {first.part}".strip() if len(gpus) == 1 else f"{len(gpus)} GPUs",
            first.result,
            first.dcgm_exporter if _are_equal(alike, "dcgm_exporter") else "several",
            first.gpuledger if _are_equal(alike, "gpuledger") else "several",
            first.reason or "unknown",
        )


def _are_equal(rows: Sequence[Row], name: str) -> bool:
    return len({getattr(row, name) for row in rows}) == 1
