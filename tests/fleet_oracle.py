"""The bill of whole GPUs by the documented rules, from the raw rows of a store.

The rules are those of `docs/concepts/usage-and-idle.md` for the basis `allocated`, without MIG.
Rows are read from the files of the tables, and amounts are fractions of nanoseconds. Nothing here
uses the product's SQL, views or units.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
from deltalake import DeltaTable

HOUR_NS: Final = 3_600_000_000_000
MINUTE_NS: Final = HOUR_NS // 60
SKEW_NS: Final = MINUTE_NS
"""Time after the end of an hour within which a pod that the hour's samples list was created."""
Row = Mapping[str, Any]
Place = tuple[str, str]
"""A node and a GPU."""
Pod = tuple[str, str, str]
"""A pod's UID, namespace and name."""


class LineKey(NamedTuple):
    """A line item by node, GPU, namespace and pod."""

    node: str
    gpu: str
    namespace: str
    pod: str


@dataclass(kw_only=True)
class Amounts:
    """The amounts of a line item, in nanoseconds."""

    allocated: Fraction = Fraction(0)
    used: Fraction = Fraction(0)
    billed: Fraction = Fraction(0)
    by_others: Fraction = Fraction(0)


@dataclass(kw_only=True)
class GpuHour:
    """The time of a GPU of a node in an hour."""

    present: int = 0
    """Time in the inventory."""
    allocated: dict[Pod, int] = field(default_factory=lambda: defaultdict(int))
    unallocated: int = 0
    unknown: int = 0
    used: dict[Pod, int] = field(default_factory=lambda: defaultdict(int))
    overhead: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Time that the host or unknown processes used."""


def raw_rows(store: Path, table: str) -> list[Row]:
    """Return the rows in the files of a table, with times in nanoseconds since the Unix epoch."""
    files = DeltaTable(str(store / table)).file_uris()
    if not files:
        return []
    with duckdb.connect() as connection:
        found = connection.execute("SELECT * FROM read_parquet($1)", [files])
        names = [(name, kind) for name, kind, *_ in found.description or ()]
        columns = ", ".join(
            f"epoch_ns({name}) AS {name}" if "TIME" in str(kind) else name for name, kind in names
        )
        sql = f"SELECT {columns} FROM read_parquet($1)"  # noqa: S608  # our own names
        rows = connection.execute(sql, [files]).fetchall()
    return [dict(zip((name for name, _ in names), row, strict=True)) for row in rows]


def bill_by_rules(store: Path) -> dict[LineKey, Amounts]:
    """Return the line items that have amounts."""
    usage = raw_rows(store, "usage")
    end_ns = max(row["minute"] for row in usage) + MINUTE_NS
    hours: dict[tuple[Place, int], GpuHour] = defaultdict(GpuHour)
    for place, begin_ns, until_ns in _stays(raw_rows(store, "inventory"), end_ns):
        for hour in range(begin_ns // HOUR_NS, -(-until_ns // HOUR_NS)):
            within = min(until_ns, (hour + 1) * HOUR_NS) - max(begin_ns, hour * HOUR_NS)
            hours[place, hour].present += within
    pods = raw_rows(store, "pods")
    for row in usage:
        of_hour = hours[(row["node"], row["gpu_uuid"]), row["minute"] // HOUR_NS]
        _add(row, to=of_hour, pods=pods)
    lines: dict[LineKey, Amounts] = defaultdict(Amounts)
    for (place, _), of_hour in hours.items():
        _divide(of_hour, place, lines)
    return {key: line for key, line in lines.items() if line != Amounts()}


def _stays(inventory: Sequence[Row], end_ns: int) -> Iterator[tuple[Place, int, int]]:
    """Yield the node and GPU, the begin and the end of each stay of a GPU in a node.

    The GPU is in the node whose inventory listed it last. In these stores, no inventory ends a stay
    without beginning another one.
    """
    listed: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in inventory:
        listed[row["gpu_uuid"]].append((row["in_force_from"], row["node"]))
    for gpu, versions in listed.items():
        versions.sort()
        ends = [*(since for since, _ in versions[1:]), end_ns]
        for (begin_ns, node), until_ns in zip(versions, ends, strict=True):
            yield (node, gpu), begin_ns, until_ns


def _add(row: Row, *, to: GpuHour, pods: Sequence[Row]) -> None:
    if row["category"] == "pod":
        to.used[_pod_of(row, "", pods)] += row["busy_ns"] or 0
    elif row["category"] != "idle":
        to.overhead[f"__{row['category']}__"] += row["busy_ns"] or 0
    elif row["allocated_pod_state"] == "unknown":
        to.unknown += row["allocated_ns"]
    elif row["allocated_pod_state"] is None:
        to.unallocated += row["allocated_ns"]
    else:
        to.allocated[_pod_of(row, "allocated_", pods)] += row["allocated_ns"]


def _pod_of(row: Row, prefix: str, pods: Sequence[Row]) -> Pod:
    """Return the pod of a row: the one with its UID, or the one that had its name in that hour.

    If the record of a UID contradicts an allocation's name, the name counts. A sample may begin
    before a pod that it lists, so a pod may get the name soon after the hour.
    """
    name = row[f"{prefix}namespace"], row[f"{prefix}pod"]
    if uid := row[f"{prefix}pod_uid"]:
        names = {(pod["namespace"], pod["pod"]) for pod in pods if pod["pod_uid"] == uid} or {name}
        if not prefix or name in names:
            return (uid, *names.pop())
    begin_ns = row["minute"] // HOUR_NS * HOUR_NS
    end_ns = begin_ns + HOUR_NS
    named = [
        pod
        for pod in sorted(pods, key=itemgetter("created_time"))
        if (pod["namespace"], pod["pod"]) == name
        and pod["node"] == row["node"]
        and pod["created_time"] < end_ns + SKEW_NS
        and (pod["deleted_time"] or begin_ns) >= begin_ns
    ]
    there = [pod for pod in named if pod["created_time"] < end_ns][-1:] or named
    return (there[0]["pod_uid"] if there else "", *name)


def _divide(hour: GpuHour, place: Place, lines: dict[LineKey, Amounts]) -> None:
    """Add the parts of a GPU's hour to the line items."""

    def line_of(pod: Pod) -> Amounts:
        return lines[LineKey(*place, *pod[1:])]

    for pod, allocated_ns in hour.allocated.items():
        line_of(pod).allocated += allocated_ns
    for pod, used_ns in hour.used.items():
        line_of(pod).used += used_ns
    # 1. If samples cover more than the inventory, all times are scaled down.
    covered = sum(hour.allocated.values()) + hour.unallocated + hour.unknown
    scale = min(Fraction(1), Fraction(hour.present, covered)) if covered else Fraction(1)
    own = {pod: time * scale for pod, time in hour.allocated.items() if time}
    others = {pod: time * scale for pod, time in hour.used.items() if pod not in own}
    overhead = {name: time * scale for name, time in hour.overhead.items()}
    # 3. Allocated time is billed, and use without an allocation up to the time that is left.
    for pod, time in own.items():
        line_of(pod).billed += time
    unknown, free = hour.unknown * scale, (hour.unallocated + hour.unknown) * scale
    wanted = sum(others.values()) + sum(overhead.values())
    fitting = min(Fraction(1), free / wanted) if wanted else Fraction(1)
    for pod, time in others.items():
        line_of(pod).billed += time * fitting
        # The rest is used by others, and the allocatees share it by their allocated time.
        rest = min(time * (1 - fitting), sum(own.values(), Fraction()))
        for allocatee, share in own.items():
            # Pods of one name have one line item, on which the time counts once.
            for key in {LineKey(*place, *pod[1:]), LineKey(*place, *allocatee[1:])}:
                lines[key].by_others += rest * share / sum(own.values())
    left = free - wanted * fitting
    special = {
        **{name: time * fitting for name, time in overhead.items()},
        # 5. Unallocated time was used first.
        "__unknown__": min(left, unknown),
        "__idle__": left - min(left, unknown),
        "__no_data__": hour.present - covered * scale,
    }
    for name, time in special.items():
        lines[LineKey(*place, name, name)].billed += time
