"""The metrics of `gpuledger reports`: requests, their time, processes, the cache."""

from enum import StrEnum
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger_reports.api.questions import PAGES

REQUESTS_TOTAL: Final = Counter(
    "gpuledger_reports_requests",
    "Requests for reports, by page and by the status that was answered.",
    ["page", "status"],
)
REQUEST_SECONDS: Final = Histogram(
    "gpuledger_reports_request_seconds",
    "Time from a request until its answer was made, with what it waited for its turn.",
    ["page"],
    buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
COMPUTING: Final = Gauge(
    "gpuledger_reports_computing",
    "Questions that a process is answering now, at most requests.max_concurrent.",
)
CACHE_HITS_TOTAL: Final = Counter(
    "gpuledger_reports_cache_hits",
    "Requests that were answered with what an earlier one had made of the same store.",
)
CACHE_BYTES: Final = Gauge(
    "gpuledger_reports_cache_bytes",
    "Answers that are kept, in bytes, at most requests.cache_bytes.",
)
STORE_TIMESTAMP_SECONDS: Final = Gauge(
    "gpuledger_reports_store_read_timestamp_seconds",
    "Time (Unix) at which the store's versions were last read; 0 before the first.",
)


class ProcessEnd(StrEnum):
    """Why a process that made a bill was ended, or ended."""

    LATE = "late"
    """It had no answer by the deadline, or nobody waited for it any more."""
    DIED = "died"
    """It ended by itself, or the system killed it for its memory."""


PROCESSES_ENDED_TOTAL: Final = Counter(
    "gpuledger_reports_processes_ended",
    "Processes that ended with a question unanswered: `late` (killed at the deadline), `died`.",
    ["reason"],
)
count_from_zero(PROCESSES_ENDED_TOTAL, reason=[reason.value for reason in ProcessEnd])
STATUSES: Final = ("200", "400", "500", "503", "504")
count_from_zero(REQUESTS_TOTAL, page=PAGES, status=STATUSES)
