"""Defines all metrics of the join."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger import dead_letter_queue
from gpuledger.records import ProcessChange
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics

TICKS_TOTAL: Final = Counter(
    "gpuledger_join_samples", "Total number of samples read, including duplicates."
)
DUPLICATES_TOTAL: Final = Counter(
    "gpuledger_join_duplicate_samples",
    "Total number of samples skipped because they had been processed before.",
)
LATE_TOTAL: Final = Counter(
    "gpuledger_join_late_samples",
    "Total number of samples processed late: delayed on their node, or more than 30 s behind their"
    " partition.",
)
GAPS_TOTAL: Final = Counter(
    "gpuledger_join_gaps",
    "Total number of samples that did not begin where their node's previous sample ended.",
)
GAP_SECONDS_TOTAL: Final = Counter(
    "gpuledger_join_gap_seconds",
    "Total node time that no sample covers, in seconds, summed over all gaps.",
)
EVENTS_TOTAL: Final = Counter(
    "gpuledger_join_events", "Total number of events published and acknowledged."
)
PENDING_TOTAL: Final = Counter(
    "gpuledger_join_pending_descriptions",
    "Total number of pods described in events before their record came, including `named` ones.",
)
NAMED_TOTAL: Final = Counter(
    "gpuledger_join_named_descriptions",
    "Total number of pods described in events by namespace and name from the kubelet's allocations,"
    " without owner and labels, because their record had not come.",
)
PENDING: Final = Gauge(
    "gpuledger_join_pending_pods", "Number of pods named by samples whose records have not come."
)
PENDING_DELAY_SECONDS: Final = Histogram(
    "gpuledger_join_pending_delay_seconds",
    "Time that the join waited for the record of a pod, in seconds; only records that came count.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 900),
)
UNKNOWN_TOTAL: Final = Counter(
    "gpuledger_join_unknown_pods",
    "Total number of pods without a record after `join.pending_pod_timeout_seconds`, or beyond the"
    " limit of pending pods: podwatch is behind, or the containers have no pod.",
)
FOREIGN_POD: Final = "foreign_pod"
FOREIGN_ALLOCATION: Final = "foreign_allocation"
NAMES_REFUSED_TOTAL: Final = Counter(
    "gpuledger_join_names_rejected",
    "Total number of pods not named in events and incidents, by reason: `foreign_pod` (placed on"
    " another node) or `foreign_allocation` (device allocated to such a pod).",
    ["reason"],
)
count_from_zero(NAMES_REFUSED_TOTAL, reason=(FOREIGN_POD, FOREIGN_ALLOCATION))
UNBALANCED_TOTAL: Final = Counter(
    "gpuledger_join_samples_unbalanced",
    "Total number of samples whose entries do not sum to the device totals, which means a defect."
    " The first and then one in 200 is checked.",
)
PROCESS_RECORDS_TOTAL: Final = Counter(
    "gpuledger_join_process_records",
    "Total number of process records read, by change: `seen`, `changed` or `ended`.",
    ["change"],
)
count_from_zero(PROCESS_RECORDS_TOTAL, change=ProcessChange)
LATE_ADJUSTED_SECONDS_TOTAL: Final = Counter(
    "gpuledger_join_late_adjustment_seconds",
    "Total GPU busy time first booked as unattributed and attributed to its process after it ended,"
    " by the driver's accounting, in seconds.",
)
OTHER_KIND: Final = "other"
INCIDENTS_TOTAL: Final = Counter(
    "gpuledger_join_incidents",
    "Total number of incidents attributed, by kind, such as `xid`; `other` for unknown kinds.",
    ["kind"],
)
count_from_zero(INCIDENTS_TOTAL, kind=(*INCIDENT_KINDS, OTHER_KIND))
OVERLAPPING_TOTAL: Final = Counter(
    "gpuledger_join_samples_overlapping",
    "Total number of samples not attributed because earlier samples cover some of their time: two"
    " agents publish as one node.",
)
OVERLAPPING_SECONDS_TOTAL: Final = Counter(
    "gpuledger_join_samples_overlapping_seconds",
    "Total time of the samples in `gpuledger_join_samples_overlapping_total`, in seconds.",
)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_join_watermark_timestamp_seconds",
    "Event time up to which all partitions of this worker are complete, as last published, in"
    " seconds since the epoch; 0 before the first.",
)
BEHIND_WATERMARK_TOTAL: Final = Counter(
    "gpuledger_join_samples_behind_watermark",
    "Total number of samples older than their partition's watermark: the node was unresponsive for"
    " two minutes, its clock was set back, or it was new.",
)
PODWATCH_TIMEOUTS_TOTAL: Final = Counter(
    "gpuledger_join_podwatch_timeouts",
    "Total number of times that the join started without a report from podwatch within"
    " `join.podwatch_timeout_seconds`: new pods have no names until podwatch reports.",
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_join_retries",
    "Total number of Kafka calls repeated after a failure, transactions not included.",
)
TRANSACTIONS_ABORTED_TOTAL: Final = Counter(
    "gpuledger_join_transactions_aborted",
    "Total number of transactions aborted and repeated, by cause: `fenced` (by another worker or a"
    " timeout), `unavailable` or `refused` (topic or permission missing).",
    ["cause"],
)
count_from_zero(TRANSACTIONS_ABORTED_TOTAL, cause=("fenced", "unavailable", "refused"))
PODS: Final = Gauge("gpuledger_join_pods", "Number of pods known to this worker.")
NODES: Final = Gauge("gpuledger_join_nodes", "Number of node records known to this worker.")
NAMESPACES: Final = Gauge(
    "gpuledger_join_namespaces", "Number of namespaces in the worker's memory; each worker has all."
)
PLACES_CUT_TOTAL: Final = Counter(
    "gpuledger_join_descriptions_cut",
    "Total number of descriptions shortened to fit into an event, by part: `namespace` or `node`"
    " (over 8 KiB), `namespaces` (over 64 KiB) or `event` (maximum message size).",
    ["what"],
)
count_from_zero(PLACES_CUT_TOTAL, what=("namespace", "node", "namespaces", "event"))
PARTITIONS: Final = Gauge(
    "gpuledger_join_partitions", "Number of sample partitions assigned to this worker."
)
LAG_SECONDS: Final = Gauge(
    "gpuledger_join_lag_seconds",
    "Age of the oldest sample whose event is not published, in seconds; 0 if none waits. Without"
    " Kafka, the time since its last answer.",
)
MIN_AGE_SECONDS: Final = Gauge(
    "gpuledger_join_min_sample_age_seconds",
    "Minimum age of samples when read, over five to ten minutes, in seconds: pipeline delay plus"
    " clock difference. Negative if a node's clock is ahead.",
)
SEQ_AHEAD_TOTAL: Final = Counter(
    "gpuledger_join_seq_ahead",
    "Total number of samples whose `seq` exceeds the time since boot by over a day; over two days"
    " makes them dead-letter records.",
)
NODES_UNBOOKED: Final = Gauge(
    "gpuledger_join_nodes_unprocessed",
    "Number of nodes whose new samples were all skipped for a minute, as duplicates, `seq_ahead` or"
    " overlapping; see `node_seq_leapt` and `samples_overlapped` in the log.",
)
NODE_UNRESPONSIVE_SINCE: Final = Gauge(
    "gpuledger_join_node_unresponsive_since_timestamp_seconds",
    "Event time of the last sample of a node without samples for two minutes, in seconds since the"
    " epoch; absent for deleted nodes.",
    ["cluster", "node"],
)
CLOCK_STEPS_TOTAL: Final = Counter(
    "gpuledger_join_clock_steps",
    "Total number of times that a node's clock stepped by more than a second, by direction: `ahead`"
    " or `back`.",
    ["direction"],
)
count_from_zero(CLOCK_STEPS_TOTAL, direction=("ahead", "back"))
NEW_CLUSTERS_TOTAL: Final = Counter(
    "gpuledger_join_new_clusters",
    "Total number of clusters whose first sample came before any watermark that names the cluster.",
)
NODE_BEHIND_SECONDS: Final = Gauge(
    "gpuledger_join_node_behind_api_server_seconds",
    "Minimum time by which a node's clock lags the API server's, in whole seconds: a recent pod"
    " started before it was created. 0 if none did.",
)


def count_topics_from_zero(topics: Topics) -> None:
    """Initialize the dead-letter counters of the topics that the join reads to zero."""
    read = (
        *(topics.samples, topics.processes, topics.incidents),
        *(topics.pods, topics.nodes, topics.namespaces, topics.progress, topics.watermarks),
    )
    count_from_zero(
        dead_letter_queue.DEAD_LETTERS_TOTAL,
        topic=[topic.name for topic in read],
        reason=("undecodable", "unreadable", "invalid", "too_large", "misplaced", "seq_ahead"),
    )
