"""A deployable as a whole: logs, health pages, its work, its end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from gpuledger import __version__
from gpuledger.runtime.http.auth import WebGuard
from gpuledger.runtime.http.health_pages import Page, serve_health
from gpuledger.runtime.lifecycle import run_until_signalled
from gpuledger.runtime.logs import configure_logs
from gpuledger.runtime.readiness import CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.groups import HttpSettings, LogSettings

_log = structlog.get_logger(__name__)


class ServiceSettings(Protocol):
    """What the settings of every deployable have."""

    @property
    def http(self) -> HttpSettings:
        """Where health and metrics are served."""

    @property
    def log(self) -> LogSettings:
        """What is written to standard error."""


S = TypeVar("S", bound=ServiceSettings)


def run_service(
    main: Callable[[S, Readiness], Awaitable[None]],
    *,
    settings: S,
    page: Page | None = None,
    about: Mapping[str, object] | None = None,
) -> int:
    """Run `main` with logs and health pages until a signal; return the exit code.

    `page` is written behind the process's own metrics on `/metrics`; `about` is what the first log
    line says of this deployable: what it does, where to, and as whom.
    """
    configure_logs(settings.log)
    readiness = Readiness()
    file = settings.http.web_config_file
    guard = _guard(file, readiness) if file else None

    async def work() -> None:
        async with serve_health(
            listen=settings.http.listen, readiness=readiness, page=page, guard=guard
        ) as address:
            _log.info("service_started", version=__version__, http=address, **(about or {}))
            looking = asyncio.create_task(readiness.keep_looking())
            try:
                await main(settings, readiness)
            finally:
                await end_tasks(looking)
                _log.info("service_ended")

    return run_until_signalled(work, on_stop=readiness.end)


def _guard(file: Path, readiness: Readiness) -> WebGuard:
    guard = WebGuard(file, check=readiness.check("web_config", severity=CheckSeverity.WARNING))
    readiness.look_each_second(guard.look)
    return guard
