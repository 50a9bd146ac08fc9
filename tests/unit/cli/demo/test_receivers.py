"""The built-in receivers accept the requests of the sinks."""

import aiohttp

from gpuledger_cli.demo.sending import serve_receivers


async def test_samples_and_alerts_are_accepted() -> None:
    async with serve_receivers() as received, aiohttp.ClientSession() as session:
        for path, status in (("/api/v1/write", 204), ("/api/v2/alerts", 200)):
            async with session.post(f"{received.url}{path}", data=b"[]") as answer:
                assert answer.status == status
    assert received.writes == 1
