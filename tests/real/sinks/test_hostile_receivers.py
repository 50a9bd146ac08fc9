"""No response of a receiver ends a sink: a process over a real Kafka, and a hostile server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.kafka import KafkaBus
from gpuledger.settings import KafkaSettings
from tests.fakes.hostile_http import HUGE_PAGES, MIB, NO_HTTP, ODD_PAGES, answering, page
from tests.real.sinks.running_sinks import Sink, make_topics, publish
from tests.real.sinks.test_alerts import publish_incident
from tests.unit.sinks.builders import NODE, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka

ANSWERS = [
    ODD_PAGES["Latin-1 declared as UTF-8"],
    ODD_PAGES["a charset that rejects everything"],
    ODD_PAGES["a date outside the calendar"],
    NO_HTTP["bytes that are not text"],
    HUGE_PAGES["300 MiB"],
    HUGE_PAGES["300 MiB in gzip"],
]
TAKEN = page(b"", status=b"HTTP/1.1 200 OK\r\n")
SETTINGS = {
    "remote_write": ("remote_write__url", "{url}"),
    "alerts": ("alerts__urls", '["{url}"]'),
}


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("kind", SETTINGS)
async def test_a_sink_survives_all_responses_of_a_receiver_until_its_samples_are_accepted(
    broker: Kafka, start_sink: Callable[..., Sink], kind: str
) -> None:
    await make_topics(broker)
    answers = [*ANSWERS, TAKEN]
    async with answering(answers) as receiver:
        setting, value = SETTINGS[kind]
        settings = {setting: value.format(url=receiver.url)}
        if kind == "remote_write":
            settings["remote_write__interval_seconds"] = "0"  # sent immediately
        sink = start_sink(kind, broker, **settings)
        await asyncio.to_thread(sink.wait_until, sink.is_ready, deadline_seconds=120)
        before_bytes = peak_bytes(sink.pid)
        if kind == "alerts":
            bus = KafkaBus(KafkaSettings(bootstrap_servers=broker.bootstrap_servers))
            await publish_incident(bus, NODE)
        else:
            await publish(broker, [event()])

        def was_taken() -> bool:
            return len(receiver.bodies) > len(ANSWERS)

        await asyncio.to_thread(sink.wait_until, was_taken, deadline_seconds=120)
        growth_bytes = peak_bytes(sink.pid) - before_bytes
        assert await asyncio.to_thread(sink.stop, deadline_seconds=120) == 0
    assert growth_bytes < 48 * MIB
    assert "Traceback" not in sink.log.read_text()
