"""Seconds to bill a month of 10,000 GPUs, against one plain group-by over the same Parquet."""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import duckdb
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from benchmarks.figure import Figure
from gpuledger.store.schema import PARTITION_COLUMN, table_uri
from gpuledger.store.usage_schema import USAGE_HOURLY
from reports.billing import BillMaker
from reports.periods import parse_period
from reports.policy_file import read_policy
from reports.usage_sums import UsageReader

NAME = "bill"
GPUS: Final = 10_000
DAYS: Final = 30
_ROUNDS: Final = 3
_SLEW_NS: Final = 10_000
_SLEWED_DAYS: Final = 2
_BYTES_PER_KIB: Final = 1024
# A device in 100 has nobody in an hour in 15, two who share it in 15, and one in 70; each pod runs
# for half a day on the GPUs of one node. Every hour is covered to the last nanosecond, or by a
# node's clock that is slewed by so much at most.
_ROWS: Final = """
WITH device_hours AS (
    SELECT gpu, hour, gpu // 8 AS node, hash(gpu * 100000 + $day * 24 + hour) % 1000000 AS chance,
        hash(gpu // 8 * 7 + ($day * 24 + hour) // 12) % 1000000 AS job
    FROM range($gpus) AS gpus(gpu), range(24) AS hours(hour)
), counted AS (
    SELECT *, CASE WHEN chance % 100 < 70 THEN 1 WHEN chance % 100 < 85 THEN 0 ELSE 2 END AS holders
    FROM device_hours
), slots AS (
    SELECT *, 0 AS slot FROM counted WHERE holders = 0
    UNION ALL SELECT *, 1 FROM counted WHERE holders >= 1
    UNION ALL SELECT *, 2 FROM counted WHERE holders = 2
), parts AS (
    SELECT *, (job * 31 + slot) % 20000 AS pod_number,
        (3600000000000 + (hash(node * 24 + hour) % (2 * $slew_ns + 1))::BIGINT - $slew_ns)
            // greatest(holders, 1) AS part_ns,
        CASE WHEN slot > 0 THEN 3590000000000 // greatest(holders, 1) // 100 * (chance // 100 % 100)
            ELSE 0 END AS used_ns
    FROM slots
), accounts AS (
    SELECT *, 'idle' AS account FROM parts
    UNION ALL SELECT *, 'pod' FROM parts WHERE used_ns > 0
)
SELECT DATE '2026-10-01' + $day::INTEGER AS event_date, 'prod' AS cluster,
    'gpu-node-' || node AS node,
    TIMESTAMPTZ '2026-10-01 00:00:00+00' + to_hours(($day * 24 + hour)::INTEGER) AS hour,
    'GPU-' || md5(gpu::VARCHAR) AS gpu_uuid, gpu % 8 AS gpu_index,
    CASE WHEN node % 3 = 0 THEN 'NVIDIA A100-SXM4-80GB' ELSE 'NVIDIA H100 80GB HBM3' END AS model,
    7 AS compute_slices, 8 AS memory_slices, 7 AS board_compute_slices, 8 AS board_memory_slices,
    account, CASE WHEN account = 'idle' THEN part_ns END AS held_ns,
    CASE WHEN account = 'idle' THEN part_ns - used_ns ELSE used_ns END AS busy_ns,
    CASE WHEN account = 'pod' THEN used_ns END AS measured_busy_ns,
    80000000000::HUGEINT * part_ns AS memory_byte_ns, chance AS energy_millijoules,
    CASE WHEN account = 'pod' THEN uid END AS pod_uid,
    CASE WHEN account = 'pod' THEN 'known' END AS pod_state,
    CASE WHEN account = 'pod' THEN namespace END AS namespace,
    CASE WHEN account = 'pod' THEN pod END AS pod,
    CASE WHEN account = 'idle' AND slot > 0 THEN 'known' END AS holder_state,
    CASE WHEN account = 'idle' AND slot > 0 THEN uid END AS holder_uid,
    CASE WHEN account = 'idle' AND slot > 0 THEN namespace END AS holder_namespace,
    CASE WHEN account = 'idle' AND slot > 0 THEN pod END AS holder_pod,
    1800 AS tick_count, node % 12 AS kafka_partition,
    ($day * 24 + hour) * 1000000 AS first_offset,
    ($day * 24 + hour) * 1000000 + 999999 AS last_offset, 0 AS ingested_time_ns
FROM (
    SELECT *, 'pod-' || pod_number AS pod, 'team-' || pod_number % 40 AS namespace,
        '00000000-0000-4000-8000-' || lpad(pod_number::VARCHAR, 12, '0') AS uid
    FROM accounts
)
"""


def run() -> Iterator[Figure]:
    """Yield the time of a bill and the memory that it took, each with what it is held against."""
    with TemporaryDirectory() as folder, TemporaryDirectory() as slewed:
        _write_days(Path(folder), DAYS, slew_ns=0)
        _write_days(Path(slewed), _SLEWED_DAYS, slew_ns=_SLEW_NS)
        reference = min(_group_by_seconds(folder) for _ in range(_ROUNDS))
        # A process of its own, so that its memory is that of bills alone.
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            seconds, cpu_seconds, peak_bytes = process.submit(_measure_bills, folder).result()
            _, of_slewed, _ = process.submit(_measure_bills, slewed).result()
    yield Figure(
        name="bill_month_10k_gpus_seconds", value=seconds, unit="seconds", reference=reference
    )
    # Of all threads: on a machine that others use too, it says what two idle cores would take.
    yield Figure(name=f"{NAME}.cpu", value=cpu_seconds, unit="seconds")
    yield Figure(name=f"{NAME}.slewed_day.cpu", value=of_slewed / _SLEWED_DAYS, unit="seconds")
    yield Figure(name=f"{NAME}.peak_memory", value=float(peak_bytes), unit="bytes")


def _measure_bills(store: str) -> tuple[float, float, int]:
    rounds = [_bill_seconds(store) for _ in range(_ROUNDS)]
    seconds, cpu_seconds = (min(each) for each in zip(*rounds, strict=True))
    # Not by getrusage, whose maximum is also that of the process which this one was forked from.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return seconds, cpu_seconds, int(peak_kib) * _BYTES_PER_KIB


def _bill_seconds(store: str) -> tuple[float, float]:
    began, cpu_began = time.monotonic(), time.process_time()
    bill = BillMaker(UsageReader(store), read_policy(None), by=["namespace", "model"]).make(
        parse_period("2026-10")
    )
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    if bill.line_cost != bill.origin_cost or not bill.lines:
        raise AssertionError("the bill does not add up")
    return seconds, cpu_seconds


def _group_by_seconds(store: str) -> float:
    files = DeltaTable(table_uri(store, USAGE_HOURLY.name)).file_uris()
    with duckdb.connect() as connection:
        began = time.monotonic()
        connection.execute(
            "SELECT model, coalesce(holder_namespace, namespace), account, sum(held_ns),"
            " sum(busy_ns) FROM read_parquet($files) GROUP BY ALL",
            {"files": files},
        ).fetchall()
        return time.monotonic() - began


def _write_days(store: Path, days: int, *, slew_ns: int) -> None:
    table = store / USAGE_HOURLY.name
    names = {column.name: _type_of(str(column.kind)) for column in USAGE_HOURLY.columns}
    made = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in names.items())
    empty = ", ".join(f"NULL AS {name}" for name in names)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        for day in range(days):
            folder = table / f"{PARTITION_COLUMN}={_day_text(day)}"
            folder.mkdir(parents=True)
            connection.execute(
                f"COPY (SELECT {made} FROM (SELECT {empty} WHERE false"  # noqa: S608  # the table's own names
                f" UNION ALL BY NAME (FROM ({_ROWS}))) ORDER BY hour, node, gpu_uuid)"
                f" TO '{folder}/rows.parquet' (FORMAT parquet, COMPRESSION zstd)",
                {"day": day, "gpus": GPUS, "slew_ns": slew_ns},
            )
    written = DeltaTable.create(
        str(table), USAGE_HOURLY.arrow, partition_by=list(USAGE_HOURLY.partition_by)
    )
    written.create_write_transaction(
        [
            AddAction(
                path=str(file.relative_to(table)),
                size=file.stat().st_size,
                partition_values={PARTITION_COLUMN: file.parent.name.partition("=")[2]},
                modification_time=0,
                data_change=True,
                stats="{}",
            )
            for file in sorted(table.glob("*/*.parquet"))
        ],
        mode="append",
        schema=written.schema(),
        partition_by=list(USAGE_HOURLY.partition_by),
    )


def _day_text(day: int) -> str:
    return f"2026-10-{day + 1:02}"


def _type_of(arrow: str) -> str:
    """Return DuckDB's type of an Arrow type."""
    kinds = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT", "Date32": "DATE"}
    kinds |= {"Timestamp": "TIMESTAMPTZ", "Decimal128": "DECIMAL(38, 0)"}
    return next(kind for name, kind in kinds.items() if name in arrow)
