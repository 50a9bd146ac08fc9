"""Quix Streams as the join's reference: whether it is installed, and its rate, from `quix_join`."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpuledger.errors import UnavailableError
from gpuledger.settings import KafkaSettings

_ROOT = Path(__file__).parents[1]
_DEADLINE_SECONDS = 180.0


def find_quix() -> None:
    """Raise UnavailableError if Quix Streams is not installed."""
    if find_spec("quixstreams") is None:
        raise UnavailableError("quixstreams is not installed; `make bench` installs it")


def measure_quix(settings: KafkaSettings, *, nodes: int, ticks: int) -> float:
    """Return Quix Streams' ticks per second and core over the ticks on the broker.

    Raises UnavailableError, with its last output, if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.quix_join"]
    command += ["--servers", settings.bootstrap_servers]
    command += ["--nodes", str(nodes), "--ticks", str(ticks)]
    ended = subprocess.run(  # noqa: S603  # our own
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
    )
    if ended.returncode != 0:
        output = ended.stderr.strip().splitlines() or ["nothing"]
        raise UnavailableError(f"Quix Streams ended with {ended.returncode}: {output[-1]}")
    return ticks / float(ended.stdout)
