"""docker-compose.yml in operation: the dashboard shows the scenario's truth.

The services run as processes; one run serves all tests of this file. podwatch starts after all
others, so that there are ticks in which pods have no names yet.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.store.query import count_rows
from tests.default_topics import ROWS
from tests.real import remote_write_page
from tests.real.compose.expected import EXPECTED, MAY_BE_ABSENT
from tests.real.compose.panel_queries import Grafana
from tests.real.compose.played import WAIT_SECONDS, Played, play
from tests.real.compose.topology import ALWAYS, BIN, SERVICES, Topology
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services.alertmanager import AlertmanagerApi
from tests.real.services.web import await_some
from tests.unit.deployment import dashboard
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.real.services.kafka import KafkaDistribution
    from tests.real.services.kcat import Kcat

INSTALL_PAGE = (ROOT / "docs" / "guides" / "install.md").read_text()
SCRAPED = '{job!="",__name__=~"gpuledger_.+"}'
SENT = '{job="",__name__=~"gpuledger_.+"}'


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
    return play(topology)


def test_every_panel_has_expected_values() -> None:
    assert EXPECTED.keys() == {panel["title"] for panel in dashboard.panels()}


@pytest.mark.parametrize("title", [panel["title"] for panel in dashboard.panels()])
def test_a_panel_shows_the_truth_of_the_scenario(played: Played, title: str) -> None:
    expected = EXPECTED[title](played.truth)

    shown = {one.name: one.mean for one in played.show_all_of(title, expected.keys())}

    assert {**dict.fromkeys(MAY_BE_ABSENT & expected.keys(), 0.0), **shown} == expected


def test_the_power_by_pod_adds_up_to_the_power_of_the_devices(played: Played) -> None:
    (devices,) = played.show("Power", played.window)
    parts = played.show("Power, by pod", played.window)

    assert sum(part.mean for part in parts) == pytest.approx(devices.mean, rel=0.01)


@pytest.mark.parametrize(
    "target", dashboard.targets(), ids=lambda target: f"{target.panel} {target.ref_id}"
)
def test_every_series_since_the_start_has_a_name_without_gaps(
    played: Played, target: dashboard.Target
) -> None:
    """Including those of pods that had no name yet."""
    shown = Grafana(played.prometheus).show(target, played.whole)

    for one in shown:
        assert all(one.labels.get(label) for label in dashboard.labels_in(target.legend))
        assert one.name.strip(" /-:,{}") == one.name
        assert one.name
        assert not {"//", "{{", "  "} & {one.name[at : at + 2] for at in range(len(one.name))}
    assert len({one.name for one in shown}) == len(shown)
    if "whose" in target.legend and "allocated" not in target.panel:  # the kubelet names them
        assert "default pods without a name yet" in {one.name for one in shown}


@pytest.mark.parametrize("variable", dashboard.variables(), ids=lambda one: one["name"])
def test_a_variable_offers_all_existing_values(played: Played, variable: dict[str, Any]) -> None:
    """All nodes, and the namespaces of the pods that had a name while they ran."""
    truth = played.truth
    there = {
        "cluster": {"default"},
        "node": {node for node, _ in truth.gpus},
        "namespace": {pod.spec.namespace for pod in truth.pods()},
    }

    offered = Grafana(played.prometheus).values_of(variable)

    assert there[variable["name"]] <= offered
    assert offered <= there[variable["name"]] | truth.namespaces


def test_no_metric_is_both_scraped_and_sent(played: Played) -> None:
    """A sum over such a name would count twice."""
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


def test_every_scrape_target_of_prometheus_answers(played: Played) -> None:
    up = {one["metric"]["instance"]: one["value"][1] for one in played.prometheus.query("up")}

    deployed = {name for name in ALWAYS if SERVICES[name].is_ours} - {
        "topics",
        "kube-api",
        "store-maintain",
    }
    assert len(up) == len(deployed)
    assert set(up.values()) == {"1"}


def test_prometheus_accepted_every_sample(played: Played) -> None:
    page = played.topology.metrics_of("sink-remote-write")

    assert 'gpuledger_sink_sent_total{sink="remote_write"}' in page
    dropped = re.findall(r"^gpuledger_sink_dropped_total\{.*\} (.+)$", page, re.MULTILINE)
    assert set(map(float, dropped)) == {0}


def test_the_topics_pass_the_documented_check(played: Played) -> None:
    """By the address that is published on the host."""
    (written,) = re.findall(r"`(gpuledger topics check --bootstrap-servers [\w:]+)`", INSTALL_PAGE)
    program, *arguments = played.topology.places.move(written, of=SERVICES["kafka"]).split()
    done = subprocess.run(
        [BIN / program, *arguments],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "query", re.findall(r"```promql\n(.*?)```", remote_write_page.PAGE, re.DOTALL)
)
def test_a_documented_query_has_a_result(played: Played, query: str) -> None:
    assert played.prometheus.query(query)


@pytest.mark.parametrize("what", remote_write_page.alerts())
def test_a_documented_alert_does_not_fire_while_nothing_is_wrong(played: Played, what: str) -> None:
    assert played.prometheus.query(remote_write_page.alerts()[what]) == []


def test_the_volume_of_the_store_has_the_table(played: Played) -> None:
    store = played.topology.places.volume("store") / "store"

    assert await_some(
        lambda: [count for count in [count_rows(str(store), name="usage")] if count],
        what=str(store),
        deadline_seconds=WAIT_SECONDS,
    )


def test_alertmanager_receives_nothing_while_nothing_is_wrong(played: Played) -> None:
    url = f"http://{played.topology.places.address('alertmanager', 9093)}"

    assert AlertmanagerApi(url=url).alerts() == []


def test_rows_are_written_only_on_request(played: Played, kcat: Kcat) -> None:
    """With `--profile rows`; nothing writes them before."""
    servers = played.topology.kafka.bootstrap_servers
    assert "sink-rows" not in ALWAYS

    played.topology.start_one("sink-rows")
    played.topology.wait_until_ready()

    assert await_some(
        lambda: kcat.consume(servers, ROWS.name), what=ROWS.name, deadline_seconds=WAIT_SECONDS
    )


def test_the_simulated_cluster_starts_at_the_time_that_its_agents_are_given(played: Played) -> None:
    log = (played.topology.places.folder / "kube-api" / "kube-api.log").read_text()

    assert f'"epoch_ns":{played.epoch_ns}' in log
