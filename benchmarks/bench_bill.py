"""Seconds to bill a month of 10,000 GPUs, against one plain group-by over the same Parquet.

The store resembles a real one: usage by the hour, the inventory, nodes, and four versions of each
of 150,000 pods.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import duckdb
from deltalake import DeltaTable

from benchmarks.figure import Figure
from benchmarks.processes import own_peak_bytes
from benchmarks.synthetic_store import commit_files, write_rows
from gpuledger.store.schema import PARTITION_COLUMN, PODS, table_uri
from gpuledger.store.usage_schema import INVENTORY, NODES, USAGE_HOURLY
from gpuledger_reports.pricing.billing import BillMaker
from gpuledger_reports.pricing.periods import parse_window
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.usage_sums import UsageReader

NAME = "bill"
GPUS: Final = 10_000
DAYS: Final = 30
_ROUNDS: Final = 3
_SLEW_NS: Final = 10_000
_SLEWED_DAYS: Final = 2
# In an hour, 15 of 100 devices have no pod, 15 have two pods that share them, and 70 have one; each
# pod runs for half a day on the GPUs of one node. Every hour is covered to the last nanosecond, or
# by a node's clock that is slewed by at most this much.
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
    SELECT *, 'idle' AS category FROM parts
    UNION ALL SELECT *, 'pod' FROM parts WHERE used_ns > 0
)
SELECT DATE '2026-10-01' + $day::INTEGER AS event_date, 'prod' AS cluster,
    'gpu-node-' || node AS node,
    TIMESTAMPTZ '2026-10-01 00:00:00+00' + to_hours(($day * 24 + hour)::INTEGER) AS hour,
    'GPU-' || md5(gpu::VARCHAR) AS gpu_uuid, gpu % 8 AS gpu_index,
    CASE WHEN node % 3 = 0 THEN 'NVIDIA A100-SXM4-80GB' ELSE 'NVIDIA H100 80GB HBM3' END AS model,
    7 AS compute_slices, 8 AS memory_slices, 7 AS gpu_compute_slices, 8 AS gpu_memory_slices,
    category, CASE WHEN category = 'idle' THEN part_ns END AS allocated_ns,
    CASE WHEN category = 'idle' THEN part_ns - used_ns ELSE used_ns END AS busy_ns,
    CASE WHEN category = 'pod' THEN used_ns END AS measured_busy_ns,
    80000000000::HUGEINT * part_ns AS memory_byte_ns, chance AS energy_millijoules,
    CASE WHEN category = 'pod' THEN uid END AS pod_uid,
    CASE WHEN category = 'pod' THEN 'known' END AS pod_state,
    CASE WHEN category = 'pod' THEN namespace END AS namespace,
    CASE WHEN category = 'pod' THEN pod END AS pod,
    CASE WHEN category = 'idle' AND slot > 0 THEN 'known' END AS allocated_pod_state,
    CASE WHEN category = 'idle' AND slot > 0 THEN uid END AS allocated_pod_uid,
    CASE WHEN category = 'idle' AND slot > 0 THEN namespace END AS allocated_namespace,
    CASE WHEN category = 'idle' AND slot > 0 THEN pod END AS allocated_pod,
    1800 AS sample_count, node % 12 AS kafka_partition,
    ($day * 24 + hour) * 1000000 AS first_offset,
    ($day * 24 + hour) * 1000000 + 999999 AS last_offset, 0 AS ingested_time_ns
FROM (
    SELECT *, 'pod-' || pod_number AS pod, 'team-' || pod_number % 40 AS namespace,
        '00000000-0000-4000-8000-' || lpad(pod_number::VARCHAR, 12, '0') AS uid
    FROM accounts
)
"""
_PODS: Final = """
WITH pods AS (
    SELECT cluster, node, coalesce(pod_uid, allocated_pod_uid) AS pod_uid,
        any_value(coalesce(namespace, allocated_namespace)) AS namespace,
        any_value(coalesce(pod, allocated_pod)) AS pod, min(hour) AS begin_time,
        max(hour) + INTERVAL 1 HOUR AS end_time, min(kafka_partition) AS kafka_partition
    FROM usage_hourly WHERE coalesce(pod_uid, allocated_pod_uid) IS NOT NULL GROUP BY ALL
), versions AS (
    SELECT *, row_number() OVER (ORDER BY node, pod_uid, version) AS number
    FROM pods CROSS JOIN range(4) AS versions(version)
)
SELECT * EXCLUDE (begin_time, end_time, version, number), 'Job' AS owner_kind,
    'job-' || hash(pod) % 6000 AS owner_name,
    '{"team":"team-' || hash(pod) % 60 || '","cost-center":"cc-' || hash(pod) % 25 || '"}'
        AS labels,
    [begin_time - INTERVAL 20 SECONDS, begin_time, end_time, end_time + INTERVAL 30 SECONDS]
        [version + 1] AS in_force_from,
    begin_time - INTERVAL 20 SECONDS AS created_time,
    CASE WHEN version = 3 THEN end_time + INTERVAL 30 SECONDS END AS deleted_time,
    number::VARCHAR AS resource_version, number AS kafka_offset,
    CASE WHEN version > 0 THEN md5(node || pod_uid) || md5(pod_uid || node) END AS container_id,
    CASE WHEN version > 0 THEN 'main' END AS container
FROM versions
"""
_NODES: Final = """
SELECT DISTINCT cluster, node, TIMESTAMPTZ '2026-09-01 00:00:00+00' AS in_force_from,
    'pool-' || hash(node) % 4 AS node_pool, 'p5.48xlarge' AS instance_type,
    'eu-west-1' AS region, 'on-demand' AS capacity_type,
    '{"kubernetes.io/hostname":"' || node || '"}' AS labels, '1' AS resource_version,
    0 AS kafka_partition, 0 AS kafka_offset
FROM usage_hourly
"""
_INVENTORY: Final = """
SELECT DISTINCT cluster, node, TIMESTAMPTZ '2026-09-01 00:00:00+00' AS in_force_from, gpu_uuid,
    model, gpu_index, 0 AS kafka_partition, 0 AS kafka_offset
FROM usage_hourly
"""
_BY: Final = ("namespace", "model")
_BY_OWNER: Final = ("owner", "label:team")


def run() -> Iterator[Figure]:
    """Yield a bill's time and memory, each with its reference."""
    with TemporaryDirectory() as folder, TemporaryDirectory() as slewed:
        _write_store(Path(folder), DAYS, slew_ns=0)
        _write_store(Path(slewed), _SLEWED_DAYS, slew_ns=_SLEW_NS)
        reference = min(_group_by_seconds(folder) for _ in range(_ROUNDS))
        by_names, slewed_by_names, by_owner = (
            _measured_apart(store, by)
            for store, by in ((folder, _BY), (slewed, _BY), (folder, _BY_OWNER))
        )
    yield Figure(
        name="bill_month_10k_gpus_seconds",
        value=by_names.seconds,
        unit="seconds",
        reference=reference,
    )
    # CPU time of all threads; on a busy machine it shows how long two idle cores would take.
    yield Figure(name=f"{NAME}.cpu", value=by_names.cpu_seconds, unit="seconds")
    yield Figure(
        name=f"{NAME}.slewed_day.cpu",
        value=slewed_by_names.cpu_seconds / _SLEWED_DAYS,
        unit="seconds",
    )
    yield Figure(name=f"{NAME}.by_owner", value=by_owner.seconds, unit="seconds")
    yield Figure(name=f"{NAME}.by_owner.cpu", value=by_owner.cpu_seconds, unit="seconds")
    yield Figure(name=f"{NAME}.peak_memory", value=float(by_names.peak_bytes), unit="bytes")
    yield Figure(
        name=f"{NAME}.by_owner.peak_memory", value=float(by_owner.peak_bytes), unit="bytes"
    )


class _Measured(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def _measured_apart(store: str, by: tuple[str, ...]) -> _Measured:
    # A separate process, so that its memory is only that of these bills.
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure_bills, store, by).result()


def _measure_bills(store: str, by: tuple[str, ...]) -> _Measured:
    rounds = [_bill_seconds(store, by) for _ in range(_ROUNDS)]
    seconds, cpu_seconds = (min(each) for each in zip(*rounds, strict=True))
    return _Measured(seconds, cpu_seconds, own_peak_bytes())


def _bill_seconds(store: str, by: tuple[str, ...]) -> tuple[float, float]:
    began, cpu_began = time.monotonic(), time.process_time()
    bill = BillMaker(UsageReader(store), read_policy(None), by=by).make(
        parse_window("2026-10", option="period", now_us=0)
    )
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    if bill.line_cost != bill.asset_cost or not bill.lines:
        raise AssertionError("the bill does not add up")
    return seconds, cpu_seconds


def _group_by_seconds(store: str) -> float:
    files = DeltaTable(table_uri(store, USAGE_HOURLY.name)).file_uris()
    with duckdb.connect() as connection:
        began = time.monotonic()
        connection.execute(
            "SELECT model, coalesce(allocated_namespace, namespace), category, sum(allocated_ns),"
            " sum(busy_ns) FROM read_parquet($files) GROUP BY ALL",
            {"files": files},
        ).fetchall()
        return time.monotonic() - began


def _write_store(store: Path, days: int, *, slew_ns: int) -> None:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for day in range(days):
            folder = store / USAGE_HOURLY.name / f"{PARTITION_COLUMN}={_day_text(day)}"
            given = {"day": day, "gpus": GPUS, "slew_ns": slew_ns}
            # In the order in which rollups write it: hour after hour, and by device.
            write_rows(connection, USAGE_HOURLY, _ROWS, folder, given, order="hour, node, gpu_uuid")
        connection.execute(
            "CREATE VIEW usage_hourly AS"
            f" FROM read_parquet('{store}/{USAGE_HOURLY.name}/*/*.parquet')"
        )
        for schema, rows in ((PODS, _PODS), (NODES, _NODES), (INVENTORY, _INVENTORY)):
            write_rows(connection, schema, rows, store / schema.name)
    for schema in (USAGE_HOURLY, PODS, NODES, INVENTORY):
        commit_files(store, schema)


def _day_text(day: int) -> str:
    return f"2026-10-{day + 1:02}"
