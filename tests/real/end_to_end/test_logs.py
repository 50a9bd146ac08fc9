"""Logs for people on call: none while all is well, and two lines for an outage of Kafka."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger_simulator.simulation import open_simulation
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.end_to_end.pipeline import UIDS_FILE, Pipeline, RealParts, begin_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.real.end_to_end.components import Component
    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.kafka import Kafka
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.prometheus import PrometheusApi

SCENARIO = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"
HEALTHY_SECONDS = 12.0  # more than one cycle of all periodic work of the Kafka client
AWAY_SECONDS = 45.0  # longer than the Kafka client tries to send a batch
BACK_SECONDS = 120.0
REASON = "check_reason_changed"
LOUD = ("warning", "error", "critical")
# On a busy machine a simulated GPU answers too late, whatever Kafka does.
LATE_GPU = "thread_leaked"

Line = dict[str, Any]


@pytest.fixture
def broker(start_kafka: Callable[[], Kafka]) -> Kafka:
    """Return a broker of the run's own, which it may kill."""
    return start_kafka()


@pytest.fixture
def pipeline(
    broker: Kafka,
    kube_api: KubeApiClient,
    prometheus: PrometheusApi,
    alertmanager: AlertmanagerApi,
    tmp_path: Path,
) -> Iterator[Pipeline]:
    """Start every component."""
    refuse_stray_settings()
    epoch_ns = begin_ns(broker)
    uids = tmp_path / UIDS_FILE
    made = Pipeline(
        parts=RealParts(
            kafka=broker,
            kube_api=kube_api,
            prometheus=prometheus,
            alertmanager=alertmanager,
        ),
        simulation=open_simulation(SCENARIO, epoch_ns=epoch_ns, uids_file=uids),
        scenario=SCENARIO,
        folder=tmp_path,
    )
    try:
        made.start()
        yield made
    finally:
        made.kill()


def loud_lines(component: Component) -> list[Line]:
    """Return the complete lines at warning or above."""
    lines = component.log.read_text().splitlines()
    return [
        line
        for line in map(json.loads, lines)
        if line["level"] in LOUD and line["event"] != LATE_GPU
    ]


def loud_lines_of(pipeline: Pipeline) -> dict[str, list[Line]]:
    return {one.name: lines for one in pipeline.everything() if (lines := loud_lines(one))}


def wait_until_all_is_well(components: Sequence[Component]) -> None:
    """Wait until no check of any component fails, including those that do not affect readiness."""
    end_seconds = time.monotonic() + BACK_SECONDS
    while failing := {one.name: found for one in components if (found := failing_checks(one))}:
        assert time.monotonic() < end_seconds, failing
        time.sleep(0.5)


def failing_checks(component: Component) -> dict[str, str]:
    """Return the failing checks, each with its reason."""
    checks = component.readyz()["checks"]
    return {name: check["detail"] for name, check in checks.items() if not check["ok"]}


def checks_of_kafka(name: str) -> set[str]:
    """Return the checks of a component that fail while Kafka is unavailable."""
    kind = name.partition("-")[0]
    return {
        "agent": {"kafka"},
        "podwatch": {
            f"{objects}.kafka" for objects in ("pods", "pending_pods", "nodes", "namespaces")
        },
        "join": {"kafka", "delivery", "namespaces"},
        "remote_write": {"remote_write.kafka", "remote_write.replay"},
        "alerts": {"alerts.kafka"},
        "store": {f"store.{of}" for of in ("kafka", "replay", "dimensions", "watermarks")},
    }[kind]


def keep_open(component: Component) -> http.client.HTTPConnection:
    """Fetch a page as Prometheus does, and keep the connection open."""
    connection = http.client.HTTPConnection(component.health.removeprefix("http://"))
    connection.request("GET", "/metrics")
    connection.getresponse().read()
    return connection


def test_an_outage_of_kafka_logs_two_lines_and_an_open_scrape_logs_no_error_at_the_end(
    pipeline: Pipeline, broker: Kafka
) -> None:
    components = list(pipeline.everything())
    time.sleep(HEALTHY_SECONDS)
    assert loud_lines_of(pipeline) == {}

    broker.kill()
    time.sleep(AWAY_SECONDS)
    broker.start()
    wait_until_all_is_well(components)

    for name, lines in loud_lines_of(pipeline).items():
        checks = {line.get("check") for line in lines}
        assert checks <= checks_of_kafka(name), (name, lines)
        for check in checks:
            own = [line for line in lines if line.get("check") == check]
            reasons = [line for line in own if line["event"] == REASON]
            assert len(reasons) <= 1, (name, lines)  # after a minute, which a slow return may take
            own = [line for line in own if line["event"] != REASON]
            message = [line["event"] for line in own]
            # Lost again while the broker starts: a further line, whose end comes a minute later.
            once = ["check_failed", "check_recovered"]
            assert message in (once, [*once, "check_failed"]), (name, lines)
            assert own[1]["failed_seconds"] > 1
    # podwatch makes no request to Kafka while no pod changes.
    silent = {one.name for one in components} - loud_lines_of(pipeline).keys()
    assert silent <= {pipeline.podwatch.name}

    before = loud_lines_of(pipeline)
    connections = [keep_open(one) for one in components]
    assert set(pipeline.end().values()) == {0}
    assert loud_lines_of(pipeline) == before
    for connection in connections:
        connection.close()
