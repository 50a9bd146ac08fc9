"""What is said at the end of a run: what was booked, how true it is, what happened, what was sent.

Pure: numbers in, one object and lines out.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import field

from gpuledger.keys import split_key
from gpuledger.records import AttributedIncident
from gpuledger.records.base import DEFAULT_CLUSTER, BaseRecord
from gpuledger_cli.demo.run_bill import RunBill, draw_bill
from gpuledger_cli.demo.screen import ScreenLine
from gpuledger_cli.demo.sending import SinkLine, has_failed, problem
from gpuledger_cli.demo.tables import (
    SUMMARY_COLUMNS,
    TableColumn,
    as_facts,
    fit,
    fold,
    line,
    shown,
    wrap,
)
from gpuledger_cli.demo.totals import AlertLine, PodTotal, as_line

FAILED: Final = 1
"""The exit code where something of the run is missing: not sent, not booked, or not known."""
_SECOND_NS: Final = 10**9
_GIB_HOUR: Final = 2**30 * 3600
_COLUMNS: Final = (
    TableColumn("Pod", "left", floor=30),
    TableColumn("GPU s"),
    TableColumn("true"),
    TableColumn("unused s"),
    TableColumn("GiB h", leaves=3),
    TableColumn("kJ", leaves=2),
    TableColumn("Owner", "left", floor=18, leaves=1),
)


class PodLine(BaseRecord, frozen=True, kw_only=True):
    """One pod's line of the summary."""

    namespace: str | None = None
    """Its namespace; absent where its record never came."""
    pod: str | None = None
    """Its name."""
    cluster: str = DEFAULT_CLUSTER
    """Its cluster; absent where that is `default`."""
    uid: str | None = None
    """Its UID; absent where it held a GPU and ran nothing on it."""
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
    unused_gpu_seconds: float = 0.0
    """Time in which GPUs that the kubelet gave it ran no kernel."""
    allocated_gpu_seconds: float = 0.0
    """How much of GPUs the kubelet gave it, whatever was used of them; a MIG instance counts as a
    device."""


class IncidentLine(BaseRecord, frozen=True, kw_only=True):
    """Something that happened to a GPU."""

    cluster: str = DEFAULT_CLUSTER
    """The cluster of its node; absent where that is `default`."""
    node: str
    """Its node."""
    gpu_uuid: str
    """Its GPU."""
    gpu_index: int | None = None
    """The driver's index of it, where it is known."""
    time_ns: int
    """When, nanoseconds since the epoch."""
    kind: str
    """What: `xid`, `gpu_lost`, …"""
    xid: int | None = None
    """The driver's XID."""
    severity: str
    """How loud it is."""
    message: str
    """One sentence for people."""


class StoreLine(BaseRecord, frozen=True, kw_only=True):
    """What the store holds."""

    path: str
    """Folder of the store."""
    rows: int
    """Rows of its table."""


class Summary(BaseRecord, frozen=True, kw_only=True):
    """The whole of `--format json`."""

    samples: int | None = None
    """Samples that the nodes published; absent where the brokers were away at the end."""
    events: int
    """Events that came of them."""
    entries: int
    """Entries in the events."""
    pods: list[PodLine]
    """The pods, most GPU time first."""
    without_pod_gpu_seconds: float
    """Busy seconds booked on the host or on nobody."""
    idle_gpu_seconds: float = 0.0
    """Time in which GPUs that nobody held ran no kernel."""
    gap_gpu_seconds: float = 0.0
    """Time in which GPUs did not answer; whoever holds one holds it on."""
    other_gpu_seconds: dict[str, float] = field(default_factory=dict)
    """Busy seconds booked on accounts that have no place of their own here, by category."""
    incidents: list[IncidentLine]
    """What happened to GPUs, the oldest first."""
    conservation_error_max_ratio: float
    """The worst difference between a device and the sum of its entries, over the device."""
    truth_error_ratio: float | None = None
    """GPU time booked on a wrong pod, over all that the pods truly used; absent on real GPUs."""
    store: StoreLine
    """The store."""
    bill: RunBill | None = None
    """What it cost, at the built-in prices; absent where the store has nothing of it."""
    dead_letters: int
    """Records that could not be used."""
    remote_write_requests: int | None = None
    """Requests to the built-in receiver; absent where a real one was named."""
    alerts: list[AlertLine]
    """Alerts that fired, the oldest first."""
    sinks: list[SinkLine]
    """What each sink has handed over."""
    bus_away: str | None = None
    """The brokers that were away at the end; absent where they answered."""
    missing_topics: tuple[str, ...] = ()
    """Topics that were gone at the end."""
    failures: tuple[str, ...] = ()
    """What parts of the pipeline failed with, or that they did not end."""
    first_attributed_seconds: float | None = None
    """From the start of the process to the first row with a pod's name."""


_NO_OWNER: Final = ("", "", "")


def pod_lines(
    pods: Mapping[str, PodTotal],
    truth: Mapping[str, float] | None,
    unused_ns: Mapping[tuple[str, str, str], int],
    allocated_ns: Mapping[tuple[str, str, str], int],
) -> list[PodLine]:
    """Return a line for each pod that was booked, truly used a GPU, or held one."""
    used = {key for key, seconds in (truth or {}).items() if seconds}
    unbooked = {
        key: PodTotal(cluster=split_key(key)[0], uid=split_key(key)[1])
        for key in sorted(used - pods.keys())
    }
    allocated_to = {
        key: (total.cluster, total.namespace or "", total.pod or "") for key, total in pods.items()
    }
    lines = [
        PodLine(
            namespace=total.namespace,
            pod=total.pod,
            cluster=total.cluster,
            uid=total.uid,
            owner=total.owner,
            gpu_seconds=total.busy_ns / _SECOND_NS,
            memory_byte_seconds=total.memory_byte_ns / _SECOND_NS,
            joules=total.energy_millijoules / 1000,
            true_gpu_seconds=None if truth is None else truth.get(key, 0.0),
            unused_gpu_seconds=unused_ns.get(allocated_to.get(key, _NO_OWNER), 0) / _SECOND_NS,
            allocated_gpu_seconds=allocated_ns.get(allocated_to.get(key, _NO_OWNER), 0)
            / _SECOND_NS,
        )
        for key, total in {**pods, **unbooked}.items()
    ]
    known = set(allocated_to.values())
    lines += [
        # It held a GPU and ran nothing, so that no entry ever named its UID.
        PodLine(
            cluster=cluster,
            namespace=namespace,
            pod=pod,
            gpu_seconds=0.0,
            memory_byte_seconds=0.0,
            joules=0.0,
            true_gpu_seconds=None if truth is None else 0.0,
            unused_gpu_seconds=free_ns / _SECOND_NS,
            allocated_gpu_seconds=allocated_ns.get((cluster, namespace, pod), 0) / _SECOND_NS,
        )
        for (cluster, namespace, pod), free_ns in unused_ns.items()
        if (cluster, namespace, pod) not in known
    ]
    return sorted(lines, key=lambda line: (-line.gpu_seconds, -line.unused_gpu_seconds))


def incident_lines(incidents: Iterable[AttributedIncident]) -> list[IncidentLine]:
    """Return a line for each incident, the oldest first."""
    lines = [
        IncidentLine(
            cluster=taken.incident.cluster,
            node=taken.incident.node,
            gpu_uuid=taken.incident.gpu_uuid,
            gpu_index=taken.incident.gpu_index,
            time_ns=taken.incident.time_ns,
            kind=taken.incident.kind,
            xid=taken.incident.xid,
            severity=taken.incident.severity.value,
            message=taken.incident.message,
        )
        for taken in incidents
    ]
    return sorted(lines, key=lambda line: line.time_ns)


def truth_error_ratio(pods: Mapping[str, PodTotal], truth: Mapping[str, float]) -> float:
    """Return the GPU time that was booked wrongly, over all GPU time that the pods truly used."""
    booked = {uid: total.busy_ns / _SECOND_NS for uid, total in pods.items()}
    wrong = sum(abs(booked.get(uid, 0.0) - truth.get(uid, 0.0)) for uid in booked.keys() | truth)
    used = sum(truth.values())
    return wrong / used if used else 0.0


def exit_code(summary: Summary) -> int:
    """Return 1 where something of the run is missing, which `draw_summary` says; else 0."""
    failed = any(has_failed(sink, events=summary.events) for sink in summary.sinks)
    missing = any(sink.missing for sink in summary.sinks)
    return FAILED if failed or missing or any(_shortcomings(summary)) else 0


def draw_summary(summary: Summary, *, width: int) -> list[ScreenLine]:
    """Return the lines that `--format table` leaves on the screen at the end."""
    rows = [_cells(line) for line in summary.pods]
    widths = fit(_COLUMNS, rows, width=width)
    if summary.truth_error_ratio is None:
        widths[2] = 0
    problems = (problem(sink, events=summary.events) for sink in summary.sinks)
    here = shown(_COLUMNS, widths)
    meanings = {name: meaning for name, meaning in SUMMARY_COLUMNS.items() if name in here}
    alerts = [f"! {as_line(alert)}" for alert in summary.alerts]
    return [
        ScreenLine(line(_COLUMNS, [column.name for column in _COLUMNS], widths), "bold"),
        *(ScreenLine(line(_COLUMNS, row, widths)) for row in rows),
        *(ScreenLine(text, "dim") for text in wrap(as_facts(meanings), width=width)),
        ScreenLine(""),
        *_folded(_sentences(summary), width),
        # Whole, as it is to be copied.
        ScreenLine(f"The store holds {summary.store.rows} rows: {summary.store.path}"),
        *_folded(alerts, width, "red"),
        *([ScreenLine(""), *draw_bill(summary.bill, width=width)] if summary.bill else []),
        *_folded(filter(None, (*_shortcomings(summary), *problems)), width, "bold red"),
    ]


def _folded(sentences: Iterable[str], width: int, style: str = "") -> list[ScreenLine]:
    return [
        ScreenLine(text, style)
        for sentence in sentences
        for text in fold(sentence, width=width, indent="  ")
    ]


def _shortcomings(summary: Summary) -> Iterator[str]:
    """Yield what is wrong beside the sinks' sends."""
    until = "this is what was booked until then, and what was not booked yet is missing."
    if summary.bus_away is not None:
        yield f"Kafka at {summary.bus_away} was away at the end: {until}"
    elif summary.missing_topics:
        names = ", ".join(summary.missing_topics)
        yield f"Gone at the end, as somebody has deleted it: the topic {names}; {until}"
    elif summary.samples is not None and summary.events < summary.samples:
        yield f"{summary.samples - summary.events} samples had not become events at the end."
    yield from summary.failures


def _cells(pod: PodLine) -> list[str]:
    truth = "" if pod.true_gpu_seconds is None else f"{pod.true_gpu_seconds:.2f}"
    return [
        f"{pod.namespace}/{pod.pod}" if pod.pod else f"pending {(pod.uid or '')[:8]}",
        f"{pod.gpu_seconds:.2f}",
        truth,
        f"{pod.unused_gpu_seconds:.2f}",
        f"{pod.memory_byte_seconds / _GIB_HOUR:.3f}",
        f"{pod.joules / 1000:.2f}",
        pod.owner or "",
    ]


def _sentences(summary: Summary) -> list[str]:
    truth, error = summary.truth_error_ratio, summary.conservation_error_max_ratio
    samples = "An unknown number of" if summary.samples is None else summary.samples
    sent = ", ".join(f"{sink.sent} by {sink.sink}" for sink in summary.sinks)
    gap = summary.gap_gpu_seconds
    without = f"{summary.without_pod_gpu_seconds:.2f} GPU s ran without a pod"
    sentences = [
        f"{without}, {summary.idle_gpu_seconds:.2f} were idle and nobody's.",
        f"GPUs did not answer for {gap:.2f} s." if gap else "",
        *(
            f"{seconds:.2f} GPU s ran on category {category}."
            for category, seconds in summary.other_gpu_seconds.items()
        ),
        "" if truth is None else f"{truth:.2%} of the pods' GPU time was attributed wrongly.",
        f"{samples} samples, {summary.events} events, {summary.entries} entries.",
        f"{summary.dead_letters} records could not be used.",
        f"Entries do not sum to the device: {error:.1e} of it is missing or too much."
        if error
        else "Entries sum to the device, to the last digit.",
        f"Sent: {sent}.",
    ]
    return [sentence for sentence in sentences if sentence]
