"""Cut Kubernetes' published OpenAPI document down to the kinds that the manifests use.

The document is what an API server of that version answers to `GET /openapi/v2`;
`python tests/data/kubernetes/subset.py openapi.json 1.36.3` writes `v1.36.3.json` beside this file.
Here alone is said how the document becomes a strict JSON Schema: unknown fields are refused, as the
API server's field validation refuses them, and prose is left out.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

Definitions = dict[str, Any]

KINDS: Final = (
    "io.k8s.api.apps.v1.DaemonSet",
    "io.k8s.api.apps.v1.Deployment",
    "io.k8s.api.batch.v1.CronJob",
    "io.k8s.api.batch.v1.Job",
    "io.k8s.api.core.v1.ConfigMap",
    "io.k8s.api.core.v1.Namespace",
    "io.k8s.api.core.v1.PersistentVolumeClaim",
    "io.k8s.api.core.v1.Service",
    "io.k8s.api.core.v1.ServiceAccount",
    "io.k8s.api.networking.v1.NetworkPolicy",
    "io.k8s.api.policy.v1.PodDisruptionBudget",
    "io.k8s.api.rbac.v1.ClusterRole",
    "io.k8s.api.rbac.v1.ClusterRoleBinding",
    "io.k8s.api.rbac.v1.Role",
    "io.k8s.api.rbac.v1.RoleBinding",
    "io.k8s.api.scheduling.v1.PriorityClass",
)
_REFERENCE: Final = "#/definitions/"
_KEPT: Final = frozenset(
    {"$ref", "additionalProperties", "enum", "items", "properties", "required", "type"}
)
_IDENTITY: Final = "x-kubernetes-group-version-kind"


def subset(definitions: Definitions) -> Definitions:
    """Return the definitions of `KINDS` and of all that they refer to, strict and without prose."""
    kept: Definitions = {}
    waiting = list(KINDS)
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = _strict(definitions[name])
            waiting += _references(kept[name])
    return dict(sorted(kept.items()))


def _strict(definition: Definitions) -> Definitions:
    if definition.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    made = {key: definition[key] for key in definition if key in _KEPT}
    if "properties" in made:
        made["properties"] = {name: _strict(one) for name, one in made["properties"].items()}
        made["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = _strict(made[key])
    if _IDENTITY in definition:
        made = _identified(made, definition[_IDENTITY])
    return made


def _identified(made: Definitions, identities: list[dict[str, str]]) -> Definitions:
    versions = ["/".join(filter(None, (one["group"], one["version"]))) for one in identities]
    made["properties"]["apiVersion"] = {"enum": versions}
    made["properties"]["kind"] = {"enum": sorted({one["kind"] for one in identities})}
    return {**made, "required": sorted({*made.get("required", []), "apiVersion", "kind"})}


def _references(definition: object) -> list[str]:
    if isinstance(definition, list):
        return [name for one in definition for name in _references(one)]
    if not isinstance(definition, dict):
        return []
    named = [
        value.removeprefix(_REFERENCE)
        for key, value in definition.items()
        if key == "$ref" and isinstance(value, str)
    ]
    return [*named, *(name for value in definition.values() for name in _references(value))]


def main() -> None:
    """Write the subset of the document that the command line names."""
    source, version = sys.argv[1:]
    definitions = json.loads(Path(source).read_text())["definitions"]
    made = {"$comment": f"Kubernetes {version}, Apache-2.0", "definitions": subset(definitions)}
    target = Path(__file__).with_name(f"v{version}.json")
    target.write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
