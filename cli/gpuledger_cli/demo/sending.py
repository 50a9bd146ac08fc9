"""Counts each sink's deliveries and failures from its own metrics and checks, as operators do."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from prometheus_client.registry import Collector

from gpuledger.bus.protocol import TopicPartition
from gpuledger.clock import Clock
from gpuledger.records.base import BaseRecord
from gpuledger.runtime import Readiness
from gpuledger_cli.demo.tables import elide
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_sinks.metrics import DROPPED_TOTAL, RETRIES_TOTAL, SENT_TOTAL

Work = Callable[..., Coroutine[Any, Any, None]]
"""Runs a sink until cancelled; takes its bus, readiness and clock by keyword."""
_SENDS_EVERY_EVENT: Final = frozenset({"remote_write", "store"})
_MAX_CHARACTERS: Final = 200


class SinkLine(BaseRecord, frozen=True, kw_only=True):
    """The deliveries of one sink."""

    sink: str
    """Kind of the sink."""
    receiver: str
    """Address of the receiver, without user, password and query."""
    sent: int
    """Number of samples, alerts or rows that the receiver acknowledged."""
    retries: int
    """Number of attempts that failed and were retried."""
    rejected: int
    """Number of samples, alerts or rows that the receiver rejected permanently."""
    failing: str | None = None
    """Details of the sink's failed checks, if any."""
    missing: int = 0
    """Number of the run's events and incidents that were not delivered at the end."""


class SinkWatch:
    """Runs a sink, and counts what it has sent since this object was created."""

    def __init__(
        self, *, sink: str, receiver: str, bus: BusView, work: Work, gathers: bool = False
    ) -> None:
        """Prepare the sink; a sink that `gathers` delivers buffered records when it ends."""
        self.sink = sink
        self.bus = bus
        self._work = work
        self._gathers = gathers
        self._readiness = Readiness()
        self._receiver = receiver
        self._before = self._counts()

    async def run(self, clock: Clock) -> None:
        """Run the sink until cancelled."""
        await self._work(bus=self.bus, readiness=self._readiness, clock=clock)

    def may_end(self, records: Sequence[tuple[TopicPartition, int]]) -> bool:
        """Return whether the sink may end now.

        It may end if it has delivered these records, or if its receiver fails. A sink that gathers
        records only needs to have read them.
        """
        done = self.bus.polled if self._gathers else self.bus.committed
        return not self.bus.count_behind(done, records) or bool(self.line().failing)

    def line(self, records: Sequence[tuple[TopicPartition, int]] = ()) -> SinkLine:
        """Return the counts so far, including how many of these records are not delivered."""
        sent, retries, rejected = (
            round(now - before) for now, before in zip(self._counts(), self._before, strict=True)
        )
        return SinkLine(
            sink=self.sink,
            receiver=self._receiver,
            sent=sent,
            retries=retries,
            rejected=rejected,
            failing=self._failing() if retries or rejected else None,
            missing=self.bus.count_behind(self.bus.committed, records),
        )

    def _counts(self) -> tuple[float, float, float]:
        return (
            _count(SENT_TOTAL, sink=self.sink),
            _count(RETRIES_TOTAL, sink=self.sink),
            _count(DROPPED_TOTAL, sink=self.sink, reason="rejected"),
        )

    def _failing(self) -> str | None:
        checks = self._readiness.report()["checks"]
        assert isinstance(checks, dict)  # noqa: S101 - the report's own form
        details = (str(check["detail"]) for check in checks.values() if not check["ok"])
        # Several checks may report the same failure of the receiver.
        texts = dict.fromkeys(detail.removeprefix(f"{self._receiver}: ") for detail in details)
        return elide("; ".join(texts), width=_MAX_CHARACTERS) or None


def has_failed(line: SinkLine, *, events: int) -> bool:
    """Return whether a sink had something to send and delivered nothing."""
    if line.sent:
        return False
    is_due = events > 0 and line.sink in _SENDS_EVERY_EVENT
    return bool(line.retries or line.rejected or is_due)


def problem(line: SinkLine, *, events: int) -> str | None:
    """Return a sentence about undelivered items of a sink; `None` if it delivered everything."""
    detail = (line.failing or "").removeprefix(f"{line.receiver}: ")
    why = f": {detail}" if detail else ""
    if has_failed(line, events=events):
        if line.retries:
            failure = f"nothing delivered to {line.receiver} in {line.retries} attempts"
        elif line.rejected:
            failure = f"{line.receiver} rejected all {line.rejected} items"
        else:
            failure = f"nothing delivered to {line.receiver} before the end"
        return f"{line.sink}: {failure}{why}"
    if line.failing:
        return f"{line.sink}: {line.receiver} no longer responds{why}"
    if line.missing:
        return f"{line.sink}: {line.missing} events not delivered to {line.receiver}"
    if line.rejected:
        return f"{line.sink}: {line.receiver} rejected {line.rejected} items"
    return None


def _count(counter: Collector, **labels: str) -> float:
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels == labels
    )


@dataclass
class Received:
    """Requests to the built-in receivers so far."""

    url: str
    """Base URL of the receivers."""
    writes: int = 0
    """Number of remote-write requests."""


@asynccontextmanager
async def serve_receivers() -> AsyncIterator[Received]:
    """Serve replacements for Prometheus and Alertmanager, so that the demo needs only Python.

    They listen on a free local port while the context is open. They accept every request without
    checking it, and count the remote-write requests.
    """

    async def take_write(request: web.Request) -> web.Response:
        received.writes += 1
        await request.read()
        return web.Response(status=204)

    async def take_alerts(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(status=200)

    app = web.Application(client_max_size=32 * 2**20)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    received = Received(url="")
    app.router.add_post("/api/v1/write", take_write)
    app.router.add_post("/api/v2/alerts", take_alerts)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        received.url = f"http://{host}:{port}"
        yield received
    finally:
        await runner.cleanup()
