"""The files under k8s/rendered follow the schemas of their kinds.

They are compared with the chart, and checked on a real API server, in tests/real/deployment.
"""

import json
import re
from textwrap import dedent
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.tables import for_each
from tests.unit.deployment import manifests
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.manifests import Manifest


@pytest.fixture(scope="module")
def definitions() -> dict[str, Any]:
    loaded = json.loads((ROOT / "tests/data/kubernetes/v1.36.3.json").read_text())
    found: dict[str, Any] = loaded["definitions"]
    return found


def schema_of(manifest: Manifest, definitions: dict[str, Any]) -> dict[str, Any]:
    group, _, version = f"/{manifest['apiVersion']}".rpartition("/")
    group = group.strip("/").removesuffix(".k8s.io").replace("rbac.authorization", "rbac")
    name = f"io.k8s.api.{group or 'core'}.{version}.{manifest['kind']}"
    return {"$ref": f"#/definitions/{name}", "definitions": definitions}


@for_each("manifest", manifests.load())
def test_a_manifest_follows_the_schema_of_its_kind(
    manifest: Manifest, definitions: dict[str, Any]
) -> None:
    errors = Draft202012Validator(schema_of(manifest, definitions)).iter_errors(manifest)

    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_the_documented_policy_lets_one_more_namespace_query_reports(
    definitions: dict[str, Any],
) -> None:
    page = (ROOT / "docs" / "guides" / "reports-api.md").read_text()
    texts = map(dedent, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    blocks = map(yaml.safe_load, texts)
    (policy,) = (block for block in blocks if block.get("kind") == "NetworkPolicy")
    (pods,) = (
        made["spec"]["template"]
        for made in manifests.load()
        if made["kind"] == "Deployment" and made["metadata"]["name"] == "gpuledger-reports"
    )

    Draft202012Validator(schema_of(policy, definitions)).validate(policy)
    assert (
        policy["spec"]["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    )
    (port,) = policy["spec"]["ingress"][0]["ports"]
    assert port["port"] in {opened["name"] for opened in pods["spec"]["containers"][0]["ports"]}


def test_the_schema_rejects_a_field_that_the_api_server_would_reject(
    definitions: dict[str, Any],
) -> None:
    agent = next(one for one in manifests.load() if one["kind"] == "DaemonSet")
    manifest = json.loads(json.dumps(agent))
    manifest["spec"]["template"]["spec"]["hostPid"] = True
    validator = Draft202012Validator(schema_of(manifest, definitions))

    assert ["hostPid" in error.message for error in validator.iter_errors(manifest)] == [True]
