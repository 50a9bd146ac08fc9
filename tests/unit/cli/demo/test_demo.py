"""The demo as users start it: a separate process, on the bus in memory."""

import json
import os
import re
import shlex
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpuledger_cli.demo.plan import DEMO_SCENARIO

COMMAND = [sys.executable, "-m", "gpuledger_cli"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("GPULEDGER")
}


ALERT = (
    "GpuIncident critical  GPU 3 on node gpu-node-2 (pod vision/transcode-6b8f4-9wkzp): XID 79, "
)


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


def test_a_short_run_books_the_true_usage(tmp_path: Path) -> None:
    """Ticks become events, books balance, pods are named, the store holds every entry."""
    store = tmp_path / "store"
    ran = run_demo(
        "--source", "simulated", "--for", "3s", "--format", "json", "--store", str(store)
    )
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["events"] == summary["samples"] > 0
    assert summary["conservation_error_max_ratio"] == 0.0
    assert summary["truth_error_ratio"] <= 0.05
    assert summary["store"] == {"path": str(store), "rows": summary["entries"]}
    assert summary["dead_letters"] == 0
    assert summary["remote_write_requests"] > 0
    named = {(pod["namespace"], pod["pod"], pod.get("owner")) for pod in summary["pods"]}
    assert ("serving", "embeddings-0", "StatefulSet/embeddings") in named
    assert ("research", "notebook-ada-0", "StatefulSet/notebook-ada") in named  # runs nothing
    assert summary["without_pod_gpu_seconds"] > 0
    lines = {line["owner"]: line for line in summary["bill"]["lines"]}
    assert sum(Decimal(line["cost"]) for line in lines.values()) == Decimal(summary["bill"]["cost"])
    notebook = lines["StatefulSet/notebook-ada"]
    assert Decimal(notebook["cost"]) == Decimal(notebook["unused_cost"]) > 0
    assert not any(line.get("idle_kind") == "no_data" for line in lines.values())
    # A node's first tick begins a moment before its inventory. If an hour ends right then, nobody
    # pays for that moment.
    excess = excess_of_the_store_s_bill(store, lines)
    # All GPUs of the run, and each second of them once: a lost one is not its allocatee's.
    whole = sum(pod["unused_gpu_seconds"] + pod["gpu_seconds"] for pod in summary["pods"])
    whole += sum(summary[f"{kind}_gpu_seconds"] for kind in ("without_pod", "idle", "gap"))
    charged = sum(line["billed_gpu_seconds"] for line in lines.values())
    assert charged + excess == pytest.approx(whole, rel=0.001)


def excess_of_the_store_s_bill(store: Path, lines: dict[str, dict[str, Any]]) -> float:
    """Return the GPU-seconds that `gpuledger bill` scales away; its lines are those of the demo."""
    requested = ["bill", "--store", str(store), "--by", "owner", "--format", "json"]
    billed = subprocess.run([*COMMAND, *requested], capture_output=True, text=True, check=False)
    assert billed.returncode == 0, billed.stderr
    bill = json.loads(billed.stdout)
    # Time without data, such as that before the run, is not part of what the demo shows.
    found = {
        (line["used_gpu_seconds"], line["billed_gpu_seconds"])
        for line in bill["lines"]
        if line["idle_kind"] != "no_data"
    }
    shown = {(line["used_gpu_seconds"], line["billed_gpu_seconds"]) for line in lines.values()}
    assert found == shown
    return float(bill["excess_gpu_seconds"])


def test_a_demo_of_20_seconds_ends_with_its_alerts_three_tables_and_three_commands(
    tmp_path: Path,
) -> None:
    """The scenario runs four times as fast here."""
    scenario = tmp_path / "demo.yaml"
    scenario.write_text(f"{DEMO_SCENARIO.read_text()}\nspeed: 4\n")
    store = tmp_path / "store"
    ran = run_demo(
        *("--source", "simulated", "--for", "8s", "--scenario", str(scenario)),
        *("--store", str(store)),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    head, gpus, usage, bill, facts, commands = ran.stdout.split("\n\n")
    assert ran.stdout.count(ALERT) == head.count(ALERT) == 1
    assert gpus.startswith("GPUs in the last sample\nGPU  Pod ")
    assert re.search(
        r"^ +3  __unresponsive__ since \d\d:\d\d:\d\d UTC, XID 79, allocated to vision/transcode",
        gpus,
        re.MULTILINE,
    )
    assert usage.startswith("Usage by pod\nPod ")
    assert bill.startswith("Bill by workload, at built-in example prices\nWorkload ")
    assert [line.partition(":")[0] for line in facts.splitlines()[:2]] == ["Accuracy", "Totals"]
    assert len(facts.splitlines()) == 3
    title, *lines = commands.splitlines()
    assert (title, len(lines)) == ("Next:", 3)
    assert "\x1b" not in ran.stdout
    assert max(map(len, gpus.splitlines())) <= 160
    # The commands on the store work as printed.
    for line in lines[:2]:
        _, *arguments = shlex.split(line)
        found = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert "serving" in found.stdout


def test_receivers_that_cannot_be_reached_are_reported_with_exit_code_1(tmp_path: Path) -> None:
    scenario = tmp_path / "demo.yaml"
    scenario.write_text(f"{DEMO_SCENARIO.read_text()}\nspeed: 4\n")
    options = {"remote_write": "--remote-write-url", "alerts": "--alertmanager-url"}
    nobody = "http://127.0.0.1:9"
    arguments = [word for option in options.values() for word in (option, nobody)]
    ran = run_demo(*arguments, "--source", "simulated", "--scenario", str(scenario), "--for", "5s")
    assert ran.returncode == 1, ran.stderr
    # Alerts are shown although no receiver has them.
    assert ran.stdout.count(ALERT) == 1
    for sink in options:
        message = rf"^{sink}: nothing delivered to {nobody} in \d+ attempts: ."
        assert re.search(message, ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("format_", ["table", "json"])
def test_no_password_or_token_of_an_address_is_shown(format_: str) -> None:
    secret = "http://user:hunter2@127.0.0.1:9/{}?token=hunter3".format
    urls = ["--remote-write-url", secret("write"), "--alertmanager-url", secret("am")]
    ran = run_demo(*urls, "--source", "simulated", "--for", "3s", "--format", format_)
    assert ran.returncode == 1, ran.stderr
    assert "http://127.0.0.1:9/write" in ran.stdout
    assert "hunter" not in ran.stdout + ran.stderr
    assert "user:" not in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "absent.yaml"], "absent.yaml: no such file"),
        (["--bus", "kafka://127.0.0.1:1", "--source", "simulated"], "127.0.0.1:1"),
        (["--source", "gpu"], "--source"),
        (["--for", "0s"], "--for"),
        (["--remote-write-url", "prometheus"], "--remote-write-url '********' must begin"),
        (["--every", "1"], "--every"),
        (["--play", "30d", "--for", "3s"], "--for: invalid with --play"),
        (["--play", "30d"], "--store: missing"),
        (["--until", "2026-10-01"], "--until: invalid without --play"),
    ],
)
def test_an_invalid_option_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    """No traceback."""
    ran = run_demo(*arguments)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stdout == ""
