"""The endpoints of `gpuledger reports`: parses requests and returns cached or new answers.

Answers are cached until the store's tables or the prices change. A cached answer is returned
without a process. If the client disconnects, its question is cancelled.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpuledger.errors import ArgumentError
from gpuledger.runtime.tasks import end_tasks
from gpuledger_reports.api.answering import ReportAnswer, error_body
from gpuledger_reports.api.description import capacity_list, description
from gpuledger_reports.api.endpoints import CAPACITY, PAGES
from gpuledger_reports.api.metrics import (
    CACHE_BYTES,
    CACHE_HITS_TOTAL,
    REQUEST_SECONDS,
    REQUESTS_TOTAL,
)
from gpuledger_reports.api.processes import Ask, BusyError, LateError, ProcessEndedError
from gpuledger_reports.api.questions import MEDIA_TYPES, Question, window_text
from gpuledger_reports.api.store_state import StoreState

FIXED: Final[Mapping[str, Callable[[], bytes]]] = {
    CAPACITY: capacity_list,
    "/openapi.json": description,
}
"""Pages that do not depend on the store."""
KUBECOST_PREFIX: Final = "/model"
"""Clients of Kubecost write this before the path of an endpoint."""
_log = structlog.get_logger(__name__)
_RETRY_SECONDS: Final = {HTTPStatus.SERVICE_UNAVAILABLE: "5"}


class AnswerCache:
    """The most recently used answers, up to a total number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, ReportAnswer] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> ReportAnswer | None:
        """Return the answer for a key, or `None`, and mark it as recently used."""
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
        return found

    def put(self, key: bytes, answer: ReportAnswer) -> None:
        """Add an answer, and drop the least recently used answers if the cache is full.

        An answer that is larger than the cache is not added.
        """
        if len(key) + len(answer.body) > self._max_bytes or key in self._answers:
            return
        self._answers[key] = answer
        self._bytes += len(key) + len(answer.body)
        while self._bytes > self._max_bytes:
            oldest, gone = self._answers.popitem(last=False)
            self._bytes -= len(oldest) + len(gone.body)
        CACHE_BYTES.set(self._bytes)

    def clear(self) -> None:
        """Drop all answers."""
        self._answers.clear()
        self._bytes = 0
        CACHE_BYTES.set(0)


class ReportPages:
    """All endpoints except those for health and metrics."""

    def __init__(self, *, cache_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._cache = AnswerCache(cache_bytes)
        self._now = now
        self._ask: Ask | None = None
        self._store: StoreState | None = None
        self._cached_state: bytes | None = None

    def app(self) -> Starlette:
        """Return the application that routes requests to the endpoints."""
        pages = [
            Route(prefix + path, self._show) for path in PAGES for prefix in ("", KUBECOST_PREFIX)
        ]
        fixed = [Route(path, _show_fixed) for path in FIXED]
        return Starlette(routes=[*pages, *fixed, Route("/{path:path}", _list_pages)])

    async def _show(self, request: Request) -> Response:
        page = request.scope["path"].removeprefix(KUBECOST_PREFIX)
        begin_seconds = time.monotonic()
        reporting = asyncio.create_task(self._report(page, request.scope["query_string"].decode()))
        leaving = asyncio.create_task(_wait_gone(request))
        try:
            await asyncio.wait({reporting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reporting.done():
                return Response()  # the client has disconnected
            response = reporting.result()
        finally:
            await end_tasks(reporting, leaving)
        REQUEST_SECONDS.labels(page=page).observe(time.monotonic() - begin_seconds)
        REQUESTS_TOTAL.labels(page=page, status=str(response.status_code)).inc()
        return response

    async def run(self, ask: Ask, store: StoreState) -> None:
        """Answer questions with `ask` and follow the store's state until cancelled."""
        self._ask, self._store = ask, store
        try:
            await store.follow()
        finally:
            self._ask = self._store = None

    async def _report(self, page: str, query: str) -> Response:
        try:
            question = PAGES[page](query, int(self._now()) * 10**6)
        except ArgumentError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error), parameter=error.name)
        # Answers are cached by question, so equivalent requests on different endpoints share an
        # answer.
        state, key = self._followed_state(), msgspec.msgpack.encode(question)
        if found := self._cache.get(key):
            CACHE_HITS_TOTAL.inc()
            return _response(found)
        answer = await self._answer(page, question)
        # If the store changed meanwhile, the answer may be outdated.
        is_same = state is not None and state == self._followed_state()
        if answer.status == HTTPStatus.OK and is_same:
            self._cache.put(key, answer)
        return _response(answer)

    def _followed_state(self) -> bytes | None:
        """Return the store's current state, or `None` if unknown; clear the cache if it changed."""
        state = self._store.current() if self._store else None
        if state != self._cached_state:
            self._cache.clear()
            self._cached_state = state
        return state

    async def _answer(self, page: str, question: Question) -> ReportAnswer:
        unavailable, late = HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT
        if self._ask is None:
            return _error_answer(unavailable, "the service is starting or stopping")
        try:
            return await self._ask(question)
        except BusyError as error:
            return _error_answer(unavailable, str(error))
        except LateError as error:
            window = window_text(question)
            _log.warning("bill_deadline_missed", page=page, window=window, error=str(error))
            return _error_answer(late, f"{error}; request less at a time")
        except ProcessEndedError as error:
            problem = f"{error}, possibly because memory ran out; request less at a time"
            return _error_answer(unavailable, problem)


async def _wait_gone(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _show_fixed(request: Request) -> Response:
    return Response(FIXED[request.scope["path"]](), media_type=MEDIA_TYPES["json"])


async def _list_pages(_: Request) -> Response:
    listed = ", ".join([*PAGES, *FIXED, "/livez", "/readyz", "/metrics"])
    return _error(HTTPStatus.NOT_FOUND, f"unknown path; paths are {listed}")


def _response(answer: ReportAnswer) -> Response:
    retry = _RETRY_SECONDS.get(HTTPStatus(answer.status))
    headers = {"Retry-After": retry} if retry else {}
    return Response(answer.body, answer.status, headers, media_type=answer.media_type)


def _error_answer(
    status: HTTPStatus, message: str, *, parameter: str | None = None
) -> ReportAnswer:
    return ReportAnswer(status=status, body=error_body(status, message, parameter=parameter))


def _error(status: HTTPStatus, message: str, *, parameter: str | None = None) -> Response:
    return _response(_error_answer(status, message, parameter=parameter))
