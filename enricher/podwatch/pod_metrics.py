"""What podwatch counts, each with its meaning. Values are set where things happen."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.runtime.process_metrics import count_from_zero

PODS: Final = Gauge("gpuledger_podwatch_pods", "Pods with a node, as the API server has them.")
EVENTS: Final = Counter(
    "gpuledger_podwatch_events",
    "Lines of watches, by type: `ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK`, `ERROR`, and `unknown`"
    " for what podwatch steps over.",
    ["type"],
)
RELISTS: Final = Counter(
    "gpuledger_podwatch_relists",
    "Complete lists of the pods; more than one means that a watch could not be resumed.",
)
INTERRUPTIONS: Final = Counter(
    "gpuledger_podwatch_watch_errors",
    "Lists and watches that ended in an error, by HTTP status; `none` where there was no answer.",
    ["status"],
)
count_from_zero(
    INTERRUPTIONS,
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
    "Objects of the API server that could not be read as pods.",
)
UNDECODABLE_RECORDS: Final = Counter(
    "gpuledger_podwatch_records_undecodable",
    "Records of the topic of pods, read after a start, that are none; such a pod counts as unknown"
    " and is published again.",
)
READ_FAILURES: Final = Counter(
    "gpuledger_podwatch_read_failures",
    "Attempts to read after a start which pods are known on Kafka; they are repeated.",
)
PUBLISHED: Final = Counter(
    "gpuledger_podwatch_messages_published",
    "Messages that Kafka has acknowledged, by kind: `record` or `tombstone`.",
    ["kind"],
)
count_from_zero(PUBLISHED, kind=("record", "tombstone"))
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_podwatch_publish_failures",
    "Attempts to publish that Kafka did not acknowledge; they are repeated.",
)
CUT: Final = Counter(
    "gpuledger_podwatch_pods_cut",
    "Records of pods of which something was cut: a name or a list that is longer than a record may"
    " carry, or, where it was too large for a message, labels, annotations, containers and"
    " requests.",
)
UNPUBLISHED: Final = Gauge(
    "gpuledger_podwatch_unpublished_pods", "Pods whose newest state Kafka has not acknowledged."
)
LAG: Final = Histogram(
    "gpuledger_podwatch_lag_seconds",
    "Time from seeing a pod's change to Kafka's acknowledgement, one observation a batch.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
EARLY_TOMBSTONES: Final = Counter(
    "gpuledger_podwatch_tombstones_evicted",
    "Deleted pods whose record did not stay its full time, because too many waited.",
)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_podwatch_watermark_timestamp_seconds",
    "Time by podwatch's clock up to which all that it saw of the pods is in the topic, as it said"
    " last; 0 before that, and while it stands by.",
)
LEADING: Final = Gauge(
    "gpuledger_podwatch_leading",
    "1 while this podwatch holds the Lease and publishes, 0 while it stands by; 1 without a Lease.",
)
LEASE_FAILURES: Final = Counter(
    "gpuledger_podwatch_lease_failures",
    "Attempts to acquire or renew the Lease that the API server did not answer, or refused.",
)
