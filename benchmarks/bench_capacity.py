"""Seconds and memory of each capacity report on 90 days of 10,000 GPUs, against one group-by.

The first run writes a store with 200,000 pods, which takes minutes, and keeps it in the temporary
directory.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import gettempdir
from typing import Final, NamedTuple

import duckdb
from deltalake import DeltaTable

from benchmarks import capacity_store, synthetic_store
from benchmarks.figure import Figure
from benchmarks.processes import own_peak_bytes
from gpuledger.store.schema import table_uri
from gpuledger.store.usage_schema import USAGE_HOURLY
from gpuledger_reports.capacity.asking import answer, ask, open_store
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.pricing.policy_file import read_policy

NAME = "capacity"
GPUS: Final = 10_000
DAYS: Final = 90


def run() -> Iterator[Figure]:
    """Yield each report's time and memory, with the time of a plain group-by of the same hours."""
    store = str(_stored(GPUS, DAYS))
    reference = _apart(_group_by, store).seconds
    for name in REPORTS:
        measured = _apart(_read, store, name)
        yield Figure(
            name=f"{NAME}.{name}", value=measured.seconds, unit="seconds", reference=reference
        )
        # CPU time of all threads; on a busy machine it shows how long two idle cores would take.
        yield Figure(name=f"{NAME}.{name}.cpu", value=measured.cpu_seconds, unit="seconds")
        yield Figure(
            name=f"{NAME}.{name}.peak_memory", value=float(measured.peak_bytes), unit="bytes"
        )


class _Measured(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def _stored(gpus: int, days: int) -> Path:
    """Return a store of this size, which an earlier run may have written."""
    makers = (Path(module.__file__ or "") for module in (capacity_store, synthetic_store))
    columns = [str(schema.arrow) for schema in capacity_store.SCHEMAS]
    made_by = sha256(b"".join(each.read_bytes() for each in makers) + str(columns).encode())
    name = f"gpuledger-{NAME}-{gpus}-{days}-{made_by.hexdigest()[:12]}"
    store = Path(gettempdir()) / name
    if not store.exists():
        unfinished = store.with_name(f"{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        capacity_store.write_store(unfinished, gpus=gpus, days=days)
        unfinished.rename(store)
    return store


def _apart(work: Callable[..., None], *given: str) -> _Measured:
    # A separate process, so that its memory is only that of this report.
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(_measured, work, *given).result()


def _read(store: str, name: str) -> None:
    """Read a report of the whole time, as its command does."""
    with duckdb.connect() as connection:
        question = ask(
            REPORTS[name],
            {"window": f"{DAYS}d"},
            complete=open_store(connection, store),
            policy=read_policy(None).policy,
            now_us=0,
            advance=lambda _: None,
        )
        if not answer(REPORTS[name], question, connection).rows:
            raise AssertionError(f"{name} found nothing")


def _group_by(store: str) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            "SELECT model, coalesce(allocated_namespace, namespace), category, sum(allocated_ns),"
            " sum(busy_ns) FROM read_parquet($files) GROUP BY ALL",
            {"files": DeltaTable(table_uri(store, USAGE_HOURLY.name)).file_uris()},
        ).fetchall()


def _measured(work: Callable[..., None], *given: str) -> _Measured:
    began, cpu_began = time.monotonic(), time.process_time()
    work(*given)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    return _Measured(seconds, cpu_seconds, own_peak_bytes())
