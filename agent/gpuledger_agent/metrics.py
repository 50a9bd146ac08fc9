"""The agent's own metrics: every name with its meaning, and the label values known before."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics

TICKS: Final = Counter("gpuledger_agent_samples", "Ticks sampled.")
TICKS_LATE: Final = Counter(
    "gpuledger_agent_samples_late", "Ticks that began later than half a tick after their time."
)
TICKS_FAILED: Final = Counter(
    "gpuledger_agent_samples_failed",
    "Samples that failed because of an internal error.",
)
TICKS_DROPPED: Final = Counter(
    "gpuledger_agent_samples_dropped",
    "Ticks and other messages dropped, oldest first, as the queue was full: the broker did not"
    " answer for too long.",
)
RECORDS_PUBLISHED: Final = Counter(
    "gpuledger_agent_records_published", "Records that the broker has acknowledged.", ["topic"]
)
QUEUE_TICKS: Final = Gauge(
    "gpuledger_agent_queue_samples", "Ticks and other messages that wait to be published."
)
TICK_SECONDS: Final = Histogram(
    "gpuledger_agent_sample_duration_seconds",
    "Time that taking one tick took.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
READINGS_DROPPED: Final = Counter(
    "gpuledger_agent_readings_dropped",
    "Values of the driver that cannot be true, left out of the tick, by reading and reason.",
    ["reading", "reason"],
)
PROCESS_SAMPLES_DROPPED: Final = Counter(
    "gpuledger_agent_process_samples_dropped",
    "Process samples of the driver that were left out, by reason.",
    ["reason"],
)
count_from_zero(PROCESS_SAMPLES_DROPPED, reason=("pid_zero", "not_listed", "implausible"))
PROCESSES_UNREADABLE: Final = Counter(
    "gpuledger_agent_processes_unreadable",
    "Processes that the driver listed in a tick and /proc did not show: gone already, or of another"
    " pid namespace.",
)
ACCOUNTS_LATE: Final = Counter(
    "gpuledger_agent_accounting_late",
    "The driver's accounts of processes that came after the process's end was published without.",
)
EXITS_UNREPORTED: Final = Counter(
    "gpuledger_agent_process_exits_unreported",
    "The driver's accounts of processes that no sample reports, so that they adjust no usage,"
    " by reason: `unidentified` (gone before anybody saw whose it was), `undated` (no start, length"
    " or use), `older` (it began before this agent did), `gpu_gone` (no tick had its GPU any more),"
    " `too_many` (wait to be reported).",
    ["reason"],
)
count_from_zero(
    EXITS_UNREPORTED, reason=("unidentified", "undated", "older", "gpu_gone", "too_many")
)
FAST_POLLS_FAILED: Final = Counter(
    "gpuledger_agent_fast_polls_failed",
    "Fast polls of GPUs, between two samples, that failed because of an internal error.",
)
FAST_POLLS_LATE: Final = Counter(
    "gpuledger_agent_fast_polls_late",
    "Looks at GPUs, between two ticks, that were not answered at once.",
)
GPU_DEADLINES_MISSED: Final = Counter(
    "gpuledger_agent_gpu_deadlines_missed",
    "Ticks that a GPU did not answer in time; they hold the other GPUs only.",
)
CALL_GROUPS_FAILED: Final = Counter(
    "gpuledger_agent_call_groups_failed",
    "Call groups that a GPU did not answer, by reason: `deadline`, `hangs` (its thread is not back"
    " from an earlier tick), `error`, or `probe` (queried again, in vain).",
    ["gpu_uuid", "group", "reason"],
)
BREAKER_OPEN: Final = Gauge(
    "gpuledger_agent_breaker_open",
    "1 where a GPU is queried for a call group by single probes only, as it failed too often.",
    ["gpu_uuid", "group"],
)
THREADS_LEAKED: Final = Gauge(
    "gpuledger_agent_threads_leaked", "Threads that hang in a call of the driver for ever."
)
GPUS_LOST: Final = Gauge(
    "gpuledger_agent_gpus_lost", "GPUs that answered once and do not answer any more."
)
DRIVER_UP: Final = Gauge(
    "gpuledger_agent_driver_up", "1 while the library is open and at least one GPU answers."
)
NVML_ERRORS: Final = Counter(
    "gpuledger_agent_nvml_errors",
    "Calls that the driver answered with an error.",
    ["call", "error"],
)
SOURCE_OPENINGS: Final = Counter(
    "gpuledger_agent_source_openings",
    "Times that the source of GPUs was opened, the first one included.",
)
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_agent_publish_failures", "Batches that the broker did not acknowledge; sent again."
)
MESSAGES_REJECTED: Final = Counter(
    "gpuledger_agent_messages_rejected",
    "Records that were left out as no broker takes them, by reason: `too_large`, and `future` (the"
    " broker refused it as too far ahead, and it is ahead of the node's clock as it is now, which"
    " had been wrong when it was made).",
    ["reason"],
)
count_from_zero(MESSAGES_REJECTED, reason=("too_large", "future"))
VALUES_CUT: Final = Counter(
    "gpuledger_agent_values_cut",
    "Texts that were cut to the length that a record may carry, and rows of lists that were longer,"
    " left out, by field, such as `NodeSample.processes`.",
    ["field"],
)
JOB_ALLOCATIONS: Final = Gauge(
    "gpuledger_agent_job_allocations",
    "Jobs that hold a GPU or a MIG instance, by the scheduler's directory.",
)
JOB_FILES_REJECTED: Final = Counter(
    "gpuledger_agent_job_files_rejected",
    "Files of the scheduler's directory of which something could not be used in a tick, by reason:"
    " `unreadable`, `malformed` (a line is no id), `too_many` (files, jobs in a file, or holdings"
    " in all), `unknown_gpu`, or `unknown_instance`.",
    ["reason"],
)
count_from_zero(
    JOB_FILES_REJECTED,
    reason=("unreadable", "malformed", "too_many", "unknown_gpu", "unknown_instance"),
)
KUBELET_ANSWERS: Final = Counter(
    "gpuledger_agent_kubelet_answers", "Answers of the kubelet to which container holds what."
)
KUBELET_ERRORS: Final = Counter(
    "gpuledger_agent_kubelet_errors",
    "Queries of which container holds what that the kubelet did not answer, by reason.",
    ["reason"],
)
POD_LIST_ERRORS: Final = Counter(
    "gpuledger_agent_pod_list_errors",
    "Queries of the node's pods and their labels that the kubelet did not answer.",
)
count_from_zero(
    KUBELET_ERRORS,
    reason=(
        "missing",
        "refused",
        "forbidden",
        "broken",
        "deadline",
        "malformed",
        "too_large",
        "unimplemented",
        "exhausted",
        "error",
    ),
)
ALLOCATIONS: Final = Gauge(
    "gpuledger_agent_allocations", "Devices of containers whose GPU is known, in the last answer."
)
ALLOCATIONS_UNRESOLVED: Final = Gauge(
    "gpuledger_agent_allocations_unresolved",
    "Devices of containers that lead to no GPU of the node, in the last answer, by reason.",
    ["reason"],
)
ATTRIBUTION: Final = Gauge(
    "gpuledger_agent_process_attribution_enabled",
    "1 while processes are read; 0 where /proc is not the whole machine's.",
)
INCIDENTS: Final = Counter(
    "gpuledger_agent_incidents",
    "Incidents reported, by kind and by their source: `nvml`, `kmsg` or `agent`.",
    ["kind", "source"],
)
count_from_zero(INCIDENTS, kind=INCIDENT_KINDS, source=("nvml", "kmsg", "agent"))
INCIDENTS_DUPLICATE: Final = Counter(
    "gpuledger_agent_incidents_duplicate",
    "Incidents that had been reported already, by the source of the second report.",
    ["source"],
)
count_from_zero(INCIDENTS_DUPLICATE, source=("nvml", "kmsg", "agent"))
INCIDENTS_DROPPED: Final = Counter(
    "gpuledger_agent_incidents_dropped",
    "Incidents that came faster than they could be published, so that they were left out.",
)
EVENT_SET_FAILURES: Final = Counter(
    "gpuledger_agent_event_set_failures",
    "Times that the driver's events could not be waited for, by reason: `create`, `register` (one"
    " GPU's), `wait`, or `hang` (too many threads that hang in earlier waits).",
    ["reason"],
)
count_from_zero(EVENT_SET_FAILURES, reason=("create", "register", "wait", "hang"))
KMSG_OVERRUNS: Final = Counter(
    "gpuledger_agent_kmsg_overruns",
    "Times that the kernel's log was overwritten before it was read.",
)
KMSG_FAILURES: Final = Counter(
    "gpuledger_agent_kmsg_failures", "Times that the kernel's log could not be opened or read."
)
SPOOL_USABLE: Final = Gauge(
    "gpuledger_agent_spool_usable",
    "1 where the disk takes what the broker does not, 0 where it is in memory only, by the node's"
    " directory; not there without a spool.",
    ["directory"],
)
SPOOL_BYTES: Final = Gauge("gpuledger_agent_spool_bytes", "Size of the frames on the disk.")
SPOOL_TICKS: Final = Gauge(
    "gpuledger_agent_spool_samples", "Ticks and other messages that wait on the disk."
)
SPOOL_OLDEST_SECONDS: Final = Gauge(
    "gpuledger_agent_spool_oldest_timestamp_seconds",
    "Event time of the oldest that waits on the disk, seconds since the epoch; 0 where none does.",
)
SPOOL_WRITTEN: Final = Counter(
    "gpuledger_agent_spool_samples_written",
    "Ticks and other messages (incidents, inventories) that were written to the disk.",
)
SPOOL_DROPPED: Final = Counter(
    "gpuledger_agent_spool_samples_dropped",
    "Ticks and other messages that were on the disk and will never be sent, by reason: bytes or age"
    " (the bounds), damaged (a file that could not be read), hung (a disk that does not answer),"
    " late (found after newer ones were sent).",
    ["reason"],
)
count_from_zero(SPOOL_DROPPED, reason=("bytes", "age", "damaged", "hung", "late"))
SPOOL_FILES_SET_ASIDE: Final = Counter(
    "gpuledger_agent_spool_files_quarantined",
    "Number of damaged spool databases that were renamed and replaced by an empty one.",
)
SPOOL_FAILURES: Final = Counter(
    "gpuledger_agent_spool_failures",
    "Refusals of the disk, by error, such as ENOSPC; what it refused stays in memory.",
    ["error"],
)
count_from_zero(SPOOL_FAILURES, error=("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "unknown"))
COUNTERS_SKIPPED: Final = Gauge(
    "gpuledger_agent_counters_skipped",
    "Lines of the list of counters that are skipped: DCGM has the field, this agent has not.",
)
PROCESS_SERIES_DROPPED: Final = Counter(
    "gpuledger_agent_process_series_dropped",
    "Processes left out of /metrics, counted each tick: there were more than are to be shown.",
)


def count_published_from_zero(topics: Topics) -> None:
    """Show the counters of the topics that the agent writes to, before anything is published."""
    written = (
        topics.samples,
        topics.readings,
        topics.processes,
        topics.incidents,
        topics.inventory,
    )
    count_from_zero(RECORDS_PUBLISHED, topic=[topic.name for topic in written])
