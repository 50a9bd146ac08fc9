"""Draws the latest events as a screen: who is on each GPU, how much, and how that is known.

Pure drawing: sums in, lines out. A screen that is too low for all lines is shown in pages, one
after the other, so that nothing stays hidden. `gpuledger_cli.demo.tables` sets the widths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import show_node, split_key
from gpuledger.ledger.entries import NO_POD, PodIndex, PodOfEntry
from gpuledger.records import (
    BusyMethod,
    Category,
    Entry,
    GpuEvent,
    PodState,
)
from gpuledger_cli.demo.tables import (
    LIVE_COLUMNS,
    LIVE_ROWS,
    TableColumn,
    as_facts,
    elide,
    fit,
    fold,
    line,
    shorten,
    shown,
    wrap,
)
from gpuledger_cli.demo.totals import LostGpu, Tally, owner_of

PAGE_SECONDS: Final = 4.0
"""For how long a page is shown where there are several."""
_GIB: Final = 2**30
_STANDSTILL_NS: Final = 5 * NS_PER_SECOND
_MAX_ALERTS: Final = 5
# Lines of the table below its titles: where there is room, and at least, a node's name and a row.
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
"""Of the accounts that this version knows."""
_COLUMNS: Final = (
    TableColumn("GPU"),
    TableColumn("Pod", "left", floor=36),
    TableColumn("Util %"),
    TableColumn("Memory", leaves=4),
    TableColumn("Watts", leaves=3),
    TableColumn("Method", "left", floor=12, leaves=2, keeps="beginning"),
    TableColumn("Owner", "left", floor=18, leaves=1),
)


class ScreenLine(NamedTuple):
    """One line of the screen."""

    text: str
    style: str = ""


class ScreenRow(NamedTuple):
    """One entry of one GPU, as it is shown."""

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
    """What stands above the table."""

    facts: Sequence[str]
    """What runs, and what was counted."""
    problems: Sequence[str] = ()
    """What does not work."""
    alerts: Sequence[str] = ()
    """The alerts that fire, the youngest first."""


class _Block(NamedTuple):
    """The lines of one GPU, which stay together where they fit on a page."""

    node: str
    lines: list[ScreenLine]


def standstill(tally: Tally, *, now_ns: int) -> str | None:
    """Return what is said where no event has come for a while, so that old rows pass for no new."""
    newest_ns = max((event.time_ns for event in tally.latest.values()), default=None)
    if newest_ns is None or now_ns - newest_ns < _STANDSTILL_NS:
        return None
    return f"no event for {(now_ns - newest_ns) / NS_PER_SECOND:.0f} s: the rows are as old as that"


def draw(
    tally: Tally,
    header: ScreenHeader,
    *,
    width: int,
    height: int | None = None,
    seconds: float = 0.0,
) -> list[ScreenLine]:
    """Return the lines of a screen; `seconds` since the first one turn the pages.

    Without a `height` all lines are returned. Where it is too low for all of them, first what the
    columns mean is left out, then alerts and problems are one line each; then GPUs and the number
    of the page come first, then what does not work, then alerts, then the facts.
    """
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
    body, whole = [titles, *_body(blocks)], _head(header, width)
    here = shown(_COLUMNS, widths)
    columns = {name: meaning for name, meaning in LIVE_COLUMNS.items() if name in here}
    facts = wrap([*as_facts(columns), *as_facts(LIVE_ROWS)], width=width)
    meanings = [ScreenLine(""), *(ScreenLine(text, "dim") for text in facts)]
    if height is None:
        return [*whole, *body, *meanings]
    for above, below in ((whole, meanings), (whole, []), (_short_head(header, width), [])):
        if len(above) + len(body) + len(below) <= height:
            return [*above, *body, *below]
    # For the head is left what titles, GPUs and the page's line leave; a line of it rather than a
    # good body, and none rather than no GPU.
    room = max(height - _GOOD_BODY - 2, min(1, height - _MIN_BODY - 2), 0)
    head = _short_head(header, width, max_lines=room)
    above = [*head, titles] if height > _MIN_SCREEN else []
    pages = _pages(blocks, max(_MIN_BODY, height - len(above) - 1))
    number = int(seconds / PAGE_SECONDS) % len(pages)
    more = f"page {number + 1} of {len(pages)}; a higher window shows more"
    return [*above, *_body(pages[number]), ScreenLine(shorten(more, width), "dim")]


def _head(header: ScreenHeader, width: int) -> list[ScreenLine]:
    """Return the lines above the table, each sentence whole."""
    return [
        *_facts(header, width),
        *(
            ScreenLine(text, "bold red")
            for problem in header.problems
            for text in fold(problem, width=width, indent="  ")
        ),
        *(
            ScreenLine(text, "red")
            for alert in _shown_alerts(header.alerts, max_lines=_MAX_ALERTS)
            for text in fold(alert, width=width, indent="  ")
        ),
    ]


def _short_head(
    header: ScreenHeader, width: int, *, max_lines: int | None = None
) -> list[ScreenLine]:
    """Return a line for each sentence, at most so many lines: of facts the last ones go first."""
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
    """Return what is said of alerts; where there are too many, the last line counts the others."""
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
    """Lay blocks out on pages, each with its nodes' names; one that is too long is cut."""
    pages: list[list[_Block]] = [[]]
    parts = [
        _Block(node, lines[start : start + room - 1])  # a line is the node's name
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
    # A lost GPU stands where it stood.
    return [_Block(node, lines) for _, lines in sorted(found, key=lambda gpu: gpu[0])]


def rows_of(event: GpuEvent) -> Iterator[ScreenRow]:
    """Yield a row for each entry, GPU by GPU; the GPU is named on its first row only."""
    pods = PodIndex(event)
    interval_ns = event.interval_ns
    for gpu in sorted(event.gpus, key=lambda books: books.reading.index):
        # One that does not answer is shown as lost.
        if gpu.reading.unresponsive:
            continue
        index = str(gpu.reading.index)
        for entry in gpu.entries:
            held, busy_ns, drawn = entry.memory_bytes, entry.busy_ns, entry.energy_millijoules
            # A host that ran nothing, and holds what the driver reserved for itself, is no news.
            is_idle = not busy_ns and (held or 0) <= 2 * _GIB
            if entry.category is Category.HOST and is_idle:
                continue
            user = pods.user_of(entry)
            who = _pod(entry, user) or _account(entry, pods.allocatee_of(entry))
            yield ScreenRow(
                gpu=index,
                pod=who,
                # What was not measured stays empty: 0 would be a measurement.
                sm="" if busy_ns is None else f"{100 * busy_ns / interval_ns:.0f}",
                memory="" if held is None else f"{held / _GIB:.1f} GiB",
                # A millijoule a nanosecond is a million watts.
                watts="" if drawn is None else f"{drawn * 10**6 / interval_ns:.0f}",
                method=_method(gpu.busy_method) if entry.category is Category.POD else "",
                owner=(user.pod and owner_of(user.pod)) or "",
                style=_STYLES.get(entry.category, ""),
            )
            index = ""


def _method(busy_method: str | None) -> str:
    """Return how the busy time of a GPU's users is known; a newer join's method as it is."""
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
        ):
            return f"estimated ({busy_method.replace('_', ' ')})"
        case _:
            return busy_method or ""


def _account(entry: Entry, allocatee: PodOfEntry) -> str:
    """Return the category with its job, and for idle time the pod that it was allocated to."""
    if entry.job_id is not None:
        category = "__unused__" if entry.category == Category.IDLE else entry.category
        return f"{category} {entry.job_id}"
    if allocatee is NO_POD:
        return f"__{entry.category}__"
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
