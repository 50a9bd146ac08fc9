"""Sums by minute, from Kafka to the table and from Python to files, against plain Parquet.

Events have two GPUs with four entries each, a second apart, for many nodes. `events` counts the CPU
time of a sink that processes a backlog, `rows` that of committing rows that are already in Python,
and `bytes` the size of its files. The reference of both is DuckDB writing the same rows to one
Parquet file with zstd, without a transaction and without offsets.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
from msgspec.structs import replace

from benchmarks.events import booked
from benchmarks.figure import Figure
from benchmarks.parts import run_kafka
from benchmarks.processes import cpu_seconds
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message, Record
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import encode
from gpuledger.errors import UnavailableError
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent
from gpuledger.settings import KafkaSettings
from gpuledger.store.usage_schema import USAGE
from gpuledger.topics import partition_of_node
from gpuledger_sinks.store.minute_sums import MinuteSums, bookings_of
from gpuledger_sinks.store.table import UsageTable
from tests.default_topics import EVENTS
from tests.real.end_to_end.components import Component

NAME = "store"
_GPUS: Final = 2
_NODES: Final = 400
_BACKLOG: Final = 120_000
_ROW_TICKS: Final = 600
_ROW_NODES: Final = 300
_RUNS: Final = 3
_DEADLINE_SECONDS: Final = 240.0


def run() -> Iterator[Figure]:
    """Yield the sink's rate, then the rate of writing, and the bytes per row."""
    yield Figure(name=f"{NAME}.events", value=_events_a_core_second(), unit="events/s/core")
    with tempfile.TemporaryDirectory(prefix="gpuledger-bench-") as folder:
        yield from _measure_rows(Path(folder))


def _event(node: int, tick: int, start_ns: int) -> GpuEvent:
    made = booked(tick, node=f"gpu-node-{node:04d}", start_ns=start_ns)
    # Ticks are never exactly a second apart.
    jitter_ns = (node * 7919 + tick * 104_729) % 2_000_003
    return replace(
        made,
        gpus=made.gpus[:_GPUS],
        pods=made.pods[: 2 * _GPUS],
        containers=made.containers[: 2 * _GPUS],
        interval_ns=NS_PER_SECOND + jitter_ns,
    )


def _events_a_core_second() -> float:
    with tempfile.TemporaryDirectory(prefix="gpuledger-bench-") as name, run_kafka() as kafka:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        asyncio.run(create_topics(settings))
        asyncio.run(_publish(settings))
        sink = Component(
            name="bench-store",
            command=["gpuledger", "sink", "store"],
            folder=Path(name) / "sink",
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": settings.bootstrap_servers,
                "STORE__URI": str(Path(name) / "store"),
                "STORE__FLUSH_SECONDS": "2",
                "STORE__MAX_POLL_RECORDS": "2000",
            },
        )
        sink.start()
        try:
            sink.wait_until_ready()
            return _rate(sink, Path(name) / "store")
        finally:
            sink.stop()


def _rate(sink: Component, store: Path) -> float:
    begun_ticks, begun = _ticks_stored(store), cpu_seconds(sink.pid)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    entries = 4 * _GPUS
    while (ticks := _ticks_stored(store)) < _BACKLOG * entries:
        if time.monotonic() > deadline:
            raise UnavailableError(f"the backlog is not stored: {sink.log_tail()}")
        time.sleep(0.5)
    return (ticks - begun_ticks) / entries / (cpu_seconds(sink.pid) - begun)


def _ticks_stored(store: Path) -> int:
    table = UsageTable(store_uri=str(store))
    if not table.exists() or not (files := table.open().file_uris()):
        return 0
    with duckdb.connect() as connection:
        sql = f"SELECT sum(sample_count)::BIGINT FROM read_parquet({files})"  # noqa: S608  # our own files
        (found,) = connection.execute(sql).fetchone() or (0,)
    return int(found or 0)


async def _publish(settings: KafkaSettings) -> None:
    start_ns = time.time_ns() - 3600 * NS_PER_SECOND
    async with KafkaBus(settings).producer() as producer:
        for tick in range(_BACKLOG // _NODES):
            by_partition: dict[int, list[Message]] = {}
            for node in range(_NODES):
                event = _event(node, tick, start_ns)
                key = node_key(event)
                at = partition_of_node(key, partitions=EVENTS.partitions)
                message = Message(key.encode(), encode(event), event.time_ns // NS_PER_MS)
                by_partition.setdefault(at, []).append(message)
            for at, messages in by_partition.items():
                await producer.publish(EVENTS.name, at, messages)


def _measure_rows(folder: Path) -> Iterator[Figure]:
    rows = _rows()
    ours, files = _best_commit(folder, rows)
    reference, parquet = _best_parquet(folder, rows)
    unit = "rows/s/core"
    yield Figure(
        name=f"{NAME}.rows", value=len(rows) / ours, unit=unit, reference=len(rows) / reference
    )
    yield Figure(
        name=f"{NAME}.bytes",
        value=files / len(rows),
        unit="bytes/row",
        reference=parquet / len(rows),
    )


def _rows() -> list[tuple[Any, ...]]:
    sums, start_ns = MinuteSums(), 1_790_000_040 * NS_PER_SECOND
    for tick in range(_ROW_TICKS):
        for node in range(_ROW_NODES):
            event = _event(node, tick, start_ns)
            record = Record(EVENTS.name, node % 12, tick * 25 + node // 12, 0, None, None)
            sums.add(event, bookings_of(event), record, ingested_time_ns=event.time_ns)
    return list(sums.rows())


def _best_commit(folder: Path, rows: list[tuple[Any, ...]]) -> tuple[float, int]:
    """Return the minimum CPU seconds of a commit, and the bytes of its files."""
    seconds, size = [], 0
    for number in range(_RUNS):
        table = UsageTable(store_uri=str(folder / f"store-{number}"))
        table.load([])
        began = time.process_time()
        table.append(rows, {"bench": 1}, time_ms=1)
        seconds.append(time.process_time() - began)
        size = sum(file.stat().st_size for file in folder.glob(f"store-{number}/**/*.parquet"))
    return min(seconds), size


def _best_parquet(folder: Path, rows: list[tuple[Any, ...]]) -> tuple[float, int]:
    seconds, file = [], folder / "plain.parquet"
    for _ in range(_RUNS):
        with duckdb.connect() as connection:
            began = time.process_time()
            table = USAGE.table_of(rows)
            connection.register("usage", table)
            connection.execute(f"COPY usage TO '{file}' (FORMAT parquet, COMPRESSION zstd)")
            seconds.append(time.process_time() - began)
    return min(seconds), file.stat().st_size
