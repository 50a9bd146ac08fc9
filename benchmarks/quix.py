"""Quix Streams beside the join: whether it is there, and its rate. `quix_join` does the work."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpuledger.errors import UnavailableError
from gpuledger.settings import KafkaSettings

_ROOT = Path(__file__).parents[1]
_DEADLINE_SECONDS = 180.0


def find_quix() -> None:
    """Raise UnavailableError where Quix Streams is not installed."""
    if find_spec("quixstreams") is None:
        raise UnavailableError("quixstreams is not installed; `make bench` installs it")


def measure_quix(settings: KafkaSettings, *, nodes: int, ticks: int) -> float:
    """Return ticks a second and core of Quix Streams, over the ticks that lie on the broker.

    Raises UnavailableError, with what it said last, where it does not get through them.
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
