"""What docker-compose.yml describes, run: the dashboard shows what the scenario truly did.

The services run as processes; one run serves all tests of this file. podwatch starts after all
others, so that there are ticks in which pods have no names yet.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from simulator.scenario import load_scenario
from tests.real.compose.asking import Grafana, Shown
from tests.real.compose.expected import EXPECTED, MAY_BE_ABSENT, OF_THE_DEPLOYABLES
from tests.real.compose.topology import BIN, SERVICES, Topology
from tests.real.compose.truth import Truth
from tests.real.end_to_end.deployables import refuse_stray_settings
from tests.real.parts.prometheus import PrometheusApi
from tests.unit.deployment import dashboard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from tests.real.parts.kafka import KafkaDistribution

TURNOVER_SECONDS = 13
"""By then the scenario's batch job has ended and the next one runs."""
WINDOW_SECONDS = 8
WAIT_SECONDS = 60.0
SCRAPED = '{job!="",__name__=~"gpuledger_.+"}'
SENT = '{job="",__name__=~"gpuledger_.+"}'
UNNAMED = 'gpuledger_pod_gpu_busy_ratio{namespace=""}'


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run of the topology, and a window of it in which nobody comes or goes."""

    topology: Topology
    prometheus: PrometheusApi
    epoch_ns: int
    end: int
    """The window's last second."""

    @property
    def window(self) -> range:
        return range(self.end - WINDOW_SECONDS + 1, self.end + 1)

    @property
    def whole(self) -> range:
        """The seconds since the scenario began."""
        return range(self.epoch_ns // 10**9, self.end + 1)

    @property
    def truth(self) -> Truth:
        service = SERVICES["agent-1"]
        source = self.topology.environment(service)["GPULEDGER_SOURCE"]
        scenario = load_scenario(source.removeprefix("simulated:"))
        start = self.end - WINDOW_SECONDS
        return Truth(scenario, epoch_ns=self.epoch_ns, start=start, end=self.end)

    def show(self, title: str, seconds: range) -> list[Shown]:
        grafana = Grafana(self.prometheus)
        targets = [target for target in dashboard.targets() if target.panel == title]
        return [one for target in targets for one in grafana.show(target, seconds)]

    def show_all_of(self, title: str, names: Collection[str]) -> list[Shown]:
        """Show the window of a panel; a panel of what is scraped as soon as all names are there."""
        if title not in OF_THE_DEPLOYABLES:
            return self.show(title, self.window)
        end_seconds = time.monotonic() + WAIT_SECONDS
        while True:
            now = int(time.time())
            shown = self.show(title, range(now - WINDOW_SECONDS, now))
            if set(names) <= {one.name for one in shown} or time.monotonic() > end_seconds:
                return shown
            time.sleep(0.5)


@pytest.fixture(scope="module")
def topology(
    tmp_path_factory: pytest.TempPathFactory,
    kafka_distribution: KafkaDistribution,
    prometheus_binary: Path,
    alertmanager_binary: Path,
) -> Iterator[Topology]:
    refuse_stray_settings()
    made = Topology(
        folder=tmp_path_factory.mktemp("compose"),
        distribution=kafka_distribution,
        programs={"prometheus": prometheus_binary, "alertmanager": alertmanager_binary},
    )
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def played(topology: Topology) -> Played:
    prometheus = PrometheusApi(url=f"http://{topology.places.address('prometheus', 9090)}")
    topology.start(without={"podwatch"})
    prometheus.await_query(UNNAMED, deadline_seconds=WAIT_SECONDS)
    topology.start_one("podwatch")
    topology.wait_until_ready()
    epoch_ns = yaml.safe_load((topology.places.volume("simulation") / "agent.yaml").read_text())[
        "simulator"
    ]["epoch_ns"]
    named_ns = await_no(prometheus, UNNAMED)
    begin = max(named_ns, epoch_ns + TURNOVER_SECONDS * 10**9) // 10**9 + 2
    end = begin + WINDOW_SECONDS
    # Every node's ticks up to the window's end are there, however long they were on their way.
    newest = f"min(max by (node) (timestamp(gpuledger_gpu_memory_total_bytes))) > {end}"
    prometheus.await_query(newest, deadline_seconds=WAIT_SECONDS)
    return Played(topology=topology, prometheus=prometheus, epoch_ns=epoch_ns, end=end)


def await_no(prometheus: PrometheusApi, query: str) -> int:
    """Wait until a query finds nothing; give the time since the epoch in nanoseconds."""
    end_seconds = time.monotonic() + WAIT_SECONDS
    while prometheus.query(query):
        assert time.monotonic() < end_seconds, f"still something after {WAIT_SECONDS} s: {query}"
        time.sleep(0.1)
    return time.time_ns()


def test_it_is_said_of_every_panel_what_it_shows() -> None:
    assert EXPECTED.keys() == {panel["title"] for panel in dashboard.panels()}


@pytest.mark.parametrize("title", [panel["title"] for panel in dashboard.panels()])
def test_a_panel_shows_what_the_scenario_truly_did(played: Played, title: str) -> None:
    expected = EXPECTED[title](played.truth)

    shown = {one.name: one.mean for one in played.show_all_of(title, expected.keys())}

    assert {**dict.fromkeys(MAY_BE_ABSENT & expected.keys(), 0.0), **shown} == expected


def test_the_power_of_the_parts_is_the_power_of_the_devices(played: Played) -> None:
    (devices,) = played.show("Power", played.window)
    parts = played.show("Power, by pod", played.window)

    assert sum(part.mean for part in parts) == pytest.approx(devices.mean, rel=0.01)


@pytest.mark.parametrize(
    "target", dashboard.targets(), ids=lambda target: f"{target.panel} {target.ref_id}"
)
def test_every_series_since_the_start_has_a_name_without_holes(
    played: Played, target: dashboard.Target
) -> None:
    """Those of pods that had no name yet as well."""
    shown = Grafana(played.prometheus).show(target, played.whole)

    for one in shown:
        assert all(one.labels.get(label) for label in dashboard.labels_in(target.legend))
        assert one.name.strip(" /-:,{}") == one.name
        assert one.name
        assert not {"//", "{{", "  "} & {one.name[at : at + 2] for at in range(len(one.name))}
    assert len({one.name for one in shown}) == len(shown)
    if "whose" in target.legend:
        assert "pods without a name yet" in {one.name for one in shown}


@pytest.mark.parametrize("variable", dashboard.variables(), ids=lambda one: one["name"])
def test_a_variable_offers_what_there_is(played: Played, variable: dict[str, Any]) -> None:
    """All nodes, and the namespaces of the pods that had a name while they ran."""
    truth = played.truth
    there = {
        "node": {node for node, _ in truth.gpus},
        "namespace": {pod.spec.namespace for pod in truth.pods()},
    }

    offered = Grafana(played.prometheus).values_of(variable)

    assert there[variable["name"]] <= offered
    assert offered <= there[variable["name"]] | truth.namespaces


def test_no_name_is_both_scraped_and_sent(played: Played) -> None:
    """Who sums over a name would count twice."""
    scraped, sent = (
        {
            one["metric"]["__name__"]
            for one in played.prometheus.query(f"count by (__name__) ({of})")
        }
        for of in (SCRAPED, SENT)
    )

    assert scraped
    assert sent
    assert scraped & sent == set()


def test_every_target_that_prometheus_is_given_answers(played: Played) -> None:
    up = {one["metric"]["instance"]: one["value"][1] for one in played.prometheus.query("up")}

    deployed = {name for name in SERVICES if SERVICES[name].is_ours} - {"topics", "kube-api"}
    assert len(up) == len(deployed)
    assert set(up.values()) == {"1"}


def test_prometheus_took_every_sample(played: Played) -> None:
    page = played.topology.metrics_of("sink-remote-write")

    assert 'gpuledger_sink_sent_total{sink="remote_write"}' in page
    assert "gpuledger_sink_dropped_total{" not in page


def test_the_topics_are_those_that_the_check_asks_for(played: Played) -> None:
    service = SERVICES["topics"]
    environment = played.topology.environment(service)
    done = subprocess.run(
        [BIN / service.command()[0], "topics", "check"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_simulated_cluster_begins_when_its_agents_are_told(played: Played) -> None:
    log = (played.topology.places.folder / "kube-api" / "kube-api.log").read_text()

    assert f'"epoch_ns":{played.epoch_ns}' in log
