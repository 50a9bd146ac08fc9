"""A missing real part is a failure in CI, and a loud line on a developer's machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = Path(__file__).parent / "test_parts.py"
WITHOUT_PROMTOOL = ["-k", "promtool", "-p", "no:cacheprovider"]


def run_without_tools(tmp_path: Path, environment: dict[str, str]) -> tuple[int, str]:
    unset = {"CI": "", "TESTS_REQUIRE_REAL_PARTS": ""}
    tools = {"TESTS_TOOLS_CACHE": str(tmp_path / "no-tools-here")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", PARTS, *WITHOUT_PROMTOOL],
        cwd=PARTS.parents[2],
        env={**os.environ, **unset, **tools, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("setting", ["CI=true", "TESTS_REQUIRE_REAL_PARTS=1"])
def test_a_missing_part_fails_the_run_if_all_parts_are_required(
    setting: str, tmp_path: Path
) -> None:
    name, _, value = setting.partition("=")
    status, printed = run_without_tools(tmp_path, {name: value})
    assert status == 1
    assert "real part missing: promtool" in printed


def test_a_missing_part_prints_one_loud_line_on_a_developers_machine(tmp_path: Path) -> None:
    status, printed = run_without_tools(tmp_path, {})
    assert status == 0
    assert "!!! 1 test(s) NOT RUN, real part missing: promtool: not built yet" in printed
