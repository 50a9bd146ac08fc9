"""From a tick's time to its readable event: p99 over several workers, against a second.

Workers of the join run as processes, exactly once; agents, broker and reader share the machine. The
rate rises until the events fall behind; the last steady rate is compared with 10,000.
"""

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Final

from benchmarks.agents import Agents, Offer, start_agents
from benchmarks.events_reader import EventsReader, open_events_reader
from benchmarks.figure import Figure
from benchmarks.join_load import publish_pods
from benchmarks.parts import run_kafka, run_workers
from benchmarks.processes import cpu_seconds
from benchmarks.ticks import Fleet
from gpuledger.bus.administration import create_topics
from gpuledger.clock import NS_PER_SECOND
from gpuledger.settings import KafkaSettings

NAME = "join_latency"
_WORKERS: Final = 4
_NODES: Final = 10_000
_RATES: Final = (500, 1_000, 1_500, 2_000, 2_500, 3_000, 4_000, 5_000, 6_000, 8_000, _NODES)
_TRIES: Final = 2
_WARM_UP_SECONDS: Final = 5
_SECONDS: Final = 20
_LATEST_SECONDS: Final = 15.0
"""How long to wait for events after the last tick."""
_MAX_P99_SECONDS: Final = 1.0
_MIN_EVENTS: Final = 100


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The result of one load."""

    rate: int
    ages_seconds: Sequence[float]
    """Ages of the events whose ticks came after the warm-up."""
    missing: int
    """Ticks without an event in time."""
    cores: Mapping[str, float]
    """CPU seconds per second, by kind of process."""

    def percentile(self, number: int) -> float:
        if len(self.ages_seconds) < _MIN_EVENTS:
            return math.inf
        return quantiles(self.ages_seconds, n=100)[number - 1]

    @property
    def is_steady(self) -> bool:
        return not self.missing and self.percentile(99) <= _MAX_P99_SECONDS


def run() -> Iterator[Figure]:
    """Measure rate after rate."""
    fleet = Fleet(nodes=_NODES)
    steady: _Measured | None = None
    with tempfile.TemporaryDirectory(prefix="gpuledger-latency-") as name, run_kafka() as kafka:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        asyncio.run(create_topics(settings))
        asyncio.run(publish_pods(settings, fleet))
        with (
            start_agents(kafka.bootstrap_servers, nodes=_NODES) as agents,
            run_workers(kafka, count=_WORKERS, folder=Path(name)) as workers,
        ):
            pids = {
                "workers": [worker.pid for worker in workers],
                "broker": [kafka.process.pid],
                "agents": [agents.pid],
                "reader": [os.getpid()],
            }
            for rate in _RATES:
                measured = _try(settings, agents, pids, rate)
                yield from _figures(measured)
                if not measured.is_steady:
                    break
                steady = measured
    if steady:
        yield from _steady_figures(steady)


def _try(
    settings: KafkaSettings,
    agents: Agents,
    pids: Mapping[str, Sequence[int]],
    rate: int,
    *,
    tries: int = _TRIES,
) -> _Measured:
    """Measure a rate, and again if it was too slow: another process may have been the cause."""
    measured = asyncio.run(_measure(settings, agents, pids, rate))
    if measured.missing:
        return measured
    agents.wait()
    if measured.is_steady or tries == 1:
        return measured
    return _try(settings, agents, pids, rate, tries=tries - 1)


def _figures(measured: _Measured) -> Iterator[Figure]:
    name = f"join_latency.{measured.rate}"
    yield Figure(name=f"{name}.p50", value=measured.percentile(50), unit="seconds")
    yield Figure(
        name=f"{name}.p99",
        value=measured.percentile(99),
        unit="seconds",
        reference=_MAX_P99_SECONDS,
    )
    if measured.missing:
        yield Figure(name=f"{name}.missing", value=measured.missing, unit="events")


def _steady_figures(steady: _Measured) -> Iterator[Figure]:
    yield Figure(
        name="join_latency_p99_seconds",
        value=steady.percentile(99),
        unit="seconds",
        reference=_MAX_P99_SECONDS,
    )
    yield Figure(
        name="join_latency.steady_rate", value=steady.rate, unit="ticks/s", reference=_NODES
    )
    for who, cores in steady.cores.items():
        yield Figure(name=f"join_latency.cores.{who}", value=cores, unit="cores")


async def _measure(
    settings: KafkaSettings, agents: Agents, pids: Mapping[str, Sequence[int]], rate: int
) -> _Measured:
    """Let the agents publish ticks, and read until each has its event or the time is over."""
    async with open_events_reader(settings.bootstrap_servers) as reader:
        offer = Offer(rate, _WARM_UP_SECONDS + _SECONDS)
        started_ns = await asyncio.to_thread(agents.offer, offer)
        begin = started_ns // NS_PER_SECOND + _WARM_UP_SECONDS
        async with asyncio.TaskGroup() as group:
            cores = group.create_task(_cores(pids, begin=begin))
            ages = await _read(reader, begin=begin, count=rate * _SECONDS)
    missing = rate * _SECONDS - len(ages)
    return _Measured(rate=rate, ages_seconds=ages, missing=missing, cores=cores.result())


async def _read(reader: EventsReader, *, begin: int, count: int) -> list[float]:
    """Return the ages of events for ticks since `begin`, at most this many."""
    ages: list[float] = []
    while len(ages) < count and time.time() < begin + _SECONDS + _LATEST_SECONDS:
        events = await reader.read()
        ages += [age_seconds for time_ms, age_seconds in events if time_ms >= begin * 1_000]
    return ages


async def _cores(pids: Mapping[str, Sequence[int]], *, begin: int) -> dict[str, float]:
    """Return the CPU seconds per second from `begin` to the last tick."""
    await asyncio.sleep(begin - time.time())
    before, began = _spent(pids), time.monotonic()
    await asyncio.sleep(_SECONDS)
    after, seconds = _spent(pids), time.monotonic() - began
    return {who: (after[who] - before[who]) / seconds for who in pids}


def _spent(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {who: sum(map(cpu_seconds, them)) for who, them in pids.items()}
