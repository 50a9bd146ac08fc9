"""The agent's own metrics with their help, and the label values that are known beforehand."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.records.incidents import INCIDENT_KINDS
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.topics import Topics

TICKS: Final = Counter("gpuledger_agent_samples", "Total number of samples taken.")
TICKS_LATE: Final = Counter(
    "gpuledger_agent_samples_late",
    "Total number of samples that began late by more than half a sampling interval.",
)
TICKS_FAILED: Final = Counter(
    "gpuledger_agent_samples_failed",
    "Total number of samples that failed because of an internal error.",
)
TICKS_DROPPED: Final = Counter(
    "gpuledger_agent_samples_dropped",
    "Total number of samples and other messages dropped, oldest first, because the queue was full:"
    " the broker did not answer for too long.",
)
RECORDS_PUBLISHED: Final = Counter(
    "gpuledger_agent_records_published",
    "Total number of records acknowledged by the broker.",
    ["topic"],
)
QUEUE_TICKS: Final = Gauge(
    "gpuledger_agent_queue_samples",
    "Number of samples and other messages that wait to be published.",
)
TICK_SECONDS: Final = Histogram(
    "gpuledger_agent_sample_duration_seconds",
    "Time spent collecting one sample, in seconds.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
READINGS_DROPPED: Final = Counter(
    "gpuledger_agent_readings_dropped",
    "Total number of driver values left out of samples because they cannot be true, by reading and"
    " reason.",
    ["reading", "reason"],
)
PROCESS_SAMPLES_DROPPED: Final = Counter(
    "gpuledger_agent_process_samples_dropped",
    "Total number of the driver's process samples that were left out, by reason.",
    ["reason"],
)
count_from_zero(PROCESS_SAMPLES_DROPPED, reason=("pid_zero", "not_listed", "implausible"))
PROCESSES_UNREADABLE: Final = Counter(
    "gpuledger_agent_processes_unreadable",
    "Total number of processes listed by the driver but not shown by /proc, counted in each sample:"
    " already gone, or in another PID namespace.",
)
PROCESSES_UNRECOGNIZED: Final = Counter(
    "gpuledger_agent_processes_unrecognized",
    "Total number of processes on GPUs in a cgroup of Slurm or the kubelet that has no known form,"
    " counted in each sample.",
)
ACCOUNTS_LATE: Final = Counter(
    "gpuledger_agent_accounting_late",
    "Total number of the driver's process accounts that arrived after the process's end had been"
    " published without them.",
)
EXITS_UNREPORTED: Final = Counter(
    "gpuledger_agent_process_exits_unreported",
    "Total number of the driver's process accounts that no sample reports, by reason:"
    " `unidentified`, `undated`, `older` (than the agent), `gpu_gone` or `too_many`.",
    ["reason"],
)
count_from_zero(
    EXITS_UNREPORTED, reason=("unidentified", "undated", "older", "gpu_gone", "too_many")
)
FAST_POLLS_FAILED: Final = Counter(
    "gpuledger_agent_fast_polls_failed",
    "Total number of fast polls between two samples that failed because of an internal error.",
)
FAST_POLLS_LATE: Final = Counter(
    "gpuledger_agent_fast_polls_late",
    "Total number of fast polls between two samples that were not answered in time.",
)
GPU_DEADLINES_MISSED: Final = Counter(
    "gpuledger_agent_gpu_deadlines_missed",
    "Total number of GPUs missing from samples because they did not answer in time.",
)
CALL_GROUPS_FAILED: Final = Counter(
    "gpuledger_agent_call_groups_failed",
    "Total number of call groups that a GPU did not answer, by reason: `deadline`, `hangs` (since"
    " an earlier sample), `error` or `probe` (a repeated query).",
    ["gpu_uuid", "group", "reason"],
)
BREAKER_OPEN: Final = Gauge(
    "gpuledger_agent_breaker_open",
    "Whether a GPU is queried for a call group by single probes only, because it failed too often"
    " (1 = yes, 0 = no).",
    ["gpu_uuid", "group"],
)
THREADS_LEAKED: Final = Gauge(
    "gpuledger_agent_threads_leaked",
    "Number of threads that hang permanently in a driver call.",
)
GPUS_LOST: Final = Gauge("gpuledger_agent_gpus_lost", "Number of GPUs that do not answer.")
DRIVER_UP: Final = Gauge(
    "gpuledger_agent_driver_up",
    "Whether the driver's library is open and at least one GPU answers (1 = yes, 0 = no).",
)
NVML_ERRORS: Final = Counter(
    "gpuledger_agent_nvml_errors",
    "Total number of driver calls that returned an error.",
    ["call", "error"],
)
SOURCE_OPENINGS: Final = Counter(
    "gpuledger_agent_source_openings",
    "Total number of times that the GPU source was opened, including the first time.",
)
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_agent_publish_failures",
    "Total number of batches that the broker did not acknowledge; they are sent again.",
)
MESSAGES_REJECTED: Final = Counter(
    "gpuledger_agent_messages_rejected",
    "Total number of records that brokers do not accept, by reason: `too_large` or `future`"
    " (stamped by a node clock that ran ahead).",
    ["reason"],
)
count_from_zero(MESSAGES_REJECTED, reason=("too_large", "future"))
VALUES_CUT: Final = Counter(
    "gpuledger_agent_values_cut",
    "Total number of texts shortened and list rows left out to keep a record's limits, by field,"
    " such as `NodeSample.processes`.",
    ["field"],
)
JOB_ALLOCATIONS: Final = Gauge(
    "gpuledger_agent_job_allocations",
    "Number of jobs that hold a GPU or a MIG instance, from the scheduler's directory.",
)
JOB_FILES_REJECTED: Final = Counter(
    "gpuledger_agent_job_files_rejected",
    "Total number of the scheduler's job files not fully usable in a sample, by reason:"
    " `unreadable`, `malformed`, `too_many`, `unknown_gpu` or `unknown_instance`.",
    ["reason"],
)
count_from_zero(
    JOB_FILES_REJECTED,
    reason=("unreadable", "malformed", "too_many", "unknown_gpu", "unknown_instance"),
)
KUBELET_ANSWERS: Final = Counter(
    "gpuledger_agent_kubelet_answers",
    "Total number of the kubelet's answers about device allocations.",
)
KUBELET_ERRORS: Final = Counter(
    "gpuledger_agent_kubelet_errors",
    "Total number of queries about device allocations that the kubelet did not answer, by reason.",
    ["reason"],
)
POD_LIST_ERRORS: Final = Counter(
    "gpuledger_agent_pod_list_errors",
    "Total number of queries for the node's pods, their labels and annotations that failed.",
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
    "gpuledger_agent_allocations",
    "Number of devices and stated shares allocated to containers whose GPU is known.",
)
ALLOCATIONS_UNRESOLVED: Final = Gauge(
    "gpuledger_agent_allocations_unresolved",
    "Number of devices and stated shares allocated to containers that match no GPU of the node, by"
    " reason.",
    ["reason"],
)
ATTRIBUTION: Final = Gauge(
    "gpuledger_agent_process_attribution_enabled",
    "Whether processes are read (1 = yes, 0 = off, or /proc is not the whole machine's).",
)
INCIDENTS: Final = Counter(
    "gpuledger_agent_incidents",
    "Total number of incidents reported, by kind and by source: `nvml`, `kmsg` or `agent`.",
    ["kind", "source"],
)
count_from_zero(INCIDENTS, kind=INCIDENT_KINDS, source=("nvml", "kmsg", "agent"))
INCIDENTS_DUPLICATE: Final = Counter(
    "gpuledger_agent_incidents_duplicate",
    "Total number of incidents that had already been reported, by source of the later report.",
    ["source"],
)
count_from_zero(INCIDENTS_DUPLICATE, source=("nvml", "kmsg", "agent"))
INCIDENTS_DROPPED: Final = Counter(
    "gpuledger_agent_incidents_dropped",
    "Total number of incidents dropped because they arrived faster than they could be published.",
)
EVENT_SET_FAILURES: Final = Counter(
    "gpuledger_agent_event_set_failures",
    "Total number of failures to wait for the driver's events, by reason: `create`, `register`"
    " (one GPU), `wait` or `hang` (in too many earlier waits).",
    ["reason"],
)
count_from_zero(EVENT_SET_FAILURES, reason=("create", "register", "wait", "hang"))
KMSG_OVERRUNS: Final = Counter(
    "gpuledger_agent_kmsg_overruns",
    "Total number of times that the kernel log was overwritten before it was read.",
)
KMSG_FAILURES: Final = Counter(
    "gpuledger_agent_kmsg_failures",
    "Total number of times that the kernel log could not be opened or read.",
)
SPOOL_USABLE: Final = Gauge(
    "gpuledger_agent_spool_usable",
    "Whether the spool's directory can be opened, read and written (1 = yes, 0 = no); absent"
    " without a spool.",
    ["directory"],
)
SPOOL_BYTES: Final = Gauge("gpuledger_agent_spool_bytes", "Size of the spooled frames, in bytes.")
SPOOL_TICKS: Final = Gauge(
    "gpuledger_agent_spool_samples", "Number of samples and other messages in the spool."
)
SPOOL_OLDEST_SECONDS: Final = Gauge(
    "gpuledger_agent_spool_oldest_timestamp_seconds",
    "Event time of the oldest message in the spool, in seconds since the epoch; 0 if it is empty.",
)
SPOOL_WRITTEN: Final = Counter(
    "gpuledger_agent_spool_samples_written",
    "Total number of samples and other messages (incidents, inventories) written to the spool.",
)
SPOOL_DROPPED: Final = Counter(
    "gpuledger_agent_spool_samples_dropped",
    "Total number of spooled samples and other messages that will never be sent, by reason:"
    " `bytes`, `age`, `damaged` (file), `hung` (disk) or `late`.",
    ["reason"],
)
count_from_zero(SPOOL_DROPPED, reason=("bytes", "age", "damaged", "hung", "late"))
SPOOL_FILES_SET_ASIDE: Final = Counter(
    "gpuledger_agent_spool_files_quarantined",
    "Total number of damaged spool databases that were renamed and replaced by an empty one.",
)
SPOOL_FAILURES: Final = Counter(
    "gpuledger_agent_spool_failures",
    "Total number of disk errors of the spool, by error, such as ENOSPC; the messages stay in"
    " memory.",
    ["error"],
)
count_from_zero(SPOOL_FAILURES, error=("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "unknown"))
COUNTERS_SKIPPED: Final = Gauge(
    "gpuledger_agent_counters_skipped",
    "Number of lines in the list of counters that have no effect, such as fields that the agent"
    " does not have.",
)
PROCESS_SERIES_DROPPED: Final = Counter(
    "gpuledger_agent_process_series_dropped",
    "Total number of processes left out of /metrics, counted in each sample, because there were"
    " more than `exposition.max_process_series`.",
)


def count_published_from_zero(topics: Topics) -> None:
    """Initialize the counters of published records with 0 for each topic that the agent writes."""
    written = (
        topics.samples,
        topics.readings,
        topics.processes,
        topics.incidents,
        topics.inventory,
    )
    count_from_zero(RECORDS_PUBLISHED, topic=[topic.name for topic in written])
