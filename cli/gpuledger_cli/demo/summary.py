"""The summary of a run: usage, accuracy, incidents, deliveries and failures.

Pure: turns numbers into one object and into lines of text.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import field

from gpuledger.keys import split_key
from gpuledger.records import AttributedIncident
from gpuledger.records.base import DEFAULT_CLUSTER, BaseRecord
from gpuledger_cli.demo.run_bill import RunBill, draw_bill
from gpuledger_cli.demo.screen import HELP, ScreenLine
from gpuledger_cli.demo.sending import SinkLine, has_failed, problem
from gpuledger_cli.demo.tables import SUMMARY_TITLE, TableColumn, fit, fold, line, note_hidden
from gpuledger_cli.demo.totals import AlertLine, AllocationTotal, PodName, PodTotal

FAILED: Final = 1
"""The exit code if data of the run was not delivered or not attributed, or if that is unknown."""
_SECOND_NS: Final = 10**9
_GIB_HOUR: Final = 2**30 * 3600
_TRUE: Final = "True GPU-s"
_COLUMNS: Final = (
    TableColumn("Pod", "left", floor=30),
    TableColumn("Used GPU-s"),
    TableColumn(_TRUE, leaves=4),
    TableColumn("Unused GPU-s", leaves=5),
    TableColumn("GiB-h", leaves=3),
    TableColumn("kJ", leaves=2),
    TableColumn("Workload", "left", floor=18, leaves=1),
)


class PodLine(BaseRecord, frozen=True, kw_only=True):
    """A pod in the summary."""

    namespace: str | None = None
    """Its namespace; absent if its record never arrived."""
    pod: str | None = None
    """Its name."""
    cluster: str = DEFAULT_CLUSTER
    """Its cluster; absent if it is `default`."""
    uid: str | None = None
    """Its UID; absent if it ran nothing on the GPUs that were allocated to it."""
    owner: str | None = None
    """Kind and name of its workload."""
    gpu_seconds: float
    """Busy time attributed to it, in GPU-seconds."""
    memory_byte_seconds: float
    """Memory attributed to it, times seconds."""
    joules: float
    """Energy attributed to it."""
    true_gpu_seconds: float | None = None
    """GPU-seconds that it used according to the scenario; absent on real GPUs."""
    unused_gpu_seconds: float = 0.0
    """GPU-seconds in which GPUs that were allocated to it ran no kernel."""
    allocated_gpu_seconds: float = 0.0
    """GPU-seconds that were allocated to it, used or not; a MIG instance counts as a device."""


class IncidentLine(BaseRecord, frozen=True, kw_only=True):
    """An incident of a GPU."""

    cluster: str = DEFAULT_CLUSTER
    """Cluster of its node; absent if it is `default`."""
    node: str
    """Its node."""
    gpu_uuid: str
    """UUID of the GPU."""
    gpu_index: int | None = None
    """The driver's index of the GPU, if known."""
    time_ns: int
    """Its time, in nanoseconds since the epoch."""
    kind: str
    """Its kind: `xid`, `gpu_lost`, …"""
    xid: int | None = None
    """The driver's XID."""
    severity: str
    """Its severity."""
    message: str
    """One sentence that describes it."""


class StoreLine(BaseRecord, frozen=True, kw_only=True):
    """The store of a run."""

    path: str
    """Directory of the store."""
    rows: int
    """Number of rows in its table `entries`."""


class Summary(BaseRecord, frozen=True, kw_only=True):
    """The object that `--format json` prints."""

    samples: int | None = None
    """Samples that the nodes published; absent if the brokers were unavailable at the end."""
    events: int
    """Events that the join made of the samples."""
    entries: int
    """Entries in the events."""
    pods: list[PodLine]
    """The pods, most GPU time first."""
    without_pod_gpu_seconds: float
    """Busy GPU-seconds of the host and of unknown processes."""
    idle_gpu_seconds: float = 0.0
    """GPU-seconds in which GPUs that were not allocated ran no kernel."""
    gap_gpu_seconds: float = 0.0
    """GPU-seconds in which GPUs did not respond, allocated or not."""
    other_gpu_seconds: dict[str, float] = field(default_factory=dict)
    """Busy GPU-seconds of other categories, such as jobs, by category."""
    incidents: list[IncidentLine]
    """Incidents of GPUs, the oldest first."""
    conservation_error_max_ratio: float
    """Largest difference between a device's reading and the sum of its entries, divided by the
    reading."""
    truth_error_ratio: float | None = None
    """GPU time attributed wrongly, divided by what the pods used; absent on real GPUs."""
    store: StoreLine
    """The store."""
    bill: RunBill | None = None
    """Bill of the run at the built-in prices; absent if the store has no usage in its hours."""
    dead_letters: int
    """Number of records that were rejected."""
    remote_write_requests: int | None = None
    """Requests to the built-in receiver; absent if another receiver was given."""
    alerts: list[AlertLine]
    """Alerts that fired, the oldest first."""
    sinks: list[SinkLine]
    """Deliveries of each sink."""
    bus_away: str | None = None
    """Brokers that were unavailable at the end; absent if they responded."""
    missing_topics: tuple[str, ...] = ()
    """Topics that did not exist any more at the end."""
    failures: tuple[str, ...] = ()
    """Errors of the tasks of the pipeline, and tasks that did not end."""
    first_attributed_seconds: float | None = None
    """Seconds from the start of the process to the first row with a pod's name."""


_NO_NAME: Final[PodName] = ("", "", "")


def pod_lines(
    pods: Mapping[str, PodTotal],
    truth: Mapping[str, float] | None,
    allocations: Mapping[PodName, AllocationTotal],
) -> list[PodLine]:
    """Return a line for each pod that used a GPU or to which a GPU was allocated."""
    used = {key for key, seconds in (truth or {}).items() if seconds}
    unbooked = {
        key: PodTotal(cluster=split_key(key)[0], uid=split_key(key)[1])
        for key in sorted(used - pods.keys())
    }
    allocated_to = {
        key: (total.cluster, total.namespace or "", total.pod or "") for key, total in pods.items()
    }
    no_allocation = AllocationTotal()
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
            unused_gpu_seconds=allocation.unused_ns / _SECOND_NS,
            allocated_gpu_seconds=allocation.allocated_ns / _SECOND_NS,
        )
        for key, total in {**pods, **unbooked}.items()
        for allocation in [allocations.get(allocated_to.get(key, _NO_NAME), no_allocation)]
    ]
    known = set(allocated_to.values())
    lines += [
        # The pod ran nothing on its GPU, so no entry has its UID.
        PodLine(
            cluster=cluster,
            namespace=namespace,
            pod=pod,
            owner=allocation.owner,
            gpu_seconds=0.0,
            memory_byte_seconds=0.0,
            joules=0.0,
            true_gpu_seconds=None if truth is None else 0.0,
            unused_gpu_seconds=allocation.unused_ns / _SECOND_NS,
            allocated_gpu_seconds=allocation.allocated_ns / _SECOND_NS,
        )
        for (cluster, namespace, pod), allocation in allocations.items()
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
    """Return the GPU time attributed wrongly, divided by the GPU time that the pods really used."""
    booked = {uid: total.busy_ns / _SECOND_NS for uid, total in pods.items()}
    wrong = sum(abs(booked.get(uid, 0.0) - truth.get(uid, 0.0)) for uid in booked.keys() | truth)
    used = sum(truth.values())
    return wrong / used if used else 0.0


def exit_code(summary: Summary) -> int:
    """Return 1 if a part of the run is missing, which `draw_summary` reports; else 0."""
    failed = any(has_failed(sink, events=summary.events) for sink in summary.sinks)
    missing = any(sink.missing for sink in summary.sinks)
    return FAILED if failed or missing or any(_shortcomings(summary)) else 0


def draw_summary(summary: Summary, *, width: int, commands: Sequence[str] = ()) -> list[ScreenLine]:
    """Return the lines that `--format table` prints below the last sample.

    `commands` are printed whole, because users copy them.
    """
    columns = [
        column
        for column in _COLUMNS
        if summary.truth_error_ratio is not None or column.name != _TRUE
    ]
    rows = [[cells[column.name] for column in columns] for cells in map(_cells, summary.pods)]
    widths = fit(columns, rows, width=width)
    problems = (problem(sink, events=summary.events) for sink in summary.sinks)
    return [
        ScreenLine(SUMMARY_TITLE, "bold"),
        ScreenLine(line(columns, [column.name for column in columns], widths), "bold"),
        *(ScreenLine(line(columns, row, widths)) for row in rows),
        *(ScreenLine(text, "dim") for text in note_hidden(columns, widths, width=width)),
        ScreenLine(""),
        *([*draw_bill(summary.bill, width=width), ScreenLine("")] if summary.bill else []),
        *_folded([_accuracy(summary), _totals(summary)], width),
        *_folded(filter(None, (*_shortcomings(summary), *problems)), width, "bold red"),
        *_folded([HELP], width, "dim"),
        *([ScreenLine(""), ScreenLine("Next:", "bold")] if commands else []),
        *(ScreenLine(f"  {command}") for command in commands),
    ]


def next_commands(program: str, summary: Summary, *, is_simulated: bool) -> list[str]:
    """Return the commands to try after the demo, for a shell."""
    store = shlex.quote(summary.store.path)
    source = " --source simulated" if is_simulated else ""
    sql = "SELECT namespace, pod, sum(busy_seconds) FROM usage WHERE category = 'pod' GROUP BY ALL"
    return [
        f"{program} bill --store {store} --by namespace",
        f'{program} query --store {store} "{sql}"',
        f"{program} agent --no-kafka --listen 127.0.0.1:9400{source}",
    ]


def _folded(sentences: Iterable[str], width: int, style: str = "") -> list[ScreenLine]:
    return [
        ScreenLine(text, style)
        for sentence in sentences
        for text in fold(sentence, width=width, indent="  ")
    ]


def _shortcomings(summary: Summary) -> Iterator[str]:
    """Yield a sentence for each part that is missing or failed, except deliveries of sinks."""
    missing = "samples that were not attributed before are missing here"
    if summary.bus_away is not None:
        yield f"Kafka at {summary.bus_away} was unavailable at the end; {missing}."
    elif summary.missing_topics:
        names = ", ".join(summary.missing_topics)
        yield f"Topics were deleted during the run: {names}; {missing}."
    elif summary.samples is not None and summary.events < summary.samples:
        yield f"{summary.samples - summary.events} samples had not become events at the end."
    yield from summary.failures


def _cells(pod: PodLine) -> dict[str, str]:
    """Return the texts of a pod's row in the summary, by column name."""
    truth = "" if pod.true_gpu_seconds is None else f"{pod.true_gpu_seconds:.2f}"
    texts = (
        f"{pod.namespace}/{pod.pod}" if pod.pod else f"pending {(pod.uid or '')[:8]}",
        f"{pod.gpu_seconds:.2f}",
        truth,
        f"{pod.unused_gpu_seconds:.2f}",
        f"{pod.memory_byte_seconds / _GIB_HOUR:.3f}",
        f"{pod.joules / 1000:.2f}",
        pod.owner or "",
    )
    return {column.name: text for column, text in zip(_COLUMNS, texts, strict=True)}


def _accuracy(summary: Summary) -> str:
    truth, error = summary.truth_error_ratio, summary.conservation_error_max_ratio
    wrong = "" if truth is None else f"{truth * 100:.2f} % of GPU time attributed wrongly; "
    sums = (
        f"entries differ from the device by {error:.1e}"
        if error
        else "entries sum to the device exactly"
    )
    return f"Accuracy: {wrong}{sums}."


def _totals(summary: Summary) -> str:
    samples = "an unknown number of" if summary.samples is None else summary.samples
    parts = [
        f"{samples} samples, {summary.events} events, {summary.entries} entries",
        "sent " + ", ".join(f"{sink.sent} by {sink.sink}" for sink in summary.sinks),
        *(
            f"{seconds:.2f} GPU-s of category {category}"
            for category, seconds in summary.other_gpu_seconds.items()
        ),
        *([f"{summary.dead_letters} records rejected"] if summary.dead_letters else []),
    ]
    return f"Totals: {'; '.join(parts)}."
