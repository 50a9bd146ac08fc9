"""reference/permissions.md states what the manifests grant."""

from typing import Any

import yaml

from tests.docs_gen.permissions_page import (
    MANIFESTS,
    rbac_rows,
    workload_rows,
)

OBJECTS = list(yaml.safe_load_all(MANIFESTS.read_text()))
PODS: list[Any] = [
    (spec.get("jobTemplate", {}).get("spec") or spec)["template"]["spec"]
    for spec in (one["spec"] for one in OBJECTS if "spec" in one)
    if "template" in (spec.get("jobTemplate", {}).get("spec") or spec)
]


def test_every_container_has_the_restrictions_that_the_page_states() -> None:
    containers = [container for pod in PODS for container in pod["containers"]]

    assert len(containers) > 8
    for container in containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for pod in PODS:
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_only_the_workloads_of_bound_service_accounts_have_a_token() -> None:
    tokens = {row[0] for row in workload_rows(OBJECTS) if row[-1]}

    assert tokens == {"`gpuledger-podwatch` (Deployment)"}
    assert {row[0] for row in rbac_rows(OBJECTS)} == {"`gpuledger/gpuledger-podwatch`"}


def test_a_rule_with_names_shows_them_and_a_volume_its_mode() -> None:
    objects = list(
        yaml.safe_load_all(
            """
kind: Role
metadata: {name: r, namespace: n}
rules: [{apiGroups: [g.io], resources: [things], resourceNames: [a, b], verbs: [get]}]
---
kind: RoleBinding
metadata: {name: r, namespace: n}
roleRef: {kind: Role, name: r}
subjects: [{kind: ServiceAccount, name: s, namespace: n}]
---
kind: CronJob
metadata: {name: w, labels: {app.kubernetes.io/component: w}}
spec:
  jobTemplate:
    spec:
      template:
        spec:
          hostPID: true
          automountServiceAccountToken: false
          securityContext: {runAsUser: 0}
          containers: [{volumeMounts: [{name: v}, {name: r, readOnly: true}]}]
          volumes: [{name: v, hostPath: {path: /w}}, {name: r, hostPath: {path: /r}}]
"""
        )
    )

    assert list(rbac_rows(objects)) == [
        ("`n/s`", "namespace `n`", "`things.g.io`", "`get`", "`a` `b`")
    ]
    assert list(workload_rows(objects)) == [
        ("`gpuledger-w` (CronJob)", "0", "yes", "`/w` (write), `/r` (read)", "")
    ]
