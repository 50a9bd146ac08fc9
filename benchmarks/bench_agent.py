"""The agent as a process: CPU and memory with all features, against 1 % of a core and 64 MiB.

8 H100, 20 processes, one tick per second. NVML is a C library whose answers come from another
process, so nvidia-ml-py and ctypes are measured and the simulation is not. Kafka is real, and
`/metrics` is scraped every 15 s.
"""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

import yaml

from benchmarks.figure import Figure
from benchmarks.nvml_stub.build import build_stub
from benchmarks.parts import run_kafka
from benchmarks.processes import cpu_seconds
from gpuledger.bus.administration import create_topics
from gpuledger.errors import UnavailableError
from gpuledger.settings import KafkaSettings
from tests.real.end_to_end.components import Component

NAME = "agent"
_NODE: Final = "bench-node"
_GPUS: Final = 8
_PODS: Final = 10
_SECONDS: Final = 60.0
_WARM_UP_SECONDS: Final = 20.0
_SCRAPE_SECONDS: Final = 15.0
_MAX_RATIO: Final = 0.01
_MAX_BYTES: Final = 64 * 1024 * 1024
_KIB: Final = 1024
_LOCK: Final = Path(__file__).parents[1] / "requirements" / "agent.lock"
# Some libraries import others if they are installed, but they are not in the agent's image.
_PROGRAM: Final = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(",")))
from gpuledger_agent.__main__ import main
sys.exit(main())
"""
_ALL_OF_THE_AGENT: Final = (
    "import gpuledger_agent.command, gpuledger_agent.host.kubelet.grpc, gpuledger.bus.kafka"
)


def run(*, seconds: float = _SECONDS) -> Iterator[Figure]:
    """Measure for a while, after a warm-up."""
    with tempfile.TemporaryDirectory(prefix="gpuledger-agent-") as name, run_kafka() as kafka:
        folder = Path(name)
        asyncio.run(create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)))
        build_stub(folder)
        with _playing(folder):
            agent = _agent(folder, kafka.bootstrap_servers)
            agent.start()
            try:
                agent.wait_until_ready()
                yield from _measure(agent, seconds)
            except Exception:
                print(agent.log_tail(), file=sys.stderr)
                raise
            finally:
                agent.stop()


def scenario() -> dict[str, object]:
    """Return a node with 8 GPUs and 20 processes in 10 pods; two pods share two of the GPUs."""
    node = {
        "name": _NODE,
        "gpus": {"model": "NVIDIA H100 80GB HBM3", "count": _GPUS},
        # The agent reads this machine's clocks, so processes must use them for their start times.
        "uptime_seconds": time.clock_gettime(time.CLOCK_BOOTTIME),
    }
    return {
        "name": "bench",
        "nodes": [node],
        "pods": [
            {
                "namespace": "bench",
                "name": f"worker-{number}",
                "node": _NODE,
                "containers": [
                    {
                        "name": "main",
                        "processes": [
                            {
                                "command": f"python train.py --rank {rank}",
                                "gpus": [(2 * number + rank) % _GPUS],
                                "load": {"busy_ratio": 0.3},
                                "memory_bytes": 8_000_000_000,
                            }
                            for rank in range(2)
                        ],
                    }
                ],
            }
            for number in range(_PODS)
        ],
    }


@contextmanager
def _playing(folder: Path) -> Iterator[None]:
    """Play the scenario in a separate process."""
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario()))
    (folder / "proc").mkdir()
    command = [sys.executable, "-m", "benchmarks.nvml_stub.player", "--node", _NODE]
    command += ["--scenario", str(folder / "scenario.yaml"), "--procfs", str(folder / "proc")]
    command += ["--memory", str(folder / "memory")]
    player = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own
    try:
        if player.stdout is None or player.stdout.readline() != "ready\n":
            raise UnavailableError("the player of the scenario did not start; see above")
        yield
    finally:
        player.kill()
        player.wait()


def _agent(folder: Path, bootstrap_servers: str) -> Component:
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    os.environ["MALLOC_ARENA_MAX"] = "1"  # as in the image
    os.environ["NVML_STUB_MEMORY"] = str(folder / "memory")
    # The image has bytecode. An agent that compiles its modules at startup keeps 10 MiB that this
    # took: most of it for pynvml, a third of a megabyte of source.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    subprocess.run([sys.executable, "-c", _ALL_OF_THE_AGENT], check=True)  # noqa: S603  # our own
    return Component(
        name="agent",
        command=["python", "-c", _PROGRAM, ",".join(_not_in_image()), "--source", "nvml"],
        folder=folder,
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "NODE_NAME": _NODE,
            "PROCFS_ROOT": str(folder / "proc"),
        },
    )


def _not_in_image() -> list[str]:
    """Return the modules that are installed here but not in the agent's image."""
    locked = re.findall(r"^([\w.-]+)==", _LOCK.read_text(), re.MULTILINE)
    named = {_plain(name) for name in ("gpuledger", *locked)}
    return [
        module
        for module, owners in packages_distributions().items()
        if not named & {_plain(owner) for owner in owners}
    ]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _measure(agent: Component, seconds: float) -> Iterator[Figure]:
    _scrape_for(agent, _WARM_UP_SECONDS)
    cpu, began = cpu_seconds(agent.pid), time.monotonic()
    early_bytes = _status_bytes(agent.pid, "VmRSS")
    _scrape_for(agent, seconds)
    ratio = (cpu_seconds(agent.pid) - cpu) / (time.monotonic() - began)
    rss = _status_bytes(agent.pid, "VmRSS")
    yield Figure(name="agent_cpu_ratio", value=ratio, unit="cores", reference=_MAX_RATIO)
    yield Figure(name="agent_rss_bytes", value=rss, unit="bytes", reference=_MAX_BYTES)
    yield Figure(name="agent_rss_growth_bytes", value=rss - early_bytes, unit="bytes")
    yield Figure(name="agent_rss_peak_bytes", value=_status_bytes(agent.pid, "VmHWM"), unit="bytes")
    yield Figure(name="agent_pss_bytes", value=_pss_bytes(agent.pid), unit="bytes")
    yield Figure(name="agent_threads", value=_status(agent.pid, "Threads"), unit="threads")


def _scrape_for(agent: Component, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SCRAPE_SECONDS))
        agent.metrics()


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def _status_bytes(pid: int, name: str) -> int:
    return _status(pid, name) * _KIB


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * _KIB
