"""The agent's own metrics: every name with its meaning, and nothing else."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

TICKS: Final = Counter("gpuledger_agent_ticks", "Ticks sampled.")
TICKS_LATE: Final = Counter(
    "gpuledger_agent_ticks_late", "Ticks that began later than half a tick after their time."
)
TICKS_DROPPED: Final = Counter(
    "gpuledger_agent_ticks_dropped",
    "Ticks dropped, oldest first, as the queue was full: the broker did not answer for too long.",
)
TICKS_PUBLISHED: Final = Counter(
    "gpuledger_agent_ticks_published", "Ticks that the broker has acknowledged."
)
PROCESS_RECORDS_PUBLISHED: Final = Counter(
    "gpuledger_agent_process_records_published",
    "Process records that the broker has acknowledged.",
)
INCIDENTS_PUBLISHED: Final = Counter(
    "gpuledger_agent_incidents_published", "Incidents that the broker has acknowledged."
)
INVENTORIES_PUBLISHED: Final = Counter(
    "gpuledger_agent_inventories_published", "Inventories that the broker has acknowledged."
)
QUEUE_TICKS: Final = Gauge("gpuledger_agent_queue_ticks", "Ticks that wait to be published.")
TICK_SECONDS: Final = Histogram(
    "gpuledger_agent_tick_seconds",
    "Time that taking one tick took.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
READINGS_DROPPED: Final = Counter(
    "gpuledger_agent_readings_dropped",
    "Values of the driver that cannot be true, left out of the tick.",
    ["reading"],
)
PROCESS_SAMPLES_DROPPED: Final = Counter(
    "gpuledger_agent_process_samples_dropped",
    "Process samples of the driver that were left out, by reason.",
    ["reason"],
)
PROCESSES_UNREADABLE: Final = Counter(
    "gpuledger_agent_processes_unreadable",
    "Processes on a GPU that /proc did not show, counted each tick: gone already, or of another"
    " pid namespace.",
)
GPU_DEADLINES_MISSED: Final = Counter(
    "gpuledger_agent_gpu_deadlines_missed",
    "Ticks that a GPU did not answer in time; they hold the other GPUs only.",
)
NVML_ERRORS: Final = Counter(
    "gpuledger_agent_nvml_errors",
    "Calls that the driver answered with an error.",
    ["call", "error"],
)
NVML_STARTS: Final = Counter(
    "gpuledger_agent_nvml_starts", "Times that the library was started, the first one included."
)
PUBLISH_FAILURES: Final = Counter(
    "gpuledger_agent_publish_failures", "Batches that the broker did not acknowledge; sent again."
)
MESSAGES_TOO_LARGE: Final = Counter(
    "gpuledger_agent_messages_too_large", "Records that no broker would take, left out."
)
KUBELET_ANSWERS: Final = Counter(
    "gpuledger_agent_kubelet_answers", "Times that the kubelet said which container holds what."
)
KUBELET_ERRORS: Final = Counter(
    "gpuledger_agent_kubelet_errors",
    "Times that the kubelet did not say which container holds what, by reason.",
    ["reason"],
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
    "gpuledger_agent_attribution",
    "1 while processes are read; 0 where /proc is not the whole machine's.",
)
