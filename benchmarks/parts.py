"""Real parts that benchmarks use. Nothing is measured here."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpuledger.errors import UnavailableError
from tests.default_topics import SAMPLES
from tests.real.end_to_end.components import Component
from tests.real.services.kafka import Kafka
from tests.tools import catalogue
from tests.tools.errors import MissingToolError

_SHARES_SECONDS = 60.0
_POLL_SECONDS = 0.5


@contextmanager
def run_kafka() -> Iterator[Kafka]:
    """Start a broker for this run only."""
    try:
        distribution = catalogue.KAFKA.distribution()
    except MissingToolError as error:
        raise UnavailableError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="gpuledger-bench-") as folder:
        part = Kafka(distribution=distribution, folder=Path(folder) / "kafka")
        part.start()
        try:
            yield part
        finally:
            part.discard()


@contextmanager
def run_workers(kafka: Kafka, *, count: int, folder: Path) -> Iterator[Sequence[Component]]:
    """Start workers of the join as processes with default settings; each gets an equal share."""
    servers = {"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    workers = [
        Component(
            name=f"join-{number}",
            command=["gpuledger", "join"],
            folder=folder / f"join-{number}",
            environment={**servers, "JOIN__PODWATCH_TIMEOUT_SECONDS": "0"},
        )
        for number in range(count)
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.stop)
            worker.start()
        _wait_for_shares(workers)
        yield workers


def _wait_for_shares(workers: Sequence[Component]) -> None:
    deadline = time.monotonic() + _SHARES_SECONDS
    share = SAMPLES.partitions // len(workers)
    for worker in workers:
        worker.wait_until_ready()
    while any(worker.metric("gpuledger_join_partitions") != share for worker in workers):
        if time.monotonic() > deadline:
            raise UnavailableError(f"the workers' shares are not even: {workers[0].log_tail()}")
        time.sleep(_POLL_SECONDS)
    for worker in workers:  # workers whose share has shrunk have read it again
        worker.wait_until_ready()
