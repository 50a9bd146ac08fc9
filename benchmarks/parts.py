"""Real parts that benchmarks talk to. Nothing is measured here."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuledger.errors import UnavailableError
from tests.real.parts.kafka import Kafka
from tests.tools import catalogue
from tests.tools.errors import MissingToolError


@contextmanager
def run_kafka() -> Iterator[Kafka]:
    """Start a broker of this run's own."""
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
