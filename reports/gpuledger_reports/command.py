"""`gpuledger reports`: connects settings, HTTP endpoints and the processes that make bills."""

import asyncio
from functools import partial
from typing import Final

from gpuledger.runtime import Readiness, explain_user_errors, run_service
from gpuledger.settings import load_settings
from gpuledger.settings.secret import mask_address
from gpuledger_reports.api.answering import AnswerSettings
from gpuledger_reports.api.capacity_metrics import CapacityMetrics
from gpuledger_reports.api.description import description
from gpuledger_reports.api.pages import ReportPages
from gpuledger_reports.api.processes import BillProcesses, kill_processes, start_server
from gpuledger_reports.api.store_state import StoreState
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.settings import ReportsSettings

DESCRIPTION: Final = (
    "Serve GPU costs over HTTP from the store, which is only read. /allocation is OpenCost's API;"
    " /openapi.json describes all endpoints."
)
EXAMPLES: Final = (
    "GPULEDGER_STORE__URI=gpuledger-store gpuledger reports",
    "curl 'http://localhost:9824/allocation?window=7d&aggregate=namespace'",
    "curl 'http://localhost:9824/bill?period=2026-10&by=team'",
)
COMMON: Final = (
    "store.uri",
    "store.storage_options",
    "prices",
    "requests.max_concurrent",
    "requests.max_waiting",
    "requests.timeout_seconds",
    "requests.memory_bytes",
    "http.listen",
    "http.web_config_file",
    "log.level",
)


@explain_user_errors
def main() -> int:
    """Serve reports until a signal; return the exit code."""
    settings = load_settings(
        ReportsSettings,
        prog="gpuledger reports",
        description=DESCRIPTION,
        examples=EXAMPLES,
        common=COMMON,
    )
    # Read before serving, so that an invalid price file prevents the start.
    read = read_policy(settings.prices)
    description()
    start_server()
    pages = ReportPages(cache_bytes=settings.requests.cache_bytes)
    about = {"store": mask_address(settings.store.uri), "prices": read.name}
    return run_service(
        partial(serve, pages=pages), settings=settings, others=pages.app(), about=about
    )


async def serve(settings: ReportsSettings, readiness: Readiness, *, pages: ReportPages) -> None:
    """Answer the questions of `pages`, and keep metrics of capacity, until cancelled."""
    answer_settings = AnswerSettings(
        store_uri=settings.store.uri,
        storage_options=settings.store.storage_options,
        prices=None if settings.prices is None else str(settings.prices),
        memory_bytes=settings.requests.memory_bytes,
    )
    requests = settings.requests
    bills = BillProcesses(
        answer_settings,
        count=requests.max_concurrent,
        max_waiting=requests.max_waiting,
        timeout_seconds=requests.timeout_seconds,
    )
    store_checks = BillProcesses(
        answer_settings, count=1, max_waiting=0, timeout_seconds=requests.timeout_seconds
    )
    check = readiness.check("store")
    check.waits("the store has not been read yet")
    store = StoreState(
        store_checks.ask,
        check=check,
        interval_seconds=requests.store_poll_interval_seconds,
        timeout_seconds=requests.timeout_seconds,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pages.run(bills.ask, store))
            if hours := settings.capacity.metrics_interval_hours:
                tasks.create_task(CapacityMetrics(bills.ask).follow(interval_seconds=hours * 3600))
    finally:
        kill_processes()
