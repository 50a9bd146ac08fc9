"""How the tests are spread over processes."""

import os
from pathlib import Path

import pytest

from tests.spreading import MAX_PROCESSES, count_processes, lane_of

ROOT = Path(__file__).parents[3]


def test_a_file_s_tests_share_a_process_and_those_on_real_parts_three() -> None:
    unit = "tests/unit/cli/test_main.py"
    assert lane_of(f"{unit}::test_x[a::b]") == unit
    real = [path.relative_to(ROOT) for path in (ROOT / "tests" / "real").rglob("test_*.py")]
    lanes = {lane_of(f"{file}::TestX::test_y") for file in real}
    assert lanes == {f"tests/real {lane}" for lane in ("folders", "a to i", "j to z")}


def test_there_are_never_more_processes_than_cores_or_four_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    assert 1 <= count_processes() <= min(MAX_PROCESSES, os.cpu_count() or 1)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "9")
    assert count_processes() == 9
