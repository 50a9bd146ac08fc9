"""Draws the latest events as a table: the users of each GPU, their usage, and its source.

Pure: returns lines of text. If the screen is too low for all lines, pages are shown one after the
other. `gpuledger_cli.demo.tables` calculates the widths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import show_node, split_key
from gpuledger.ledger.entries import NO_POD, UNKNOWN_ALLOCATEE, PodIndex, PodOfEntry
from gpuledger.records import (
    BusyMethod,
    Category,
    Entry,
    GpuEvent,
    PodState,
)
from gpuledger_cli.demo.tables import (
    LIVE_TITLE,
    TableColumn,
    elide,
    fit,
    fold,
    line,
    shorten,
    wrap,
)
from gpuledger_cli.demo.totals import LostGpu, Tally, owner_of

PAGE_SECONDS: Final = 4.0
"""How long each of several pages is shown."""
HELP: Final = "`gpuledger demo --help` explains the columns."
_GIB: Final = 2**30
_STANDSTILL_NS: Final = 5 * NS_PER_SECOND
_MAX_ALERTS: Final = 5
# Lines below the headings: the preferred number, and the minimum (a node's name and one row).
_GOOD_BODY: Final = 4
_MIN_BODY: Final = 2
_MIN_SCREEN: Final = 3
_STYLES: Final = {
    Category.POD: "",
    Category.JOB: "",
    Category.HOST: "yellow",
    Category.UNATTRIBUTED: "red",
    Category.IDLE: "dim",
}
"""Styles of the categories that this version knows."""
_COLUMNS: Final = (
    TableColumn("GPU"),
    TableColumn("Pod", "left", floor=36),
    TableColumn("Util %"),
    TableColumn("Memory", leaves=4),
    TableColumn("Power W", leaves=3),
    TableColumn("Source", "left", floor=12, leaves=2, keeps="beginning"),
    TableColumn("Workload", "left", floor=18, leaves=1),
)


class ScreenLine(NamedTuple):
    """One line of the screen."""

    text: str
    style: str = ""


class ScreenRow(NamedTuple):
    """A row of the table: the cells of one entry, and the row's style."""

    gpu: str
    pod: str
    sm: str
    memory: str
    watts: str
    method: str
    owner: str
    style: str


@dataclass(frozen=True, kw_only=True)
class ScreenHeader:
    """The lines above the table."""

    facts: Sequence[str]
    """The data source, the bus and counts."""
    problems: Sequence[str] = ()
    """Sentences on failures."""
    alerts: Sequence[str] = ()
    """Alerts, in the order in which they are shown."""


class _Block(NamedTuple):
    """The lines of one GPU, which stay together if they fit on a page."""

    node: str
    lines: list[ScreenLine]


def standstill(tally: Tally, *, now_ns: int) -> str | None:
    """Return a warning that the rows are out of date if no event arrived for 5 s, or `None`."""
    newest_ns = max((event.time_ns for event in tally.latest.values()), default=None)
    if newest_ns is None or now_ns - newest_ns < _STANDSTILL_NS:
        return None
    return f"no event for {(now_ns - newest_ns) / NS_PER_SECOND:.0f} s: the rows are out of date"


def draw(
    tally: Tally,
    header: ScreenHeader,
    *,
    width: int,
    height: int,
    seconds: float = 0.0,
) -> list[ScreenLine]:
    """Return the lines of a screen; `seconds` since the first frame select the page.

    If the screen is too low, the line about the help is left out. If that is not enough, each alert
    and each problem is cut to one line. If that is still not enough, the GPUs are divided into
    pages, and only a few lines remain above them. These show problems first, then alerts, then
    facts.
    """
    titles, blocks = _table(tally, width)
    body, whole = [titles, *_body(blocks)], _head(header, width, max_alerts=_MAX_ALERTS)
    help_lines = [ScreenLine(""), *(ScreenLine(text, "dim") for text in fold(HELP, width=width))]
    for above, below in ((whole, help_lines), (whole, []), (_short_head(header, width), [])):
        if len(above) + len(body) + len(below) <= height:
            return [*above, *body, *below]
    # The head gets the lines that headings, GPUs and the page number leave. It has at least one
    # line if a GPU still fits.
    room = max(height - _GOOD_BODY - 2, min(1, height - _MIN_BODY - 2), 0)
    head = _short_head(header, width, max_lines=room)
    above = [*head, titles] if height > _MIN_SCREEN else []
    pages = _pages(blocks, max(_MIN_BODY, height - len(above) - 1))
    number = int(seconds / PAGE_SECONDS) % len(pages)
    more = f"page {number + 1} of {len(pages)}; a higher window shows more"
    return [*above, *_body(pages[number]), ScreenLine(shorten(more, width), "dim")]


def draw_last(tally: Tally, header: ScreenHeader, *, width: int) -> list[ScreenLine]:
    """Return the lines of the last sample, with all alerts and a title."""
    titles, blocks = _table(tally, width)
    head = _head(header, width, max_alerts=len(header.alerts))
    return [*head, ScreenLine(""), ScreenLine(LIVE_TITLE, "bold"), titles, *_body(blocks)]


def _table(tally: Tally, width: int) -> tuple[ScreenLine, list[_Block]]:
    """Return the line of headings and the blocks of all GPUs."""
    rows = {node: list(rows_of(event)) for node, event in sorted(tally.latest.items())}
    cells = [row[:-1] for shown in rows.values() for row in shown]
    widths = fit(_COLUMNS, cells, width=width)
    titles = ScreenLine(line(_COLUMNS, [column.name for column in _COLUMNS], widths), "bold")
    lost = {node: tally.gpu_tracker.lost(event) for node, event in tally.latest.items()}
    blocks = [
        block
        for node, shown in rows.items()
        for block in _blocks(
            show_node(*split_key(node)), shown, lost[node], widths=widths, width=width
        )
    ]
    return titles, blocks


def _head(header: ScreenHeader, width: int, *, max_alerts: int) -> list[ScreenLine]:
    """Return the lines above the table, with every sentence in full."""
    return [
        *_facts(header, width),
        *(
            ScreenLine(text, "bold red")
            for problem in header.problems
            for text in fold(problem, width=width, indent="  ")
        ),
        *(
            ScreenLine(text, "red")
            for alert in _shown_alerts(header.alerts, max_lines=max_alerts)
            for text in fold(alert, width=width, indent="  ")
        ),
    ]


def _short_head(
    header: ScreenHeader, width: int, *, max_lines: int | None = None
) -> list[ScreenLine]:
    """Return the header's lines, at most `max_lines`; the last facts are left out first."""
    facts = _facts(header, width)
    problems = [
        ScreenLine(elide(problem, width=width), "bold red")
        for problem in header.problems[:max_lines]
    ]
    room = _MAX_ALERTS if max_lines is None else min(max_lines - len(problems), _MAX_ALERTS)
    alerts = [
        ScreenLine(elide(alert, width=width), "red")
        for alert in _shown_alerts(header.alerts, max_lines=room)
    ]
    left = None if max_lines is None else max_lines - len(problems) - len(alerts)
    return [*facts[:left], *problems, *alerts]


def _facts(header: ScreenHeader, width: int) -> list[ScreenLine]:
    return [ScreenLine(text, "dim") for text in wrap(header.facts, width=width)]


def _shown_alerts(alerts: Sequence[str], *, max_lines: int) -> list[str]:
    """Return a line for each alert; if there are too many, the last line counts the others."""
    shown = list(alerts)
    if len(alerts) > max_lines:
        others = len(alerts) - max_lines + 1
        shown = [*alerts[: max_lines - 1], f"and {others} more alerts"] if max_lines else []
    return [f"! {alert}" for alert in shown]


def _body(blocks: Sequence[_Block]) -> list[ScreenLine]:
    lines: list[ScreenLine] = []
    node = None
    for block in blocks:
        if block.node != node:
            node = block.node
            lines.append(ScreenLine(node, "bold"))
        lines += block.lines
    return lines


def _pages(blocks: Sequence[_Block], room: int) -> list[list[_Block]]:
    """Lay out blocks on pages, with the names of their nodes; a block longer than a page is cut."""
    pages: list[list[_Block]] = [[]]
    parts = [
        _Block(node, lines[start : start + room - 1])  # the node's name takes a line
        for node, lines in blocks
        for start in range(0, len(lines), room - 1)
    ]
    for block in parts:
        if pages[-1] and len(_body([*pages[-1], block])) > room:
            pages.append([])
        pages[-1].append(block)
    return pages


def _blocks(
    node: str,
    rows: Sequence[ScreenRow],
    lost: Sequence[LostGpu],
    *,
    widths: Sequence[int],
    width: int,
) -> list[_Block]:
    found: list[tuple[int, list[ScreenLine]]] = []
    for row in rows:
        if row.gpu:
            found.append((int(row.gpu), []))
        found[-1][1].append(ScreenLine(line(_COLUMNS, row[:-1], widths), row.style))
    for gpu in lost:
        since = f"{datetime.fromtimestamp(gpu.since_ns / NS_PER_SECOND, tz=UTC):%H:%M:%S UTC}"
        held = f"allocated to {', '.join(gpu.allocatees)}" if gpu.allocatees else None
        facts = ", ".join(filter(None, [f"__unresponsive__ since {since}", gpu.cause, held]))
        text = elide(f"{gpu.index!s:>{widths[0]}}  {facts}", width=width)
        found.append((gpu.index, [ScreenLine(text, "bold red")]))
    # A lost GPU keeps its place.
    return [_Block(node, lines) for _, lines in sorted(found, key=lambda gpu: gpu[0])]


def rows_of(event: GpuEvent) -> Iterator[ScreenRow]:
    """Yield a row for each entry of each GPU; only a GPU's first row has its index."""
    pods = PodIndex(event)
    interval_ns = event.interval_ns
    for gpu in sorted(event.gpus, key=lambda books: books.reading.index):
        # A GPU that does not respond is shown as lost.
        if gpu.reading.unresponsive:
            continue
        index = str(gpu.reading.index)
        for entry in gpu.entries:
            held, busy_ns, drawn = entry.memory_bytes, entry.busy_ns, entry.energy_millijoules
            # Leave out a host that ran nothing and only holds the memory that the driver reserves.
            is_idle = not busy_ns and (held or 0) <= 2 * _GIB
            if entry.category is Category.HOST and is_idle:
                continue
            user = pods.user_of(entry)
            who = _pod(entry, user) or _account(entry, pods.allocatee_of(entry))
            yield ScreenRow(
                gpu=index,
                pod=who,
                # Empty if not measured, because 0 would be a measurement.
                sm="" if busy_ns is None else f"{100 * busy_ns / interval_ns:.0f}",
                memory="" if held is None else f"{held / _GIB:.1f} GiB",
                # A millijoule per nanosecond is a million watts.
                watts="" if drawn is None else f"{drawn * 10**6 / interval_ns:.0f}",
                method=_method(gpu.busy_method) if entry.category is Category.POD else "",
                owner=(user.pod and owner_of(user.pod)) or "",
                style=_STYLES.get(entry.category, ""),
            )
            index = ""


def _method(busy_method: str | None) -> str:
    """Return the source of busy time; a method of a newer join is returned unchanged."""
    match busy_method:
        case BusyMethod.EXCLUSIVE:
            return "measured"
        case BusyMethod.PROCESS_UTILIZATION | BusyMethod.ACCOUNTING:
            return "measured (shared)"
        case (
            BusyMethod.MEMORY_SHARE
            | BusyMethod.EQUAL_SHARE
            | BusyMethod.EQUAL_TURNS
            | BusyMethod.MPS_SERVER
            | BusyMethod.PARTIAL_SAMPLES
            | BusyMethod.SAMPLED
        ):
            return f"estimated ({busy_method.replace('_', ' ')})"
        case _:
            return busy_method or ""


def _account(entry: Entry, allocatee: PodOfEntry) -> str:
    """Return an entry's category, with its job or with the pod to which idle time was allocated."""
    if entry.job_id is not None:
        category = "__unused__" if entry.category == Category.IDLE else entry.category
        return f"{category} {entry.job_id}"
    if allocatee is NO_POD:
        return f"__{entry.category}__"
    if allocatee is UNKNOWN_ALLOCATEE:
        return "__unknown__"
    pod = allocatee.described
    if pod.name is None:
        return f"__unused__ {pod.state} pod"
    return f"__unused__ {pod.namespace}/{pod.name}"


def _pod(entry: Entry, user: PodOfEntry) -> str | None:
    if entry.category is not Category.POD:
        return None
    description = user.pod
    if description is None or description.state not in {PodState.KNOWN, PodState.NAMED}:
        state = PodState.PENDING if description is None else description.state
        return f"{state} {(user.described.uid or user.container_id or '')[:8]}"
    return f"{description.namespace}/{description.name}"
