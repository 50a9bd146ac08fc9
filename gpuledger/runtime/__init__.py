"""The runtime of every component: logs, health endpoints, checks, signals, retries."""

from gpuledger.runtime.http.health_pages import serve_health
from gpuledger.runtime.logs import configure_logs
from gpuledger.runtime.readiness import Check, CheckParts, CheckSeverity, Readiness
from gpuledger.runtime.retry import Backoff, RetryingCaller, RetryTimer
from gpuledger.runtime.service import (
    ServiceSettings,
    explain_user_errors,
    run_service,
    run_until_signalled,
)
from gpuledger.runtime.tasks import end_where_stalled

__all__ = [
    "Backoff",
    "Check",
    "CheckParts",
    "CheckSeverity",
    "Readiness",
    "RetryTimer",
    "RetryingCaller",
    "ServiceSettings",
    "configure_logs",
    "end_where_stalled",
    "explain_user_errors",
    "run_service",
    "run_until_signalled",
    "serve_health",
]
