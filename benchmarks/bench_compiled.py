"""What each compiled module saves: the join's stage without it, against all of them; no Kafka.

A worker for each, at 200 nodes, all at once and measured in turn, so that what else the machine
does falls on all alike. `compiled.none` is the sources alone.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.figure import Figure
from benchmarks.stage_worker import StageWorker, start_stage_worker
from gpuledger.errors import UnavailableError
from tests.compiled import compiled_modules

NAME = "compiled"
_NODES: Final = 200
_ROUNDS: Final = 25
_ALL: Final = "all"
_OF_SINKS: Final = frozenset(
    {
        Path("gpuledger/ledger/interval_values.py"),
        Path("gpuledger/ledger/series.py"),
        Path("gpuledger/ledger/usage.py"),
        *Path("sinks/gpuledger_sinks/remote_write").glob("*.py"),
    }
)
"""Compiled for remote-write (`bench_remote_write`): the join's stage does not import them."""


def run() -> Iterator[Figure]:
    """Measure all modules, all without one, and none."""
    modules = [module for module in compiled_modules() if module not in _OF_SINKS]
    if not modules:
        raise UnavailableError("nothing is compiled where this runs; `make bench` compiles")
    dropped: dict[str, Sequence[Path]] = {_ALL: []}
    dropped |= {f"without_{module.stem}": [module] for module in modules}
    dropped["none"] = modules
    with TemporaryDirectory() as folder, ExitStack() as stack:
        workers: dict[str, StageWorker] = {}
        for name, without in dropped.items():
            with _compiled_but(without, Path(folder, name)):
                workers[name] = stack.enter_context(start_stage_worker(nodes=_NODES))
        costs: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(_ROUNDS):
            for name, worker in workers.items():
                costs[name].append(worker.measure())
    # Round by round, as the machine's other work changes from one round to the next.
    for name, measured in costs.items():
        ratio = median(cost / of_all for cost, of_all in zip(measured, costs[_ALL], strict=True))
        reference = median(costs[_ALL])
        yield Figure(
            name=f"{NAME}.{name}",
            value=ratio * reference,
            unit="microseconds/tick",
            reference=None if name == _ALL else reference,
        )


@contextmanager
def _compiled_but(modules: Sequence[Path], copy: Path) -> Iterator[None]:
    """Have processes that are started meanwhile import a copy in which these are not compiled."""
    suffix = EXTENSION_SUFFIXES[0]
    some = compiled_modules()[0].with_suffix(suffix)
    place = next(at for at, path in enumerate(sys.path) if Path(path, some).is_file())
    compiled = sys.path[place]
    shutil.copytree(compiled, copy)
    for module in modules:
        (copy / module.with_suffix(suffix)).unlink()
    sys.path[place] = str(copy)
    try:
        yield
    finally:
        sys.path[place] = compiled
