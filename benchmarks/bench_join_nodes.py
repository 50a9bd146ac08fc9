"""CPU per tick of the join at 10 to 10,000 nodes, against its CPU at 10; without Kafka.

10 pods per node, so at most 100,000. There is a worker for each size; all run at once and are
measured in turn, so that other load on the machine affects all equally.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Final

from benchmarks.figure import Figure
from benchmarks.stage_worker import StageWorker, start_stage_worker

NAME = "join_nodes"
_SIZES: Final = (10, 100, 1_000, 10_000)
_ROUNDS: Final = 15


def run() -> Iterator[Figure]:
    """Measure each size."""
    with ExitStack() as stack:
        workers = [stack.enter_context(start_stage_worker(nodes=nodes)) for nodes in _SIZES]
        costs = _measure(workers)
    smallest, *larger = _SIZES
    unit = "microseconds/tick"
    yield Figure(name=f"join_nodes.{smallest}", value=costs[smallest], unit=unit)
    for nodes in larger:
        value = costs[nodes]
        yield Figure(name=f"join_nodes.{nodes}", value=value, unit=unit, reference=costs[smallest])


def _measure(workers: list[StageWorker]) -> dict[int, float]:
    """Return the microseconds per tick of each worker, by its nodes: the median of the rounds."""
    measured: dict[int, list[float]] = {worker.nodes: [] for worker in workers}
    for _ in range(_ROUNDS):
        for worker in workers:
            measured[worker.nodes].append(worker.measure())
    return {nodes: median(values) for nodes, values in measured.items()}
