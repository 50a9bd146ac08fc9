"""What the join says of itself. Every metric of the join is named here, and nowhere else."""

from typing import Final

from prometheus_client import Counter, Gauge

TICKS_TOTAL: Final = Counter("gpuledger_join_ticks", "Ticks read, duplicates included.")
DUPLICATES_TOTAL: Final = Counter(
    "gpuledger_join_duplicate_ticks", "Ticks left out because they had been booked before."
)
EVENTS_TOTAL: Final = Counter("gpuledger_join_events", "Events published and acknowledged.")
PENDING_TOTAL: Final = Counter(
    "gpuledger_join_pending_descriptions",
    "Times that an event named a pod by UID or container id only, its record not having come.",
)
PROCESS_RECORDS_TOTAL: Final = Counter(
    "gpuledger_join_process_records",
    "Process records read, by change: `seen`, `changed` or `ended`.",
    ["change"],
)
INCIDENTS_TOTAL: Final = Counter(
    "gpuledger_join_incidents", "Incidents attributed, by kind, such as `xid`.", ["kind"]
)
RETRIES_TOTAL: Final = Counter(
    "gpuledger_join_retries",
    "Calls that Kafka did not answer, made again: polls, publications, commits.",
)
PODS: Final = Gauge("gpuledger_join_pods", "Pods known to this worker.")
PARTITIONS: Final = Gauge("gpuledger_join_partitions", "Partitions of ticks held by this worker.")
LAG_SECONDS: Final = Gauge(
    "gpuledger_join_lag_seconds",
    "Age of the last tick when it was taken up, by this machine's clock; it stands still while"
    " none comes.",
)
