"""How the tests are distributed over processes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.spreading import (
    MAX_PROCESSES,
    MAX_REAL_PROCESSES,
    SLOWEST,
    Spreading,
    count_processes,
    next_file,
)

ROOT = Path(__file__).parents[3]
UNIT = [f"tests/unit/cli/test_{name}.py" for name in "abcdef"]
REAL = [f"tests/real/test_{name}.py" for name in "abcdef"] + ["tests/real/bus/test_g.py"]


class Node:
    """A process of xdist, with the tests that it is told to run."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.waiting: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def spread(tests: list[str], *, processes: int, config: pytest.Config) -> dict[Node, list[str]]:
    """Run the tests in this many processes, one test of each in turn; return the tests of each."""
    ran: dict[Node, list[str]] = {Node(): [] for _ in range(processes)}
    spreading = Spreading(config)
    spreading.numnodes = processes
    for node in ran:
        spreading.add_node(node)
        spreading.add_node_collection(node, tests)
    spreading.schedule()
    while not spreading.tests_finished or spreading.has_pending:
        busy = [node for node in ran if node.waiting]
        assert busy, "no process has work although some is left"
        for node in busy:
            index = node.waiting.pop(0)
            ran[node].append(tests[index])
            spreading.mark_test_complete(node, index)
    return ran


@pytest.fixture
def config(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> pytest.Config:
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"], raising=False)
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", True, raising=False)
    return pytestconfig


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("files", [UNIT, REAL, UNIT + REAL, UNIT + REAL[:1], UNIT[:1] + REAL])
def test_each_test_runs_once_and_the_tests_of_a_file_share_a_process(
    files: list[str], processes: int, config: pytest.Config
) -> None:
    tests = [f"{file}::test_{index}[x::y]" for file in files for index in range(5)]
    ran = spread(tests, processes=processes, config=config)
    assert sorted(test for each in ran.values() for test in each) == sorted(tests)
    for file in files:
        assert sum(any(test.startswith(file) for test in each) for each in ran.values()) == 1


@pytest.mark.parametrize("processes", [2, 3, 4, 6])
def test_real_tests_begin_first_and_keep_at_most_one_process_per_core_busy(
    processes: int, config: pytest.Config
) -> None:
    tests = [f"{file}::test_{index}" for file in UNIT + REAL for index in range(5)]
    ran = spread(tests, processes=processes, config=config)
    firsts = [each[0] for each in ran.values()]
    real = min(processes, MAX_REAL_PROCESSES)
    assert ["tests/real" in first for first in firsts] == [True] * real + [False] * (
        processes - real
    )
    assert sum(any("tests/real" in test for test in each) for each in ran.values()) == real


def test_the_slowest_files_exist_and_begin_first() -> None:
    assert [file for file in SLOWEST if not (ROOT / file).is_file()] == []
    slow = "tests/real/test_demo.py"
    assert next_file([*REAL, slow], takes_real=True) == slow


def test_a_process_that_accepts_no_real_tests_is_idle_once_only_those_are_left() -> None:
    assert next_file(REAL, takes_real=False) is None
    assert next_file(REAL + UNIT, takes_real=False) == UNIT[0]
    assert next_file(UNIT + REAL, takes_real=True) == REAL[0]
    assert next_file(UNIT, takes_real=True) == UNIT[0]


def test_there_is_one_process_more_than_cores_and_at_most_four_unless_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    assert count_processes() == min(MAX_PROCESSES, len(os.sched_getaffinity(0)) + 1)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "9")
    assert count_processes() == 9
