"""The chart on a real API server: objects accepted, pods admitted, a release installed and removed.

No controller runs, so a release has no pods.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.real.deployment.chart import (
    CASES,
    CENTRAL,
    CHART,
    EDGE,
    NAMESPACES,
    OPERATORS,
    PLATFORMS,
    PRODUCTION,
    TRIAL,
    render_chart,
)
from tests.real.deployment.installation import eventually
from tests.real.services.starter import running
from tests.tables import for_each
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.deployment.rendering import Manifest, Rendering
    from tests.real.services.cluster_tools import Helm
    from tests.real.services.kubernetes import KubeApi

LEVELS: Final = {
    "gpuledger-agent": "privileged",
    "gpuledger": "restricted",
    "gpuledger-trial": "privileged",
}
VERSION: Final = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
LATER_VERSION: Final = "9.9.9"
RELEASES: Final[list[tuple[Path, dict[str, Any]]]] = [
    *((file, {}) for file in CASES.values()),
    (PRODUCTION, {}),
    (PRODUCTION, {"components": "central"}),
    (TRIAL, {}),
    (EDGE, {"components": "podwatch"}),
    *((file, {}) for file in PLATFORMS.values()),
]
"""Values files, and the values over them."""


@pytest.fixture(scope="module")
def api(
    own_kube_api: Callable[..., KubeApi], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KubeApi]:
    """Start an API server with the namespaces and the RuntimeClass of a cluster."""
    with running(own_kube_api(folder=tmp_path_factory.mktemp("kubernetes"))) as started:
        for name, level in LEVELS.items():
            labels = {"pod-security.kubernetes.io/enforce": level}
            create(
                started,
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {"name": name, "labels": labels},
                },
            )
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
        create(started, {**runtime, "metadata": {"name": "nvidia"}})
        yield started


def create(api: KubeApi, manifest: Manifest, *, dry_run: bool = False) -> str:
    """Create an object; return the error, or nothing."""
    path = api.path_of(manifest).rpartition("/")[0]
    query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
    status, found = api.request("POST", path + query, manifest)
    return "" if status in {201, 409} else f"{status} {found['message']}"


@for_each("file,over", RELEASES)
def test_the_api_server_accepts_every_object_and_pod(
    file: Path, over: dict[str, Any], api: KubeApi, helm: Helm, tmp_path: Path
) -> None:
    rendering = render_chart(file, over, folder=tmp_path)
    # A pod is admitted only if its PriorityClass exists.
    refused = [create(api, made) for made in rendering.of_kind("PriorityClass")]
    native = [made for made in rendering.objects if made["apiVersion"] not in OPERATORS]
    pods = [each.as_pod() for each in rendering.workloads()]

    refused += [create(api, made, dry_run=True) for made in (*native, *pods)]
    for made in rendering.of_kind("PriorityClass"):
        api.request("DELETE", api.path_of(made))
    assert pods
    assert [error for error in refused if error] == []


def test_a_cluster_with_kubesphere_accepts_its_dashboard(
    api: KubeApi, helm: Helm, tmp_path: Path
) -> None:
    definition = yaml.safe_load((ROOT / "tests/data/kubernetes/clusterdashboards.yaml").read_text())
    assert create(api, definition) == ""
    page = (ROOT / "docs" / "guides" / "dashboards.md").read_text()
    (command,) = re.findall(r"^ *helm upgrade (.*kubeSphere.*)$", page, re.MULTILINE)
    (options,) = re.findall(r"--set (\S+)", command)
    where = ["--namespace=gpuledger-agent", f"--kubeconfig={api.kubeconfig}"]
    stored = "/apis/monitoring.kubesphere.io/v1alpha2/clusterdashboards"
    # While a kind is unknown, the answer is a text.
    eventually(lambda: api.fetch("GET", stored).status == 200)
    helm("install", "gpuledger", CHART, f"--set={options}", *where)
    _, found = api.request("GET", stored)
    (made,) = found["items"]
    helm("uninstall", "gpuledger", *where)

    # A field that the definition lacks would not be stored.
    (rendered,) = render_chart(
        {"dashboards": {"enabled": True, "kubeSphere": {"enabled": True}}}, folder=tmp_path
    ).of_kind("ClusterDashboard")
    assert made["spec"] == rendered["spec"]


def test_only_the_agent_needs_more_than_restricted(
    api: KubeApi, helm: Helm, tmp_path: Path
) -> None:
    values = {"agent": {"priorityClassName": "system-node-critical"}}
    trial = render_chart(TRIAL, values, folder=tmp_path)
    (kafka,) = trial.of_kind("StatefulSet")
    pods = {each.name: each.as_pod()["spec"] for each in trial.workloads()}
    pods["gpuledger-kafka"] = kafka["spec"]["template"]["spec"]
    for volume in pods["gpuledger-kafka"]["containers"][0].pop("volumeMounts"):
        assert volume["name"] == kafka["spec"]["volumeClaimTemplates"][0]["metadata"]["name"]
    refused = {
        name: create(
            api,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": NAMESPACES["central"]},
                "spec": {**spec, "serviceAccountName": "default"},
            },
            dry_run=True,
        )
        for name, spec in pods.items()
    }

    assert 'violates PodSecurity "restricted:latest"' in refused.pop("gpuledger-agent")
    assert set(refused.values()) == {""}


def test_the_documented_copy_of_a_volume_mounts_it_like_the_store(
    api: KubeApi, helm: Helm, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "guides" / "backup.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    pod = yaml.safe_load(text)
    store = render_chart(CENTRAL, folder=tmp_path).workload("gpuledger-sink-store")
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    variables = {one["name"]: one.get("value") for one in store.container["env"]}
    commands = re.findall(r"store-copy -- tar -C (\S+) -[cx]zf - ?(store)?", page)

    assert create(api, pod, dry_run=True) == ""
    assert mount in store.container["volumeMounts"]
    assert all(one in store.pod["volumes"] for one in pod["spec"]["volumes"])
    assert commands == [(mount["mountPath"], "store"), (mount["mountPath"], "")]
    assert variables["GPULEDGER_STORE__URI"] == f"{mount['mountPath']}/store"


def exists(api: KubeApi, manifest: Manifest) -> bool:
    return api.request("GET", api.path_of(manifest))[0] == 200


def settings_of(api: KubeApi, rendering: Rendering) -> dict[str, Any]:
    """Return the pods and settings of a release from the API server."""
    kinds = ("DaemonSet", "Deployment", "ConfigMap")
    found = [api.request("GET", api.path_of(made))[1] for made in rendering.of_kind(*kinds)]
    return {
        f"{each['kind']} {each['metadata']['name']}": each["spec"]["template"]["spec"]
        if "spec" in each
        else each["data"]
        for each in found
    }


def make_later_chart(folder: Path) -> Path:
    """Return a copy of the chart with a later version of chart and application."""
    copy = shutil.copytree(CHART, folder / "chart", dirs_exist_ok=True)
    described = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(described.replace(VERSION, LATER_VERSION))
    return copy


@for_each("values", [{"cluster": "eu"}, CENTRAL])
def test_a_release_is_installed_upgraded_and_removed_except_for_the_store(
    values: dict[str, Any], api: KubeApi, helm: Helm, tmp_path: Path
) -> None:
    """It is rolled back between. Its notes have three commands, with objects of the release.

    They also have the label that the agents' nodes need.
    """
    rendering = render_chart(values, folder=tmp_path)
    file, namespace = tmp_path / "values.json", NAMESPACES[values.get("components", "agent")]
    where = [f"--namespace={namespace}", f"--kubeconfig={api.kubeconfig}"]

    printed = helm("install", "gpuledger", CHART, f"--values={file}", *where)
    _, _, notes = printed.partition("\nNOTES:\n")
    commands = re.findall(r"^  (\S.*)$", notes, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert command.startswith(("kubectl ", "curl "))
        assert all(
            name in {made["metadata"]["name"] for made in rendering.of_kind("DaemonSet")}
            for name in re.findall(r"daemonset/(\S+)", command)
        )
    assert ("node has the label nvidia.com/gpu.present=true;" in notes) == bool(
        rendering.of_kind("DaemonSet")
    )
    assert all(exists(api, made) for made in rendering.objects)

    first = settings_of(api, rendering)
    changed = "--set=kafka.bootstrapServers=other:9092"
    helm("upgrade", "gpuledger", CHART, f"--values={file}", changed, *where)
    helm("upgrade", "gpuledger", make_later_chart(tmp_path), f"--values={file}", *where)
    later = settings_of(api, rendering)
    assert later != first
    assert later == json.loads(json.dumps(first).replace(f":{VERSION}", f":{LATER_VERSION}"))
    helm("rollback", "gpuledger", "1", *where)
    assert settings_of(api, rendering) == first
    helm("uninstall", "gpuledger", *where)
    left = {made["kind"] for made in rendering.objects if exists(api, made)}
    assert left == {made["kind"] for made in rendering.of_kind("PersistentVolumeClaim")}
