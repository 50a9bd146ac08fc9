"""Metrics of `gpuledger reports`: requests, durations, processes, cache."""

from enum import StrEnum
from typing import Final, TypeAlias

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger_reports.api.endpoints import PAGES

REQUESTS_TOTAL: Final = Counter(
    "gpuledger_reports_requests",
    "Total number of report requests, by page and HTTP status.",
    ["page", "status"],
)
REQUEST_SECONDS: Final = Histogram(
    "gpuledger_reports_request_seconds",
    "Time from a request to its answer, in seconds, including the wait for a process.",
    ["page"],
    buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
COMPUTING: Final = Gauge(
    "gpuledger_reports_computing",
    "Number of requests that processes are answering now, at most requests.max_concurrent.",
)
CACHE_HITS_TOTAL: Final = Counter(
    "gpuledger_reports_cache_hits",
    "Total number of requests answered from the cache.",
)
CACHE_BYTES: Final = Gauge(
    "gpuledger_reports_cache_bytes",
    "Size of cached answers in bytes, at most requests.cache_bytes.",
)
STORE_TIMESTAMP_SECONDS: Final = Gauge(
    "gpuledger_reports_store_read_timestamp_seconds",
    "Unix time in seconds when the store's versions were last read; 0 before the first time.",
)


class ProcessEnd(StrEnum):
    """Why a process ended without an answer."""

    LATE = "late"
    """Killed: it had no answer by the deadline, or its client had gone."""
    DIED = "died"
    """It crashed, or the system killed it because memory ran out."""


PROCESSES_ENDED_TOTAL: Final = Counter(
    "gpuledger_reports_processes_ended",
    "Total number of processes ended without an answer: `late` (killed at the deadline), `died`.",
    ["reason"],
)
count_from_zero(PROCESSES_ENDED_TOTAL, reason=[reason.value for reason in ProcessEnd])
STATUSES: Final = ("200", "400", "500", "503", "504")
count_from_zero(REQUESTS_TOTAL, page=PAGES, status=STATUSES)

_GROUP: Final = ("cluster", "pool", "model")
CapacityGauge: TypeAlias = Gauge
"""The type of the following metrics. Only modules of metrics import `prometheus_client`."""
CAPACITY_GPUS: Final = Gauge(
    "gpuledger_reports_capacity_gpus",
    "Number of GPUs in the last hour of complete usage, by state: `total`, `healthy`,"
    " `allocatable`, `allocated`, `used` or `free`. A GPU may have several states.",
    [*_GROUP, "state"],
)
CAPACITY_UNUSED_GPU_HOURS: Final = Gauge(
    "gpuledger_reports_capacity_unused_gpu_hours",
    "Allocated and unused GPU-hours of the last 30 days.",
    _GROUP,
)
CAPACITY_UNUSED_COST: Final = Gauge(
    "gpuledger_reports_capacity_unused_cost",
    "Cost of the allocated and unused time of the last 30 days, in the currency of the prices.",
    _GROUP,
)
CAPACITY_STRANDED_GPUS: Final = Gauge(
    "gpuledger_reports_capacity_stranded_gpus",
    "Mean number of free GPUs in the last 30 days that pods could use only if pods were packed.",
    _GROUP,
)
CAPACITY_WAITING_PODS: Final = Gauge(
    "gpuledger_reports_capacity_waiting_pods",
    "Number of pods that wait for GPUs at the end of complete usage.",
    ["cluster"],
)
CAPACITY_UNMET_GPUS: Final = Gauge(
    "gpuledger_reports_capacity_unmet_gpus",
    "Mean number of GPUs for which pods waited in the last 30 days.",
    ["cluster"],
)
CAPACITY_EXPECTED_GPUS: Final = Gauge(
    "gpuledger_reports_capacity_expected_gpus",
    "Mean expected demand in GPUs over the last seven of the next 28 days, or of 14 or 7 days while"
    " the history is shorter than 84 days.",
    _GROUP,
)
CAPACITY_FULL_DAYS: Final = Gauge(
    "gpuledger_reports_capacity_full_days",
    "Days until the expected demand reaches all GPUs (P50); absent if not within the horizon.",
    _GROUP,
)
CAPACITY_FAILURES: Final = Gauge(
    "gpuledger_reports_capacity_failures",
    "Number of failures of GPUs in the last 30 days.",
    _GROUP,
)
CAPACITY_LOST_GPU_HOURS: Final = Gauge(
    "gpuledger_reports_capacity_lost_gpu_hours",
    "GPU-hours lost to failures and cordons in the last 30 days.",
    _GROUP,
)
CAPACITY_TIMESTAMP_SECONDS: Final = Gauge(
    "gpuledger_reports_capacity_timestamp_seconds",
    "Unix time in seconds of the end of the usage from which a report's metrics were calculated.",
    ["report"],
)
