"""What a receiver refused is listed, shown, and sent to it again once it takes that, alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gpuledger.keys import key_in
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.real.end_to_end.deployables import refuse_stray_settings
from tests.real.services import web
from tests.real.services.prometheus import CONFIG
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.prometheus import Prometheus, PrometheusApi, VictoriaMetrics
    from tests.real.sinks.running_sinks import Sink

ROOT = Path(__file__).parents[3]
WINDOW = CONFIG + "storage: {tsdb: {out_of_order_time_window: 2h}}\n"
NODE = "node-late"
LOOK_SECONDS = 60.0
LATE = 3
BUSY = f'gpuledger_pod_gpu_busy_ratio{{node="{NODE}"}}[1h]'


class Letters:
    """`gpuledger dead-letters`, as people run it."""

    def __init__(self, kafka: Kafka, config: Path) -> None:
        self.kafka, self._config = kafka, config

    def point_to(self, receiver: PrometheusApi) -> None:
        """Write the settings file of the sink."""
        settings = {"remote_write": {"url": receiver.remote_write_url}}
        self._config.write_text(yaml.safe_dump(settings))

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

    def replay(self, *options: str) -> subprocess.CompletedProcess[str]:
        sink = ["--sink", "remote_write", "--config", str(self._config)]
        return self.run("replay", *sink, *options)


@pytest.fixture
def letters(broker: Kafka, tmp_path: Path) -> Letters:
    refuse_stray_settings()
    return Letters(broker, tmp_path / "sink.yaml")


async def eventually(holds: Callable[[], object], *, what: str) -> None:
    end = time.monotonic() + LOOK_SECONDS
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, what
        await asyncio.sleep(0.3)


async def put_late_ticks_aside(
    letters: Letters, receiver: Prometheus, start_sink: Callable[..., Sink]
) -> int:
    """Let a strict Prometheus refuse ticks that are half an hour old; return when the first is."""
    kafka = letters.kafka
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
    await eventually(lambda: len(letters.listed()) == LATE, what="no letters")
    return late_ns


def tick(number: int, *, time_ns: int) -> Any:  # noqa: ANN401  # an event
    return event(number, node=NODE, time_ns=time_ns, entries=[entry(busy_ns=250_000_000)])


def stored(receiver: PrometheusApi) -> dict[float, float]:
    """Return the values of one series by their times."""
    found = receiver.query(BUSY)
    return {time_s: float(value) for series in found for time_s, value in series["values"]}


async def test_refused_ticks_are_listed_shown_and_replayed_once_prometheus_takes_them(
    start_prometheus: Callable[..., Prometheus],
    start_sink: Callable[..., Sink],
    letters: Letters,
    kcat: Kcat,
) -> None:
    prometheus = start_prometheus()
    letters.point_to(prometheus)
    late_ns = await put_late_ticks_aside(letters, prometheus, start_sink)

    def counts() -> tuple[int, ...]:
        topics = (EVENTS, ROWS, DEAD_LETTERS)
        return tuple(len(kcat.consume(letters.kafka.bootstrap_servers, one.name)) for one in topics)

    await eventually(lambda: counts()[1] == 1 + LATE, what="no rows")
    before = counts()
    found = letters.listed("--reason", "out_of_order", "--node", NODE)
    assert [one["key"] for one in found] == [key_in("default", NODE)] * LATE
    assert "out of order" in letters.run("list").stdout
    counted = letters.run("list", "--count-by", "consumer,reason", "--format", "csv").stdout
    assert counted.splitlines()[1].startswith(f"gpuledger-remote-write,out_of_order,{LATE},")
    shown = letters.run("show", found[0]["position"]).stdout
    assert "400" in shown
    assert f'"time_ns": {late_ns}' in shown

    rehearsed = letters.replay("--all")
    assert (rehearsed.returncode, counts()) == (0, before), rehearsed.stdout + rehearsed.stderr
    assert f"{LATE} would be replayed to {prometheus.url}" in rehearsed.stdout

    refused = letters.replay("--all", "--yes")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert refused.stdout.count("refused again: 400") == LATE
    assert counts() == before

    prometheus.config_file.write_text(WINDOW)
    assert web.fetch(f"{prometheus.url}/-/reload", method="POST").status == 200
    one = letters.replay(found[1]["position"], "--yes")
    assert one.returncode == 0, one.stdout + one.stderr
    rest = letters.replay("--all", "--yes")
    assert f"{LATE - 1} replayed to {prometheus.url}" in rest.stdout
    assert "0 refused again, 0 left out, 1 replayed before" in rest.stdout
    assert rest.returncode == 0

    late = {late_ns / SECOND_NS + number: 0.25 for number in range(LATE)}
    assert late.items() <= (await asyncio.to_thread(stored, prometheus)).items()
    # The marks are all that anybody else finds.
    assert counts() == (before[0], before[1], before[2] + LATE)
    assert letters.listed("--pending") == []
    assert letters.replay("--all", "--yes").stdout.endswith(f"{LATE} replayed before\n")


async def test_refused_ticks_reach_another_receiver_that_takes_them(
    start_prometheus: Callable[..., Prometheus],
    start_victoria_metrics: Callable[..., VictoriaMetrics],
    start_sink: Callable[..., Sink],
    letters: Letters,
) -> None:
    prometheus, other = start_prometheus(), start_victoria_metrics()
    late_ns = await put_late_ticks_aside(letters, prometheus, start_sink)
    letters.point_to(other)

    replayed = letters.replay("--reason", "out_of_order", "--yes")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    late = {late_ns / SECOND_NS + number: 0.25 for number in range(LATE)}
    await eventually(lambda: stored(other) == late, what="no samples")


async def test_a_receiver_that_is_away_ends_a_replay_with_nothing_marked(
    start_prometheus: Callable[..., Prometheus],
    start_sink: Callable[..., Sink],
    letters: Letters,
) -> None:
    prometheus = start_prometheus()
    letters.point_to(prometheus)
    await put_late_ticks_aside(letters, prometheus, start_sink)
    prometheus.stop()

    ended = letters.replay("--all", "--yes", "--give-up-after", "2s")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "0 replayed to" in ended.stdout
    assert ended.stderr.count("\n") == 1
    assert len(letters.listed("--pending")) == LATE
