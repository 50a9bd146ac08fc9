"""An HTTP receiver that answers as the test configures and records its requests."""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from aiohttp import web


class Answer(NamedTuple):
    status: int
    text: str = ""
    headers: Mapping[str, str] = {}


class Received(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Receiver:
    url: str = ""
    received: list[Received] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """The next answers, in order; afterwards every request is answered by its body."""
    by_body: Callable[[bytes], Answer] = lambda _: Answer(204)
    login: str = ""
    """The `Authorization` without which a request is answered with 401; empty accepts any."""

    hangs_up: bool = False
    """Whether it closes the connection instead of answering."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.received.append(Received(request.path, dict(request.headers), body))
        if self.hangs_up and request.transport is not None:
            request.transport.close()
        if self.login and request.headers.get("Authorization") != self.login:
            return web.Response(status=401, text="who are you?")
        answer = self.answers.pop(0) if self.answers else self.by_body(body)
        return web.Response(status=answer.status, text=answer.text, headers=answer.headers)


@asynccontextmanager
async def receiving(
    *answers: Answer,
    by_body: Callable[[bytes], Answer] = lambda _: Answer(204),
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[Receiver]:
    receiver = Receiver(answers=list(answers), by_body=by_body)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    host, port = runner.addresses[0][:2]
    receiver.url = f"{'https' if context else 'http'}://{host}:{port}"
    try:
        yield receiver
    finally:
        await runner.cleanup()
