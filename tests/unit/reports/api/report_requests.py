"""A small store, and answers to requests about it within this process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpuledger.runtime import Readiness
from gpuledger.runtime.http.asgi import AsgiApp, Message
from gpuledger.runtime.tasks import end_tasks
from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer, answer_to
from gpuledger_reports.api.pages import ReportPages
from gpuledger_reports.api.processes import Ask
from gpuledger_reports.api.questions import Question
from gpuledger_reports.api.store_state import StoreState
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    allocated,
    inventory_row,
    pending_row,
    pod_row,
    used,
    write_store,
)

DAY = "2026-10-01T00:00:00Z,2026-10-02T00:00:00Z"
NOW_SECONDS = (BEGIN_US + 20 * HOUR_US) / 1e6
INTERVAL_SECONDS = 3600.0
FLEET_HOURS = 72
WHOLE_HOUR = (1 << 60) - 1
PRICES = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(
    app: AsgiApp, path: str, query: str = "", *, gone: asyncio.Event | None = None
) -> Response:
    """Return the response to a GET of an ASGI application; the client may disconnect."""
    reported: list[Message] = []
    received = iter([{"type": "http.request"}])

    async def receive() -> Message:
        if message := next(received, None):
            return message
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        reported.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await app({**scope, "query_string": query.encode()}, receive, send)
    start, body = reported
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(status=start["status"], headers=headers, body=body["body"])


def small_store(folder: Path) -> AnswerSettings:
    """Return settings for a store of four GPU-hours: two of ns (a, b), one idle, one of other."""
    store = write_store(
        folder / "store",
        usage_hourly=[
            allocated(0, "a", busy_ns=HOUR_NS // 2),
            used(0, "a", HOUR_NS // 2),
            allocated(1, "b"),
            allocated(2, None),
            allocated(2, "c", gpu="GPU-z", node="m", allocated_namespace="other"),
        ],
        inventory=[inventory_row(), inventory_row("GPU-z", node="m", hour=2)],
        pods=[pod_row("a", owner_kind="Job", owner_name="train", labels='{"app":"x"}')],
    )
    prices = folder / "prices.yaml"
    prices.write_text(PRICES)
    return settings_for(store, prices=prices)


def fleet_store(folder: Path) -> AnswerSettings:
    """Return settings for a store on which each capacity report has rows.

    The forecast has none, because the history is too short.
    """
    store = write_store(
        folder / "store",
        usage_hourly=[row for hour in range(FLEET_HOURS) for row in _fleet_rows(hour, 1)],
        usage_daily=[row for day in range(FLEET_HOURS // 24) for row in _fleet_rows(day * 24, 24)],
        pending_pods=[pending_row("waits", created=50), pending_row("had", created=1, left=3)],
        incidents=[_incident(30)],
    )
    prices = folder / "prices.yaml"
    prices.write_text("prices: [{name: h100, product: H100, per_gpu_hour: 7}]\n")
    return settings_for(store, prices=prices)


def _fleet_rows(begin: int, count: int) -> Iterator[Row]:
    """Yield the usage of three nodes, each with a pod of two GPUs, a pod of one, and a free GPU.

    No pod runs a kernel.
    """
    known = {
        "event_date": (BEGIN_US + begin * HOUR_US) // (24 * HOUR_US),
        "model": "NVIDIA H100 80GB HBM3",
        "busy_minutes_0": count * 60,
    }
    bits = {"allocated_minutes": WHOLE_HOUR, "used_minutes": 0} if count == 1 else {}
    for node in "abc":
        for number, pod in enumerate((f"large-{node}", f"large-{node}", f"small-{node}", None)):
            fields = {"gpu": f"GPU-{node}{number}", "node": node, **known}
            of_pod = bits if pod else {}
            yield allocated(begin, pod, count * HOUR_NS, **fields, **of_pod)
            if pod:
                fields |= {"memory_minutes_8": count * 60, "memory_bytes_max": 7 * 2**30}
                yield used(begin, pod, 0, **fields)


def _incident(hour: float) -> Row:
    """Return the row of an XID 48."""
    return {
        "cluster": "prod",
        "node": "a",
        "time": BEGIN_US + round(hour * HOUR_US),
        "boot_id": "b",
        "gpu_uuid": "GPU-a0",
        "kind": "xid",
        "xid": 48,
        "severity": "critical",
        "source": "nvml",
        "kafka_partition": 3,
        "kafka_offset": 0,
    }


def settings_for(
    store: str, *, prices: Path | None = None, memory_bytes: int = 256 * 2**20
) -> AnswerSettings:
    return AnswerSettings(
        store_uri=store,
        storage_options={},
        prices=None if prices is None else str(prices),
        memory_bytes=memory_bytes,
    )


@dataclass
class InlineAnswerer:
    """Answers in the event loop itself, and records its requests."""

    settings: AnswerSettings
    requests: list[Question] = field(default_factory=list)
    waits_for: asyncio.Event | None = None
    """The event that answers wait for, like answers that take long."""

    async def ask(self, question: Question) -> ReportAnswer:
        if self.waits_for is not None:
            await self.waits_for.wait()
        self.requests.append(question)
        return answer_to(question, self.settings)


class InlinePages:
    """The endpoints over one inline answerer; the store is read when `check_store` is called."""

    def __init__(self, settings: AnswerSettings, *, cache_bytes: int = 2**20) -> None:
        self.answerer, self.looker = InlineAnswerer(settings), InlineAnswerer(settings)
        self.readiness = Readiness()
        self.check = self.readiness.check("store")
        self.pages = ReportPages(cache_bytes=cache_bytes, now=lambda: NOW_SECONDS)
        self.clock_seconds = 0.0
        self.store = StoreState(
            lambda question: self.looker.ask(question),  # noqa: PLW0108  # tests replace `ask`
            check=self.check,
            interval_seconds=INTERVAL_SECONDS,
            timeout_seconds=0.05,
            monotonic_seconds=lambda: self.clock_seconds,
        )

    async def get(
        self, path: str, query: str = "", *, gone: asyncio.Event | None = None
    ) -> Response:
        return await ask(self.pages.app(), path, query, gone=gone)

    async def check_store(self) -> None:
        """Check the store now."""
        await self.store.check_store()

    @asynccontextmanager
    async def running(self, ask: Ask | None = None) -> AsyncIterator[None]:
        """Answer while the context is open, after the store has been checked."""
        task = asyncio.create_task(self.pages.run(ask or self.answerer.ask, self.store))
        try:
            # An inline answerer never waits, so that a check takes one step of the loop.
            await asyncio.sleep(0)
            yield
        finally:
            await end_tasks(task)
