"""The chart as Helm renders it: equal to the base, without values that have no effect."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.real.deployment.chart import CASES, CENTRAL, CHART, render_chart
from tests.real.deployment.rendering import Manifest, Rendering, render, strings
from tests.tables import for_each
from tests.unit.deployment.components import ROOT, VERSION
from tests.unit.deployment.test_scraping import MONITOR

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.real.services.kustomize import Helm, Kustomize

BASE_KAFKA: Final = {
    "bootstrapServers": "kafka.kafka.svc:9092",
    "caSecret": "gpuledger-kafka-credentials",
}
LIKE_BASE: Final[list[dict[str, Any]]] = [
    # The two settings by which the chart replaces dcgm-exporter.
    {"kafka": BASE_KAFKA, "agent": {"port": 9820, "settings": {"exposition": None}}},
    {"kafka": BASE_KAFKA, "components": "central"},
]
"""The values of the two releases that are equal to the base."""
RULES: Final = sorted((ROOT / "deploy" / "prometheus").glob("*.rules.yaml"))
ALERTS: Final[dict[str, dict[str, Any]]] = {
    "prometheusRule": {
        "enabled": True,
        "disabled": [],
        "groups": [
            "gpuledger",
            "gpuledger-scrapes",
            "gpuledger-gpus",
            "gpuledger-usage",
            "gpuledger-dcgm",
        ],
    }
}
"""Every group of rules, complete."""


def without_instance(labels: dict[str, Any]) -> dict[str, Any]:
    """Return an object as decoded, without Helm's label for the name of the release."""
    return {key: value for key, value in labels.items() if key != "app.kubernetes.io/instance"}


def comparable(rendering: Rendering) -> dict[tuple[str, str, str], Manifest]:
    """Return the objects by kind, name and namespace, without generated parts of names."""
    hashed = {name: original for original, name in rendering.hashed_names().items()}
    text = json.dumps(rendering.objects)
    for name, original in hashed.items():
        text = text.replace(f'"{name}"', f'"{original}"')
    text = re.sub(r'"gpuledger-topics-[0-9a-f]{8}"', '"gpuledger-topics"', text)
    found = {}
    for made in json.loads(text, object_hook=without_instance):
        if made["kind"] == "Namespace":
            continue
        metadata = made.pop("metadata")
        template = made.get("spec", {}).get("jobTemplate", {}).get("spec", made.get("spec", {}))
        template.get("template", {}).get("metadata", {}).pop("annotations", None)
        found[made["kind"], metadata["name"], metadata.get("namespace", "")] = made
    return found


@pytest.fixture(scope="module")
def base(kustomize: Kustomize) -> Rendering:
    return Rendering(objects=[*render("base").objects, *render("topics").objects])


@pytest.fixture(scope="module")
def chart(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = tmp_path_factory.mktemp("chart")
    made = [render_chart(values, folder=folder).objects for values in LIKE_BASE]
    return Rendering(objects=[one for objects in made for one in objects])


def test_two_releases_have_the_objects_of_the_base(base: Rendering, chart: Rendering) -> None:
    expected, found = comparable(base), comparable(chart)

    assert found.keys() == expected.keys()
    for key, manifest in expected.items():
        kind = key[0]
        if kind == "NetworkPolicy":
            # Another application may run in the namespace of a release.
            selected = found[key]["spec"].pop("podSelector")
            assert manifest["spec"].pop("podSelector") == {}
            assert selected == {"matchLabels": {"app.kubernetes.io/name": "gpuledger"}}
        if kind != "ConfigMap" or key[1] == "gpuledger-kafka":
            assert found[key] == manifest, key


def test_the_programs_of_two_releases_start_with_the_settings_of_the_base(
    base: Rendering, chart: Rendering, tmp_path: Path
) -> None:
    def settings(rendering: Rendering, folder: Path) -> dict[str, str]:
        # Each rendering has its own directory, which paths in settings contain.
        return {
            each.name: json.dumps(each.settings(folder)).replace(str(folder), "")
            for each in rendering.services()
        }

    assert settings(chart, tmp_path / "chart") == settings(base, tmp_path / "base")


def test_an_object_has_at_least_the_labels_of_the_base(base: Rendering, chart: Rendering) -> None:
    given = {
        (made["kind"], made["metadata"]["name"]): made["metadata"]["labels"]
        for made in chart.objects
    }
    common = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}

    assert all(common <= labels.keys() for labels in given.values())
    for made in base.objects:
        labels = given.get((made["kind"], made["metadata"]["name"]), {})
        if labels:
            assert made["metadata"].get("labels", {}).items() <= labels.items()


def test_agents_without_kafka_neither_connect_to_it_nor_write_to_the_node(
    helm: Helm, tmp_path: Path
) -> None:
    rendering = render_chart({}, folder=tmp_path)
    agent = rendering.workload("gpuledger-agent")
    settings = agent.settings(tmp_path)
    (port,) = agent.container["ports"]

    assert settings["no_kafka"]
    assert settings["http"]["listen"] == "0.0.0.0:9400"
    assert port["containerPort"] == 9400
    assert settings["exposition"]["counters_file"].endswith("dcp-metrics-included.csv")
    assert {made["kind"] for made in rendering.objects} == {
        "ConfigMap",
        "DaemonSet",
        "NetworkPolicy",
        "PriorityClass",
        "Service",
    }
    assert all(mount["readOnly"] for mount in agent.container["volumeMounts"])
    assert "kafka" not in json.dumps(agent.pod)


@for_each("case", [*CASES, "production", "production-central"])
def test_every_program_accepts_its_arguments_files_and_environment(
    case: str, helm: Helm, tmp_path: Path
) -> None:
    central = {"components": "central"} if case == "production-central" else {}
    file = CASES.get(case, CHART / "values-production.yaml")
    rendering = with_secrets(render_chart(file, central, folder=tmp_path))

    assert rendering.services()
    for workload in rendering.services():
        assert workload.settings(tmp_path), workload.name


def with_secrets(rendering: Rendering) -> Rendering:
    """Return a rendering with all Secrets that its pods mount."""
    keys = ("username", "password", "ca.crt", "tls.crt", "tls.key")
    data = dict.fromkeys(keys, base64.b64encode(b"secret").decode())
    named = {
        (text, each.namespace)
        for each in rendering.workloads()
        for path, text in strings(each.pod)
        if path.endswith(("secret.secretName", "secret.name"))
    }
    made = [
        {"kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "data": data}
        for name, namespace in named
    ]
    return Rendering(objects=[*rendering.objects, *made])


def test_a_changed_setting_restarts_only_pods_that_read_it(helm: Helm, tmp_path: Path) -> None:
    def checksums(over: Mapping[str, Any]) -> dict[str, object]:
        objects = render_chart(CENTRAL, over, folder=tmp_path).objects
        return {
            made["metadata"]["name"]: made["spec"]["template"]["metadata"].get("annotations")
            for made in objects
            if made["kind"] == "Deployment"
        }

    before = checksums({})
    changed = {
        name
        for name, found in checksums({"join": {"settings": {"log": {"level": "debug"}}}}).items()
        if found != before[name]
    }

    assert changed == {"gpuledger-join"}
    assert all(
        found != before[name]
        for name, found in checksums({"kafka": {"bootstrapServers": "other:9092"}}).items()
    )


def test_the_topics_job_has_another_name_when_it_changes(helm: Helm, tmp_path: Path) -> None:
    """A Job's template cannot be changed."""

    def job(over: Mapping[str, Any]) -> tuple[str, object]:
        (made,) = render_chart(CENTRAL, over, folder=tmp_path).of_kind("Job")
        return made["metadata"]["name"], made["spec"]["template"]

    same, other = job({"cluster": "other"}), job({"kafka": {"bootstrapServers": "other:9092"}})

    assert job({}) == same
    assert same[0] != other[0]


def test_names_follow_the_release_and_fit(helm: Helm, tmp_path: Path) -> None:
    names = {name: render_chart(CENTRAL, folder=tmp_path, name=name) for name in ("eu", "x" * 53)}

    for name, rendering in names.items():
        prefix = f"{name}-gpuledger"[:37].strip("-")
        for made in rendering.objects:
            assert made["metadata"]["name"].startswith(prefix)
            assert len(made["metadata"]["name"]) <= (52 if made["kind"] == "CronJob" else 63)
        (role,) = rendering.of_kind("Role")
        assert role["rules"][0]["resourceNames"] == [f"{prefix}-podwatch"]
        podwatch = rendering.workload(f"{prefix}-podwatch")
        assert podwatch.settings(tmp_path / name)["lease"]["name"] == f"{prefix}-podwatch"


def test_the_rules_are_those_of_the_shipped_files(helm: Helm, tmp_path: Path) -> None:
    (made,) = render_chart(ALERTS, folder=tmp_path).of_kind("PrometheusRule")
    shipped = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]

    assert made["spec"]["groups"] == sorted(
        shipped,
        key=lambda group: [one["name"] for one in made["spec"]["groups"]].index(group["name"]),
    )
    assert {group["name"] for group in shipped} == set(ALERTS["prometheusRule"]["groups"])


def test_an_address_of_the_documentation_is_in_every_runbook_url(
    helm: Helm, tmp_path: Path
) -> None:
    wiki = {"prometheusRule": {"runbookUrl": "https://wiki.example.com/gpuledger/"}}
    (made,) = render_chart(ALERTS, wiki, folder=tmp_path).of_kind("PrometheusRule")
    urls = [
        rule["annotations"]["runbook_url"]
        for group in made["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]

    assert urls
    assert all(url.startswith("https://wiki.example.com/gpuledger/docs/") for url in urls)


def test_by_default_no_alert_requires_central_components(helm: Helm, tmp_path: Path) -> None:
    (made,) = render_chart({"prometheusRule": {"enabled": True}}, folder=tmp_path).of_kind(
        "PrometheusRule"
    )
    expressions = [rule["expr"] for group in made["spec"]["groups"] for rule in group["rules"]]

    assert expressions
    assert [text for text in expressions if re.search(r"absent\(up", text)] == []


@for_each("kind", ["PodMonitor", "ServiceMonitor"])
def test_a_monitor_selects_every_pod_and_has_the_documented_labels(
    kind: str, helm: Helm, tmp_path: Path
) -> None:
    enabled = {f"{kind[0].lower()}{kind[1:]}": {"enabled": True}}
    for values in LIKE_BASE:
        rendering = render_chart(values, enabled, folder=tmp_path)
        (monitor,) = rendering.of_kind("PodMonitor", "ServiceMonitor")
        spec = monitor["spec"]
        (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
        selected = spec["selector"]["matchLabels"].items()
        services = [made["metadata"]["labels"] for made in rendering.of_kind("Service")]

        assert [endpoint] == MONITOR["podMetricsEndpoints"]
        assert spec["jobLabel"] == MONITOR["jobLabel"]
        labels = [each.labels for each in rendering.services()]
        for each in labels if kind == "PodMonitor" else services:
            assert selected <= each.items()


def test_a_packaged_chart_has_the_rules(helm: Helm, tmp_path: Path) -> None:
    helm("package", CHART, f"--destination={tmp_path}")
    (package,) = tmp_path.glob("*.tgz")

    assert package.name == f"gpuledger-{VERSION}.tgz"
    assert (
        render_chart(ALERTS, folder=tmp_path, chart=package).objects
        == render_chart(ALERTS, folder=tmp_path).objects
    )


def test_the_chart_has_the_version_of_the_images(helm: Helm) -> None:
    read = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert read["version"] == read["appVersion"] == VERSION
