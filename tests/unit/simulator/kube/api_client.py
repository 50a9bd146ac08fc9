"""A client of the played API server for its tests."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

PODS = "/api/v1/pods"


class Client:
    """Plain requests, and a watch's events as they arrive."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def get(self, path: str = PODS, **query: str) -> tuple[int, Any]:
        return await self.send("GET", path, None, **query)

    async def send(self, method: str, path: str, body: object, **query: str) -> tuple[int, Any]:
        data = None if body is None else orjson.dumps(body)
        url = self.url + path
        async with self.session.request(method, url, params=query, data=data) as answer:
            return answer.status, orjson.loads(await answer.read())

    async def watch(self, path: str = PODS, **query: str) -> AsyncIterator[dict[str, Any]]:
        query = {"watch": "true", "timeoutSeconds": "20", **query}
        async with self.session.get(self.url + path, params=query) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                yield orjson.loads(line)
