"""The law of every fault, judged by the store: each second is there once, or a gap names it.

Time of a node is covered by the samples in `entries`. A gap is named by the `gap_ns` of the sample
after it, or by a row of `gaps`. Time that is neither covered nor named is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import duckdb

from gpuledger.clock import NS_PER_SECOND
from gpuledger.store.query import entries_sql, gaps_sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

ACCURACY_NS: Final = 50_000_000
"""Times are stored in microseconds, and a simulated agent's clock has its own jitter."""
_SAMPLES: Final = """
WITH devices AS (
  SELECT node, boot_id, seq, time, interval_ns, gap_ns, gpu_uuid, sum(allocated_ns) AS allocated_ns
  FROM {entries} WHERE busy_method IS DISTINCT FROM 'accounting' GROUP BY ALL
)
SELECT node, epoch_ns(time) - interval_ns, epoch_ns(time), coalesce(gap_ns, 0),
  max(coalesce(round(allocated_ns / interval_ns), 1))::BIGINT
FROM devices GROUP BY node, boot_id, seq, time, interval_ns, gap_ns ORDER BY ALL
"""
_UNKNOWN: Final = """
SELECT coalesce(sum(allocated_ns), 0)::BIGINT FROM {entries} WHERE allocated_pod_state = 'unknown'
"""
_GAPS: Final = "SELECT epoch_ns(time_before), epoch_ns(time_after) FROM {gaps}"
_END_OF_TIME: Final = 2**62


class StoredSample(NamedTuple):
    """A sample in the store; its devices have the same interval."""

    node: str
    start_ns: int
    end_ns: int
    gap_ns: int
    """Time before it that no sample covers."""
    copies: int
    """How often it is stored."""


@dataclass(frozen=True, kw_only=True)
class StoredTime:
    """The time of all nodes, from the first sample of each to its last."""

    lost_seconds: float
    repeated_seconds: float
    named_seconds: float
    """Time that no sample covers, but that the store names as a gap."""
    newest_ns: int
    unknown_seconds: float = 0.0
    """GPU time whose allocation is unknown."""

    def as_line(self) -> str:
        """Return the result of a fault."""
        return (
            f"lost {self.lost_seconds:.1f} s, duplicated {self.repeated_seconds:.1f} s,"
            f" named as a gap {self.named_seconds:.1f} s,"
            f" allocation unknown {self.unknown_seconds:.1f} s"
        )


def read_time(store: Path) -> StoredTime:
    """Judge a store; raises UserError if it has no rows yet."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        entries = entries_sql(str(store))
        found = connection.sql(_SAMPLES.format(entries=entries)).fetchall()
        ((unknown_ns,),) = connection.sql(_UNKNOWN.format(entries=entries)).fetchall()
        gaps = connection.sql(_GAPS.format(gaps=gaps_sql(str(store)))).fetchall()
    judged = judge_time(
        [StoredSample(*row) for row in found],
        [(start or 0, end or _END_OF_TIME) for start, end in gaps],
    )
    return replace(judged, unknown_seconds=_seconds(unknown_ns))


def judge_time(samples: Sequence[StoredSample], gaps: Iterable[tuple[int, int]] = ()) -> StoredTime:
    """Judge the samples, sorted by node and time, with the gaps that the store names."""
    found = list(gaps)
    lost = repeated = named = 0
    for _, of_node in groupby(samples, key=lambda sample: sample.node):
        end_ns = None
        for sample in of_node:
            length_ns = sample.end_ns - sample.start_ns
            repeated += (sample.copies - 1) * length_ns
            if end_ns is None:
                end_ns = sample.start_ns
            missing_ns, overlap_ns = sample.start_ns - end_ns, end_ns - sample.start_ns
            if missing_ns > ACCURACY_NS:
                known_ns = min(missing_ns, max(sample.gap_ns, _named(end_ns, sample, found)))
                named += known_ns
                lost += missing_ns - known_ns
            if overlap_ns > ACCURACY_NS:
                repeated += min(overlap_ns, length_ns)
            end_ns = max(end_ns, sample.end_ns)
    return StoredTime(
        lost_seconds=_seconds(lost),
        repeated_seconds=_seconds(repeated),
        named_seconds=_seconds(named),
        newest_ns=max((sample.end_ns for sample in samples), default=0),
    )


def _named(end_ns: int, sample: StoredSample, gaps: Iterable[tuple[int, int]]) -> int:
    """Return the most time that one of the gaps names between two samples."""
    # The event before a gap and the one after it belong to any node of the partition.
    return max((min(sample.start_ns, end) - max(end_ns, start) for start, end in gaps), default=0)


def _seconds(ns: int) -> float:
    # Differences within the accuracy of many samples add up to less than a tenth of a second.
    return round(ns / NS_PER_SECOND, 1)
