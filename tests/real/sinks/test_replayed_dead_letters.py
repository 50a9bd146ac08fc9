"""Records that a receiver rejected are listed, shown, and replayed to it once it accepts them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.keys import key_in
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services import web
from tests.real.services.prometheus import CONFIG
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.prometheus import Prometheus, PrometheusApi
    from tests.real.sinks.running_sinks import Sink

ROOT = Path(__file__).parents[3]
WINDOW = CONFIG + "storage: {tsdb: {out_of_order_time_window: 2h}}\n"
NODE = "node-late"
DEADLINE_SECONDS = 120.0
LATE = 3
BUSY = f'gpuledger_pod_gpu_busy_ratio{{node="{NODE}"}}[1h]'


class DeadLetterCommand:
    """`gpuledger dead-letters`, as users run it."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka = kafka

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        servers = ["--bootstrap-servers", self.kafka.bootstrap_servers]
        return subprocess.run(
            [sys.executable, "-m", "gpuledger_cli", "dead-letters", *options, *servers],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def listed(self, *options: str) -> list[dict[str, Any]]:
        ran = self.run("list", "--format", "json", *options)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture
def dead_letters(broker: Kafka) -> DeadLetterCommand:
    refuse_stray_settings()
    return DeadLetterCommand(broker)


async def eventually(holds: Callable[[], object], *, what: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, what
        await asyncio.sleep(0.3)


async def reject_late_ticks(
    dead_letters: DeadLetterCommand, receiver: Prometheus, start_sink: Callable[..., Sink]
) -> int:
    """Let a strict Prometheus reject ticks that are half an hour old; return after the first."""
    kafka = dead_letters.kafka
    await make_topics(kafka)
    start_sink("rows", kafka)
    each_tick = {"remote_write__interval_seconds": "0"}
    start_sink("remote_write", kafka, remote_write__url=receiver.remote_write_url, **each_tick)
    now_ns = time.time_ns() // SECOND_NS * SECOND_NS
    late_ns = now_ns - 1800 * SECOND_NS
    await publish(kafka, [tick(0, time_ns=now_ns)])
    await asyncio.to_thread(receiver.await_query, f'gpuledger_gpu_power_watts{{node="{NODE}"}}')
    late = [tick(1 + number, time_ns=late_ns + number * SECOND_NS) for number in range(LATE)]
    await publish(kafka, late)
    await eventually(lambda: len(dead_letters.listed()) == LATE, what="no letters")
    return late_ns


def tick(number: int, *, time_ns: int) -> Any:  # noqa: ANN401  # an event
    return event(number, node=NODE, time_ns=time_ns, entries=[entry(busy_ns=250_000_000)])


def stored(receiver: PrometheusApi) -> dict[float, float]:
    """Return the values of one series by time."""
    found = receiver.query(BUSY)
    return {time_s: float(value) for series in found for time_s, value in series["values"]}


async def test_rejected_ticks_are_listed_shown_and_replayed_once_prometheus_accepts_them(
    start_prometheus: Callable[..., Prometheus],
    start_sink: Callable[..., Sink],
    dead_letters: DeadLetterCommand,
    kcat: Kcat,
) -> None:
    prometheus = start_prometheus()
    late_ns = await reject_late_ticks(dead_letters, prometheus, start_sink)

    def counts() -> tuple[int, ...]:
        topics = (EVENTS, ROWS, DEAD_LETTERS)
        return tuple(
            len(kcat.consume(dead_letters.kafka.bootstrap_servers, one.name)) for one in topics
        )

    await eventually(lambda: counts()[1] == 1 + LATE, what="no rows")
    before = counts()
    found = dead_letters.listed("--reason", "out_of_order", "--node", NODE)
    assert [one["key"] for one in found] == [key_in("default", NODE)] * LATE
    assert "out of order" in dead_letters.run("list").stdout
    counted = dead_letters.run("list", "--count-by", "consumer,reason", "--format", "csv").stdout
    assert counted.splitlines()[1].startswith(f"gpuledger-remote-write,out_of_order,{LATE},")
    shown = dead_letters.run("show", found[0]["position"]).stdout
    assert "400" in shown
    assert f'"time_ns": {late_ns}' in shown

    rehearsed = dead_letters.run("replay", "--all")
    assert (rehearsed.returncode, counts()) == (0, before), rehearsed.stdout + rehearsed.stderr
    assert f"{LATE} would be replayed to gpuledger-remote-write" in rehearsed.stdout

    # Rejected again: a further dead letter for each, and nothing for any other consumer.
    ran = dead_letters.run("replay", "--all", "--yes")
    assert (ran.returncode, ran.stdout) == (0, f"{LATE} replayed to gpuledger-remote-write\n")
    after = (*before[:2], before[2] + LATE)
    await eventually(lambda: counts() == after, what="no letters")

    prometheus.config_file.write_text(WINDOW)
    assert web.fetch(f"{prometheus.url}/-/reload", method="POST").status == 200
    again = dead_letters.run("replay", "--reason", "out_of_order", "--yes")
    assert f"{LATE} replayed to gpuledger-remote-write" in again.stdout
    late = {late_ns / SECOND_NS + number: 0.25 for number in range(LATE)}
    await eventually(lambda: late.items() <= stored(prometheus).items(), what="no samples")
    assert counts() == after
