"""HTTP requests directly to the parts, regardless of any configured proxy."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

LIMIT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status and body of an HTTP response, including errors."""

    status: int
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - the type of another server's response is not ours
        """Read the body as JSON."""
        return json.loads(self.body)


def fetch(
    url: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
    limit_seconds: float = LIMIT_SECONDS,
) -> Answer:
    """Send one request and return the response, whatever its status; raises OSError without one."""
    request = urllib.request.Request(  # noqa: S310 - tests choose the addresses
        url, data=body, method=method, headers=dict(headers or {})
    )
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=limit_seconds) as response:
            return Answer(status=response.status, body=response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(status=error.code, body=error.read())


def await_some(
    attempt: Callable[[], list[Any]], *, what: str, deadline_seconds: float
) -> list[Any]:
    """Fetch until the answer is not empty; raises TimeoutError that contains `what`."""
    end_seconds = time.monotonic() + deadline_seconds
    while not (found := attempt()):
        if time.monotonic() > end_seconds:
            raise TimeoutError(f"nothing after {deadline_seconds} s: {what}")
        time.sleep(0.1)
    return found
