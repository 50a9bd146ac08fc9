"""The metrics of podwatch; other modules set the values of most of them.

The label `kind` is the kind of object: `pod`, `pending_pod`, `node` or `namespace`.
"""

from collections import Counter as Counts
from collections.abc import Iterable
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.pod_requests import requested_amounts
from gpuledger.records import PendingPodRecord
from gpuledger.runtime.process_metrics import count_from_zero

KINDS: Final = ("pod", "pending_pod", "node", "namespace")
KINDS_WITH_WATERMARKS: Final = ("pod",)
EVENT_TYPES: Final = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "unknown")
OBJECTS: Final = Gauge(
    "gpuledger_podwatch_objects",
    "Number of objects in the API server, by kind: `pod` (with a node), `pending_pod` (without a"
    " node, requests GPUs), `node`, `namespace`.",
    ["kind"],
)
count_from_zero(OBJECTS, kind=KINDS)
PENDING_GPU_PODS: Final = Gauge(
    "gpuledger_podwatch_pending_gpu_pods",
    "Number of pods that request GPUs and wait for a node, by namespace and reason:"
    " `Unschedulable`, `SchedulingGated` or `other`.",
    ["namespace", "reason"],
)
PENDING_GPUS: Final = Gauge(
    "gpuledger_podwatch_pending_gpus",
    "Number of GPUs that these pods request as `nvidia.com/gpu`, by namespace and reason; MIG"
    " instances, parts of GPUs and claims do not count.",
    ["namespace", "reason"],
)
EVENTS: Final = Counter(
    "gpuledger_podwatch_events",
    "Total number of watch events, by kind of object and type: `ADDED`, `MODIFIED`, `DELETED`,"
    " `BOOKMARK`, `ERROR`, and `unknown` for types that podwatch ignores.",
    ["kind", "type"],
)
count_from_zero(EVENTS, kind=KINDS, type=EVENT_TYPES)
RELISTS: Final = Counter(
    "gpuledger_podwatch_relists",
    "Total number of complete lists, by kind of object; after the first, each means that a watch"
    " could not be resumed.",
    ["kind"],
)
count_from_zero(RELISTS, kind=KINDS)
INTERRUPTIONS: Final = Counter(
    "gpuledger_podwatch_watch_errors",
    "Total number of lists and watches that ended in an error, by kind of object and HTTP status;"
    " `none` without a response.",
    ["kind", "status"],
)
count_from_zero(
    INTERRUPTIONS,
    kind=KINDS,
    status=(
        "none",
        "400",
        "401",
        "403",
        "404",
        "410",
        "429",
        "500",
        "502",
        "503",
        "504",
    ),
)
UNDECODABLE: Final = Counter(
    "gpuledger_podwatch_objects_undecodable",
    "Total number of objects from the API server that could not be read, by kind.",
    ["kind"],
)
count_from_zero(UNDECODABLE, kind=KINDS)
UNDECODABLE_RECORDS: Final = Counter(
    "gpuledger_podwatch_records_undecodable",
    "Total number of unreadable records found in podwatch's topics at start, by kind of object;"
    " their objects are published again.",
    ["kind"],
)
count_from_zero(UNDECODABLE_RECORDS, kind=KINDS)
READ_FAILURES: Final = Counter(
    "gpuledger_podwatch_read_failures",
    "Total number of failed attempts to read podwatch's topics at start, by kind of object; they"
    " are repeated.",
    ["kind"],
)
count_from_zero(READ_FAILURES, kind=KINDS)
PUBLISHED: Final = Counter(
    "gpuledger_podwatch_messages_published",
    "Total number of messages acknowledged by Kafka, by kind of object and type: `record` or"
    " `tombstone`.",
    ["kind", "type"],
)
count_from_zero(PUBLISHED, kind=KINDS, type=("record", "tombstone"))
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_podwatch_publish_failures",
    "Total number of attempts to publish that Kafka did not acknowledge, by kind of object; they"
    " are repeated.",
    ["kind"],
)
count_from_zero(PUBLISH_FAILURES, kind=KINDS)
CUT: Final = Counter(
    "gpuledger_podwatch_records_cut",
    "Total number of records shortened to their maximum size, by kind of object: values were cut,"
    " or labels, annotations and containers removed.",
    ["kind"],
)
count_from_zero(CUT, kind=KINDS)
UNPUBLISHED: Final = Gauge(
    "gpuledger_podwatch_unpublished_objects",
    "Number of objects whose newest state Kafka has not acknowledged, by kind.",
    ["kind"],
)
count_from_zero(UNPUBLISHED, kind=KINDS)
LAG: Final = Histogram(
    "gpuledger_podwatch_lag_seconds",
    "Time from the detection of a change to Kafka's acknowledgement, in seconds, by kind of object;"
    " one observation per batch.",
    ["kind"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
EARLY_TOMBSTONES: Final = Counter(
    "gpuledger_podwatch_tombstones_evicted",
    "Total number of deleted objects whose tombstone was published early because too many waited,"
    " by kind.",
    ["kind"],
)
count_from_zero(EARLY_TOMBSTONES, kind=KINDS)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_podwatch_watermark_timestamp_seconds",
    "Time up to which podwatch's topic is complete, in seconds since the epoch, by kind (only"
    " `pod`); 0 before the first report and on standby.",
    ["cluster", "kind"],
)
LEADING: Final = Gauge(
    "gpuledger_podwatch_leading",
    "Whether this podwatch publishes (1 = yes, 0 = on standby); always 1 without a Lease.",
    ["cluster"],
)
LEASE_FAILURES: Final = Counter(
    "gpuledger_podwatch_lease_failures",
    "Total number of failed attempts to acquire or renew the Lease, because the API server did not"
    " answer or refused.",
)


_REASONS: Final = ("Unschedulable", "SchedulingGated")
_shown: Final[set[tuple[str, str]]] = set()
"""Namespaces and reasons of the pods that waited at the last measurement."""


def measure_pending_pods(pods: Iterable[PendingPodRecord]) -> None:
    """Count the pods that wait, and remove the series of namespaces in which none waits."""
    counts, gpus = Counts[tuple[str, str]](), Counts[tuple[str, str]]()
    for pod in pods:
        # Other reasons are texts of any scheduler, so they must not become label values.
        key = pod.namespace, pod.reason if pod.reason in _REASONS else "other"
        counts[key] += 1
        gpus[key] += requested_amounts(pod.containers).get("nvidia.com/gpu", 0)
    for key in _shown - counts.keys():
        PENDING_GPU_PODS.remove(*key)
        PENDING_GPUS.remove(*key)
    _shown.clear()
    _shown.update(counts)
    for key, count in counts.items():
        PENDING_GPU_PODS.labels(*key).set(count)
        PENDING_GPUS.labels(*key).set(gpus[key])


def count_cluster_from_zero(cluster: str) -> None:
    """Initialize the metrics that have the label `cluster` to zero."""
    LEADING.labels(cluster=cluster)
    count_from_zero(WATERMARK_TIMESTAMP, cluster=[cluster], kind=KINDS_WITH_WATERMARKS)
