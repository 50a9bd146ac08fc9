"""reference/permissions.md: rights on Kafka, and rights of each workload on Kubernetes and nodes.

The rights on Kafka are in `gpuledger.rights`. The others are in k8s/rendered, so the page can only
be made in a checkout.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gpuledger.rights import COLUMNS, table_rows
from gpuledger.topics import Topics
from tests.docs_gen.markdown import code, head, table

MANIFESTS: Final = Path(__file__).parents[2] / "k8s" / "rendered" / "production.yaml"
_Object = Mapping[str, Any]
_HEAD: Final = head(
    "Permissions",
    audience="SRE",
    about="""\
This page lists the permissions that each component and command needs on Kafka, on the Kubernetes
API and on nodes. Use it to create users and to review an installation.""",
)
_KAFKA: Final = """
## Kafka

The table has the names for the default `kafka.topic_prefix`. Grant the operations as follows:

- *reads*: `Read` on the topic;
- *writes*: `Write` on the topic;
- *group*: `Read` on the group;
- *transactional ids*: `Write` on all ids with that prefix (`--resource-pattern-type prefixed`).

`Read` and `Write` imply `Describe`. To create the users, see [Kafka](../guides/kafka.md).
`gpuledger topics export` prints the same permissions for Strimzi and for `kafka-acls.sh`.
"""
_KAFKA_NOTES: Final = """
- `gpuledger replay` reads `gpuledger.events.v1` only with `--compare` or `--topic`. With `--topic`
  it also needs `Write` on that topic.
- `gpuledger watermarks` needs `Describe` only on the topic of its `--component`: events for `join`
  and `store`, rows for `rows`, pods for `podwatch`.
- `gpuledger doctor` reports the checks for which its user lacks a permission as `unknown`.
- `gpuledger query`, `bill`, `store` and `reports` do not connect to Kafka.
- Your own consumer needs `Read` on its topics. If it uses a group, it also needs `Read` on the
  group.
- If you run a second sink of a kind, it needs the permissions of its row, but on its own groups and
  transactional ids.
"""
_RBAC: Final = """
## Kubernetes API

Only these service accounts have roles. All other workloads have no permissions and no token for the
Kubernetes API.
"""
_WORKLOADS: Final = """
## Nodes

All containers drop all capabilities, cannot escalate privileges, and have a read-only root file
system and the seccomp profile `RuntimeDefault`.
"""
_CHANGES: Final = """
Further sinks (`sinkRows`, `sinkScaler`, `receivers`) have the access of the other sinks. These
values of the Helm chart change the agent's permissions:

| value | change |
| --- | --- |
| `agent.runAsRoot: false` | user 65532; only the host directory `/var/log/containers` (read) |
| `agent.readKubelet: true` | a service account with a token, which may `get` `nodes/pods` |
| `agent.migMonitor: true` | the capability `SYS_ADMIN`, with privilege escalation |
| `openshift: true` | security context constraints: `privileged`; for others `nonroot-v2` |

See [Security hardening](../guides/security-hardening.md) for the risks.
"""
_RBAC_COLUMNS: Final = ("service account", "scope", "resources", "verbs", "only the object")
_WORKLOAD_COLUMNS: Final = ("workload", "user", "host processes", "host directories", "token")
_CONTROLLERS: Final = {"Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob"}


def permissions_page() -> str:
    """Return the page, in Markdown."""
    objects = list(yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")))
    lines = [
        *_HEAD.splitlines(),
        *_KAFKA.splitlines(),
        "",
        *table(COLUMNS, table_rows(Topics())),
        *_KAFKA_NOTES.splitlines(),
        *_RBAC.splitlines(),
        "",
        *table(_RBAC_COLUMNS, rbac_rows(objects)),
        *_WORKLOADS.splitlines(),
        "",
        *table(_WORKLOAD_COLUMNS, workload_rows(objects)),
        *_CHANGES.splitlines(),
    ]
    return "\n".join([*lines, ""])


def rbac_rows(objects: list[_Object]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each rule of each role that a binding gives to a service account."""
    roles = {(one["kind"], one["metadata"]["name"]): one for one in objects if "rules" in one}
    for binding in (one for one in objects if "roleRef" in one):
        role = roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        for subject in binding["subjects"]:
            for rule in role["rules"]:
                yield (
                    code(f"{subject['namespace']}/{subject['name']}"),
                    "cluster"
                    if binding["kind"] == "ClusterRoleBinding"
                    else f"namespace {code(binding['metadata']['namespace'])}",
                    ", ".join(code(name) for name in _resources(rule)),
                    ", ".join(code(verb) for verb in rule["verbs"]),
                    code(*rule.get("resourceNames", ())),
                )


def _resources(rule: _Object) -> Iterator[str]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            yield f"{resource}.{group}" if group else resource


def workload_rows(objects: list[_Object]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each workload: its user, its access to the node, and its token."""
    for workload in (one for one in objects if one["kind"] in _CONTROLLERS):
        pod = _pod_of(workload)
        mounts = [each for one in pod["containers"] for each in one.get("volumeMounts", ())]
        modes = {each["name"]: each.get("readOnly", False) for each in mounts}
        paths = [
            f"{code(volume['hostPath']['path'])} ({'read' if modes[volume['name']] else 'write'})"
            for volume in pod.get("volumes", ())
            if "hostPath" in volume
        ]
        # Without the hash in the name of a Job.
        name = f"gpuledger-{workload['metadata']['labels']['app.kubernetes.io/component']}"
        yield (
            f"{code(name)} ({workload['kind']})",
            str(pod["securityContext"]["runAsUser"]),
            "yes" if pod.get("hostPID") else "",
            ", ".join(paths),
            "yes" if pod.get("automountServiceAccountToken", True) else "",
        )


def _pod_of(workload: _Object) -> _Object:
    spec = workload["spec"]
    spec = spec["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else spec
    found: _Object = spec["template"]["spec"]
    return found
