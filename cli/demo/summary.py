"""What is said at the end of a run: what was booked, how well it balances, how true it is.

Pure: numbers in, one object and one table out.
"""

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.demo.tally import PodTotal
from gpuledger.records.base import record

_GIB_HOUR = 2**30 * 3600


@record
class PodLine:
    """One pod's line of the summary."""

    namespace: str | None = None
    """Its namespace; absent where its record never came."""
    pod: str | None = None
    """Its name."""
    uid: str
    """Its UID."""
    owner: str | None = None
    """Kind and name of its workload."""
    gpu_seconds: float
    """Busy seconds booked on it."""
    memory_byte_seconds: float
    """Memory times time booked on it."""
    joules: float
    """Energy booked on it."""
    true_gpu_seconds: float | None = None
    """What it truly used, where the scenario knows."""


@record
class StoreLine:
    """What the store holds."""

    path: str
    """Folder of the store."""
    rows: int
    """Rows of its table."""


@record
class Summary:
    """The whole of `--format json`."""

    ticks: int
    """Ticks that the nodes published."""
    events: int
    """Events that came of them."""
    entries: int
    """Entries in the events."""
    pods: list[PodLine]
    """The pods, most GPU time first."""
    conservation_error_max_ratio: float
    """The worst difference between a device and the sum of its entries, over the device."""
    truth_error_ratio: float | None = None
    """GPU time booked on a wrong pod, over all that the pods truly used; absent on real GPUs."""
    store: StoreLine
    """The store."""
    dead_letters: int
    """Records that could not be used."""
    remote_write_requests: int | None = None
    """Requests to the built-in receiver; absent where a real one was named."""
    alerts: list[str] | None = None
    """Alerts that the built-in receiver was sent; absent where a real one was named."""
    first_attributed_seconds: float | None = None
    """From the start of the process to the first row with a pod's name."""


def pod_lines(pods: Mapping[str, PodTotal], truth: Mapping[str, float] | None) -> list[PodLine]:
    """Give a line for each pod that was booked or truly used a GPU."""
    names = {**pods, **{uid: PodTotal(uid=uid) for uid in (truth or {}) if uid not in pods}}
    lines = [
        PodLine(
            namespace=total.namespace,
            pod=total.pod,
            uid=uid,
            owner=total.owner,
            gpu_seconds=total.gpu_seconds,
            memory_byte_seconds=total.memory_byte_seconds,
            joules=total.joules,
            true_gpu_seconds=None if truth is None else truth.get(uid, 0.0),
        )
        for uid, total in names.items()
    ]
    return sorted(lines, key=lambda line: -line.gpu_seconds)


def truth_error_ratio(pods: Mapping[str, PodTotal], truth: Mapping[str, float]) -> float:
    """Give the GPU time that was booked wrongly, over all GPU time that the pods truly used."""
    booked = {uid: total.gpu_seconds for uid, total in pods.items()}
    wrong = sum(abs(booked.get(uid, 0.0) - truth.get(uid, 0.0)) for uid in booked.keys() | truth)
    used = sum(truth.values())
    return wrong / used if used else 0.0


def draw_summary(summary: Summary) -> RenderableType:
    """Draw what `--format table` leaves on the screen at the end."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Pod", "Owner"):
        table.add_column(name)
    for name in ("GPU s", "true GPU s", "GiB h", "kJ"):
        table.add_column(name, justify="right")
    for line in summary.pods:
        table.add_row(*_cells(line))
    return Group(table, Text(_sentence(summary)))


def _cells(line: PodLine) -> list[str]:
    truth = "" if line.true_gpu_seconds is None else f"{line.true_gpu_seconds:.2f}"
    return [
        f"{line.namespace}/{line.pod}" if line.pod else f"pending {line.uid[:8]}",
        line.owner or "",
        f"{line.gpu_seconds:.2f}",
        truth,
        f"{line.memory_byte_seconds / _GIB_HOUR:.3f}",
        f"{line.joules / 1000:.2f}",
    ]


def _sentence(summary: Summary) -> str:
    truth = summary.truth_error_ratio
    said = [
        f"{summary.ticks} ticks, {summary.events} events, {summary.entries} entries.",
        f"{summary.dead_letters} records could not be used.",
        f"Entries sum to the device within {summary.conservation_error_max_ratio:.1e}.",
        "" if truth is None else f"{truth:.2%} of the GPU time was booked wrongly.",
        f"The store holds {summary.store.rows} rows: {summary.store.path}",
    ]
    return "\n".join(line for line in said if line)
