"""The provisioned dashboard asks only for what the project sends, and Grafana finds it."""

import re

import pytest
import yaml
from prometheus_client import REGISTRY

from enricher.join import metrics as join_metrics
from sinks import metrics as sink_metrics
from sinks.remote_write.families import FAMILIES
from tests.unit.deployment import compose_file, dashboard

SENT = {metric.name: {"node", *family.labels} for family in FAMILIES for metric in family.metrics}
OWN = {"gpuledger_join_lag_seconds": set[str](), "gpuledger_sink_lag_seconds": {"sink"}}


def test_the_metrics_of_the_deployables_are_named_as_they_are_scraped() -> None:
    exposed = {family.name for family in REGISTRY.collect()}

    assert set(OWN) <= exposed
    assert {next(iter(join_metrics.LAG_SECONDS.collect())).name} <= set(OWN)
    assert {next(iter(sink_metrics.LAG_SECONDS.collect())).name} <= set(OWN)


@pytest.mark.parametrize("query", [*dashboard.queries(), *dashboard.variables()])
def test_a_query_asks_for_metrics_and_labels_that_are_sent(query: str) -> None:
    (metric,) = dashboard.metrics(query)

    assert dashboard.labels(query) <= (SENT | OWN)[metric]


def test_every_variable_is_used_and_every_one_used_is_there() -> None:
    named = {variable["name"] for variable in dashboard.load()["templating"]["list"]}
    written = [
        target["expr"] for panel in dashboard.load()["panels"] for target in panel["targets"]
    ]

    assert {name for query in written for name in re.findall(r"\$(\w+)", query)} == named


def test_every_legend_names_a_label_of_its_query() -> None:
    for panel in dashboard.load()["panels"]:
        for target in panel["targets"]:
            (metric,) = dashboard.metrics(target["expr"])
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= (dashboard.labels(target["expr"]) | (SENT | OWN)[metric])


def test_every_panel_asks_the_provisioned_data_source() -> None:
    provisioned = yaml.safe_load(
        (dashboard.GRAFANA / "provisioning/datasources/prometheus.yaml").read_text()
    )
    (source,) = provisioned["datasources"]
    panels = dashboard.load()["panels"]

    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert source["url"] == "http://prometheus:9090"


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard.load()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_grafana_finds_the_dashboard_where_compose_mounts_it() -> None:
    (service,) = [one for one in compose_file.services() if one.name == "grafana"]
    mounts = {mount.source: mount.target for mount in service.mounts}
    provided = yaml.safe_load(
        (dashboard.GRAFANA / "provisioning/dashboards/gpuledger.yaml").read_text()
    )
    folder = mounts["./deploy/compose/grafana/dashboards"]

    assert [provider["options"]["path"] for provider in provided["providers"]] == [folder]
    assert service.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        f"{folder}/gpuledger.json"
    )
