"""`gpuledger load`: an agent reads the load, and a CUDA library receives it.

The CUDA library is a stand-in of a few lines of C. It checks the arguments, not the kernel's code.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.real.end_to_end.components import BIN
from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process

LIBRARY = Path(__file__).with_name("libcuda.c")
PERIOD_NS = 100_000_000
DEADLINE_SECONDS = 120.0
ERROR = 0.03
"""Rounding of the driver's windows, and the variation of a load over some seconds."""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a load with options and variables."""
    started = []

    def start(*options: str, **environment: str) -> subprocess.Popen[str]:
        loading = subprocess.Popen(
            [BIN / "gpuledger", "load", "--format", "json", *options],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(loading)
        return loading

    yield start
    for loading in started:
        loading.terminate()
        loading.communicate(timeout=DEADLINE_SECONDS)


def result_of(loading: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = loading.communicate(timeout=DEADLINE_SECONDS)
    assert loading.returncode == 0, errors
    result: dict[str, Any] = json.loads(out)
    return result


def readings_of(url: str, *, ticks: int) -> dict[str, dict[str, list[float]]]:
    """Return the values of so many samples, by metric and pid."""
    found: dict[str, dict[str, list[float]]] = {}
    times: set[float] = set()
    while len(times) < ticks:
        page = web.fetch(f"{url}/metrics").body.decode()
        families = text_string_to_metric_families(page)
        samples = [one for family in families for one in family.samples]
        now = {
            one.value for one in samples if one.name == "gpuledger_node_sample_timestamp_seconds"
        }
        for one in samples if now - times else ():
            by_pid = found.setdefault(one.name, {})
            by_pid.setdefault(one.labels.get("pid", "GPU"), []).append(one.value)
        times |= now
        time.sleep(0.1)
    return found


def test_an_agent_started_as_printed_shows_the_load(load: Start, tmp_path: Path) -> None:
    options = ["--utilization=60", "--processes=2", "--memory-mib=700", "--for=5m"]
    loading = load("--simulated", *options)
    assert loading.stderr
    assert loading.stderr.readline() == "Start an agent now:\n"
    words = shlex.split(loading.stderr.readline())
    settings = dict(word.split("=", 1) for word in words if word.startswith("GPULEDGER_"))
    program, *arguments = words[len(settings) :]
    (port,) = free_ports(1)
    agent = Process(
        name="agent",
        argv=[BIN / program, *arguments, f"--listen=127.0.0.1:{port}"],
        folder=tmp_path,
        environment=settings,
    )
    agent.start()
    url = f"http://127.0.0.1:{port}"
    try:
        agent.wait_until(lambda: web.fetch(f"{url}/readyz").status == 200, deadline_seconds=60.0)
        read = readings_of(url, ticks=12)
    finally:
        assert agent.stop(deadline_seconds=DEADLINE_SECONDS) == 0, agent.log_tail()
    loading.send_signal(signal.SIGINT)
    ratios = result_of(loading)["busy_ratios"]
    assert sum(ratios.values()) == pytest.approx(0.6, abs=ERROR)
    # The first sample has no interval of its own.
    assert mean(read["gpuledger_node_gpu_utilization_ratio"]["GPU"][1:]) == pytest.approx(
        0.6, abs=ERROR
    )
    shown = read["gpuledger_process_gpu_busy_ratio"]
    assert {pid: mean(values[1:]) for pid, values in shown.items()} == pytest.approx(
        ratios, abs=ERROR
    )
    assert {
        pid: values[-1] for pid, values in read["gpuledger_process_gpu_memory_bytes"].items()
    } == dict.fromkeys(ratios, 700 << 20)


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    """Compile the CUDA library; return the environment in which it is found."""
    made = tmp_path / "lib" / "libcuda.so.1"
    made.parent.mkdir()
    compiler = shutil.which("cc") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, LIBRARY], check=True)
    return {"LD_LIBRARY_PATH": str(made.parent), "LIBCUDA_LOG": str(tmp_path / "calls")}


def calls(folder: Path, name: str) -> list[tuple[str, int]]:
    log = folder / "calls"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(pid, int(value)) for pid, called, value in lines if called == name]


def test_each_process_runs_its_share_of_each_period(
    load: Start, library: dict[str, str], tmp_path: Path
) -> None:
    options = ["--utilization=40", "--processes=2", "--memory-mib=700", "--for=2s"]
    result = result_of(load(*options, **library))
    ratios = result["busy_ratios"]
    seconds = (result["end_ns"] - result["start_ns"]) / 1e9
    assert result["gpu_uuid"] == "GPU-07070707-0707-0707-0707-070707070707"
    assert seconds >= 2
    assert dict(calls(tmp_path, "alloc")) == dict.fromkeys(ratios, 700 << 20)
    for pid, ratio in ratios.items():
        spins = [value for caller, value in calls(tmp_path, "spin") if caller == pid]
        assert set(spins[:-1]) == {PERIOD_NS * 40 // 100 // 2}
        assert len(spins) <= 2 * 10**9 // PERIOD_NS
        assert ratio >= sum(spins) / 1e9 / seconds


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_load_and_its_processes(
    number: signal.Signals, load: Start, library: dict[str, str], tmp_path: Path
) -> None:
    loading = load("--for=1h", "--processes=3", **library)
    ends = time.monotonic() + DEADLINE_SECONDS
    while len({pid for pid, _ in calls(tmp_path, "spin")}) < 3 and time.monotonic() < ends:
        time.sleep(0.05)
    loading.send_signal(number)
    result = result_of(loading)
    assert result["end_ns"] - result["start_ns"] < DEADLINE_SECONDS * 1e9
    assert not any(Path(f"/proc/{pid}").exists() for pid in result["busy_ratios"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu=1"], r"cuDeviceGet returned 101; .*--gpu"),
        (["--memory-mib=90000", "--processes=2"], r"cuMemAlloc_v2 returned 2; .*--memory-mib"),
    ],
)
def test_an_error_of_the_library_is_printed(
    options: list[str], words: str, load: Start, library: dict[str, str]
) -> None:
    loading = load(*options, **library)
    _, errors = loading.communicate(timeout=DEADLINE_SECONDS)
    assert loading.returncode == 2
    assert re.fullmatch(rf"gpuledger: cannot load the GPU: {words}.*\n", errors)


def test_a_crash_of_the_library_is_an_error(load: Start, library: dict[str, str]) -> None:
    loading = load("--processes=2", **library, LIBCUDA_CRASH="1")
    _, errors = loading.communicate(timeout=DEADLINE_SECONDS)
    assert loading.returncode == 2
    assert re.search("a process ended with exit code -6; .*use --simulated", errors)


def test_a_machine_without_the_library_is_named(load: Start) -> None:
    loading = load()
    _, errors = loading.communicate(timeout=DEADLINE_SECONDS)
    assert loading.returncode == 2
    assert re.search("libcuda.so.1: .*use --simulated", errors)
