"""The shipped rule on a sink's lag, evaluated over an outage by Prometheus's promtool."""

from __future__ import annotations

import re
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from gpuledger.runtime import Readiness
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import ManualClock, bus, event, eventually, publish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from gpuledger_sinks.remote_write.write_client import Payload


RULES = Path(__file__).parents[3] / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml"
METRIC = "gpuledger_sink_lag_seconds"
MINUTES = 20


class Receiver:
    """A receiver that is away for some minutes of the clock, and then accepts everything."""

    def __init__(self, clock: ManualClock, *, away_minutes: int) -> None:
        self.clock = clock
        self.back_at_ns = clock.now_ns + away_minutes * 60 * 10**9
        self.seen: list[tuple[float, float]] = []
        """For each attempt the minute and the value that a scrape would have."""

    async def write(self, message: Payload, *, attempt: int) -> int:  # a client's method
        self.seen.append((self.minute(), lag_seconds()))
        if self.clock.now_ns < self.back_at_ns:
            raise ReceiverUnavailableError("away")
        return message.samples

    def minute(self) -> float:
        return MINUTES - (self.back_at_ns - self.clock.now_ns) / 60e9


def lag_seconds() -> float:
    found = REGISTRY.get_sample_value(METRIC, {"sink": "remote_write"})
    assert found is not None
    return found


def shipped_rule() -> str:
    (rule,) = re.findall(rf"^ +expr: ({METRIC} > \d+)$", RULES.read_text(), re.MULTILINE)
    return str(rule)


def fires(values: list[float], rule: str, promtool: Path, folder: Path) -> bool:
    """Return whether the rule fires at the end of a series with a value per minute."""
    (folder / "rules.yml").write_text(
        f"groups: [{{name: g, rules: [{{alert: SinkLags, expr: '{rule}'}}]}}]"
    )
    series = f'{METRIC}{{sink="remote_write"}}'
    (folder / "test.yml").write_text(
        "rule_files: [rules.yml]\n"
        "tests:\n"
        "  - interval: 1m\n"
        f"    input_series: [{{series: '{series}', values: '{' '.join(map(str, values))}'}}]\n"
        "    alert_rule_test:\n"
        f"      - eval_time: {len(values) - 1}m\n"
        "        alertname: SinkLags\n"
        "        exp_alerts: [{exp_labels: {sink: remote_write}}]\n"
    )
    command: list[str | Path] = [promtool, "test", "rules", folder / "test.yml"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


async def test_an_outage_of_the_receiver_fires_the_shipped_rule_and_its_end_resolves_it(
    promtool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, on = ManualClock(), bus()
    receiver = Receiver(clock, away_minutes=MINUTES)

    @asynccontextmanager
    async def opened(_: RemoteWriteSettings, **_others: Readiness) -> AsyncIterator[Receiver]:
        yield receiver

    monkeypatch.setattr("gpuledger_sinks.remote_write.remote_write_sink.open_client", opened)
    await publish(on, event(0))
    async with sending(on, RemoteWriteSettings(interval_seconds=0), clock=clock):
        await eventually(lambda: receiver.minute() >= MINUTES)
        during = list(receiver.seen)
        await eventually(lambda: lag_seconds() == 0)

    by_minute = [
        max(lag for at, lag in during if at <= minute)
        for minute in range(MINUTES)
        if any(at <= minute for at, _ in during)
    ]
    assert by_minute == sorted(by_minute)
    assert fires(by_minute, shipped_rule(), promtool, tmp_path)
    assert not fires([*by_minute, 0.0], shipped_rule(), promtool, tmp_path)
    assert not fires(by_minute[:3], shipped_rule(), promtool, tmp_path)
