"""The fields of alerts for routing and for the person on call."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import DeviceAllocation, NamespaceDescription, PodDescription, PodState
from gpuledger_sinks.alerts.active_alerts import ActiveAlerts, Now
from gpuledger_sinks.alerts.incident_words import IncidentWords
from gpuledger_sinks.alerts.posted_alert import AlertPosting
from gpuledger_sinks.settings import AlertsSettings
from tests.unit.sinks.alerts.alerting import incident
from tests.unit.sinks.builders import GPU, SECOND_NS, START_NS, event, holder, pod

NOW = Now(time_ns=START_NS, monotonic_ns=START_NS)


def posted(labels: dict[str, str], **settings: Any) -> dict[str, Any]:  # noqa: ANN401  # as AlertsSettings takes them
    alerts = ActiveAlerts()
    alerts.hold(labels, {"summary": "words"}, at_ns=START_NS, hold_ns=SECOND_NS, now=NOW)
    (alert,) = alerts
    return AlertPosting(AlertsSettings(**settings), resend_ns=SECOND_NS).as_json(alert, now=NOW)


def test_every_alert_has_the_external_labels_which_replace_none_of_its_own() -> None:
    labels = {"alertname": "GpuIncident", "node": "node-a"}
    assert posted(labels, external_labels={"region": "eu"})["labels"] == {"region": "eu", **labels}


def test_an_alert_links_to_its_runbook_and_its_source() -> None:
    alert = posted(
        {"alertname": "GpuIncident", "kind": "xid", "xid": "79", "node": "a/b?c"},
        runbook_url="https://wiki/{alertname}/{kind}{xid}{category}",
        generator_url="https://grafana/d/gpu?var-node={node}",
    )
    assert alert["annotations"]["runbook_url"] == "https://wiki/GpuIncident/xid79"
    assert alert["generatorURL"] == "https://grafana/d/gpu?var-node=a%2Fb%3Fc"


@pytest.mark.parametrize(
    "labels",
    [
        {"alertname": "GpuIncident", "kind": "xid", "xid": "79"},
        {"alertname": "GpuIncident", "kind": "gpu_lost"},
    ],
)
def test_the_documented_runbook_address_is_that_of_the_page(labels: dict[str, str]) -> None:
    page = (Path(__file__).parents[4] / "docs" / "guides" / "alerts.md").read_text()
    (template,) = re.findall(r"RUNBOOK_URL='(.*?)'", page)
    address = posted(labels, runbook_url=template)["annotations"]["runbook_url"]
    begin = template.partition("/gpu/")[0]
    assert f"`…{address.removeprefix(begin)}`" in page


def test_an_alert_has_no_address_if_none_is_configured() -> None:
    alert = posted({"alertname": "GpuIncident"})
    assert "generatorURL" not in alert
    assert "runbook_url" not in alert["annotations"]


def test_an_alert_names_the_team_to_which_it_is_routed() -> None:
    words = IncidentWords(
        AlertsSettings(pod_labels=["team", "app.kubernetes.io/name"], namespace_labels=["cost"])
    )
    labels = {"cost": "42", "other": "x"}
    words.observe(event(namespaces=[NamespaceDescription(name="research", labels=labels)]))
    given = DeviceAllocation(
        gpu_uuid=GPU,
        device_id=GPU,
        resource_name="nvidia.com/gpu",
        namespace="research",
        pod="train-0",
        container="trainer",
    )
    one = incident(START_NS)
    owned = pod(labels={"team": "vision", "app.kubernetes.io/name": "train", "secret": "x"})
    attributed = replace(
        one,
        incident=replace(one.incident, allocations=[given]),
        pods=[PodDescription(uid="u", state=PodState.PENDING), owned, holder()],
        allocation_pods=[1],
    )

    named = words.labels_of(attributed)
    routed = {
        "namespace": "research",
        "pod": "train-0",
        "container": "trainer",
        "owner_kind": "StatefulSet",
        "owner_name": "train",
        "label_team": "vision",
        "label_app_kubernetes_io_name": "train",
        "namespace_label_cost": "42",
    }
    assert named == named | routed
    assert "x" not in named.values()


def test_an_incident_of_several_containers_names_no_container() -> None:
    one = incident(START_NS)
    given = [
        DeviceAllocation(
            gpu_uuid=GPU,
            device_id=GPU,
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod="train-0",
            container=name,
        )
        for name in ("trainer", "sidecar")
    ]
    attributed = replace(
        one,
        incident=replace(one.incident, allocations=given),
        pods=[pod()],
        allocation_pods=[0, 0],
    )
    assert IncidentWords().labels_of(attributed)["container"] == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"external_labels": {"cluster": "a"}}, "external_labels: reserved label: cluster"),
        ({"external_labels": {"severity": "a"}}, "external_labels: reserved label: severity"),
        ({"external_labels": {"label_team": "a"}}, "external_labels: reserved label: label_team"),
        (
            {"external_labels": {"a-b": "a"}},
            "external_labels: invalid Prometheus label name: 'a-b'",
        ),
        ({"external_labels": {"region": ""}}, "external_labels: empty value: region"),
        ({"headers": {"Content-Type": "a"}}, "headers: reserved header: Content-Type"),
        ({"headers": {"X-Org": "a\r\nb"}}, "headers: control character in the value of X-Org"),
        ({"pod_labels": ["a.b", "a/b"]}, "pod_labels: a.b and a/b would be the same label"),
        ({"namespace_labels": [""]}, "namespace_labels: empty label name"),
        ({"runbook_url": "https://wiki/{pod}"}, "runbook_url: unknown field: {pod}; use one of"),
        ({"runbook_url": "https://wiki/{"}, "runbook_url: "),
        ({"generator_url": "wiki"}, "generator_url: "),
    ],
)
def test_a_setting_that_no_alert_can_carry_is_rejected_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AlertsSettings(**settings)
