"""Sets metrics to columns of the capacity reports, which are asked in the background.

Each report is asked like in a request, with the same limits. A metric has no series for a group of
GPUs whose value is unknown, and none at all while its report cannot be answered. A group without a
row has the value 0 if the fleet's row of the group implies it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
import structlog

from gpuledger.clock import Sleeper, SystemClock
from gpuledger_reports.api import metrics
from gpuledger_reports.api.endpoints import CAPACITY, PAGES
from gpuledger_reports.api.processes import Ask, BusyError, LateError, ProcessEndedError
from gpuledger_reports.capacity.report import Row

_KEPT_FAILURES: Final = 2
"""Metrics keep their last values for so many failures in a row."""
_RETRY_SECONDS: Final = 300.0
"""Time between updates until a report is answered for the first time, and before a report for which
the service was too busy is asked again."""
_GROUP: Final = ("cluster", "pool", "model")
_log = structlog.get_logger(__name__)


class Headlines(NamedTuple):
    """The columns of a report that become metrics."""

    by: tuple[str, ...]
    """The dimensions of the rows, which are labels."""
    columns: Mapping[str, tuple[metrics.CapacityGauge, *tuple[str, ...]]]
    """The metric of each column, with the values of its further labels."""


_FLEET: Final = "fleet"
_STATES: Final = ("total", "healthy", "allocatable", "allocated", "used", "free")
HEADLINES: Final[Mapping[str, Headlines]] = {
    _FLEET: Headlines(_GROUP, {state: (metrics.CAPACITY_GPUS, state) for state in _STATES}),
    "waste": Headlines(
        _GROUP,
        {
            "unused_gpu_hours": (metrics.CAPACITY_UNUSED_GPU_HOURS,),
            "unused_cost": (metrics.CAPACITY_UNUSED_COST,),
        },
    ),
    "fragmentation": Headlines(_GROUP, {"stranded_gpus": (metrics.CAPACITY_STRANDED_GPUS,)}),
    "queue": Headlines(
        ("cluster",),
        {
            "waiting": (metrics.CAPACITY_WAITING_PODS,),
            "unmet_gpus": (metrics.CAPACITY_UNMET_GPUS,),
        },
    ),
    "forecast": Headlines(
        _GROUP,
        {
            "expected": (metrics.CAPACITY_EXPECTED_GPUS,),
            "full_days_p50": (metrics.CAPACITY_FULL_DAYS,),
        },
    ),
    "faults": Headlines(
        _GROUP,
        {
            "failures": (metrics.CAPACITY_FAILURES,),
            "lost_gpu_hours": (metrics.CAPACITY_LOST_GPU_HOURS,),
        },
    ),
}
"""The metrics that are made from each report."""
_ROUNDING_GPUS: Final = 0.02
"""Means may be rounded to 0.01."""
_IS_ZERO: Final[Mapping[str, Callable[[Row], bool]]] = {
    "waste": lambda gpus: (
        gpus["mean_allocated"] == 0
        and bool(gpus["mean_healthy"])
        and abs(gpus["mean_healthy"] - gpus["mean_allocatable"] - gpus["mean_cordoned"])
        < _ROUNDING_GPUS
    ),
    "faults": lambda gpus: bool(gpus["mean_healthy"]),
}
"""Whether a group with a row in the report `fleet`, but without one in this report, has only zeros:
nothing is allocated, or its GPUs are known to respond."""


class CapacityMetrics:
    """The metrics of the reports in `HEADLINES`."""

    def __init__(self, ask: Ask, *, clock: Sleeper | None = None) -> None:
        self._ask, self._clock = ask, clock or SystemClock()
        self._awaited: str | None = ""
        """The reason for which no report can be answered yet; `None` after the first answer."""
        self._fleet: Sequence[Row] = ()
        self._failures = Counter[str]()
        """The number of failures of each report since its last answer."""

    async def follow(self, *, interval_seconds: float) -> None:
        """Update the metrics repeatedly until cancelled."""
        while True:
            late = await self.update()
            if self._awaited is not None:
                await self._clock.sleep(_RETRY_SECONDS)
            elif late:
                await self._clock.sleep(_RETRY_SECONDS)
                # The next failure is the same one.
                self._failures.subtract(late)
                await self.update(late)
                await self._clock.sleep(interval_seconds - _RETRY_SECONDS)
            else:
                await self._clock.sleep(interval_seconds)

    async def update(self, reports: Iterable[str] = HEADLINES) -> list[str]:
        """Ask reports once, one after another, and set their metrics.

        Returns the reports for which the service was too busy.
        """
        late: list[str] = []
        for report in reports:
            headlines = HEADLINES[report]
            query = urlencode({"by": ",".join(headlines.by)})
            question = PAGES[f"{CAPACITY}/{report}"](query, int(time.time()) * 10**6)
            try:
                answer = await self._ask(question)
            except (BusyError, LateError, ProcessEndedError) as error:
                self._keep_or_clear(report, str(error))
                if not isinstance(error, ProcessEndedError):
                    late.append(report)
                continue
            content = msgspec.json.decode(answer.body)
            if answer.status == HTTPStatus.OK:
                self._awaited = None
                del self._failures[report]
                _clear(report)
                if report == _FLEET:
                    self._fleet = content["rows"]
                _set(report, content, self._fleet)
            elif answer.status == HTTPStatus.SERVICE_UNAVAILABLE and self._awaited is not None:
                # A new installation has no store or no complete hour, for any report.
                if self._awaited != content["message"]:
                    self._awaited = content["message"]
                    _log.info("capacity_metrics_awaited", error=self._awaited)
                break
            else:
                self._keep_or_clear(report, content["message"])
        return late

    def _keep_or_clear(self, report: str, error: str) -> None:
        _log.warning("capacity_metrics_failed", report=report, error=error)
        self._failures[report] += 1
        if self._failures[report] > _KEPT_FAILURES:
            _clear(report)
            if report == _FLEET:
                self._fleet = ()


def _clear(report: str) -> None:
    for gauge, *_ in HEADLINES[report].columns.values():
        gauge.clear()
    with suppress(KeyError):
        metrics.CAPACITY_TIMESTAMP_SECONDS.remove(report)


def _set(report: str, content: dict[str, Any], fleet: Sequence[Row]) -> None:
    by, columns = HEADLINES[report]
    known = {tuple(row[name] for name in by) for row in content["rows"]}
    zeros = (
        dict.fromkeys(columns, 0) | {name: gpus[name] for name in by}
        for gpus in fleet
        if report in _IS_ZERO
        and tuple(gpus[name] for name in by) not in known
        and _IS_ZERO[report](gpus)
    )
    for row in (*zeros, *content["rows"]):
        group = [row[name] or "" for name in by]
        for column, (gauge, *others) in columns.items():
            if row[column] is not None:
                gauge.labels(*group, *others).set(row[column])
    end_seconds = datetime.fromisoformat(content["to"]).timestamp()
    metrics.CAPACITY_TIMESTAMP_SECONDS.labels(report).set(end_seconds)
