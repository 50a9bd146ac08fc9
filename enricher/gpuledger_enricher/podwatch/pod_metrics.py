"""What podwatch counts, each with its meaning. Values are set where things happen.

The label `kind` is the kind of object: `pod`, `node` or `namespace`.
"""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.runtime.process_metrics import count_from_zero

KINDS: Final = ("pod", "node", "namespace")
KINDS_WITH_WATERMARKS: Final = ("pod",)
EVENT_TYPES: Final = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "unknown")
OBJECTS: Final = Gauge(
    "gpuledger_podwatch_objects",
    "Objects as the API server has them, by kind: `pod` (with a node), `node`, `namespace`.",
    ["kind"],
)
count_from_zero(OBJECTS, kind=KINDS)
EVENTS: Final = Counter(
    "gpuledger_podwatch_events",
    "Lines of watches, by kind of object and type: `ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK`,"
    " `ERROR`, and `unknown` for what podwatch steps over.",
    ["kind", "type"],
)
count_from_zero(EVENTS, kind=KINDS, type=EVENT_TYPES)
RELISTS: Final = Counter(
    "gpuledger_podwatch_relists",
    "Complete lists, by kind of object; more than one means that a watch could not be resumed.",
    ["kind"],
)
count_from_zero(RELISTS, kind=KINDS)
INTERRUPTIONS: Final = Counter(
    "gpuledger_podwatch_watch_errors",
    "Lists and watches that ended in an error, by kind of object and HTTP status; `none` where"
    " there was no answer.",
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
    "Objects of the API server that could not be read, by kind.",
    ["kind"],
)
count_from_zero(UNDECODABLE, kind=KINDS)
UNDECODABLE_RECORDS: Final = Counter(
    "gpuledger_podwatch_records_undecodable",
    "Records of podwatch's topics, read after a start, that are none, by kind of object; what they"
    " were of counts as unknown and is published again.",
    ["kind"],
)
count_from_zero(UNDECODABLE_RECORDS, kind=KINDS)
READ_FAILURES: Final = Counter(
    "gpuledger_podwatch_read_failures",
    "Attempts to read after a start what is known on Kafka, by kind of object; they are repeated.",
    ["kind"],
)
count_from_zero(READ_FAILURES, kind=KINDS)
PUBLISHED: Final = Counter(
    "gpuledger_podwatch_messages_published",
    "Messages that Kafka has acknowledged, by kind of object and type: `record` or `tombstone`.",
    ["kind", "type"],
)
count_from_zero(PUBLISHED, kind=KINDS, type=("record", "tombstone"))
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_podwatch_publish_failures",
    "Attempts to publish that Kafka did not acknowledge, by kind of object; they are repeated.",
    ["kind"],
)
count_from_zero(PUBLISH_FAILURES, kind=KINDS)
CUT: Final = Counter(
    "gpuledger_podwatch_records_cut",
    "Records of which something was cut, by kind of object: a name or a list that is longer than a"
    " record may carry, or, where it was too large for a message, labels, annotations and"
    " containers.",
    ["kind"],
)
count_from_zero(CUT, kind=KINDS)
UNPUBLISHED: Final = Gauge(
    "gpuledger_podwatch_unpublished_objects",
    "Objects whose newest state Kafka has not acknowledged, by kind.",
    ["kind"],
)
count_from_zero(UNPUBLISHED, kind=KINDS)
LAG: Final = Histogram(
    "gpuledger_podwatch_lag_seconds",
    "Time from seeing an object's change to Kafka's acknowledgement, by kind, one observation a"
    " batch.",
    ["kind"],
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
EARLY_TOMBSTONES: Final = Counter(
    "gpuledger_podwatch_tombstones_evicted",
    "Deleted objects whose record did not stay its full time, because too many waited, by kind.",
    ["kind"],
)
count_from_zero(EARLY_TOMBSTONES, kind=KINDS)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_podwatch_watermark_timestamp_seconds",
    "Time by podwatch's clock up to which all that it saw of a kind of object, so far `pod` alone,"
    " is in that kind's topic, as it said last; 0 before that, and while it stands by.",
    ["cluster", "kind"],
)
LEADING: Final = Gauge(
    "gpuledger_podwatch_leading",
    "1 while this podwatch holds the Lease and publishes, 0 while it stands by; 1 without a Lease.",
    ["cluster"],
)
LEASE_FAILURES: Final = Counter(
    "gpuledger_podwatch_lease_failures",
    "Attempts to acquire or renew the Lease that the API server did not answer, or refused.",
)


def count_cluster_from_zero(cluster: str) -> None:
    """Show what is told by cluster, before there is anything to tell."""
    LEADING.labels(cluster=cluster)
    count_from_zero(WATERMARK_TIMESTAMP, cluster=[cluster], kind=KINDS_WITH_WATERMARKS)
