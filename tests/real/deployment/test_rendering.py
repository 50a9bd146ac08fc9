"""Each kustomization of k8s/ as rendered: complete, least privileged, accepted by its programs."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gpuledger_cli.bill import WRONG
from gpuledger_cli.command import main
from gpuledger_sinks.registry import KINDS
from tests.real.deployment.installation import copy_of_k8s
from tests.real.deployment.rendering import (
    ACCOUNT_TOKEN,
    FIELDS,
    K8S,
    PUBLISHED,
    Manifest,
    Rendering,
    Workload,
    kustomizations,
    render,
    strings,
)
from tests.real.services.kustomize import KustomizeError
from tests.unit.deployment import components
from tests.unit.deployment.components import ROOT
from tests.unit.reports.stores import allocated, inventory_row, write_store
from tests.unit.sinks.store.test_maintainer import fill

if TYPE_CHECKING:
    from tests.real.services.kustomize import Kubectl, Kustomize

AGENT = "gpuledger-agent"
PODWATCH = "gpuledger-podwatch"
CENTRAL = "gpuledger"
ROOTLESS = "overlays/agent-without-root"
POD_LABELS = "overlays/agent-pod-labels"
MIG = "overlays/agent-mig"
BILL = "overlays/bill"
REPORTS = "overlays/reports"
INSTALLATIONS = (
    "base",
    ROOTLESS,
    POD_LABELS,
    MIG,
    BILL,
    REPORTS,
    "overlays/pages-tls",
    "overlays/sasl-ssl",
)
"""The directories that a user applies as a whole; the topics are applied separately."""
SPOOL = "/var/spool/gpuledger"
SCRAPERS = {"kubernetes.io/metadata.name": "monitoring"}
INSPECTED = {
    "/var/lib/kubelet/pod-resources",
    "/var/log/containers",
    "/var/log/pods",
    "/sys/fs/cgroup",
}
CLUSTER_KINDS = {"Namespace", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}
REFERENCES = re.compile(
    r"metadata\.name"
    r"|spec\.(jobTemplate\.spec\.)?template\.spec\.volumes\.(configMap\.name|(projected\.sources\.)?secret\.(secretN|n)ame)"
    r"|spec\.template\.spec\.containers\.envFrom\.(configMapRef|secretRef)\.name"
    r"|spec\.template\.spec\.containers\.env\.valueFrom\.secretKeyRef\.name"
)
"""The fields that may contain the name of a ConfigMap or Secret."""


@pytest.fixture(scope="module", params=kustomizations())
def rendering(request: pytest.FixtureRequest, kustomize: Kustomize) -> Rendering:
    """Return one kustomization, rendered; the `kustomize` fixture reports a missing program."""
    return render(request.param)


@pytest.fixture(scope="module", params=INSTALLATIONS)
def installation(request: pytest.FixtureRequest, kustomize: Kustomize) -> Rendering:
    """Return a whole installation, including its topics."""
    folder = request.param
    topics = f"{folder}/topics" if folder == "overlays/sasl-ssl" else "topics"
    return Rendering(objects=[*render(folder).objects, *render(topics).objects])


@pytest.fixture
def settings(installation: Rendering, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings with which each continuously running workload would start."""
    return {each.name: each.settings(tmp_path) for each in installation.services()}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("folder", kustomizations())
def test_kubectl_renders_the_same(folder: str, kustomize: Kustomize, kubectl: Kubectl) -> None:
    assert kubectl.kustomize(K8S / folder) == kustomize.build(K8S / folder)


def test_every_component_is_part_of_an_overlay() -> None:
    folders = [*kustomizations(), *kustomizations(kind="Component")]
    files = [K8S / folder / "kustomization.yaml" for folder in folders]
    used = {
        str((file.parent / name).resolve().relative_to(K8S))
        for file in files
        for name in yaml.safe_load(file.read_text()).get("components", [])
    }

    assert used == set(kustomizations(kind="Component"))


def test_a_generated_name_is_used_only_as_the_name_of_a_config_map_or_secret(
    rendering: Rendering,
) -> None:
    """Kustomize writes it wherever it recognizes the name, such as a Role's `resourceNames`."""
    generated = set(rendering.hashed_names().values())
    places = {
        (made["kind"], path)
        for made in rendering.objects
        for path, text in strings(made)
        if any(name in text for name in generated)
    }

    assert [place for place in places if not REFERENCES.fullmatch(place[1])] == []


def test_the_documented_command_prints_every_generated_object_that_must_be_kept(
    rendering: Rendering,
) -> None:
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (pattern,) = re.findall(r"kubectl kustomize k8s\S+ \| grep -E '(.*?)'", page)

    for name in rendering.hashed_names().values():
        assert re.search(pattern, f"  name: {name}")


def test_a_generated_object_has_the_name_of_no_other_object(rendering: Rendering) -> None:
    others = [made for made in rendering.objects if made["kind"] not in ("ConfigMap", "Secret")]
    names = {made["metadata"]["name"] for made in others}

    assert names & rendering.hashed_names().keys() == set()


def test_every_config_map_is_generated_and_used(rendering: Rendering) -> None:
    made = {found["metadata"]["name"] for found in rendering.of_kind("ConfigMap", "Secret")}
    used = {text for each in rendering.workloads() for _, text in strings(each.pod)}

    assert made == set(rendering.hashed_names().values())
    assert made <= used


def test_every_object_that_a_workload_names_is_rendered_too(rendering: Rendering) -> None:
    for workload in rendering.workloads():
        named = workload.files().keys() | workload.environment().keys()
        assert named or workload.pod["volumes"], workload.name
        for volume in workload.pod.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                rendering.get("PersistentVolumeClaim", claim["claimName"], workload.namespace)
        if account := workload.pod.get("serviceAccountName"):
            rendering.get("ServiceAccount", account, workload.namespace)
        if priority := workload.pod.get("priorityClassName"):
            rendering.get("PriorityClass", priority)


def test_every_object_that_a_binding_names_is_rendered_too(rendering: Rendering) -> None:
    for binding in rendering.of_kind("RoleBinding", "ClusterRoleBinding"):
        role, namespace = binding["roleRef"], binding["metadata"].get("namespace")
        rendering.get(role["kind"], role["name"], namespace if role["kind"] == "Role" else None)
        for subject in binding["subjects"]:
            rendering.get(subject["kind"], subject["name"], subject["namespace"])


def test_references_follow_names_that_an_overlay_changes_and_the_lease_keeps_its_name(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    copy_of_k8s(tmp_path)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    named = {"namePrefix": "eu-", "nameSuffix": "-2", "resources": ["../k8s/base"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(named))
    rendering = render(overlay)
    (role,) = rendering.of_kind("Role")

    test_every_object_that_a_workload_names_is_rendered_too(rendering)
    test_every_object_that_a_binding_names_is_rendered_too(rendering)
    assert role["metadata"]["name"] == "eu-gpuledger-podwatch-2"
    assert role["rules"][0]["resourceNames"] == ["gpuledger-podwatch"]


def test_an_overlay_cannot_silently_put_everything_into_one_namespace(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    copy_of_k8s(tmp_path)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    named = {"namespace": "elsewhere", "resources": ["../k8s/base"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(named))

    with pytest.raises(KustomizeError, match="ID conflict"):
        render(overlay)


def test_the_agent_has_its_own_namespace(installation: Rendering) -> None:
    found = {each.name: each.namespace for each in installation.workloads()}

    assert found.pop(AGENT) == "gpuledger-agent"
    assert set(found.values()) == {CENTRAL}
    for made in installation.objects:
        namespace = made["metadata"].get("namespace")
        assert (namespace is None) == (made["kind"] in CLUSTER_KINDS), made
        if namespace is not None:
            installation.get("Namespace", namespace)


def test_only_the_agents_namespace_admits_pods_that_need_more_than_restricted(
    installation: Rendering,
) -> None:
    levels = {
        made["metadata"]["name"]: {
            made["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"]
            for mode in ("enforce", "audit", "warn")
        }
        for made in installation.of_kind("Namespace")
    }

    assert levels == {CENTRAL: {"restricted"}, "gpuledger-agent": {"privileged"}}


def test_every_image_is_started_by_a_workload(installation: Rendering) -> None:
    """Only reports may be absent."""
    started = {each.stage.name for each in installation.workloads()}
    assert started | {"reports"} == set(components.targets())


def test_the_reports_read_the_store_that_the_sink_writes(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    rendering = render(REPORTS)
    reports = rendering.workload("gpuledger-reports")
    sink = rendering.workload("gpuledger-sink-store")
    read, written = (
        each.settings(tmp_path)["store"]["uri"].removeprefix(str(tmp_path / each.name))
        for each in (reports, sink)
    )
    (mount,) = (one for one in reports.container["volumeMounts"] if one["name"] == "store")

    assert read == written
    assert mount["readOnly"]
    assert {
        one["persistentVolumeClaim"]["claimName"]
        for each in (reports, sink)
        for one in each.pod["volumes"]
        if "persistentVolumeClaim" in one
    } == {"gpuledger-store"}


def test_the_overlay_pulls_every_image_from_its_registry(kustomize: Kustomize) -> None:
    folder = "overlays/sasl-ssl"
    workloads = [*render(folder).workloads(), *render(f"{folder}/topics").workloads()]

    assert {each.container["image"].partition("/")[0] for each in workloads} == {
        "registry.example.com"
    }


def test_every_path_in_arguments_and_variables_is_a_file_that_is_mounted(
    installation: Rendering,
) -> None:
    for workload in installation.workloads():
        words = [*workload.container["args"], *workload.environment().values()]
        named = [word for word in words if word.startswith("/")]
        assert set(named) <= workload.files().keys(), workload.name


def test_a_component_accepts_its_arguments_files_and_environment(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    expected = {
        each.name: each.environment()["GPULEDGER_KAFKA__BOOTSTRAP_SERVERS"]
        for each in installation.services()
        # It reads the store, and nothing from Kafka.
        if each.stage.name != "reports"
    }

    assert expected
    assert {
        name: loaded["kafka"]["bootstrap_servers"]
        for name, loaded in settings.items()
        if "kafka" in loaded
    } == expected
    assert len(set(expected.values())) == 1


def test_the_settings_file_takes_effect(settings: dict[str, dict[str, Any]]) -> None:
    """None of these values is a default."""
    assert settings[AGENT]["source"] == "nvml"
    assert settings[PODWATCH]["lease"]["enabled"]
    assert settings["gpuledger-join"]["kafka"]["client_id"] == "gpuledger-join"
    assert "localhost" not in settings["gpuledger-sink-remote-write"]["remote_write"]["url"]


def test_the_overlay_has_its_own_receivers(kustomize: Kustomize, tmp_path: Path) -> None:
    """Merged over the base's, under the name that the base's sinks mount."""
    loaded = render("overlays/sasl-ssl").workload("gpuledger-sink-alerts").settings(tmp_path)

    assert loaded["alerts"]["urls"] == ["https://alertmanager.example.com"]
    assert loaded["remote_write"]["url"] == "https://prometheus.example.com/api/v1/write"


def test_a_container_opens_the_port_on_which_its_program_listens(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    opened = {each.name: each.container["ports"] for each in installation.services()}

    assert opened == {
        name: [{"name": "http", "containerPort": components.listen_port(loaded)}]
        for name, loaded in settings.items()
    }


def test_a_component_is_probed_on_that_port_and_has_resource_limits(
    installation: Rendering,
) -> None:
    pages = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for workload in installation.services():
        probes = {name: workload.container[name]["httpGet"] for name in pages}
        over_tls = "GPULEDGER_HTTP__WEB_CONFIG_FILE" in workload.environment()
        where = {"port": "http", **({"scheme": "HTTPS"} if over_tls else {})}
        assert probes == {name: {"path": path, **where} for name, path in pages.items()}
        assert workload.pod["terminationGracePeriodSeconds"] > 10
        assert {"cpu", "memory"} <= workload.container["resources"]["requests"].keys()
        assert "memory" in workload.container["resources"]["limits"]


def test_a_start_may_take_two_minutes_and_a_hang_is_ended_within_two(
    installation: Rendering,
) -> None:
    for workload in installation.services():
        start, live = (workload.container[name] for name in ("startupProbe", "livenessProbe"))
        assert start["periodSeconds"] * start["failureThreshold"] == 120
        assert live.get("periodSeconds", 10) * live["failureThreshold"] == 60


def test_a_service_leads_to_the_port_of_its_pods(installation: Rendering) -> None:
    for workload in installation.services():
        (service,) = [
            made
            for made in installation.of_kind("Service")
            if made["metadata"]["namespace"] == workload.namespace
            and matches(made["spec"]["selector"], workload.labels)
        ]
        (opened,) = workload.container["ports"]
        assert service["spec"]["ports"] == [
            {"name": "http", "port": opened["containerPort"], "targetPort": opened["name"]}
        ]


def test_a_policy_admits_traffic_only_on_that_port(installation: Rendering) -> None:
    found = {
        policy["metadata"]["namespace"]: policy["spec"]
        for policy in installation.of_kind("NetworkPolicy")
    }

    assert found.keys() == {each.namespace for each in installation.workloads()}
    for spec in found.values():
        assert spec == {
            "podSelector": {},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"namespaceSelector": {"matchLabels": SCRAPERS}}],
                    "ports": [{"port": "http", "protocol": "TCP"}],
                }
            ],
        }


def test_the_documented_patch_lets_another_namespace_scrape(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    copy_of_k8s(tmp_path)
    overlay = tmp_path / "k8s" / "overlays" / "elsewhere"
    overlay.mkdir()
    (patch,) = re.findall(
        r"```yaml\n(patches:\n.*?NetworkPolicy.*?)```",
        (ROOT / "docs" / "guides" / "kubernetes.md").read_text(),
        re.DOTALL,
    )
    made = {"resources": ["../../base"], **yaml.safe_load(patch)}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(made))

    policies = render(overlay).of_kind("NetworkPolicy")
    assert len(policies) == 2
    for policy in policies:
        (source,) = policy["spec"]["ingress"][0]["from"]
        assert source == {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}
        }


def test_there_is_a_sink_of_each_kind_and_those_that_write_to_kafka_are_optional(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    kinds = {
        folder: [
            sink.settings(tmp_path / folder)["kind"]
            for sink in render(folder).services()
            if sink.stage.name == "sinks"
        ]
        for folder in INSTALLATIONS
    }

    assert set(kinds["base"]) == set(KINDS) - {"rows"}
    assert set(kinds["overlays/sasl-ssl"]) == set(KINDS)


def test_the_topics_are_created_by_an_existing_command(installation: Rendering) -> None:
    job = installation.workload("gpuledger-topics")
    join = installation.workload("gpuledger-join")

    assert "partitions" in components.run([*job.command, "--help"], {})
    assert brokers_of(job) == brokers_of(join)


def brokers_of(workload: Workload) -> dict[str, str]:
    """Return the variables about brokers, except the user, which differs per workload."""
    found = workload.environment().items()
    return {
        name: value
        for name, value in found
        if name.startswith("GPULEDGER_KAFKA__") and not name.endswith("__SASL_USERNAME")
    }


def test_every_volume_is_mounted_and_every_mount_has_a_volume(installation: Rendering) -> None:
    for workload in installation.workloads():
        mounts = [mount["name"] for mount in workload.container.get("volumeMounts", [])]
        volumes = [volume["name"] for volume in workload.pod.get("volumes", [])]
        assert sorted(mounts) == sorted(volumes)


def test_only_the_agent_mounts_host_directories_and_it_writes_only_to_its_spool(
    installation: Rendering,
) -> None:
    for workload in installation.workloads():
        volumes = {
            volume["name"]: volume["hostPath"]["path"]
            for volume in workload.pod.get("volumes", [])
            if "hostPath" in volume
        }
        mounts = [mount for mount in workload.container["volumeMounts"] if mount["name"] in volumes]
        is_agent = workload.name == AGENT
        of_agent = {*INSPECTED, SPOOL} if is_root(workload) else {"/var/log/containers"}
        assert set(volumes.values()) == (of_agent if is_agent else set())
        assert all(mount["mountPath"] == volumes[mount["name"]] for mount in mounts)
        assert [mount["mountPath"] for mount in mounts if not mount.get("readOnly")] == (
            [SPOOL] if is_root(workload) else []
        )


def is_root(workload: Workload) -> bool:
    """Return whether it runs as user 0, as the agent does if it queries the kubelet."""
    return bool(workload.pod["securityContext"]["runAsUser"] == 0)


def test_only_the_agent_runs_as_root_and_an_overlay_avoids_that(kustomize: Kustomize) -> None:
    found = {
        folder: [each.name for each in render(folder).workloads() if is_root(each)]
        for folder in INSTALLATIONS
    }

    assert found == {folder: [] if folder == ROOTLESS else [AGENT] for folder in INSTALLATIONS}


def test_without_root_the_agent_spools_to_a_writable_directory(kustomize: Kustomize) -> None:
    agent = render(ROOTLESS).workload(AGENT)
    (mount,) = [one for one in agent.container["volumeMounts"] if one["mountPath"] == SPOOL]
    (volume,) = [one for one in agent.pod["volumes"] if one["name"] == mount["name"]]

    assert volume.keys() == {"name", "emptyDir"}
    assert agent.pod["securityContext"]["fsGroup"] == agent.pod["securityContext"]["runAsUser"]


def test_the_agents_settings_name_the_mounted_host_directories(
    settings: dict[str, dict[str, Any]],
) -> None:
    kubelet = settings[AGENT]["kubelet"]

    folders = {kubelet[name] for name in ("container_log_dir", "pod_log_dir", "cgroup_root")}
    assert {str(Path(kubelet["socket"]).parent), *folders} == INSPECTED
    assert settings[AGENT]["spool"]["directory"] == SPOOL


def test_the_store_is_kept_on_its_volume(
    installation: Rendering, settings: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    name = "gpuledger-sink-store"
    mounts = installation.workload(name).container["volumeMounts"]
    (mount,) = [mount for mount in mounts if mount["name"] == "store"]

    # The place where `lay_out` puts the container's root.
    root = f"{tmp_path / name}"
    assert settings[name]["store"]["uri"].startswith(f"{root}{mount['mountPath']}/")


def test_the_bill_is_closed_as_rendered_and_kept_in_the_store_of_the_sink(
    kustomize: Kustomize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the one existing day, instead of last month; a second run finds nothing to add."""
    rendering = render(BILL)
    job = rendering.workload("gpuledger-bill")
    laid_out = job.lay_out(tmp_path)
    store = rendering.workload("gpuledger-sink-store").settings(tmp_path)["store"]["uri"]
    command = [word.replace("lastmonth", "2026-10-01") for word in laid_out.argv[1:]]
    (given,) = [word for word in command if word.startswith("--store=")]
    write_store(
        Path(given.partition("=")[2]),
        usage_hourly=[allocated(hour, "a", model="NVIDIA H100") for hour in range(24)],
        inventory=[inventory_row(model="NVIDIA H100")],
    )

    assert command != laid_out.argv[1:]
    assert Path(given).name == Path(store).name
    assert main(command) == 0
    assert "closed as revision 1: 1 lines, 60.00 USD" in capsys.readouterr().out
    assert main(command) == 0
    assert "nothing has changed" in capsys.readouterr().out


def test_the_store_of_the_sink_is_maintained_as_rendered(
    kustomize: Kustomize, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendering = render("base")
    job, sink = (
        rendering.workload(f"gpuledger-{name}") for name in ("store-maintain", "sink-store")
    )
    command = job.lay_out(tmp_path).argv[1:]
    store = Path(sink.settings(tmp_path)["store"]["uri"])
    (given,) = [word for word in command if word.startswith("--store=")]
    fill(Path(given.partition("=")[2]), commits=1)

    assert Path(given.partition("=")[2]).name == store.name
    assert main(command) == 0
    assert "sum up" in capsys.readouterr().out
    assert job.manifest["spec"]["concurrencyPolicy"] == "Forbid"
    (beside,) = job.pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [each.name for each in _selected(rendering, beside["labelSelector"])] == [sink.name]


@pytest.mark.parametrize(
    ("page", "workload", "mounted"),
    [
        ("guides/close-a-month.md", "gpuledger-bill", "/etc/gpuledger/prices.yaml"),
        ("guides/reports-api.md", "gpuledger-reports", "/etc/gpuledger-prices/prices.yaml"),
    ],
)
def test_the_documented_lines_add_the_bill_with_its_prices_to_a_copy_of_the_overlay(
    page: str, workload: str, mounted: str, kustomize: Kustomize, tmp_path: Path
) -> None:
    central = copy_of_k8s(tmp_path) / "overlays" / "sasl-ssl" / "central"
    _put_at_the_head(central / "kustomization.yaml", _documented(page, "components"))
    (central / "prices.yaml").write_text("prices: []\n")
    made = render(central.parent).workload(workload)

    assert made.files()[mounted] == b"prices: []\n"
    assert made.container["image"].startswith("registry.example.com/")


def test_the_reports_use_the_mounted_prices(kustomize: Kustomize, tmp_path: Path) -> None:
    reports = render(REPORTS).workload("gpuledger-reports")
    prices = Path(reports.settings(tmp_path)["prices"])

    assert prices.read_bytes() == (K8S / REPORTS / "prices.yaml").read_bytes()


def test_the_documented_patch_makes_the_reports_read_a_store_elsewhere(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    overlay = copy_of_k8s(tmp_path) / "overlays" / "reports"
    _put_at_the_head(
        overlay / "kustomization.yaml", _documented("guides/reports-api.md", "patches")
    )
    reports = render(overlay).workload("gpuledger-reports")

    assert reports.settings(tmp_path)["store"]["uri"] == "s3://books/gpuledger"
    assert "affinity" not in reports.pod
    assert {volume["name"] for volume in reports.pod["volumes"]} == {"settings", "prices"}
    assert {mount["name"] for mount in reports.container["volumeMounts"]} == {"settings", "prices"}


def _documented(page: str, key: str) -> dict[str, list[Any]]:
    """Return the block of a page of docs/ that begins with this list of a kustomization."""
    text = (ROOT / "docs" / page).read_text()
    blocks = map(dedent, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    (lines,) = (block for block in blocks if block.startswith(f"{key}:\n"))
    loaded: dict[str, list[Any]] = yaml.safe_load(lines)
    return loaded


def _put_at_the_head(file: Path, added: dict[str, list[Any]]) -> None:
    merged = yaml.safe_load(file.read_text())
    for name, more in added.items():
        merged[name] = [*more, *merged.get(name, [])]
    file.write_text(yaml.safe_dump(merged))


def test_the_bill_runs_on_the_node_of_the_stores_volume_and_is_not_retried_after_a_final_error(
    kustomize: Kustomize,
) -> None:
    rendering = render(BILL)
    job, sink = (rendering.workload(f"gpuledger-{name}") for name in ("bill", "sink-store"))
    spec = job.manifest["spec"]["jobTemplate"]["spec"]
    (beside,) = job.pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    claims = [
        volume["persistentVolumeClaim"]
        for each in (job, sink)
        for volume in each.pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    (codes,) = [
        rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]

    assert claims[0] == claims[1]
    assert [each.name for each in _selected(rendering, beside["labelSelector"])] == [sink.name]
    assert job.manifest["spec"]["concurrencyPolicy"] == "Forbid"
    assert codes == {"containerName": "bill", "operator": "In", "values": [WRONG]}


def test_a_container_has_the_least_privilege(installation: Rendering) -> None:
    for workload in installation.workloads():
        is_agent = workload.name == AGENT
        if "NVIDIA_MIG_MONITOR_DEVICES" in workload.environment():
            continue  # it has its own test
        pod = workload.pod["securityContext"]
        # The kubelet's socket admits only user 0.
        users = ["0:0"] if is_root(workload) else components.stages()["runtime"].values("USER")
        assert workload.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert [f"{pod['runAsUser']}:{pod['runAsGroup']}"] == users
        assert pod["runAsNonRoot"] == (not is_root(workload))
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostIPC"} & workload.pod.keys()
        assert workload.pod.get("hostPID", False) == is_agent
        assert workload.pod["automountServiceAccountToken"] == (workload.name == PODWATCH)


def test_podwatch_may_only_read_its_watched_objects_and_keep_its_own_lease(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    cluster_role = installation.get("ClusterRole", PODWATCH)
    (role,) = installation.of_kind("Role")
    lease = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}

    assert cluster_role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["pods", "nodes", "namespaces"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    assert role["rules"] == [
        {
            **lease,
            "resourceNames": [settings[PODWATCH]["lease"]["name"]],
            "verbs": ["get", "update"],
        },
        {**lease, "verbs": ["create"]},
    ]


def test_the_agent_may_only_read_a_kubelets_pods_and_only_if_labels_are_configured(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    roles = [one for one in installation.of_kind("ClusterRole", "Role") if AGENT in title(one)]
    pod = installation.workload(AGENT).pod
    reads_labels = bool(settings[AGENT]["exposition"]["pod_labels"])
    rule = {"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]}

    assert [one["rules"] for one in roles] == ([[rule]] if reads_labels else [])
    assert pod.get("serviceAccountName") == (AGENT if reads_labels else None)
    assert pod["automountServiceAccountToken"] is False


def title(made: Manifest) -> str:
    return str(made["metadata"]["name"])


def test_nothing_grants_permission_to_run_commands_in_every_pod(rendering: Rendering) -> None:
    granted = {
        (group, resource, verb)
        for role in rendering.of_kind("ClusterRole", "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert [one for one in granted if "*" in one or one[1] in ("nodes/proxy", "pods/exec")] == []


def test_the_token_for_the_kubelet_is_the_one_that_the_agent_presents(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    agent = render(POD_LABELS).workload(AGENT)
    api = agent.settings(tmp_path)["kubelet"]["api"]
    # The place where `lay_out` puts the container's root.
    paths = {one: api[one].removeprefix(f"{tmp_path / AGENT}") for one in ("token_file", "ca_file")}
    (sources,) = [
        volume["projected"]["sources"]
        for volume in agent.pod["volumes"]
        if volume["name"] == "kubelet-api"
    ]

    assert agent.files()[paths["token_file"]] == ACCOUNT_TOKEN
    assert agent.files()[paths["ca_file"]] == PUBLISHED["kube-root-ca.crt"]["ca.crt"].encode()
    # A kubelet would reject a token for another audience.
    assert sources[0] == {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    assert api["host"] == FIELDS["status.hostIP"]


def test_the_agent_requests_all_mig_instances_with_the_capability_that_the_runtime_requires(
    kustomize: Kustomize,
) -> None:
    """NVIDIA's runtime starts no container with the variable and without SYS_ADMIN."""
    for folder in INSTALLATIONS:
        agent = render(folder).workload(AGENT)
        monitors = agent.environment().get("NVIDIA_MIG_MONITOR_DEVICES")
        security = agent.container["securityContext"]
        assert monitors == ("all" if folder == MIG else None)
        assert security["capabilities"].get("add") == (["SYS_ADMIN"] if monitors else None)
        # Kubernetes requires this with SYS_ADMIN in any case.
        assert security["allowPrivilegeEscalation"] == bool(monitors)
        assert security["capabilities"]["drop"] == ["ALL"]
        assert agent.environment()["NVIDIA_VISIBLE_DEVICES"] == "all"


def test_the_agent_has_a_priority_that_preempts_no_other_pod(installation: Rendering) -> None:
    (made,) = installation.of_kind("PriorityClass")
    named = {each.name: each.pod.get("priorityClassName") for each in installation.workloads()}

    assert {name for name, priority in named.items() if priority} == {AGENT}
    assert named[AGENT] == made["metadata"]["name"]
    assert made["preemptionPolicy"] == "Never"
    assert not made.get("globalDefault")


@pytest.mark.parametrize("name", [PODWATCH, "gpuledger-join"])
def test_the_pods_of_a_pair_are_spread_and_stopped_one_by_one(
    installation: Rendering, name: str
) -> None:
    workload = installation.workload(name)
    (spread,) = workload.pod["topologySpreadConstraints"]
    (apart,) = workload.pod["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    (budget,) = [
        made["spec"]
        for made in installation.of_kind("PodDisruptionBudget")
        if made["metadata"]["name"] == name
    ]

    assert workload.manifest["spec"]["replicas"] == 2
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "topology.kubernetes.io/zone",
        "ScheduleAnyway",
    )
    assert apart["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    for selector in (spread, apart["podAffinityTerm"]):
        found = _selected(installation, selector["labelSelector"])
        assert [each.name for each in found] == [name]
    assert [each.name for each in _selected(installation, budget["selector"])] == [name]


def test_a_selector_matches_only_its_own_pods(installation: Rendering) -> None:
    for workload in installation.services():
        found = _selected(installation, workload.manifest["spec"]["selector"])
        assert [each.name for each in found] == [workload.name]


def _selected(rendering: Rendering, selector: Manifest) -> list[Workload]:
    labels = selector["matchLabels"]
    return [each for each in rendering.workloads() if matches(labels, each.labels)]
