"""Installations as rendered: complete, least privileged, accepted by their programs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gpuledger.programs import COMPONENTS
from gpuledger_cli.bill import WRONG
from gpuledger_cli.command import main
from gpuledger_sinks.registry import KINDS
from tests.real.deployment.chart import (
    BILL,
    BROKERS,
    BUCKET,
    MIG,
    NAMESPACES,
    POD_LABELS,
    PRODUCTION,
    REPORTS,
    ROOTLESS,
    ROWS,
    SECOND,
    TRIAL,
    WEB,
    render,
    render_chart,
    with_secrets,
)
from tests.real.deployment.rendering import (
    ACCOUNT_TOKEN,
    FIELDS,
    PUBLISHED,
    Manifest,
    Rendering,
    Workload,
    strings,
)
from tests.unit.deployment import components
from tests.unit.deployment.components import ROOT
from tests.unit.reports.stores import allocated, inventory_row, write_store
from tests.unit.sinks.store.test_maintainer import fill

if TYPE_CHECKING:
    from tests.real.services.cluster_tools import Helm

AGENT = "gpuledger-agent"
PODWATCH = "gpuledger-podwatch"
CENTRAL = "gpuledger"
TRIAL_NAMESPACE = NAMESPACES["all"]
INSTALLATIONS: dict[str, list[Path | dict[str, Any]]] = {
    "default": [BROKERS],
    "without root": [BROKERS, ROOTLESS],
    "pod labels": [BROKERS, POD_LABELS],
    "MIG": [BROKERS, MIG],
    "bill": [BROKERS, BILL],
    "reports": [BROKERS, REPORTS],
    "bucket": [BROKERS, REPORTS, BILL, BUCKET],
    "further sinks": [BROKERS, ROWS, SECOND],
    "TLS": [BROKERS, WEB, REPORTS],
    "production": [PRODUCTION],
    "trial": [TRIAL],
}
"""The values of installations; a trial is one release, all others are two."""
SPOOL = "/var/spool/gpuledger"
SCRAPERS = {"kubernetes.io/metadata.name": "monitoring"}
INSPECTED = {
    "/var/lib/kubelet/pod-resources",
    "/var/log/containers",
    "/var/log/pods",
    "/sys/fs/cgroup",
}
CLUSTER_KINDS = {"ClusterRole", "ClusterRoleBinding", "PriorityClass"}


def rendered(name: str) -> Rendering:
    """Return an installation with every Secret that its pods name."""
    values = INSTALLATIONS[name]
    if name != "trial":
        return with_secrets(render(*values))
    with TemporaryDirectory() as folder:
        return with_secrets(render_chart(*values, folder=Path(folder)))


@pytest.fixture(scope="module", params=INSTALLATIONS)
def installation(request: pytest.FixtureRequest, helm: Helm) -> Rendering:
    """Return one installation; the `helm` fixture reports a missing program."""
    return rendered(request.param)


@pytest.fixture
def settings(installation: Rendering, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings with which each workload with HTTP endpoints would start."""
    return {each.name: each.settings(tmp_path) for each in installation.services()}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_every_config_map_is_used(installation: Rendering) -> None:
    made = {found["metadata"]["name"] for found in installation.of_kind("ConfigMap")}
    used = {text for each in installation.workloads() for _, text in strings(each.pod)}

    assert made <= used


def test_every_object_that_a_workload_names_is_rendered_too(installation: Rendering) -> None:
    for workload in installation.workloads():
        named = workload.files().keys() | workload.environment().keys()
        assert named or workload.pod["volumes"], workload.name
        for volume in workload.pod.get("volumes", []):
            if claim := volume.get("persistentVolumeClaim"):
                installation.get("PersistentVolumeClaim", claim["claimName"], workload.namespace)
        if account := workload.pod.get("serviceAccountName"):
            installation.get("ServiceAccount", account, workload.namespace)
        if priority := workload.pod.get("priorityClassName"):
            installation.get("PriorityClass", priority)


def test_every_object_that_a_binding_names_is_rendered_too(installation: Rendering) -> None:
    for binding in installation.of_kind("RoleBinding", "ClusterRoleBinding"):
        role, namespace = binding["roleRef"], binding["metadata"].get("namespace")
        installation.get(role["kind"], role["name"], namespace if role["kind"] == "Role" else None)
        for subject in binding["subjects"]:
            installation.get(subject["kind"], subject["name"], subject["namespace"])


def test_the_agent_has_its_own_namespace_except_in_a_trial(helm: Helm) -> None:
    for name in INSTALLATIONS:
        installation = rendered(name)
        found = {each.name: each.namespace for each in installation.workloads()}
        if name == "trial":
            assert set(found.values()) == {TRIAL_NAMESPACE}
        else:
            assert found.pop(AGENT) == "gpuledger-agent"
            assert set(found.values()) == {CENTRAL}
        for made in installation.objects:
            namespace = made["metadata"].get("namespace")
            assert (namespace is None) == (made["kind"] in CLUSTER_KINDS), made


def test_every_component_is_started_by_a_workload(installation: Rendering) -> None:
    """Only reports may be absent."""
    started = {each.command[1] for each in installation.services()}
    assert started | {"reports"} == set(COMPONENTS)
    assert {each.stage.name for each in installation.workloads()} == set(components.targets())


@pytest.mark.parametrize("name", ["reports", "bucket", "trial"])
def test_every_program_uses_the_store_that_the_sink_writes(
    name: str, helm: Helm, tmp_path: Path
) -> None:
    installation = rendered(name)
    users = [
        each
        for each in installation.workloads()
        if each.name.rpartition("-")[2] in {"store", "maintain", "reports", "bill"}
    ]
    store = {
        (found["GPULEDGER_STORE__URI"], found.get("GPULEDGER_STORE__STORAGE_OPTIONS"))
        for found in (each.environment() for each in users)
    }
    reports = installation.workload("gpuledger-reports")
    sink = installation.workload("gpuledger-sink-store").settings(tmp_path)["store"]

    assert len(users) >= 3
    assert len(store) == 1
    assert reports.settings(tmp_path)["store"]["storage_options"] == sink["storage_options"]
    if name == "bucket":
        assert sink["uri"] == "s3://ledger/gpuledger"
        assert sink["storage_options"].keys() == {"aws_region"}  # values are not printed
        assert all("AWS_ACCESS_KEY_ID" in each.environment() for each in users)
        assert not installation.of_kind("PersistentVolumeClaim")
    else:
        # All continuous users of a volume are in one pod, because only one node can mount it.
        pods = [each.pod for each in users if each.manifest["kind"] == "Deployment"]
        assert all(pod == pods[0] for pod in pods)
        (mount,) = (one for one in reports.container["volumeMounts"] if one["name"] == "store")
        assert mount["readOnly"]


def test_production_pulls_every_image_from_its_registry(helm: Helm) -> None:
    workloads = rendered("production").workloads()

    assert {each.container["image"].partition("/")[0] for each in workloads} == {
        "registry.example.com"
    }


def test_every_path_in_arguments_and_variables_is_a_file_that_is_mounted(
    installation: Rendering,
) -> None:
    for workload in installation.workloads():
        variables = workload.environment()
        store = variables.pop("GPULEDGER_STORE__URI", "")
        words = [*workload.container["args"], *variables.values()]
        named = [word.rpartition("=")[2] for word in words if "/" in word and "://" not in word]
        paths = {word for word in named if word.startswith("/")}
        assert paths <= workload.files().keys(), workload.name
        if store.startswith("/"):
            mounts = [one["mountPath"] for one in workload.container["volumeMounts"]]
            assert str(Path(store).parent) in mounts


def test_a_component_accepts_its_arguments_files_and_environment(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    expected = {
        each.name: each.environment()["GPULEDGER_KAFKA__BOOTSTRAP_SERVERS"]
        for each in installation.services()
        # It reads the store, and nothing from Kafka.
        if each.command[1] != "reports"
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
    assert settings["gpuledger-sink-store"]["kafka"]["client_id"] == "gpuledger-sink"


def test_production_has_its_own_receivers(helm: Helm, tmp_path: Path) -> None:
    loaded = rendered("production").workload("gpuledger-sink-alerts").settings(tmp_path)

    assert loaded["alerts"]["urls"] == ["https://alertmanager.example.com"]
    assert loaded["remote_write"]["url"] == "https://prometheus.example.com/api/v1/write"


def test_a_container_opens_the_port_on_which_its_program_listens(
    installation: Rendering, settings: dict[str, dict[str, Any]]
) -> None:
    opened = {
        each.name: [port["containerPort"] for port in each.container["ports"]]
        for each in installation.services()
    }

    assert opened == {name: [components.listen_port(loaded)] for name, loaded in settings.items()}


def test_no_pod_has_two_ports_of_one_name(installation: Rendering) -> None:
    for workload in installation.services():
        names = [
            port["name"] for one in workload.pod["containers"] for port in one.get("ports", [])
        ]
        assert len(names) == len(set(names))


def test_a_component_is_probed_on_that_port_and_has_resource_limits(
    installation: Rendering,
) -> None:
    pages = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for workload in installation.services():
        probes = {name: workload.container[name]["httpGet"] for name in pages}
        over_tls = "GPULEDGER_HTTP__WEB_CONFIG_FILE" in workload.environment()
        (opened,) = workload.container["ports"]
        where = {"port": opened["name"], **({"scheme": "HTTPS"} if over_tls else {})}
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
            and made["metadata"]["name"] == workload.name
        ]
        (opened,) = workload.container["ports"]
        assert matches(service["spec"]["selector"], workload.labels)
        assert service["spec"]["ports"] == [
            {"name": "http", "port": opened["containerPort"], "targetPort": opened["name"]}
        ]


def test_a_policy_admits_traffic_only_on_that_port(installation: Rendering) -> None:
    policies = installation.of_kind("NetworkPolicy")
    found = [one for one in policies if not one["metadata"]["name"].endswith("-kafka")]
    opened = {
        (each.namespace, port["name"])
        for each in installation.services()
        for port in each.container["ports"]
    }

    assert {
        (one["metadata"]["namespace"], port["port"])
        for one in found
        for port in one["spec"]["ingress"][0]["ports"]
    } == opened
    for policy in found:
        (rule,) = policy["spec"]["ingress"]
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": SCRAPERS}}]
        for each in installation.workloads():
            if each.namespace == policy["metadata"]["namespace"]:
                assert matches(policy["spec"]["podSelector"]["matchLabels"], each.labels)


def test_only_pods_of_a_trial_may_connect_to_its_kafka(helm: Helm) -> None:
    installation = rendered("trial")
    kafka = installation.get("StatefulSet", "gpuledger-kafka", TRIAL_NAMESPACE)
    policy = installation.get("NetworkPolicy", "gpuledger-kafka", TRIAL_NAMESPACE)["spec"]
    ((peer,),) = (rule["from"] for rule in policy["ingress"])
    labels = kafka["spec"]["template"]["metadata"]["labels"]

    assert matches(policy["podSelector"]["matchLabels"], labels)
    for each in installation.workloads():
        assert matches(peer["podSelector"]["matchLabels"], each.labels)
        assert not matches(policy["podSelector"]["matchLabels"], each.labels)


def test_a_trial_has_the_kafka_of_compose(helm: Helm) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["kafka"]
    kafka = rendered("trial").get("StatefulSet", "gpuledger-kafka", TRIAL_NAMESPACE)
    (container,) = kafka["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    same = {name for name in given if name in compose["environment"]} - {
        "KAFKA_LISTENERS",
        "KAFKA_ADVERTISED_LISTENERS",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP",
        "KAFKA_CONTROLLER_QUORUM_VOTERS",
        "KAFKA_LOG_DIRS",
    }

    assert container["image"] == compose["image"]
    assert {name: given[name] for name in same} == {
        name: compose["environment"][name] for name in same
    }
    brokers = rendered("trial").workload("gpuledger-join").environment()
    assert (
        given["KAFKA_ADVERTISED_LISTENERS"].removeprefix("PLAINTEXT://")
        == (brokers["GPULEDGER_KAFKA__BOOTSTRAP_SERVERS"])
    )


def test_there_is_a_sink_of_each_kind_and_those_that_write_to_kafka_are_optional(
    helm: Helm, tmp_path: Path
) -> None:
    kinds = {
        name: {
            sink.settings(tmp_path / name)["kind"]
            for sink in rendered(name).services()
            if sink.command[1] == "sink"
        }
        for name in ("default", "further sinks")
    }

    assert kinds["default"] == set(KINDS) - {"rows"}
    assert kinds["further sinks"] == set(KINDS)


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
        mounts = {
            mount["name"]
            for one in workload.pod["containers"]
            for mount in one.get("volumeMounts", [])
        }
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
        mounts = [
            mount
            for mount in workload.container.get("volumeMounts", [])
            if mount["name"] in volumes
        ]
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


def test_only_the_agent_runs_as_root_and_a_value_avoids_that(helm: Helm) -> None:
    found = {
        name: [each.name for each in rendered(name).workloads() if is_root(each)]
        for name in INSTALLATIONS
    }

    assert found == {name: [] if name == "without root" else [AGENT] for name in INSTALLATIONS}


def test_without_root_the_agent_spools_to_a_writable_directory(helm: Helm) -> None:
    agent = rendered("without root").workload(AGENT)
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


def test_the_bill_is_closed_as_rendered(
    helm: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the one existing day, instead of last month; a second run finds nothing to add."""
    laid_out = rendered("bill").workload("gpuledger-bill").lay_out(tmp_path)
    command = [word.replace("lastmonth", "2026-10-01") for word in laid_out.argv[1:]]
    store = laid_out.environment["GPULEDGER_STORE__URI"]
    monkeypatch.setenv("GPULEDGER_STORE__URI", store)
    write_store(
        Path(store),
        usage_hourly=[allocated(hour, "a", model="NVIDIA H100") for hour in range(24)],
        inventory=[inventory_row(model="NVIDIA H100")],
    )

    assert command != laid_out.argv[1:]
    assert main(command) == 0
    assert "closed as revision 1: 1 lines, 60.00 USD" in capsys.readouterr().out
    assert main(command) == 0
    assert "nothing has changed" in capsys.readouterr().out


def test_the_store_of_the_sink_is_maintained_as_rendered(
    helm: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = rendered("default").workload("gpuledger-store-maintain").lay_out(tmp_path)
    store = laid_out.environment["GPULEDGER_STORE__URI"]
    monkeypatch.setenv("GPULEDGER_STORE__URI", store)
    fill(Path(store), commits=1)
    *once, every = laid_out.argv[1:]

    assert every == "--every=10m"
    assert main(once) == 0
    assert "sum up" in capsys.readouterr().out


def test_a_bucket_is_maintained_by_a_job_that_never_runs_twice(helm: Helm) -> None:
    job = rendered("bucket").workload("gpuledger-store-maintain")

    assert job.command[1:] == ["store", "maintain"]
    assert job.manifest["kind"] == "CronJob"
    assert job.manifest["spec"]["concurrencyPolicy"] == "Forbid"
    assert "affinity" not in job.pod


def test_the_reports_use_the_mounted_prices(helm: Helm, tmp_path: Path) -> None:
    reports = rendered("reports").workload("gpuledger-reports")
    prices = Path(reports.settings(tmp_path)["prices"])

    assert yaml.safe_load(prices.read_text()) == REPORTS["prices"]


def test_the_bill_runs_on_the_node_of_the_stores_volume_and_is_not_retried_after_a_final_error(
    helm: Helm,
) -> None:
    rendering = rendered("bill")
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
    selected = _selected(rendering, beside["labelSelector"])
    assert {each.manifest["metadata"]["name"] for each in selected} == {sink.name}
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


def test_nothing_grants_permission_to_run_commands_in_every_pod(installation: Rendering) -> None:
    granted = {
        (group, resource, verb)
        for role in installation.of_kind("ClusterRole", "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert [one for one in granted if "*" in one or one[1] in ("nodes/proxy", "pods/exec")] == []


def test_the_token_for_the_kubelet_is_the_one_that_the_agent_presents(
    helm: Helm, tmp_path: Path
) -> None:
    agent = rendered("pod labels").workload(AGENT)
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
    helm: Helm,
) -> None:
    """NVIDIA's runtime starts no container with the variable and without SYS_ADMIN."""
    for name in INSTALLATIONS:
        agent = rendered(name).workload(AGENT)
        monitors = agent.environment().get("NVIDIA_MIG_MONITOR_DEVICES")
        security = agent.container["securityContext"]
        assert monitors == ("all" if name == "MIG" else None)
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
    if workload.manifest["spec"]["replicas"] == 1:
        return  # a trial
    (spread,) = workload.pod["topologySpreadConstraints"]
    (apart,) = workload.pod["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    (budget,) = [
        made["spec"]
        for made in installation.of_kind("PodDisruptionBudget")
        if made["metadata"]["name"] == name
    ]

    assert workload.manifest["spec"]["replicas"] >= 2
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


def test_only_components_with_several_replicas_have_a_disruption_budget(
    installation: Rendering,
) -> None:
    several = {
        made["metadata"]["name"]
        for made in installation.of_kind("Deployment")
        if made["spec"]["replicas"] > 1
    }
    budgets = installation.of_kind("PodDisruptionBudget")

    assert {made["metadata"]["name"] for made in budgets} == several


def test_a_selector_matches_only_its_own_pods(installation: Rendering) -> None:
    for workload in installation.services():
        found = _selected(installation, workload.manifest["spec"]["selector"])
        assert all(each.manifest == workload.manifest for each in found)


def _selected(rendering: Rendering, selector: Manifest) -> list[Workload]:
    labels = selector["matchLabels"]
    return [each for each in rendering.workloads() if matches(labels, each.labels)]
