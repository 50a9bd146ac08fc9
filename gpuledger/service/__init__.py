"""The life of a deployable: logs, health pages, signals, back-off."""

from gpuledger.service.backoff import Backoff
from gpuledger.service.health import serve_health
from gpuledger.service.lifecycle import explain_user_errors, run_until_signalled
from gpuledger.service.logs import configure_logs
from gpuledger.service.readiness import Check, CheckSeverity, Readiness
from gpuledger.service.retrying import until_done
from gpuledger.service.run import ServiceSettings, run_service
from gpuledger.service.stall import end_where_stalled

__all__ = [
    "Backoff",
    "Check",
    "CheckSeverity",
    "Readiness",
    "ServiceSettings",
    "configure_logs",
    "end_where_stalled",
    "explain_user_errors",
    "run_service",
    "run_until_signalled",
    "serve_health",
    "until_done",
]
