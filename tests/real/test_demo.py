"""The demo over a real broker, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.real.parts.kafka import Kafka

COMMAND = [str(Path(sys.executable).parent / "gpuledger"), "demo", "--source", "simulated"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("GPULEDGER")
}


def test_missing_topics_are_made_and_every_tick_comes_back_as_an_event(
    kafka_of_this_run: Kafka, tmp_path: Path
) -> None:
    """Twice, so that the second run meets the first one's topics and events."""
    bus = f"kafka://{kafka_of_this_run.bootstrap_servers}"
    for run in ("first", "second"):
        arguments = ["--bus", bus, "--for", "5", "--format", "json", "--store", tmp_path / run]
        ran = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        summary = json.loads(ran.stdout)
        assert summary["events"] == summary["ticks"] > 0, run
        assert summary["conservation_error_max_ratio"] <= 1e-9
        assert summary["store"]["rows"] >= summary["entries"]
        assert {pod["pod"] for pod in summary["pods"]} >= {"embeddings-0"}


def test_ctrl_c_ends_it_cleanly_with_the_summary(kafka_of_this_run: Kafka, tmp_path: Path) -> None:
    """Within ten seconds, on a broker too."""
    bus = f"kafka://{kafka_of_this_run.bootstrap_servers}"
    arguments = ["--bus", bus, "--for", "60", "--format", "json", "--store", str(tmp_path)]
    running = subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        running.wait(6)
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=10)
    assert running.returncode == 0
    assert json.loads(out)["events"] > 0
