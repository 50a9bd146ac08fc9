"""Metrics of `gpuledger reports`: requests, durations, processes, cache."""

from enum import StrEnum
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger_reports.api.questions import PAGES

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
