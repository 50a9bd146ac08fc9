"""The deployment files, taken by the programs that they are written for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.kubernetes.subset import subset
from tests.real.parts.kube_client import KubeApiClient
from tests.real.parts.kubeconfig import read_kubeconfig
from tests.unit.deployment import manifests
from tests.unit.deployment.deployables import ROOT

NAMESPACE = "gpuledger"


def _path_of(manifest: dict[str, Any], plurals: dict[tuple[str, str], str]) -> str:
    version, kind = manifest["apiVersion"], manifest["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = manifest["metadata"].get("namespace")
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{inside}/{plurals[version, kind]}"


@pytest.fixture
def plurals(kube_api: KubeApiClient) -> dict[tuple[str, str], str]:
    """Ask the API server by which word each kind is known."""
    found = {}
    for version in {manifest["apiVersion"] for manifest in manifests.load()}:
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        _, listing = kube_api.request("GET", root)
        for resource in listing["resources"]:
            if "/" not in resource["name"]:
                found[version, resource["kind"]] = resource["name"]
    return found


def test_the_schemas_of_the_unit_tests_are_those_of_the_api_server(
    kube_api: KubeApiClient,
) -> None:
    (file,) = (ROOT / "tests" / "data" / "kubernetes").glob("v*.json")
    _, version = kube_api.request("GET", "/version")
    if version["gitVersion"] != file.stem:
        pytest.skip(f"the given API server is {version['gitVersion']}, the schemas {file.stem}")
    _, document = kube_api.request("GET", "/openapi/v2")

    assert subset(document["definitions"]) == json.loads(file.read_text())["definitions"]


@pytest.mark.parametrize("manifest", manifests.load(), ids=manifests.title)
def test_the_api_server_takes_a_manifest(
    kube_api: KubeApiClient, plurals: dict[tuple[str, str], str], manifest: dict[str, Any]
) -> None:
    if manifest["kind"] != "Namespace":
        kube_api.create_namespace(NAMESPACE)
    # Applied rather than created: another test may have put the object there in earnest.
    path = f"{_path_of(manifest, plurals)}/{manifest['metadata']['name']}"
    asked = "dryRun=All&fieldValidation=Strict&fieldManager=tests&force=true"

    answer = kube_api.fetch(
        "PATCH", f"{path}?{asked}", manifest, content_type="application/apply-patch+yaml"
    )

    assert answer.status in {200, 201}, answer.json()["message"]


def test_podwatch_s_account_may_list_and_watch_pods_and_keep_its_lease_and_nothing_else(
    kube_api: KubeApiClient, tmp_path: Path
) -> None:
    kube_api.create_namespace(NAMESPACE)
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
        for manifest in manifests.of_kind(kind):
            kube_api.apply(manifest)
    file = kube_api.service_account_kubeconfig(namespace=NAMESPACE, name="gpuledger-podwatch")
    cluster, login = read_kubeconfig(file, folder=tmp_path)
    account = KubeApiClient(cluster=cluster, login=login, kubeconfig=file, folder=tmp_path)

    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    allowed = [
        account.fetch(method, path, body).status
        for method, path, body in (
            ("GET", "/api/v1/pods", None),
            ("GET", "/api/v1/pods?watch=true&timeoutSeconds=1", None),
            ("POST", f"{leases}?dryRun=All", {"metadata": {"name": "gpuledger-podwatch"}}),
        )
    ]
    refused = [
        account.fetch(method, path, body).status
        for method, path, body in (
            ("GET", "/api/v1/secrets", None),
            ("GET", "/api/v1/nodes", None),
            ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", {"metadata": {"name": "intruder"}}),
            ("GET", leases, None),
            ("GET", f"{leases}/another", None),
            ("DELETE", f"{leases}/gpuledger-podwatch", None),
            ("GET", leases.replace(NAMESPACE, "kube-system") + "/gpuledger-podwatch", None),
        )
    ]

    assert allowed == [200, 200, 201]
    assert set(refused) == {403}
