"""Bills of real clusters: the costs of tenants by shares, compared with whole GPUs."""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from gpuledger_reports.reading.charging_sql import HOUR_UNITS
from tests.unit.reports.stores import BEGIN_US, HOUR_US, Row, allocated, write_store
from tests.unit.reports.test_bill import bill_of

TRACES = Path(__file__).parents[2] / "data/traces"
NS_PER_SECOND = 10**9
ONE = "prices: [{name: one, per_gpu_hour: 1}]\n"


def rows_of(name: str) -> list[dict[str, str]]:
    with gzip.open(TRACES / name, "rt") as file:
        return list(csv.DictReader(file))


def hours_of(begin_second: int, end_second: int) -> Iterator[tuple[int, int]]:
    """Yield each hour that a period touches, with its seconds in that hour."""
    for hour in range(begin_second // 3600, -(-end_second // 3600)):
        yield hour, min(end_second, (hour + 1) * 3600) - max(begin_second, hour * 3600)


def test_pods_that_share_gpus_pay_for_their_shares_and_not_for_whole_gpus(tmp_path: Path) -> None:
    """15,219 GPU-hours if each pod pays for a whole GPU, 7,077 by the allocated shares."""
    usage: list[Row] = []
    whole_seconds = share_milliseconds = 0
    for row in rows_of("openb_shared_pods.csv.gz"):
        share = int(row["gpu_milli"])
        begin, end = int(row["scheduled_time"]), int(row["deletion_time"])
        whole_seconds += end - begin
        share_milliseconds += (end - begin) * share
        for hour, seconds in hours_of(begin, end):
            # All on the first day; each day of a pod is on its own GPU, which changes no sum.
            part_ns = seconds * share * NS_PER_SECOND // 1000
            where = {"gpu": f"GPU-{row['name']}-{hour // 24}", "model": "openb"}
            usage.append(allocated(hour % 24, row["name"], part_ns, **where))
            rest_ns = seconds * NS_PER_SECOND - part_ns
            usage.append(allocated(hour % 24, None, rest_ns, **where))
    bill = bill_of(write_store(tmp_path, usage_hourly=usage), ONE, by=["model"], hours=24)
    assert bill.exact_asset_cost == Fraction(whole_seconds, 3600)
    by_kind = {line.idle_kind: line.gpu_cost for line in bill.lines}
    assert by_kind[None] == Fraction(share_milliseconds, 3_600_000)
    assert (round(bill.exact_asset_cost), round(by_kind[None])) == (15_219, 7_077)


def test_jobs_are_billed_to_their_virtual_clusters(tmp_path: Path) -> None:
    usage: list[Row] = []
    seconds_of: dict[str, int] = defaultdict(int)
    for number, row in enumerate(rows_of("philly_day.csv.gz")):
        begin, gpus = int(row["second"]), int(row["gpus"])
        end = begin + int(row["duration_seconds"])
        seconds_of[row["virtual_cluster"]] += (end - begin) * gpus
        usage += [
            allocated(
                hour,
                f"job-{number}",
                seconds * NS_PER_SECOND,
                gpu=f"GPU-{number}-{gpu}",
                allocated_namespace=row["virtual_cluster"],
            )
            for hour, seconds in hours_of(begin, end)
            for gpu in range(gpus)
        ]
    bill = bill_of(write_store(tmp_path, usage_hourly=usage), ONE, by=["namespace"], hours=48)
    assert {line.values[0]: line.exact_cost for line in bill.lines} == {
        cluster: Fraction(seconds, 3600) for cluster, seconds in seconds_of.items()
    }
    assert sum(line.billed for line in bill.lines) == bill.exact_asset_cost * HOUR_UNITS
    assert bill.end_us <= BEGIN_US + 48 * HOUR_US
