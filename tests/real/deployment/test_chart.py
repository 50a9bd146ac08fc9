"""The chart as Helm renders it: presets, platforms, rules, monitors, dashboards and names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from gpuledger_cli.command import main
from gpuledger_sinks.settings import ScalerSettings
from tests.real.deployment import rendered
from tests.real.deployment.chart import (
    BROKERS,
    BUCKET,
    CASES,
    CENTRAL,
    CHART,
    EDGE,
    OPERATORS,
    PLATFORMS,
    PRODUCTION,
    REPORTS,
    ROWS,
    SECOND,
    TRIAL,
    WEB,
    render,
    render_chart,
    with_secrets,
)
from tests.tables import for_each
from tests.unit.deployment import dashboard
from tests.unit.deployment.components import ROOT, VERSION
from tests.unit.deployment.test_scraping import SCRAPE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.real.services.cluster_tools import Helm

RULES: Final = sorted((ROOT / "k8s" / "chart" / "rules").glob("*.rules.yaml"))
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
AGENT: Final = "gpuledger-agent"
PODWATCH: Final = "gpuledger-podwatch"
JOIN: Final = "gpuledger-join"
OPTIONAL: Final = (
    "autoscaling",
    "bill",
    "dashboards",
    "http",
    "kafka.env",
    "kafka.tokenUrl",
    "kafka.trial",
    "openshift",
    "prices",
    "receivers",
    "reports",
    "sinkRows",
    "sinkScaler",
    "store",
    "storeMaintain",
    "topics.partitions",
    "topics.replicationFactor",
)
"""Values that a release of an older chart may lack."""


PRESETS: Final[dict[str, Path | dict[str, Any]]] = {
    "exporter": {},
    "production": PRODUCTION,
    "production central": PRODUCTION,
    "edge": EDGE,
    "edge podwatch": EDGE,
    "trial": TRIAL,
}


def components_of(preset: str) -> dict[str, str]:
    """Return the value that selects the components of a preset's second release."""
    _, _, part = preset.partition(" ")
    return {"components": part} if part else {}


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
    # A list that is not mounted would end the agent; the built-in one is dcgm-exporter's.
    assert settings["exposition"]["counters_file"] is None
    assert {made["kind"] for made in rendering.objects} == {
        "ConfigMap",
        "DaemonSet",
        "NetworkPolicy",
        "PriorityClass",
        "Service",
    }
    assert all(mount["readOnly"] for mount in agent.container["volumeMounts"])
    assert "kafka" not in json.dumps(agent.pod)


@for_each("case", [*CASES, *PRESETS])
def test_every_program_accepts_its_arguments_files_and_environment(
    case: str, helm: Helm, tmp_path: Path
) -> None:
    values = CASES[case] if case in CASES else PRESETS[case]
    rendering = with_secrets(render_chart(values, components_of(case), folder=tmp_path))

    assert rendering.services()
    for workload in rendering.services():
        assert workload.settings(tmp_path / case), workload.name


def test_a_list_of_metrics_is_mounted_where_the_agent_reads_it(helm: Helm, tmp_path: Path) -> None:
    values = {"agent": {"customMetrics": "DCGM_FI_DEV_GPU_UTIL, gauge, GPU utilization\n"}}
    agent = render_chart(values, folder=tmp_path).workload(AGENT)
    file = agent.settings(tmp_path)["exposition"]["counters_file"]

    assert file.removeprefix(f"{tmp_path / AGENT}") in agent.files()


def test_a_further_cluster_has_only_agents_and_podwatch_under_its_name(
    helm: Helm, tmp_path: Path
) -> None:
    """With the permissions and endpoints that podwatch has in a whole installation."""
    further = render(EDGE, central="podwatch")
    whole = render(PRODUCTION)
    others = ("ConfigMap", "DaemonSet", "Deployment", "NetworkPolicy")

    assert {each.name for each in further.workloads()} == {AGENT, PODWATCH}
    for workload in with_secrets(further).services():
        assert workload.settings(tmp_path)["cluster"] == "eu-west-1"
    for made in further.objects:
        metadata = made["metadata"]
        if made["kind"] not in others:
            name, namespace = metadata["name"], metadata.get("namespace")
            assert made == whole.get(made["kind"], name, namespace)


@for_each("platform", list(PLATFORMS))
def test_a_platform_changes_only_how_the_agent_gets_onto_its_node(
    platform: str, helm: Helm, tmp_path: Path
) -> None:
    plain, changed = (
        render_chart(*values, folder=tmp_path).workload(AGENT)
        for values in ([BROKERS], [BROKERS, PLATFORMS[platform]])
    )
    paths = {one["hostPath"]["path"] for one in changed.pod["volumes"] if "hostPath" in one}
    expected = {
        "k0s": "/var/lib/k0s/kubelet/pod-resources",
        "microk8s": "/var/snap/microk8s/common/var/lib/kubelet/pod-resources",
    }

    assert expected.get(platform, "/var/lib/kubelet/pod-resources") in paths
    runtime = None if platform == "gpu-operator-nri" else "nvidia"
    assert changed.pod.get("runtimeClassName") == runtime
    assert changed.container == plain.container


def test_with_the_nri_plugin_the_agents_container_requests_the_management_device(
    helm: Helm, tmp_path: Path
) -> None:
    """By the annotation of NVIDIA's toolkit, which names the container."""
    agent = render_chart(PLATFORMS["gpu-operator-nri"], folder=tmp_path).workload(AGENT)
    annotations = agent.manifest["spec"]["template"]["metadata"]["annotations"]

    assert (
        annotations[f"nvidia.cdi.k8s.io/container.{agent.container['name']}"]
        == "management.nvidia.com/gpu=all"
    )


@for_each("platform", ["gpu-operator", "openshift"])
def test_the_gpu_operator_can_remove_the_agent_for_a_driver_upgrade(
    platform: str, helm: Helm, tmp_path: Path
) -> None:
    """By the label that it sets to `paused-for-driver-upgrade`: it evicts no pods of DaemonSets."""
    agent = render_chart(PLATFORMS[platform], folder=tmp_path).workload(AGENT)

    assert agent.pod["nodeSelector"] == {"nvidia.com/gpu.deploy.dcgm-exporter": "true"}


def test_openshift_admits_every_pod_by_its_account(helm: Helm) -> None:
    rendering = render(BROKERS, REPORTS, BUCKET, PLATFORMS["openshift"])
    admitted = {
        (subject["namespace"], subject["name"]): binding["roleRef"]["name"]
        for binding in rendering.of_kind("RoleBinding")
        for subject in binding["subjects"]
        if binding["roleRef"]["kind"] == "ClusterRole"
    }

    for each in rendering.workloads():
        account = each.pod.get("serviceAccountName", "default")
        level = "privileged" if each.name == AGENT else "nonroot-v2"
        assert admitted[each.namespace, account] == f"system:openshift:scc:{level}"


@for_each("path", OPTIONAL)
def test_a_value_that_an_older_release_lacks_has_its_default(
    path: str, helm: Helm, tmp_path: Path
) -> None:
    """As with `helm upgrade --reuse-values`, which does not read new defaults."""
    first, _, second = path.partition(".")
    missing = {first: {second: None} if second else None}

    assert (
        render_chart(CENTRAL, missing, folder=tmp_path).objects
        == render_chart(CENTRAL, folder=tmp_path).objects
    )


def test_objects_of_other_projects_are_left_out_if_the_cluster_lacks_their_kinds(
    helm: Helm, tmp_path: Path
) -> None:
    wanted = {
        "podMonitor": {"enabled": True},
        "autoscaling": {"enabled": True},
        "dashboards": {
            "enabled": True,
            "grafanaOperator": {"enabled": True},
            "kubeSphere": {"enabled": True},
        },
    }
    versions = [
        {
            made["apiVersion"]
            for made in render_chart(CENTRAL, ALERTS, wanted, folder=tmp_path, kinds=kinds).objects
        }
        for kinds in (OPERATORS, ())
    ]

    assert set(OPERATORS) <= versions[0]
    assert versions[1] == versions[0] - set(OPERATORS)


def test_the_join_and_sinks_are_scaled_by_their_own_lag(helm: Helm, tmp_path: Path) -> None:
    values = {"autoscaling": {"enabled": True, "maxReplicas": 9}, **ROWS, **SECOND}
    rendering = render_chart(CENTRAL, values, folder=tmp_path)
    scaled = {
        one["spec"]["scaleTargetRef"]["name"]: one for one in rendering.of_kind("ScaledObject")
    }

    assert scaled.keys() == {
        JOIN,
        "gpuledger-sink-remote-write",
        "gpuledger-sink-rows",
        "gpuledger-sink-remote-write-second",
    }
    for name, made in scaled.items():
        deployment = rendering.get("Deployment", name, "gpuledger")
        (trigger,) = made["spec"]["triggers"]
        metric = "gpuledger_join_lag_seconds" if name == JOIN else "gpuledger_sink_lag_seconds"
        # The autoscaler owns the number of replicas.
        assert "replicas" not in deployment["spec"]
        assert rendering.get("PodDisruptionBudget", name, "gpuledger")
        assert made["spec"]["maxReplicaCount"] == 9
        assert trigger["metricType"] == "Value"
        assert metric in trigger["metadata"]["query"]
        assert f'component="{name.removeprefix("gpuledger-")}"' in trigger["metadata"]["query"]
    manifest = tmp_path / "scaled.yaml"
    manifest.write_text(yaml.safe_dump_all(scaled.values()))
    assert main(["autoscale", "check", str(manifest)]) == 0


def test_only_keda_may_connect_to_the_grpc_port_of_the_scaler(helm: Helm, tmp_path: Path) -> None:
    values = {"cluster": "eu", "sinkScaler": {"enabled": True, "tlsSecret": "scaler-tls"}}
    rendering = render_chart(CENTRAL, values, folder=tmp_path)
    name = "gpuledger-sink-scaler"
    workload = rendering.workload(name)
    ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
    service = rendering.get("Service", name, "gpuledger")["spec"]
    policy = rendering.get("NetworkPolicy", name, "gpuledger")["spec"]
    (rule,) = policy["ingress"]
    variables = workload.environment()
    mounted = {one["name"]: one["mountPath"] for one in workload.container["volumeMounts"]}

    assert variables["GPULEDGER_SCALER__CLUSTER"] == "eu"
    assert variables["GPULEDGER_SCALER__CERT_FILE"] == f"{mounted['scaler']}/tls.crt"
    assert variables["GPULEDGER_SCALER__KEY_FILE"] == f"{mounted['scaler']}/tls.key"
    assert ScalerSettings().listen == f"0.0.0.0:{ports['grpc']}"
    assert {one["port"]: one["targetPort"] for one in service["ports"]} == {
        ports["http"]: "http",
        ports["grpc"]: "grpc",
    }
    assert policy["podSelector"]["matchLabels"].items() <= workload.labels.items()
    assert [port["port"] for port in rule["ports"]] == ["grpc"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}


def test_the_dashboards_are_the_shipped_files(helm: Helm, tmp_path: Path) -> None:
    values = {"dashboards": {"enabled": True, "grafanaOperator": {"enabled": True}}}
    rendering = render_chart(values, folder=tmp_path)
    found = [
        made
        for made in rendering.of_kind("ConfigMap")
        if "grafana_dashboard" in made["metadata"]["labels"]
    ]
    shipped = {
        file.name: json.loads(file.read_text())
        for file in (ROOT / "k8s/chart/dashboards").glob("*.json")
    }
    references = [one["spec"]["configMapRef"] for one in rendering.of_kind("GrafanaDashboard")]

    assert shipped == {
        name: json.loads(text) for one in found for name, text in one["data"].items()
    }
    assert [(one["name"], one["key"]) for one in references] == [
        (one["metadata"]["name"], name) for one in found for name in one["data"]
    ]


def test_kubespheres_dashboard_has_the_shipped_panels_for_all_clusters_nodes_and_namespaces(
    helm: Helm, tmp_path: Path
) -> None:
    values = {"dashboards": {"enabled": True, "kubeSphere": {"enabled": True}}}
    (made,) = render_chart(values, folder=tmp_path).of_kind("ClusterDashboard")
    panels = made["spec"]["panels"]
    queries = [
        (target["legendFormat"], target["expr"]) for one in panels for target in one["targets"]
    ]

    assert [one["title"].partition(" (")[0] for one in panels] == [
        one["title"] for one in dashboard.panels()
    ]
    assert queries == [(target.legend, target.query) for target in dashboard.targets()]
    assert {one["type"] for one in panels} == {"singlestat", "graph", "table"}
    assert {one["title"] for one in panels if "(" in one["title"]} == {
        "Power (W)",
        "Power, by pod (W)",
        "Hottest (°C)",
    }


def documented() -> list[str]:
    """Return the commands of docs/ that install or upgrade a release."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    found = [
        command
        for page in pages
        for command in re.findall(
            r"^ *helm (?:install|upgrade) (.*k8s/chart.*)$", page.read_text(), re.MULTILINE
        )
    ]
    return sorted(set(found))


@for_each("command", documented())
def test_every_documented_command_renders(command: str, helm: Helm, tmp_path: Path) -> None:
    words = command.replace("$REGISTRY", "registry.example.com").split()
    if "--kube-context" in words:
        at = words.index("--kube-context")
        del words[at : at + 2]
    if not (tmp_path / "k8s").exists():
        (tmp_path / "k8s").symlink_to(CHART.parent)
        (tmp_path / "my-values.yaml").write_bytes(PRODUCTION.read_bytes())
        (tmp_path / "eu-west-1.yaml").write_bytes(EDGE.read_bytes())

    assert "kind: " in helm("template", *words, folder=tmp_path)


@for_each("name", list(rendered.PRESETS))
def test_the_rendered_files_are_those_of_the_chart(name: str, helm: Helm) -> None:
    """If this fails, run `make rendered`."""
    made = rendered.text_of(rendered.PRESETS[name])

    assert (rendered.FOLDER / f"{name}.yaml").read_text() == made


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


@for_each(
    "topics,arguments",
    [
        ({}, []),
        (
            {"partitions": 24, "replicationFactor": 2},
            ["--partitions=24", "--replication-factor=2"],
        ),
    ],
)
def test_the_topics_have_the_given_partitions_and_replicas(
    topics: dict[str, int], arguments: list[str], helm: Helm, tmp_path: Path
) -> None:
    """And otherwise the numbers that `topics create` chooses."""
    job = render_chart(CENTRAL, {"topics": topics}, folder=tmp_path).workload("gpuledger-topics")

    assert job.container["args"] == ["topics", "create", *arguments]


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
    source = "pod" if kind == "PodMonitor" else "service"
    text = json.dumps(SCRAPE["relabel_configs"][1:]).replace("service_label", f"{source}_label")
    relabelings = json.loads(
        text.replace("source_labels", "sourceLabels").replace("target_label", "targetLabel")
    )
    documented = {"port": "http", "path": "/metrics", "honorLabels": SCRAPE["honor_labels"]}
    for values in ({}, CENTRAL):
        rendering = render_chart(values, enabled, folder=tmp_path)
        (monitor,) = rendering.of_kind("PodMonitor", "ServiceMonitor")
        spec = monitor["spec"]
        (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
        selected = spec["selector"]["matchLabels"].items()
        services = [made["metadata"]["labels"] for made in rendering.of_kind("Service")]

        assert endpoint == {**documented, "relabelings": relabelings}
        assert spec["jobLabel"] == "app.kubernetes.io/name"
        labels = [each.labels for each in rendering.services()]
        for each in labels if kind == "PodMonitor" else services:
            assert selected <= each.items()


def test_a_pod_monitor_scrapes_the_reports_of_a_volume_as_their_own_component(
    helm: Helm, tmp_path: Path
) -> None:
    """They are in the pod of the sink, whose labels name the sink."""
    values = {"podMonitor": {"enabled": True, "endpoint": {"basicAuth": {}}}, **WEB, **REPORTS}
    rendering = render_chart(CENTRAL, values, folder=tmp_path)
    (monitor,) = rendering.of_kind("PodMonitor")
    first, second = monitor["spec"]["podMetricsEndpoints"]
    (port,) = rendering.workload("gpuledger-reports").container["ports"]

    assert second["port"] == port["name"] != first["port"]
    assert second["relabelings"][0] == {"targetLabel": "component", "replacement": "reports"}
    assert second["relabelings"][1:] == first["relabelings"][1:]
    for endpoint in (first, second):
        assert (endpoint["scheme"], endpoint["basicAuth"]) == ("https", {})


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
