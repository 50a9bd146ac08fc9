"""Every silenced rule, for the project or on a line, has a reason."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SILENCER = re.compile(r"#\s*(?:noqa\b|type:\s*ignore\b)")
WITH_REASON = re.compile(
    r"#\s*(?:noqa: [A-Z]+\d+(?:, ?[A-Z]+\d+)*|type: ignore\[[a-z-]+(?:, ?[a-z-]+)*\])"
    r"\s+(?:#|-|:)?\s*\S.{8,}"
)


def python_files() -> list[Path]:
    """Return the Python files of every package, including tests and benchmarks."""
    packages = [found.parent for found in ROOT.glob("*/__init__.py")]
    return [file for folder in [*packages, ROOT / "tests"] for file in folder.rglob("*.py")]


def without_reason(text: str) -> list[str]:
    """Return the lines that silence a rule without naming it and a reason."""
    return [
        line.strip()
        for line in text.splitlines()
        if SILENCER.search(line) and not WITH_REASON.search(line)
    ]


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("x = 1  # " + "noqa: S105 - a name, not a password", True),
        ("x = 1  # " + "type: ignore[misc, arg-type]  # the stub knows no such overload", True),
        ("x = 1  # " + "noqa: S105", False),
        ("x = 1  # " + "noqa", False),
        ("x = 1  # " + "type: ignore[misc]", False),
        ("x = 1  # " + "type: ignore  # all of it", False),
    ],
)
def test_a_reason_follows_the_rule_that_it_silences(line: str, *, accepted: bool) -> None:
    assert (without_reason(line) == []) is accepted


def test_every_line_that_silences_a_rule_gives_the_reason() -> None:
    silent = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if path != Path(__file__) and (lines := without_reason(path.read_text()))
    }

    assert silent == {}


def test_every_rule_ignored_for_the_project_has_a_reason() -> None:
    ruff = (ROOT / "pyproject.toml").read_text().partition("[tool.ruff.lint]")[2]
    ignored = re.findall(r'^    "[A-Z]+\d*",.*$', ruff.partition("[tool.mypy]")[0], re.MULTILINE)

    assert len(ignored) > 10
    assert [line for line in ignored if not re.search(r",\s+# \w", line)] == []
