"""The settings that docs/guides/prometheus.md requires, on receivers with and without them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import yaml
from typing_extensions import override

from gpuledger.errors import GpuledgerError
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.services.prometheus import Prometheus
from tests.unit.deployment import compose_file
from tests.unit.deployment.components import ROOT
from tests.unit.sinks.builders import SECOND_NS, event
from tests.unit.sinks.remote_write.interval_samples import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.prometheus import PrometheusApi, VictoriaMetrics
    from tests.real.services.starter import Starter

RECEIVER_FLAG = "--web.enable-remote-write-receiver"
OF_COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yml").read_text())
TOLERANT = yaml.safe_dump({"storage": OF_COMPOSE["storage"]})
STRICT = "global: {scrape_interval: 1s}"
MINUTE, HOUR = 60, 3600
READING = "gpuledger_gpu_memory_total_bytes"
TAKEN, REJECTED = "taken", "RejectedError: 400"
NOT_ENABLED = "remote write receiver needs to be enabled"
OUT_OF_ORDER, OUT_OF_BOUNDS = "out of order sample", "out of bounds"
TOO_OLD = "too old sample"


class WithoutReceiver(Prometheus):
    """A Prometheus with its default settings."""

    @override
    def argv(self) -> list[str | Path]:
        return [word for word in super().argv() if word != RECEIVER_FLAG]


async def send(to: PrometheusApi, node: str, *, time_ns: int) -> str:
    """Send a node's tick as the sink does; return the result."""
    encoded = ActiveSeries().encode(samples_of(event(node=node, time_ns=time_ns)))
    async with open_client(RemoteWriteSettings(url=to.remote_write_url)) as client:
        try:
            await client.write(encoded, attempt=0)
        except GpuledgerError as error:
            return f"{type(error).__name__}: {error}"
    return TAKEN


def test_compose_configures_its_prometheus_as_the_page_documents() -> None:
    (service,) = [one for one in compose_file.services() if one.name == "prometheus"]

    page = (ROOT / "docs" / "guides" / "prometheus.md").read_text()

    assert RECEIVER_FLAG in service.spec["command"]
    assert RECEIVER_FLAG in page
    assert "out_of_order_time_window: 6h" in page
    assert all(one in page for one in (NOT_ENABLED, OUT_OF_ORDER, OUT_OF_BOUNDS, TOO_OLD))
    assert OF_COMPOSE["storage"]["tsdb"]["out_of_order_time_window"] == "6h"


async def test_a_prometheus_without_its_receiver_is_retried_until_the_receiver_is_enabled(
    prometheus_binary: Path, starter: Starter
) -> None:
    folder = starter.new_folder("without-receiver")
    prometheus = starter.start(WithoutReceiver(binary=prometheus_binary, folder=folder))

    answer = await send(prometheus, "node-a", time_ns=time.time_ns())

    assert f": 404 {NOT_ENABLED}" in answer


@pytest.mark.parametrize(
    ("config", "node", "seconds_ago", "becomes"),
    [
        (STRICT, "same", 10, f"{REJECTED} {OUT_OF_ORDER}"),
        (STRICT, "another", HOUR - 5 * MINUTE, TAKEN),
        (STRICT, "another", HOUR + 5 * MINUTE, f"{REJECTED} {OUT_OF_BOUNDS}"),
        (TOLERANT, "same", 10, TAKEN),
        (TOLERANT, "same", 6 * HOUR - 5 * MINUTE, TAKEN),
        (TOLERANT, "another", 2 * HOUR, TAKEN),
        (TOLERANT, "same", 6 * HOUR + 5 * MINUTE, f"{REJECTED} {TOO_OLD}"),
    ],
)
async def test_prometheus_accepts_late_samples_within_its_window(
    start_prometheus: Callable[..., Prometheus],
    config: str,
    node: str,
    seconds_ago: int,
    becomes: str,
) -> None:
    """After a current tick of the same node or of another one."""
    prometheus, now_ns = start_prometheus(config=config), time.time_ns()
    assert await send(prometheus, "same", time_ns=now_ns) == TAKEN

    answer = await send(prometheus, node, time_ns=now_ns - seconds_ago * SECOND_NS)

    assert answer.startswith(becomes)


async def test_victoriametrics_accepts_late_samples_and_stores_a_repetition_once_if_configured(
    start_victoria_metrics: Callable[..., VictoriaMetrics],
) -> None:
    counts = {}
    for arguments in ((), ("-dedup.minScrapeInterval=1ms",)):
        receiver = start_victoria_metrics(arguments=arguments)
        now_ns = time.time_ns()
        for seconds_ago in (5, HOUR, 5):
            time_ns = now_ns - seconds_ago * SECOND_NS
            assert await send(receiver, "node-a", time_ns=time_ns) == TAKEN
        query = f"count_over_time({READING}[2h])"
        counts[arguments] = receiver.await_query(query)[0]["value"][1]

    assert counts == {(): "3", ("-dedup.minScrapeInterval=1ms",): "2"}
