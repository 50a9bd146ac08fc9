"""No response from the API server's address ends podwatch: its process over a real Kafka."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fakes.hostile_http import HUGE_PAGES, MIB, NO_HTTP, ODD_PAGES, Raw, answering, page
from tests.real.end_to_end.components import Component
from tests.real.sinks.running_sinks import make_topics

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka

NESTED = page(b'{"metadata":' + b"[" * 50_000, b"Content-Type: application/json")
ENDLESS = Raw(begin=b"HTTP/1.1 200 OK\r\n\r\n", again=b" " * MIB, times=10_000)
ANSWERS = [
    NESTED,
    ODD_PAGES["a charset that rejects everything"],
    ODD_PAGES["a date outside the calendar"],
    NO_HTTP["bytes that are not text"],
    HUGE_PAGES["300 MiB"],
    HUGE_PAGES["300 MiB in gzip"],
    ENDLESS,
]


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


async def test_podwatch_retries_whatever_answers_at_the_api_servers_address(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    broker = await asyncio.to_thread(start_kafka)
    await make_topics(broker)
    async with answering(ANSWERS) as server:
        podwatch = Component(
            name="podwatch",
            command=["gpuledger", "podwatch"],
            folder=tmp_path,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers,
                "KUBERNETES__URL": server.url,
                "KUBERNETES__WATCH_LIST": "off",
                "KUBERNETES__BACKOFF_FIRST_SECONDS": "0.1",
                "KUBERNETES__BACKOFF_MAX_SECONDS": "0.2",
            },
        )
        podwatch.start()
        try:
            async with asyncio.timeout(120):
                while len(server.bodies) <= len(ANSWERS) + 2:
                    assert podwatch.exit_status() is None, podwatch.log_tail()
                    await asyncio.sleep(0.1)
            max_bytes = peak_bytes(podwatch.pid)
            checks = (await asyncio.to_thread(podwatch.readyz))["checks"]
            assert await asyncio.to_thread(podwatch.stop) == 0, podwatch.log_tail()
        finally:
            podwatch.kill()
    assert checks["pods.api"]["ok"] is False
    assert max_bytes < 384 * MIB
    assert "Traceback" not in podwatch.log.read_text()
