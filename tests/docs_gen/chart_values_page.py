"""reference/chart-values.md: the values of the Helm chart, from the comments of values.yaml."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from tests.docs_gen.markdown import code, head, table

VALUES: Final = Path(__file__).parents[2] / "k8s" / "chart" / "values.yaml"
_HEAD: Final = head(
    "Chart values",
    audience="SRE",
    about="""\
This page lists the values of the Helm chart `k8s/chart`. Use it to write a values file for
[Install on Kubernetes](../guides/kubernetes.md).""",
)
_MARK: Final = "# -- "
_COLUMNS: Final = ("value", "default", "meaning")


def chart_values_page() -> str:
    """Return the page, in Markdown."""
    text = VALUES.read_text(encoding="utf-8")
    root = yaml.compose(text)
    lines = [*_HEAD.splitlines(), "", "## Shared values", ""]
    general, parts = [], []
    for key, node in entries(root):
        found = list(_rows(text.splitlines(), key, node, path=key.value))
        if description_of(text.splitlines(), key):
            general += found
        else:
            parts.append((key.value, found))
    lines += table(_COLUMNS, general)
    for name, found in parts:
        lines += ["", f"## {name}", "", *table(_COLUMNS, found)]
    return "\n".join([*lines, ""])


def entries(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _rows(
    lines: list[str], key: yaml.ScalarNode, node: yaml.Node, *, path: str
) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each value with a description, at and below a key."""
    if meaning := description_of(lines, key):
        default = yaml.safe_load(yaml.serialize(node))
        shown = "" if default in ("", [], {}) else code(json.dumps(default))
        yield code(path), shown, meaning
    for inner, value in entries(node):
        name = f'"{inner.value}"' if "." in inner.value else inner.value
        yield from _rows(lines, inner, value, path=f"{path}.{name}")


def description_of(lines: list[str], key: yaml.ScalarNode) -> str:
    """Return the description above a key; empty if it has none."""
    found: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        text = line.strip()
        if text.startswith(_MARK):
            return " ".join([text.removeprefix(_MARK), *found])
        if not text.startswith("# "):
            return ""
        found.insert(0, text.removeprefix("# "))
    return ""
