"""The wheel's compiled modules and their sources turn records into the same bytes.

So a replay on a laptop gives the books of the cluster. Both run in their own processes, on the same
topics; it does not matter which of the two runs this test.
"""

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.records import NodeSample
from tests.default_topics import SAMPLES
from tests.examples import examples
from tests.unit.enricher.join.booking.test_laws import ticks as contradictory_ticks
from tests.unit.enricher.laws.runs import draw_runs
from tests.unit.enricher.laws.stage_worker import Made
from tests.unit.enricher.laws.topics import BEGIN_NS, Topics, topics
from tests.wheel.building import ROOT, build_wheel

SECOND_NS = 10**9


class Worker:
    """A component in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.modules = str(self._answer())

    def make(self, given_topics: Topics) -> Made:
        """Return the output for these topics."""
        assert self._process.stdin
        pickle.dump(given_topics, self._process.stdin)
        self._process.stdin.flush()
        made: Made = self._answer()
        return made

    def _answer(self) -> Any:  # noqa: ANN401 - whatever the worker wrote
        assert self._process.stdout
        return pickle.load(self._process.stdout)  # noqa: S301 - the worker's own


@contextmanager
def start_worker(*path: Path) -> Iterator[Worker]:
    """Yield a worker that finds its modules in these directories, in this order."""
    found = os.pathsep.join(map(str, path))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.enricher.laws.stage_worker"],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": found},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield Worker(process)
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """Yield a worker that runs the compiled modules, and one that runs the sources."""
    folder = tmp_path_factory.mktemp("compiled")
    with zipfile.ZipFile(build_wheel(folder)) as archive:
        archive.extractall(folder)
    with start_worker(folder, ROOT) as compiled, start_worker(ROOT) as sources:
        assert compiled.modules.startswith("compiled: yes")
        assert sources.modules == "compiled: no"
        yield compiled, sources


@st.composite
def any_ticks(draw: st.DrawFn) -> Topics:
    """Draw ticks that need not make sense: MIG-partitioned GPUs, shared GPUs, missing readings."""
    drawn = draw(st.lists(contradictory_ticks(), min_size=1, max_size=4))
    # The join skips ticks that overlap, so the time between two ticks is the longest interval.
    apart_seconds = max(1, -(-max(tick.interval_ns for tick in drawn) // SECOND_NS))
    one_after_another = [
        replace(
            tick,
            seq=1000 * number * apart_seconds,
            time_ns=BEGIN_NS + number * apart_seconds * SECOND_NS,
        )
        for number, tick in enumerate(drawn, start=1)
    ]
    return Topics({0: records_of(one_after_another)}, {})


def records_of(samples: Sequence[NodeSample]) -> list[Record]:
    return [
        Record(SAMPLES.name, 0, place, one.time_ns // 10**6, node_key(one).encode(), encode(one))
        for place, one in enumerate(samples)
    ]


def events_of(workers: tuple[Worker, Worker], given_topics: Topics) -> int:
    """Assert that both workers produce the same bytes; return the number of events."""
    compiled, sources = (worker.make(given_topics) for worker in workers)
    assert compiled == sources
    return len(sources[0])


@examples(150)
@given(given_topics=any_ticks())
def test_any_ticks_give_the_same_bytes_from_compiled_modules_and_sources(
    workers: tuple[Worker, Worker], given_topics: Topics
) -> None:
    assert events_of(workers, given_topics) == len(given_topics.samples[0])


@examples(100)
@given(given_topics=topics())
def test_nodes_that_boot_pause_and_repeat_themselves_give_the_same_bytes_from_both(
    workers: tuple[Worker, Worker], given_topics: Topics
) -> None:
    events_of(workers, given_topics)


@pytest.mark.parametrize("seed", range(3))
def test_a_minute_of_simulated_nodes_gives_the_same_bytes_from_both(
    workers: tuple[Worker, Worker], seed: int
) -> None:
    _, drawn = draw_runs(Random(seed))  # noqa: S311 - no secret

    assert events_of(workers, drawn) > 100
