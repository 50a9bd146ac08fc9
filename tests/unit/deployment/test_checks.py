"""The table of docs/reference/checks.md has those of the code, with their severities."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gpuledger_sinks.registry import KINDS

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = (ROOT / "docs" / "reference" / "checks.md").read_text()
FOLDERS: Final = {
    "all": "gpuledger",
    "agent": "agent",
    "podwatch": "enricher/gpuledger_enricher/podwatch",
    "join": "enricher/gpuledger_enricher/join",
    "sinks": "sinks",
    "reports": "reports",
    "standalone": "cli/gpuledger_cli/standalone",
}
OF_A_KIND: Final = r"^(<sink>|pods)\."
OF_A_SINK: Final = rf"^({'|'.join(KINDS)}|…)\."

Checks = set[tuple[str, str]]


def written(component: str) -> Checks:
    """Return name and severity of each check in the page's table."""
    row = rf"^\| {component} \| `([^`]+)` \| (critical|warning) \|"
    return set(re.findall(row, PAGE, flags=re.MULTILINE))


def made(folder: Path) -> Checks:
    """Return name and severity of each check that the code creates."""
    trees = [ast.parse(file.read_text()) for file in folder.rglob("*.py")]
    found = {each for tree in trees for each in _made_in(tree)}
    if folder.name != "podwatch":
        return found
    # Each kind of object has its own; `pods.api` is also named separately, for before kinds exist.
    return {(re.sub(OF_A_KIND, "<kind>.", name), severity) for name, severity in found}


def _made_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        # A variable as the name looks up a check that a literal name has created.
        if node.func.attr == "check" and node.args and not isinstance(node.args[0], ast.Name):
            severities = [ast.unparse(each.value) for each in node.keywords]
            severity = severities[0].rpartition(".")[2].lower() if severities else "critical"
            yield re.sub(OF_A_SINK, "<sink>.", _name(node.args[0])), severity


def _name(argument: ast.expr) -> str:
    if isinstance(argument, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in argument.values]
        return "".join(map(str, parts))
    assert isinstance(argument, ast.Constant)
    return str(argument.value)


@pytest.mark.parametrize("component", FOLDERS)
def test_the_checks_of_a_component_are_those_of_the_table(component: str) -> None:
    assert sorted(written(component)) == sorted(made(ROOT / FOLDERS[component]))


def test_a_failure_that_the_agent_can_work_with_leaves_it_ready() -> None:
    critical = {name for name, severity in written("agent") if severity == "critical"}

    assert critical == {"nvml", "samples"}


@pytest.mark.parametrize("component", sorted(FOLDERS.keys() - {"all", "reports", "standalone"}))
def test_every_component_has_the_same_check_for_kafka(component: str) -> None:
    last_words = {re.sub(r"^<\w+>\.", "", name) for name, _ in written(component)}

    assert "kafka" in last_words
    assert "bus" not in last_words
