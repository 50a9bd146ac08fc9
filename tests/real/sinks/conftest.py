"""Fixtures of the sinks' tests: a test's own broker, and sinks that end with the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.real.sinks.running_sinks import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.kafka import Kafka


@pytest.fixture
def start_sink(tmp_path: Path) -> Iterator[Callable[..., Sink]]:
    """Start a sink that ends with the test."""
    started: list[Sink] = []

    def start(kind: str, kafka: Kafka, **settings: str) -> Sink:
        sink = Sink(kind, kafka, tmp_path, **settings)
        started.append(sink)
        sink.start()
        return sink

    yield start
    for sink in started:
        sink.kill()


@pytest.fixture
def broker(start_kafka: Callable[[], Kafka]) -> Kafka:
    return start_kafka()
