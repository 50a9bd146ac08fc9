"""One cause sends one notification: the shipped rules in promtool, and a real Alertmanager."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from tests.real.rule_tests import firing, names
from tests.real.services import web
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.real.rule_tests import Labels
    from tests.real.services.alertmanager import Alertmanager

CONFIG: Final = (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
BEGIN, END, LAST = 10, 22, 50
"""An outage of twelve minutes, and the minutes until all components have caught up."""
SAME_ANSWERS: Final = 10
"""The number of equal answers in a second that count as final."""


def at(component: str, *, place: str = "") -> str:
    """Return the labels that the shipped scrape configuration gives to a target."""
    labels = {"job": "gpuledger", "component": component, "instance": place or f"{component}-0"}
    if component == "agent":
        labels["node"] = place
    return "".join(f',{name}="{value}"' for name, value in labels.items())


def fails(check: str, where: str, *, severity: str = "critical") -> dict[str, str]:
    """Return the series of a check that fails during the outage."""
    name = f'gpuledger_check_ok{{cluster="c",check="{check}",severity="{severity}"{where}}}'
    return {name: f"1x{BEGIN} 0x{END - BEGIN - 1} 1x{LAST - END}"}


def lags(metric: str, where: str) -> dict[str, str]:
    """Return a lag that grows in the outage, and shrinks within five minutes after it."""
    behind = (END - BEGIN) * 60
    shrinking = " ".join(str(behind * left // 5) for left in range(5, 0, -1))
    growing = f"60+60x{END - BEGIN - 1}"
    return {f'{metric}{{cluster="c"{where}}}': f"0x{BEGIN} {growing} {shrinking} 0x{LAST - END}"}


def stalls(metric: str, where: str) -> dict[str, str]:
    """Return the time of a watermark that does not move in the outage."""
    begin = BEGIN * 60
    return {
        f'{metric}{{cluster="c"{where}}}': (
            f"0+60x{BEGIN} {begin}x{END - BEGIN + 4} {(END + 5) * 60}+60x{LAST - END}"
        )
    }


def outage() -> dict[str, str]:
    """Return the series of four nodes and of the components behind them."""
    series: dict[str, str] = {}
    for node in ("n1", "n2", "n3", "n4"):
        where = at("agent", place=node)
        series |= fails("kafka", where, severity="warning")
        series[f'gpuledger_agent_spool_samples{{cluster="c"{where}}}'] = (
            f"0x{BEGIN} 60+60x{END - BEGIN - 1} 300x4 0x{LAST - END}"
        )
    where = at("podwatch")
    for kind in ("pods", "pending_pods", "nodes", "namespaces"):
        series |= fails(f"{kind}.kafka", where)
    series[f'gpuledger_podwatch_unpublished_objects{{cluster="c"{where}}}'] = (
        f"0x{BEGIN} 3x{END - BEGIN} 0x{LAST - END}"
    )
    series |= stalls("gpuledger_podwatch_watermark_timestamp_seconds", f'{where},kind="pod"')
    where = at("join")
    for check in ("kafka", "delivery"):
        series |= fails(check, where)
    series |= lags("gpuledger_join_lag_seconds", where)
    series |= stalls("gpuledger_join_watermark_timestamp_seconds", where)
    for sink in ("alerts", "remote_write", "store"):
        where = at(f"sink-{sink.replace('_', '-')}")
        series |= fails(f"{sink}.kafka", where)
        series |= lags("gpuledger_sink_lag_seconds", where)
    series |= stalls("gpuledger_sink_watermark_timestamp_seconds", at("sink-store"))
    components = ("podwatch", "join", "sink-alerts", "sink-remote-write", "sink-store")
    for where in (at("agent", place="n1"), *map(at, components)):
        series[f'up{{cluster="c"{where}}}'] = f"1x{LAST}"
    return series


def notified(alertmanager: Alertmanager, alerts: Mapping[int, Sequence[Labels]]) -> list[str]:
    """Return the names of alerts that Alertmanager does not suppress.

    The alerts of each minute are those of a cluster of their own.
    """
    posted = [
        {"labels": one | {"cluster": f"{one.get('cluster')}-{minute}"}}
        for minute, found in alerts.items()
        for one in found
    ]
    request = urllib.request.Request(  # noqa: S310 - the tests' own Alertmanager
        f"{alertmanager.url}/api/v2/alerts",
        data=json.dumps(posted).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30):  # noqa: S310 - as above
        pass

    answers: list[list[str]] = []

    def settled() -> list[Any]:
        shown = alertmanager.alerts()
        states = [one["status"]["state"] for one in shown]
        if len(shown) == len(posted) and "unprocessed" not in states:
            active = [one["labels"] for one in shown if one["status"]["state"] == "active"]
            answers.append(sorted(f"{one['alertname']} {one['cluster']}" for one in active))
        # Alertmanager may show an alert before it has learned of the alert that suppresses it.
        last = answers[-SAME_ANSWERS:]
        return last if len(last) == SAME_ANSWERS and last.count(last[0]) == SAME_ANSWERS else []

    final: list[str] = web.await_some(settled, what="settled alerts", deadline_seconds=60)[0]
    return final


def test_an_outage_of_kafka_sends_one_notification(
    promtool: Path, tmp_path: Path, start_alertmanager: Callable[..., Alertmanager]
) -> None:
    """From its second minute until every component has caught up."""
    minutes = range(BEGIN, LAST)
    alerts = firing(outage(), minutes=minutes, promtool=promtool, folder=tmp_path)
    burning = [minute for minute in minutes if alerts[minute]]

    assert max(len(alerts[minute]) for minute in minutes) > 15
    assert burning == [*range(BEGIN + 2, burning[-1] + 1)]
    assert notified(start_alertmanager(config=CONFIG.replace("1m", "0s")), alerts) == [
        f"GpuledgerKafkaUnavailable c-{minute}" for minute in burning
    ]


def labels(alert: str, component: str, *, place: str = "", **more: str) -> Labels:
    instance = place or f"{component}-0"
    node = {"node": place} if component == "agent" else {}
    known = {"alertname": alert, "cluster": "c", "component": component, "instance": instance}
    return known | node | more


CAUSES: Final = {
    "a node that is down": (
        labels("GpuledgerComponentUnreachable", "agent", place="n1"),
        [{"alertname": "GpuledgerNodeUnresponsive", "cluster": "c", "node": "n1"}],
    ),
    "a join that is gone": (
        {"alertname": "GpuledgerComponentGone", "cluster": "c", "component": "join"},
        [
            labels("GpuledgerSinkWatermarkStalled", "sink-store"),
            {"alertname": "GpuledgerNodeUnresponsive", "cluster": "c", "node": "n1"},
        ],
    ),
    "a driver that is gone": (
        labels("GpuledgerDriverDown", "agent", place="n1"),
        [
            labels("GpuledgerGpusLost", "agent", place="n1"),
            labels("GpuledgerCriticalCheckFailing", "agent", place="n1", check="nvml"),
            labels("GpuledgerComponentRestarting", "agent", place="n1"),
        ],
    ),
    "a receiver that is unavailable": (
        labels("GpuledgerSinkLagging", "sink-store"),
        [labels("GpuledgerCheckFailing", "sink-store", check="store.receiver")],
    ),
}
"""For each fault, the alert on its cause, and those on its consequences."""
NOT_CAUSED: Final = {
    "another node": labels("GpuledgerGpusLost", "agent", place="n2"),
    "another cluster": labels("GpuledgerJoinLagging", "join") | {"cluster": "d"},
    "a loss": labels("GpuledgerSpoolSamplesDropped", "agent", place="n1"),
    "another check": labels("GpuledgerCheckFailing", "agent", place="n1", check="spool"),
}
"""Alerts that no alert on another cause suppresses."""


def test_the_alert_on_a_cause_suppresses_those_on_its_consequences(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    alerts = {
        number: [cause, *consequences]
        for number, (cause, consequences) in enumerate(CAUSES.values())
    }
    assert notified(start_alertmanager(config=CONFIG.replace("1m", "0s")), alerts) == sorted(
        f"{cause['alertname']} c-{number}" for number, (cause, _) in enumerate(CAUSES.values())
    )


def test_causes_suppress_neither_losses_nor_alerts_of_other_places(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    causes = [cause for cause, _ in CAUSES.values()]
    kafka = {"alertname": "GpuledgerKafkaUnavailable", "cluster": "c"}
    alerts = {0: [*causes, kafka, *NOT_CAUSED.values()]}
    active = notified(start_alertmanager(config=CONFIG.replace("1m", "0s")), alerts)
    assert {f"{one['alertname']} {one['cluster']}-0" for one in NOT_CAUSED.values()} <= set(active)
    assert len(names(NOT_CAUSED.values())) == len(NOT_CAUSED)
