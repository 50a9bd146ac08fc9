"""The provisioned dashboard queries only what the project sends, and Grafana finds it."""

import re

import pytest
import yaml
from prometheus_client import REGISTRY

from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger_enricher.join import join_metrics
from gpuledger_sinks import metrics as sink_metrics
from tests.unit.deployment import compose_file, dashboard

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SENT = {
    metric.name: {"cluster", "node", *family.labels}
    for family in (*FAMILIES, *HEALTH_FAMILIES, *INCIDENT_FAMILIES)
    for metric in family.metrics
}
OWN = {"gpuledger_join_lag_seconds": set[str](), "gpuledger_sink_lag_seconds": {"sink"}}


def test_the_metrics_of_the_components_are_named_as_they_are_scraped() -> None:
    exposed = {family.name for family in REGISTRY.collect()}

    assert set(OWN) <= exposed
    assert {next(iter(join_metrics.LAG_SECONDS.collect())).name} <= set(OWN)
    assert {next(iter(sink_metrics.LAG_SECONDS.collect())).name} <= set(OWN)


@pytest.mark.parametrize(
    "query",
    [
        *(target.query for target in dashboard.targets()),
        *(variable["definition"] for variable in dashboard.variables()),
    ],
)
def test_a_query_uses_only_metrics_and_labels_that_are_sent(query: str) -> None:
    requested = {metric: (SENT | OWN)[metric] for metric in dashboard.metrics(query)}

    assert requested
    for metric, labels in dashboard.selections(query):
        assert labels <= requested[metric]
    joined = dashboard.joined_labels(query)
    assert {metric for metric, _ in joined} == {one for one in requested if one.endswith("_info")}
    for metric, labels in joined:
        assert labels <= requested[metric]
    assert dashboard.labels(query) <= set().union(*requested.values())


def test_every_variable_is_used_and_every_used_one_is_defined() -> None:
    named = {variable["name"] for variable in dashboard.variables()}
    written = [target.written for target in dashboard.targets()]

    assert {name for query in written for name in dashboard.variables_in(query)} == named


@pytest.mark.parametrize("target", dashboard.targets(), ids=str)
def test_every_series_has_a_name_made_of_labels_that_the_query_returns(
    target: dashboard.Target,
) -> None:
    made = set(re.findall(r'"(\w+)", "[^"]*", "[^"]*"', target.written))
    given = dashboard.labels(target.written) | made

    assert target.is_table == (not target.legend)
    assert dashboard.labels_in(target.legend) <= given


def test_every_query_uses_the_data_source_that_the_reader_selects() -> None:
    """So the file can be imported as it is, whatever the data source is called there."""
    (chosen,) = dashboard.data_source_variables()
    asking = [*dashboard.panels(), *dashboard.variables()]

    assert (chosen["name"], chosen["query"]) == ("datasource", "prometheus")
    assert dashboard.load()["templating"]["list"][0] is chosen
    assert all(one["datasource"] == SOURCE for one in asking)
    assert all(target.data_source == SOURCE for target in dashboard.targets())
    assert not {"__inputs", "id"} & dashboard.load().keys()


def test_there_is_a_data_source_and_panel_ids_are_unique() -> None:
    (source,) = yaml.safe_load(
        (dashboard.GRAFANA / "provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    panels = dashboard.panels()

    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["isDefault"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard.panels()
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
    folder = mounts["./k8s/chart/dashboards"]

    assert [provider["options"]["path"] for provider in provided["providers"]] == [folder]
    assert service.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == (
        f"{folder}/gpuledger.json"
    )
