"""What the join says of itself. Every metric of the join is named here, and nowhere else."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger import dead_letter_queue
from gpuledger.records import ProcessChange
from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics

TICKS_TOTAL: Final = Counter("gpuledger_join_samples", "Ticks read, duplicates included.")
DUPLICATES_TOTAL: Final = Counter(
    "gpuledger_join_duplicate_samples", "Ticks left out because they had been booked before."
)
LATE_TOTAL: Final = Counter(
    "gpuledger_join_late_samples",
    "Ticks booked that were late: the node itself was, or more than 30 s behind its partition.",
)
GAPS_TOTAL: Final = Counter(
    "gpuledger_join_gaps", "Times that a node's tick did not begin where its last one ended."
)
GAP_SECONDS_TOTAL: Final = Counter(
    "gpuledger_join_gap_seconds", "Time of nodes that no tick covers, summed over the gaps."
)
EVENTS_TOTAL: Final = Counter("gpuledger_join_events", "Events published and acknowledged.")
PENDING_TOTAL: Final = Counter(
    "gpuledger_join_pending_descriptions",
    "Times that an event described a pod whose record had not come, `named` ones included.",
)
NAMED_TOTAL: Final = Counter(
    "gpuledger_join_named_descriptions",
    "Times that an event called a pod whose record had not come by the kubelet's allocations:"
    " namespace and name, without owner and labels.",
)
PENDING: Final = Gauge(
    "gpuledger_join_pending_pods", "Pods that ticks name and whose records are waited for."
)
PENDING_DELAY_SECONDS: Final = Histogram(
    "gpuledger_join_pending_delay_seconds",
    "Time for which the records of pods were waited for that have come.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 900),
)
UNKNOWN_TOTAL: Final = Counter(
    "gpuledger_join_unknown_pods",
    "Pods whose records did not come in `join.pending_pod_timeout_seconds`, and those that were too"
    " many to wait for: the pod watch is behind, or no pod has these containers.",
)
FOREIGN_POD: Final = "foreign_pod"
FOREIGN_ALLOCATION: Final = "foreign_allocation"
NAMES_REFUSED_TOTAL: Final = Counter(
    "gpuledger_join_names_rejected",
    "Times that an event or an incident got no names of what its node spoke of, by reason:"
    " `foreign_pod` (the API server has placed the pod on another node), `foreign_allocation` (the"
    " kubelet is said to have given a device to a pod of a name that is placed on another node).",
    ["reason"],
)
count_from_zero(NAMES_REFUSED_TOTAL, reason=(FOREIGN_POD, FOREIGN_ALLOCATION))
UNBALANCED_TOTAL: Final = Counter(
    "gpuledger_join_samples_unbalanced",
    "Ticks whose entries do not sum to what a device read, to the last unit: there are none, unless"
    " the join has a defect. One tick in 200 is checked, the first one of each worker among them.",
)
PROCESS_RECORDS_TOTAL: Final = Counter(
    "gpuledger_join_process_records",
    "Process records read, by change: `seen`, `changed` or `ended`.",
    ["change"],
)
count_from_zero(PROCESS_RECORDS_TOTAL, change=ProcessChange)
LATE_ADJUSTED_SECONDS_TOTAL: Final = Counter(
    "gpuledger_join_late_adjustment_seconds",
    "Time in which GPUs were busy and ticks saw nobody there, booked after its end on the process"
    " whose it was, by the driver's accounting.",
)
OTHER_KIND: Final = "other"
INCIDENTS_TOTAL: Final = Counter(
    "gpuledger_join_incidents",
    "Incidents attributed, by kind, such as `xid`; `other` where this version does not know it.",
    ["kind"],
)
count_from_zero(INCIDENTS_TOTAL, kind=(*INCIDENT_KINDS, OTHER_KIND))
OVERLAPPING_TOTAL: Final = Counter(
    "gpuledger_join_samples_overlapping",
    "Ticks booked that cover time which the tick of their boot before them covers too, so that it"
    " is booked twice: two agents write as one node.",
)
WATERMARK_TIMESTAMP: Final = Gauge(
    "gpuledger_join_watermark_timestamp_seconds",
    "Event time up to which the events of this worker's partitions are complete, as it said last:"
    " the earliest of them; 0 where it has said nothing, or holds none.",
)
BEHIND_WATERMARK_TOTAL: Final = Counter(
    "gpuledger_join_samples_behind_watermark",
    "Ticks booked of a time up to which their partition had been called complete: their node was"
    " unresponsive for two minutes, its clock was set back, or it was new and sent a backlog.",
)
PODWATCH_TIMEOUTS_TOTAL: Final = Counter(
    "gpuledger_join_podwatch_timeouts",
    "Times that ticks were taken up although podwatch had said nothing since the worker's start for"
    " `join.podwatch_timeout_seconds`: pods that are new are without their names until it does.",
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_join_retries",
    "Failed calls to Kafka that were repeated; transactions are counted by themselves.",
)
TRANSACTIONS_ABORTED_TOTAL: Final = Counter(
    "gpuledger_join_transactions_aborted",
    "Transactions whose work was dropped and done again from what is committed, by cause: `fenced`"
    " (another worker has the partition, or Kafka aborted what took too long), `unavailable`,"
    " `refused` (a topic or a right is missing).",
    ["cause"],
)
count_from_zero(TRANSACTIONS_ABORTED_TOTAL, cause=("fenced", "unavailable", "refused"))
PODS: Final = Gauge("gpuledger_join_pods", "Pods known to this worker.")
NODES: Final = Gauge("gpuledger_join_nodes", "Node records known to this worker.")
NAMESPACES: Final = Gauge("gpuledger_join_namespaces", "Namespaces known to this worker: all.")
PLACES_CUT_TOTAL: Final = Counter(
    "gpuledger_join_descriptions_cut",
    "Times that something was too much for an event, by what: `namespace` or `node` (its"
    " annotations or labels take more than 8 KiB, and are left out), `namespaces` (those of one"
    " event take more than 64 KiB, and the last ones are left out), `event` (it would be more than"
    " a message, and has neither namespaces nor node).",
    ["what"],
)
count_from_zero(PLACES_CUT_TOTAL, what=("namespace", "node", "namespaces", "event"))
PARTITIONS: Final = Gauge("gpuledger_join_partitions", "Partitions of ticks held by this worker.")
LAG_SECONDS: Final = Gauge(
    "gpuledger_join_lag_seconds",
    "Age of the oldest tick that was read and whose event is not published yet, as of the scrape:"
    " it grows while Kafka takes nothing, and is 0 while there is nothing to join.",
)
MIN_AGE_SECONDS: Final = Gauge(
    "gpuledger_join_min_sample_age_seconds",
    "Age of the newest tick of the last ten minutes when it was taken up: what the way takes at"
    " least, and by how much the clocks of its node and of this machine differ. Below zero, a"
    " node's clock is ahead of this machine's by at least that.",
)
SEQ_AHEAD_TOTAL: Final = Counter(
    "gpuledger_join_seq_ahead",
    "Ticks whose `seq` is by over a day more than can have passed since the boot. By over two days:"
    " dead letters, `seq_ahead`; by less, they are booked, and until that `seq` is reached the"
    " further ticks of that boot count as booked before.",
)
NODES_UNBOOKED: Final = Gauge(
    "gpuledger_join_nodes_unprocessed",
    "Nodes of whose new ticks none has been booked for a minute, as each counts as booked before,"
    " or is refused as `seq_ahead`: a tick's `seq` ran ahead, or the node's boot was begun anew by"
    " somebody else. The log line `node_seq_leapt` says whose and by how much.",
)
CLOCK_STEPS_TOTAL: Final = Counter(
    "gpuledger_join_clock_steps",
    "Settings of nodes' wall clocks by more than a second, by direction: `ahead` or `back`. Found"
    " where the time between two ticks and their `seq` differ, or where a boot begins before the"
    " last tick of the boot before it.",
    ["direction"],
)
count_from_zero(CLOCK_STEPS_TOTAL, direction=("ahead", "back"))
NODE_BEHIND_SECONDS: Final = Gauge(
    "gpuledger_join_node_behind_api_server_seconds",
    "Time by which a node's clock is behind the API server's at least: the most by which a pod read"
    " in the last ten minutes was taken on, by its node's clock, before it was made, by the API"
    " server's. Whole seconds; 0 where none was.",
)


def count_topics_from_zero(topics: Topics) -> None:
    """Show the counters of the topics that the join reads, before a record is put aside."""
    read = (
        *(topics.samples, topics.processes, topics.incidents),
        *(topics.pods, topics.nodes, topics.namespaces, topics.progress, topics.watermarks),
    )
    count_from_zero(
        dead_letter_queue.DEAD_LETTERS_TOTAL,
        topic=[topic.name for topic in read],
        reason=("undecodable", "unreadable", "invalid", "too_large", "misplaced", "seq_ahead"),
    )
