"""Draws the latest events as a table: who is on each GPU, how much, and how that is known.

Pure drawing: events in, a rich renderable out.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.demo.tally import Tally, owner_of
from gpuledger.records import (
    Account,
    DeviceAllocation,
    Entry,
    GpuBooks,
    GpuEvent,
    PodDescription,
    PodState,
)
from sinks.describing import Debtor, Debtors

_GIB: Final = 2**30
_STYLES: Final = {
    Account.POD: "",
    Account.HOST: "yellow",
    Account.UNATTRIBUTED: "red",
    Account.IDLE: "dim",
}


class _Column(NamedTuple):
    """A column of the table."""

    name: str
    justify: Literal["left", "right"] = "left"
    least: int | None = None
    """Characters below which it does not shrink: half a number misleads, half a name does not."""
    is_name: bool = False
    """Whether it gives way where the screen is narrow, the widest of these first."""


_COLUMNS: Final = (
    _Column("Node", least=10),
    _Column("GPU", "right", least=3),
    _Column("Pod", is_name=True),
    _Column("Owner", is_name=True),
    _Column("SM %", "right", least=4),
    _Column("Memory", "right", least=9),
    _Column("Watts", "right", least=5),
    _Column("Method", least=12, is_name=True),
)


class Row(NamedTuple):
    """One entry of one GPU, as it is shown."""

    node: str
    gpu: str
    pod: str
    owner: str
    sm: str
    memory: str
    watts: str
    method: str
    style: str


def draw(tally: Tally, *, headline: str) -> RenderableType:
    """Draw the table of all nodes under a headline."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, justify, least, is_name in _COLUMNS:
        # Only a column that may be wrapped shrinks before all do; its cells still have one line.
        table.add_column(name, justify=justify, min_width=least, no_wrap=not is_name)
    for event in (tally.latest[node] for node in sorted(tally.latest)):
        for row in rows_of(event):
            cells = (Text(cell, no_wrap=True, overflow="ellipsis") for cell in row[:-1])
            table.add_row(*cells, style=row.style)
        table.add_section()
    return Group(Text(headline), table)


def rows_of(event: GpuEvent) -> Iterator[Row]:
    """Give a row for each entry, GPU by GPU; node and GPU are named on the first row only."""
    debtors = Debtors(event)
    seconds = event.interval_ns / 1e9
    node = event.node
    for gpu in sorted(event.gpus, key=lambda each: each.reading.index):
        index = str(gpu.reading.index)
        for entry in _shown_entries(gpu):
            debtor = debtors.of(entry)
            who = _pod(entry, debtor) or _account(entry, event.allocations)
            yield _row(entry, debtor.pod, who=who, node=node, gpu=index, seconds=seconds)
            node = index = ""


def _shown_entries(gpu: GpuBooks) -> list[Entry]:
    """Leave out a host entry that holds nothing but what the driver reserved."""
    return [
        entry
        for entry in gpu.entries
        if entry.account is not Account.HOST
        or entry.busy_seconds
        or (entry.memory_byte_seconds or 0) > 2 * _GIB
    ]


def _row(
    entry: Entry,
    description: PodDescription | None,
    *,
    who: str,
    node: str,
    gpu: str,
    seconds: float,
) -> Row:
    return Row(
        node=node,
        gpu=gpu,
        pod=who,
        owner=(description and owner_of(description)) or "",
        sm=_percent(entry.busy_seconds, seconds),
        memory=_gibibytes(entry.memory_byte_seconds, seconds),
        watts="" if entry.joules is None else f"{entry.joules / seconds:.0f}",
        method=entry.method if entry.account is Account.POD else "",
        style=_STYLES[entry.account],
    )


def _account(entry: Entry, allocations: Sequence[DeviceAllocation]) -> str:
    """Name the account, and on idle who held it; an event that does not list him is the sinks'."""
    if entry.allocation is None or entry.allocation >= len(allocations):
        return f"({entry.account})"
    holder = allocations[entry.allocation]
    return f"({entry.account}) {holder.namespace}/{holder.pod}"


def _pod(entry: Entry, debtor: Debtor) -> str | None:
    if entry.account is not Account.POD:
        return None
    description = debtor.pod
    if description is None or description.state is PodState.PENDING:
        return f"pending {(debtor.pod_uid or debtor.container_id or '')[:8]}"
    return f"{description.namespace}/{description.name}"


def _percent(busy_seconds: float | None, seconds: float) -> str:
    return "" if busy_seconds is None else f"{100 * busy_seconds / seconds:.0f}"


def _gibibytes(byte_seconds: float | None, seconds: float) -> str:
    return "" if byte_seconds is None else f"{byte_seconds / seconds / _GIB:.1f} GiB"
