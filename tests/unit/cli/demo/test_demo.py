"""The demo as a user starts it: a process of its own, on the bus in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "cli"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("GPULEDGER")
}


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        [*COMMAND, "demo", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_short_run_books_what_was_used(tmp_path: Path) -> None:
    """Ticks become events, books balance, pods are named, the store holds every entry."""
    store = tmp_path / "store"
    ran = run_demo("--source", "simulated", "--for", "3", "--format", "json", "--store", str(store))
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["events"] == summary["ticks"] > 0
    assert summary["conservation_error_max_ratio"] <= 1e-9
    assert summary["truth_error_ratio"] <= 0.05
    assert summary["store"] == {"path": str(store), "rows": summary["entries"]}
    assert summary["dead_letters"] == 0
    assert summary["remote_write_requests"] > 0
    named = {(pod["namespace"], pod["pod"], pod["owner"]) for pod in summary["pods"]}
    assert ("serving", "embeddings-0", "StatefulSet/embeddings") in named


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "absent.yaml"], "absent.yaml: there is no such file"),
        (["--bus", "kafka://127.0.0.1:1", "--source", "simulated"], "127.0.0.1:1"),
        (["--source", "gpu"], "--source"),
        (["--for", "0"], "--for"),
        (["--every", "1"], "--every"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    """No traceback."""
    ran = run_demo(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""
