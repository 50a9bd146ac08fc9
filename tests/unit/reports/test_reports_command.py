"""`gpuledger reports` as users start it."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import end_tasks
from gpuledger_reports.api.capacity_metrics import HEADLINES
from gpuledger_reports.api.metrics import CAPACITY_TIMESTAMP_SECONDS
from gpuledger_reports.api.pages import ReportPages
from gpuledger_reports.command import main, serve
from gpuledger_reports.settings import (
    CapacitySettings,
    ReadStoreSettings,
    ReportsSettings,
    RequestSettings,
)
from tests.unit.reports.api.report_requests import ask, small_store


def calculated() -> Sequence[Sample]:
    """Return the times of the metrics of capacity."""
    (family,) = CAPACITY_TIMESTAMP_SECONDS.collect()
    return family.samples


@pytest.mark.parametrize("hours", [0, 1])
async def test_the_service_uses_its_settings_and_is_ready_once_the_store_was_read(
    tmp_path: Path, hours: int
) -> None:
    reported = small_store(tmp_path)
    settings = ReportsSettings(
        store=ReadStoreSettings(uri=reported.store_uri),
        prices=Path(reported.prices or ""),
        requests=RequestSettings(max_concurrent=1),
        capacity=CapacitySettings(metrics_interval_hours=hours),
    )
    readiness, pages = Readiness(), ReportPages(cache_bytes=0)
    task = asyncio.create_task(serve(settings, readiness, pages=pages))
    await asyncio.sleep(0)  # it begins
    assert not readiness.is_ready()
    response = await ask(pages.app(), "/bill", "by=pod")
    while not readiness.is_ready():  # noqa: ASYNC110  # another process is queried
        await asyncio.sleep(0.001)
    while hours and len(calculated()) < len(HEADLINES):  # noqa: ASYNC110  # as above
        await asyncio.sleep(0.001)
    await end_tasks(task)
    assert bool(calculated()) == bool(hours)
    CAPACITY_TIMESTAMP_SECONDS.clear()
    assert json.loads(response.body)["line_cost"] == "28.00"
    assert json.loads(response.body)["prices"]["name"] == "prices.yaml"


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("PRICES", "no-such-file.yaml", "no-such-file.yaml"),
        ("REQUESTS__MAX_CONCURRENT", "0", "GPULEDGER_REQUESTS__MAX_CONCURRENT"),
        ("REQUESTS__MEMORY_BYTES", "1", "GPULEDGER_REQUESTS__MEMORY_BYTES"),
        ("STORE__URI", "", "GPULEDGER_STORE__URI"),
        ("KAFKA__BOOTSTRAP_SERVERS", "kafka:9092", "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS"),
    ],
)
def test_an_invalid_setting_is_one_line_that_names_it(
    variable: str,
    value: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuledger reports"])
    monkeypatch.setenv(f"GPULEDGER_{variable}", value)
    assert main() == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert named in message
