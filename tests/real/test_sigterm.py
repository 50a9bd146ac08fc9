"""SIGTERM at any moment of a component's start ends it with 0: tested on real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.services.ports import free_ports

BIN = Path(sys.executable).parent
TIMEOUT_SECONDS = 120.0
STARTS: dict[str, list[str | Path]] = {
    "agent": [BIN / "gpuledger", "agent", "--source", "simulated"],
    "podwatch": [BIN / "gpuledger", "podwatch"],
    "join": [BIN / "gpuledger", "join"],
    "sink": [BIN / "gpuledger", "sink", "alerts"],
    "reports": [BIN / "gpuledger", "reports"],
    "python -m gpuledger_agent": [sys.executable, "-m", "gpuledger_agent", "--source", "simulated"],
    "python -m gpuledger_sinks": [sys.executable, "-m", "gpuledger_sinks", "alerts"],
}
AFTER_SECONDS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def environment(start: str) -> dict[str, str]:
    """Return settings with which a component starts, without any server to connect to."""
    http, kafka, kubernetes = free_ports(3)
    settings = {"HTTP__LISTEN": http, "KAFKA__BOOTSTRAP_SERVERS": kafka}
    found = {name: f"127.0.0.1:{port}" for name, port in settings.items()}
    if start == "podwatch":
        found["KUBERNETES__URL"] = f"http://127.0.0.1:{kubernetes}"
    if start == "reports":
        del found["KAFKA__BOOTSTRAP_SERVERS"]
    if "agent" in start:
        found["SPOOL__DIRECTORY"] = ""
    return {**os.environ, **{f"GPULEDGER_{name}": value for name, value in found.items()}}


def heeds_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, according to the kernel."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("start", STARTS)
def test_sigterm_at_any_moment_after_the_first_instruction_ends_with_zero(start: str) -> None:
    for after_seconds in AFTER_SECONDS:
        with subprocess.Popen(
            STARTS[start], env=environment(start), stderr=subprocess.PIPE
        ) as child:
            while not heeds_sigterm(child.pid):
                assert child.poll() is None
                time.sleep(0.0005)
            time.sleep(after_seconds)
            child.send_signal(signal.SIGTERM)
            _, written = child.communicate(timeout=TIMEOUT_SECONDS)

        assert child.returncode == 0, (after_seconds, written.decode())
        assert b"Traceback" not in written, (after_seconds, written.decode())
