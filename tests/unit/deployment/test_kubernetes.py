"""The manifests under k8s/: valid, complete, least in rights, accepted by what they start."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sinks.settings import KINDS
from tests.unit.deployment import deployables, manifests
from tests.unit.deployment.deployables import ROOT
from tests.unit.deployment.manifests import Manifest, Workload

WORKLOADS = {workload.name: workload for workload in manifests.workloads()}
SERVICES = {workload.name: workload for workload in manifests.services()}
AGENT = "gpuledger-agent"
SPOOL = "/var/spool/gpuledger"
LOOKED_AT = {"/var/lib/kubelet/pod-resources", "/var/log/containers"}
HOST_PATHS = {AGENT: LOOKED_AT | {SPOOL}}
STANDARD = {"apiVersion", "kind"}


@pytest.fixture(scope="module")
def definitions() -> dict[str, Any]:
    loaded = json.loads((ROOT / "tests/data/kubernetes/v1.36.3.json").read_text())
    found: dict[str, Any] = loaded["definitions"]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder for settings files, one for all tests so that each command runs once."""
    return tmp_path_factory.mktemp("settings")


def schema_of(manifest: Manifest, definitions: dict[str, Any]) -> dict[str, Any]:
    group, _, version = f"/{manifest['apiVersion']}".rpartition("/")
    group = group.strip("/").removesuffix(".k8s.io").replace("rbac.authorization", "rbac")
    name = f"io.k8s.api.{group or 'core'}.{version}.{manifest['kind']}"
    return {"$ref": f"#/definitions/{name}", "definitions": definitions}


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("manifest", manifests.load(), ids=manifests.title)
def test_a_manifest_follows_the_schema_of_its_kind(
    manifest: Manifest, definitions: dict[str, Any]
) -> None:
    errors = Draft202012Validator(schema_of(manifest, definitions)).iter_errors(manifest)

    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_the_schema_refuses_what_the_api_server_would(definitions: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps(manifests.of_kind("DaemonSet")[0]))
    manifest["spec"]["template"]["spec"]["hostPid"] = True
    validator = Draft202012Validator(schema_of(manifest, definitions))

    assert ["hostPid" in error.message for error in validator.iter_errors(manifest)] == [True]


@pytest.mark.parametrize("place", manifests.FOLDERS, ids=lambda place: str(place.name))
def test_every_file_of_a_folder_is_listed(place: Path) -> None:
    written = {path.name for path in place.glob("*.yaml")} - {"kustomization.yaml"}
    generators = manifests.kustomization(place).get("configMapGenerator", [])
    generated = {file for generator in generators for file in generator.get("files", [])}

    assert written == set(manifests.kustomization(place)["resources"])
    assert {str(path.relative_to(place)) for path in place.glob("*/*.yaml")} == generated


def test_the_kustomizations_use_only_what_these_tests_understand() -> None:
    used = [set(manifests.kustomization(folder)) - STANDARD for folder in manifests.FOLDERS]

    assert used[0] == {"namespace", "resources", "configMapGenerator"}
    assert all(keys <= {"namespace", "resources"} for keys in used[1:])


@pytest.mark.parametrize("manifest", manifests.load(), ids=manifests.title)
def test_all_that_has_a_namespace_is_in_ours(manifest: Manifest) -> None:
    is_of_the_cluster = manifest["kind"] in ("Namespace", "ClusterRole", "ClusterRoleBinding")
    expected = None if is_of_the_cluster else manifests.kustomization(manifests.BASE)["namespace"]

    assert manifest["metadata"].get("namespace") == expected


def test_every_image_is_started_by_a_workload() -> None:
    assert {workload.stage.name for workload in WORKLOADS.values()} == set(deployables.targets())


@pytest.mark.parametrize("workload", SERVICES.values(), ids=SERVICES)
def test_a_deployable_takes_its_arguments_files_and_environment(
    workload: Workload, folder: Path
) -> None:
    loaded = workload.settings(folder)

    assert loaded["kafka"]["bootstrap_servers"] == "kafka.kafka.svc:9092"
    assert [port["containerPort"] for port in workload.container["ports"]] == [
        deployables.listen_port(loaded)
    ]


def test_there_is_a_sink_of_each_kind(folder: Path) -> None:
    sinks = [workload for workload in SERVICES.values() if workload.stage.name == "sinks"]

    assert [sink.settings(folder)["kind"] for sink in sinks] == list(KINDS)


def test_a_sink_that_writes_to_kafka_again_is_not_of_the_base() -> None:
    resources = manifests.kustomization(manifests.BASE)["resources"]

    assert [name for name in resources if name.startswith("sink")] == [
        "sink-remote-write.yaml",
        "sink-alerts.yaml",
        "sink-store.yaml",
    ]


@pytest.mark.parametrize("name", ["gpuledger-sink-rows", "gpuledger-sink-otlp"])
def test_a_sink_beside_the_base_has_the_bases_brokers(name: str) -> None:
    environment = WORKLOADS[name].environment()

    assert environment == manifests.config_map("gpuledger-kafka")


def test_the_topics_are_made_by_a_command_that_there_is() -> None:
    workload = WORKLOADS["gpuledger-topics"]
    command = [*deployables.entrypoint(workload.stage), *workload.container["args"], "--help"]

    assert "partitions" in deployables.run(command, {})
    assert workload.environment().items() <= manifests.config_map("gpuledger-kafka").items()


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_every_volume_is_mounted_and_every_mount_has_a_volume(workload: Workload) -> None:
    claims = {claim["metadata"]["name"] for claim in manifests.of_kind("PersistentVolumeClaim")}
    volumes = workload.pod.get("volumes", [])
    claimed = [
        volume["persistentVolumeClaim"]
        for volume in volumes
        if len(volume) > 1 and "persistentVolumeClaim" in volume
    ]
    mounts = workload.container.get("volumeMounts", [])

    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
    assert {claim["claimName"] for claim in claimed} <= claims


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_of_the_host_only_the_agent_sees_folders_and_changes_nothing_but_its_spool(
    workload: Workload,
) -> None:
    volumes = {
        one["name"]: one["hostPath"] for one in workload.pod.get("volumes", []) if "hostPath" in one
    }
    mounts = [one for one in workload.container.get("volumeMounts", []) if one["name"] in volumes]

    assert {one["path"] for one in volumes.values()} == HOST_PATHS.get(workload.name, set())
    assert all(one["mountPath"] == volumes[one["name"]]["path"] for one in mounts)
    assert [one["mountPath"] for one in mounts if not one.get("readOnly")] == [
        path for path in HOST_PATHS.get(workload.name, ()) if path == SPOOL
    ]


def test_the_agent_finds_the_hosts_folders_where_it_looks(folder: Path) -> None:
    settings = WORKLOADS[AGENT].settings(folder)
    kubelet = settings["kubelet"]

    assert {str(Path(kubelet["socket"]).parent), kubelet["names_folder"]} == LOOKED_AT
    assert settings["spool"]["folder"] == SPOOL


def test_the_store_is_kept_on_its_volume(folder: Path) -> None:
    workload = WORKLOADS["gpuledger-sink-store"]
    (mount,) = [one for one in workload.container["volumeMounts"] if one["name"] == "store"]

    assert workload.settings(folder)["store"]["uri"].startswith(f"{mount['mountPath']}/")


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_container_has_the_least_privilege(workload: Workload) -> None:
    pod = workload.pod["securityContext"]

    assert workload.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # The kubelet's socket lets user 0 in and nobody else.
    users = ["0:0"] if workload.name == AGENT else deployables.stages()["runtime"].values("USER")
    assert [f"{pod['runAsUser']}:{pod['runAsGroup']}"] == users
    assert pod["runAsNonRoot"] == (workload.name != AGENT)
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostIPC"} & set(workload.pod)
    assert workload.pod.get("hostPID", False) == (workload.name == AGENT)
    assert workload.pod["automountServiceAccountToken"] == (workload.name == "gpuledger-podwatch")


def test_podwatch_may_read_pods_and_nothing_else() -> None:
    (role,), (binding,) = map(manifests.of_kind, ("ClusterRole", "ClusterRoleBinding"))
    (account,) = manifests.of_kind("ServiceAccount")

    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(one["name"], one["namespace"]) for one in binding["subjects"]] == [
        (account["metadata"]["name"], account["metadata"]["namespace"])
    ]
    assert WORKLOADS["gpuledger-podwatch"].pod["serviceAccountName"] == account["metadata"]["name"]


def test_podwatch_may_keep_its_own_lease_and_no_other(folder: Path) -> None:
    (role,), (binding,) = map(manifests.of_kind, ("Role", "RoleBinding"))
    lease = WORKLOADS["gpuledger-podwatch"].settings(folder)["lease"]
    (account,) = manifests.of_kind("ServiceAccount")

    assert lease["enabled"]
    assert role["rules"] == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [lease["name"]],
            "verbs": ["get", "update"],
        },
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [(one["name"], one["namespace"]) for one in binding["subjects"]] == [
        (account["metadata"]["name"], account["metadata"]["namespace"])
    ]


@pytest.mark.parametrize("workload", SERVICES.values(), ids=SERVICES)
def test_a_deployable_is_probed_and_bounded(workload: Workload) -> None:
    probes = [workload.container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]

    assert probes == [{"path": "/livez", "port": "http"}, {"path": "/readyz", "port": "http"}]
    assert workload.pod["terminationGracePeriodSeconds"] > 10
    assert {"cpu", "memory"} <= set(workload.container["resources"]["requests"])
    assert "memory" in workload.container["resources"]["limits"]


@pytest.mark.parametrize("workload", SERVICES.values(), ids=SERVICES)
def test_a_deployable_has_a_service_for_its_metrics(workload: Workload) -> None:
    (service,) = [
        one
        for one in manifests.of_kind("Service")
        if matches(one["spec"]["selector"], workload.labels)
    ]

    (port,) = service["spec"]["ports"]
    assert port == {
        "name": "http",
        "port": workload.container["ports"][0]["containerPort"],
        "targetPort": workload.container["ports"][0]["name"],
    }


@pytest.mark.parametrize("workload", SERVICES.values(), ids=SERVICES)
def test_a_selector_finds_its_own_pods_alone(workload: Workload) -> None:
    selector = workload.manifest["spec"]["selector"]["matchLabels"]
    found = [one.name for one in WORKLOADS.values() if matches(selector, one.labels)]

    assert found == [workload.name]


def test_policies_and_budgets_select_pods_that_there_are() -> None:
    policies = [one["spec"]["podSelector"] for one in manifests.of_kind("NetworkPolicy")]
    budgets = [one["spec"]["selector"] for one in manifests.of_kind("PodDisruptionBudget")]

    for selector in (*policies, *budgets):
        wanted = selector["matchLabels"]
        assert any(matches(wanted, workload.labels) for workload in WORKLOADS.values()), wanted
