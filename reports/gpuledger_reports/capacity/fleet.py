"""The report `fleet`: the number of GPUs, how many are in use, and which pods would fit now.

GPUs are counted by time: a GPU that was allocated for half an hour counts as half a GPU in that
hour. A GPU belongs to the fleet while the inventory of its node lists it, as in bills. It belongs
to the group of its node's labels at the start of each day, and for the last hour, of this hour.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import duckdb

from gpuledger.store.pod_names import NEWEST_LAST
from gpuledger.store.views import with_nodes
from gpuledger_reports.capacity.allocations import USAGE, usage_limits
from gpuledger_reports.capacity.cordons import create_cordoned
from gpuledger_reports.capacity.power import ABOUT as ABOUT_POWER
from gpuledger_reports.capacity.power import COLUMNS as POWER
from gpuledger_reports.capacity.power import read_power
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Key,
    Option,
    Question,
    Report,
    Row,
    one_of,
    rounded_cell,
)
from gpuledger_reports.reading.inventory import InventoryRow, Node, stays_of
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window, day_of, days_in
from gpuledger_reports.reading.versions import NodeVersion, effective_versions, version_at

SHAPES: Final = (1, 2, 4, 8)
"""Numbers of whole GPUs, on one node, for which the report counts the pods that fit."""
_DIMENSIONS: Final = {
    **GPU_DIMENSIONS,
    "node": "node",
    "namespace": "namespace",
}
_AMOUNTS: Final = ("total", "healthy", "allocatable", "allocated", "used", "free", "cordoned")
_OF_GPUS: Final = ("healthy", "allocatable", "free", "cordoned")
_OF_HOLDERS: Final = ("allocated", "used")
"""The amounts that are counted by namespace; the others are in the row without a namespace."""
COLUMNS: Final[Mapping[str, str]] = {
    "day": "Day",
    "total": "GPUs",
    "healthy": "Healthy",
    "allocatable": "Allocatable",
    "allocated": "Allocated",
    "used": "Used",
    "free": "Free",
    "cordoned": "",
    "mean_total": "",
    "mean_healthy": "",
    "mean_allocatable": "",
    "mean_allocated": "Mean: allocated",
    "mean_used": "Mean: used",
    "mean_free": "Mean: free",
    "mean_cordoned": "",
    "fits_1": "Fit: 1 GPU",
    "fits_2": "2 GPUs",
    "fits_4": "4 GPUs",
    "fits_8": "8 GPUs",
    "fits_mig": "MIG",
    "fits_shares": "Shares",
    **POWER,
}
_WHOLE: Final = 0.999
"""The minimum share of an hour that counts as the whole hour."""
_NOT_SHARED: Final = 0.75
"""The minimum share of a container that counts as a whole GPU, because runs may begin during a
minute."""
_SHOWN: Final = 0.05
"""The minimum number of GPUs for a note."""
_SHARES_FROM_US: Final = DAY_US
"""Time before the end of the window from which the size of a GPU's shares is derived."""
# A row of the category `idle` is the part of a device that is allocated to one pod or job, or free.
# Rows of other categories contain use, and have no `allocated_ns`.
_PARTS: Final = """
    SELECT *,
        CASE WHEN category <> 'idle' THEN NULL
            WHEN allocated_pod_state = 'unknown' THEN 'unknown'
            WHEN allocated_pod_state IS NULL AND allocated_job_id IS NULL THEN 'free'
            ELSE 'allocated' END AS part_state,
        (allocated_ns - coalesce(unresponsive_ns, 0)) / 3.6e12 AS healthy_hours
    FROM {rows}
"""
_DAY: Final = f"make_timestamptz(greatest(epoch_us({{time}}) // {DAY_US} * {DAY_US}, $begin_us))"
"""SQL of the start of a time's day, within the window."""
_SUMS: Final = f"""
    WITH parts AS ({_PARTS.format(rows=USAGE)}),
    of_nodes AS (
        SELECT {_DAY.format(time="time")} AS time,
            cluster, node, model, {{namespace}} AS namespace,
            sum(healthy_hours * device_fraction) AS healthy,
            sum(healthy_hours * device_fraction) FILTER (part_state <> 'unknown') AS allocatable,
            sum(healthy_hours * device_fraction) FILTER (part_state = 'free') AS free,
            sum(allocated_gpu_hours) FILTER (part_state = 'allocated') AS allocated,
            sum(gpu_hours) FILTER (part_state IS NULL) AS used
        FROM parts GROUP BY ALL
        UNION ALL BY NAME
        SELECT {_DAY.format(time="hour")} AS time,
            cluster, node, model, sum(hours * device_fraction) AS cordoned,
            -cordoned AS allocatable, -cordoned AS free
        FROM cordoned_hours
        WHERE hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)
        GROUP BY ALL
    )
    SELECT epoch_us(time) // {DAY_US} AS day, {{columns}},
        {{amounts}}
    FROM {with_nodes("of_nodes")} GROUP BY ALL
"""  # noqa: S608  # our own names
_NAMESPACE: Final = "coalesce(namespace, allocated_namespace)"
# The share of a container is its allocated time in the minutes in which it had an allocation. It is
# a part of the GPU only if the rest was free meanwhile: in the first and the last minute of a run,
# the whole GPU may be free, too.
_DEVICES: Final = f"""
    WITH found AS ({_PARTS.format(rows="usage_hourly_unnamed")}
        WHERE category = 'idle' AND hour >= make_timestamptz($shares_from_us)
            AND hour < make_timestamptz($end_us)),
    parts AS (
        SELECT *, allocated_ns / 6e10 / nullif(bit_count(allocated_minutes), 0) AS share,
            bit_count(allocated_minutes & bit_or(allocated_minutes) FILTER (part_state = 'free')
                OVER (PARTITION BY cluster, node, gpu_uuid, hour)) AS minutes_with_rest
        FROM found
    )
    SELECT cluster, node, model, gpu_uuid, mig_profile,
        max(share) FILTER (part_state = 'allocated'
            AND (minutes_with_rest > 2 OR share >= {_NOT_SHARED})) AS share,
        coalesce(sum(healthy_hours) FILTER (
            part_state = 'free' AND hour >= make_timestamptz($begin_us)), 0) AS free
    FROM parts WHERE mig_profile IS NOT NULL OR device_fraction = 1 GROUP BY ALL
"""  # noqa: S608  # our own names
_CORDONED_DEVICES: Final = """
    SELECT cluster, node, gpu_uuid, hours FROM cordoned_hours
    WHERE hour = make_timestamptz($begin_us)
"""
_INVENTORY: Final = """
    SELECT cluster, node, epoch_us(in_force_from), kafka_offset, gpu_uuid, model FROM inventory
"""
_NODES: Final = f"""
    SELECT cluster, node, epoch_us(in_force_from), epoch_us(deleted_time),
        node_pool, instance_type, zone, region, capacity_type
    FROM nodes ORDER BY cluster, node, in_force_from, {NEWEST_LAST}
"""  # noqa: S608  # our own names


class FreeDevice(NamedTuple):
    """A GPU or MIG instance in the newest hour."""

    key: Key
    node: Node
    mig_profile: str | None
    share: float | None
    """The largest part that one container certainly held; `None` if there is none."""
    free: float
    """The part of the hour and of the device that was free, and not on a cordoned node."""


class Fits(NamedTuple):
    """How many pods of a shape fit into a group, if all new pods have that shape."""

    whole: Mapping[int, int]
    """By the number of whole GPUs."""
    mig: Mapping[str, int]
    """By MIG profile."""
    shares: int
    """Shares of shared GPUs."""


def find_fits(devices: Collection[FreeDevice]) -> dict[Key, Fits]:
    """Return what fits into each group. A device is free if it was free for the whole hour.

    The GPUs of a node are shared if every container whose part is known had only a part of a GPU.
    The size of a share is then the largest of these parts.
    """
    share_of: dict[Node, float] = {}
    for device in devices:
        if device.mig_profile is None and device.share is not None:
            share_of[device.node] = max(share_of.get(device.node, 0.0), device.share)
    whole: dict[Key, Counter[Node]] = defaultdict(Counter)
    mig: dict[Key, Counter[str]] = defaultdict(Counter)
    shares: Counter[Key] = Counter()
    for device in devices:
        is_free = device.free >= _WHOLE
        share = share_of.get(device.node, 1.0)
        if device.mig_profile is not None:
            mig[device.key][device.mig_profile] += is_free
        elif share >= _NOT_SHARED:
            whole[device.key][device.node] += is_free
        else:
            # Rounded down, but nearly a whole share counts.
            shares[device.key] += int(device.free * round(1 / share) + 1 - _WHOLE)
    return {
        key: Fits(
            whole={size: sum(free // size for free in whole[key].values()) for size in SHAPES},
            mig=dict(sorted(mig[key].items())),
            shares=shares[key],
        )
        for key in {*whole, *mig, *shares}
    }


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    window = question.window
    create_cordoned(connection, window)
    fleet = _Reader(connection, question.by)
    newest = Window(window.end_us - HOUR_US, window.end_us)
    days = fleet.days(window)
    question.advance(60)
    if question.options["history"]:
        return Answer(rows=fleet.daily_rows(days))
    ((_, now),) = fleet.days(newest)
    question.advance(20)
    fits = find_fits(fleet.devices(newest))
    gpus = {
        gpu: key
        for gpu, key in fleet.gpus_at_end(newest).items()
        if question.selects(dict(zip(question.by, key, strict=True)))
    }
    power, unknown_limits = read_power(connection, window, gpus)
    total = _total(of_keys for _, of_keys in days)
    # If neither an inventory nor usage has GPUs of a group in the last hour, there are none.
    now |= {
        key: dict.fromkeys(hours, 0.0)
        for key, hours in total.items()
        if fleet.without_namespace(key) not in now
    }
    # The labels of a group may be new since the start of the day.
    total |= {key: dict.fromkeys(hours, 0.0) for key, hours in now.items() if key not in total}
    rows = [
        fleet.row(
            key,
            **_means(now.get(key, {}), newest),
            **{f"mean_{name}": mean for name, mean in _means(hours, window).items()},
            **_fit_columns(fits.get(key)),
            **power.get(key, {}),
        )
        for key, hours in total.items()
    ]
    rows.sort(key=lambda row: (-(row["mean_total"] or 0), -(row["mean_allocated"] or 0)))
    notes = [*_notes(filter(question.selects, rows))]
    if power and unknown_limits:
        notes.append(f"Power excludes GPUs whose power limit is unknown: {unknown_limits}.")
    return Answer(rows=rows, notes=notes)


Hours = dict[str, float]
"""GPU-hours by the name of the amount."""


class _Reader:
    """Reads the fleet from the views of a connection, by the report's dimensions."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, by: Sequence[str]) -> None:
        self._connection, self._by = connection, by
        versions: dict[Node, list[NodeVersion]] = defaultdict(list)
        for cluster, node, *version in connection.execute(_NODES).fetchall():
            versions[cluster, node].append(NodeVersion(*version))
        inventory = (InventoryRow(*row) for row in connection.execute(_INVENTORY).fetchall())
        self._stays = stays_of(inventory, versions)
        # GPUs of one node mostly have equal stays, so equal stays are counted, not listed.
        self._counts = Counter(stay._replace(physical_gpu="") for stay in self._stays)
        self._nodes = {node: effective_versions(found) for node, found in versions.items()}

    def _key(self, node: Node, model: str | None, time_us: int) -> Key:
        """Return the group of a GPU at a time."""
        facts: dict[str, Any] = dict(zip(("cluster", "node"), node, strict=True), model=model)
        if versions := self._nodes.get(node):
            facts |= version_at(versions, time_us)._asdict()
        return tuple(facts.get(_DIMENSIONS[name]) for name in self._by)

    def row(self, key: Key, **values: Any) -> Row:  # noqa: ANN401  # any column
        """Return a row with all columns."""
        return dict(zip(self._by, key, strict=True)) | dict.fromkeys(COLUMNS) | values

    def daily_rows(self, days: Iterable[tuple[Window, Mapping[Key, Hours]]]) -> list[Row]:
        """Return a row for each day and group."""
        rows = [
            self.row(key, day=day_of(day.begin_us).isoformat(), **_means(hours, day))
            for day, of_keys in days
            for key, hours in of_keys.items()
        ]
        rows.sort(key=lambda row: (row["day"], -(row["total"] or 0), -(row["allocated"] or 0)))
        return rows

    def days(self, window: Window) -> list[tuple[Window, dict[Key, Hours]]]:
        """Return the amounts of each day of a window, by group."""
        names = (*_OF_GPUS, *_OF_HOLDERS)
        sql = _SUMS.format(
            amounts=", ".join(f"sum({name})" for name in names),
            columns=", ".join(_DIMENSIONS[name] for name in self._by),
            namespace=_NAMESPACE if "namespace" in self._by else "NULL",
        )
        sums = self._connection.execute(sql, usage_limits(self._connection, window)).fetchall()
        found: dict[int, dict[Key, Hours]] = defaultdict(lambda: defaultdict(dict))
        for day, *values in sums:
            key = values[: len(self._by)]
            hours = dict(zip(names, values[len(self._by) :], strict=True))
            of_gpus = {name: hours[name] for name in _OF_GPUS}
            _add(found[day][self.without_namespace(key)], of_gpus)
            _add(found[day][tuple(key)], {name: hours[name] for name in _OF_HOLDERS})
        days = []
        for part in days_in(window):
            of_day = found[part.begin_us // DAY_US]
            for stay, count in self._counts.items():
                begin_us = max(stay.begin_us, part.begin_us)
                if (length_us := min(stay.end_us, part.end_us) - begin_us) > 0:
                    group = self._key(stay.node, stay.model, part.begin_us)
                    _add(of_day[group], {"total": count * length_us / HOUR_US, "healthy": 0.0})
            days.append((part, dict(of_day)))
        return days

    def without_namespace(self, key: Sequence[str | None]) -> Key:
        """Return a group of all namespaces, from the group of one of them."""
        return tuple(
            None if name == "namespace" else value
            for name, value in zip(self._by, key, strict=True)
        )

    def devices(self, newest: Window) -> list[FreeDevice]:
        """Return the GPUs and MIG instances with samples in the newest hour or the day before."""
        since = {"shares_from_us": newest.end_us - _SHARES_FROM_US}
        rows = self._connection.execute(_DEVICES, since | newest._asdict()).fetchall()
        given = {"begin_us": newest.begin_us}
        cordoned = {
            tuple(gpu): hours
            for *gpu, hours in self._connection.execute(_CORDONED_DEVICES, given).fetchall()
        }
        return [
            FreeDevice(
                self._key((cluster, node), model, newest.begin_us),
                (cluster, node),
                mig_profile,
                share,
                free - cordoned.get((cluster, node, gpu), 0.0),
            )
            for cluster, node, model, gpu, mig_profile, share, free in rows
        ]

    def gpus_at_end(self, newest: Window) -> dict[tuple[Node, str], Key]:
        """Return the group of each GPU in the fleet at the end of an hour, by node and UUID."""
        return {
            (stay.node, stay.physical_gpu): self._key(stay.node, stay.model, newest.begin_us)
            for stay in self._stays
            if stay.begin_us < newest.end_us <= stay.end_us
        }


def _add(hours: Hours, more: Mapping[str, float | None]) -> None:
    for name, amount in more.items():
        hours[name] = hours.get(name, 0.0) + (amount or 0.0)


def _total(days: Iterable[Mapping[Key, Hours]]) -> dict[Key, Hours]:
    found: dict[Key, Hours] = defaultdict(dict)
    for of_keys in days:
        for key, hours in of_keys.items():
            _add(found[key], hours)
    return found


def _means(hours: Hours, window: Window) -> dict[str, float | None]:
    """Return the mean of each amount in GPUs; `None` for an amount that the group does not have."""
    length = (window.end_us - window.begin_us) / HOUR_US
    # GPUs may respond before their node's inventory is known.
    if "healthy" in hours:
        hours = hours | {"total": max(hours.get("total", 0.0), hours["healthy"])}
    return {
        # Sums of parts of hours differ by rounding errors. Adding 0 makes a negative zero positive.
        name: round(hours[name] / length, 6) + 0.0 if name in hours else None
        for name in _AMOUNTS
    }


def _fit_columns(fits: Fits | None) -> Row:
    if fits is None:
        return {}
    return {
        **{f"fits_{size}": count for size, count in fits.whole.items()},
        "fits_mig": dict(fits.mig) or None,
        "fits_shares": fits.shares,
    }


def _notes(rows: Iterable[Row]) -> Iterator[str]:
    rows = [row for row in rows if row["total"] is not None]
    total, healthy, allocatable, cordoned = (
        sum(row[name] or 0.0 for row in rows)
        for name in ("total", "healthy", "allocatable", "cordoned")
    )
    if total - healthy >= _SHOWN:
        yield f"GPUs that do not respond or have no samples: {total - healthy:.3g}."
    if (unknown := healthy - allocatable - cordoned) >= _SHOWN:
        yield f"GPUs with unknown allocation: {unknown:.3g}; see the check `kubelet` of the agents."
    if cordoned >= _SHOWN:
        yield f"Free GPUs on cordoned nodes, which are not allocatable: {cordoned:.3g}."


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name == "fits_mig" and row[name]:
        return ", ".join(f"{count} {profile}" for profile, count in row[name].items())
    return rounded_cell(name, row)


REPORT: Final = Report(
    name="fleet",
    summary="Show how many GPUs exist, are healthy, allocated and used, and which pods fit now.",
    about=(
        "Now is the last hour of the time range. A GPU is healthy while it responds. A healthy GPU"
        " is allocatable unless its allocation is unknown or it is free on a cordoned node."
        " `Allocated` counts GPUs that are allocated to pods and jobs. `Used` is the mean number of"
        " GPUs on which kernels ran, of any process. The columns with `Mean:`"
        " are means over the time range, grouped by the labels of nodes at the start of each"
        " day. `Fit` to `Shares` count the pods that would fit now if all of them had the same"
        " shape. Shapes are 1, 2, 4 or 8 whole GPUs of one node, MIG profiles, and shares of shared"
        " GPUs. A GPU is free if it was"
        " free for the whole hour. The report ignores taints, CPU and memory of nodes. "
        + ABOUT_POWER
    ),
    examples={
        "By model": "",
        "Free GPUs of each node pool": "--by cluster,pool",
        "A row for each day of a quarter": "--window 90d --history day",
    },
    columns=COLUMNS,
    droppable=(
        "mean_power_watts",
        "peak_power_watts",
        "power_limit_watts",
        "power_headroom_watts",
        "mean_free",
        "mean_used",
        "mean_allocated",
        "allocatable",
        "fits_shares",
        "fits_2",
        "fits_4",
        "healthy",
        "fits_mig",
    ),
    texts=frozenset({"day", "fits_mig"}),
    counts=frozenset({"fits_1", "fits_2", "fits_4", "fits_8", "fits_shares"}),
    dimensions=_DIMENSIONS,
    default_by="model",
    options={
        "history": Option(
            help="`day` for a row per day and group, with the means of the day.",
            parse=one_of("day"),
        )
    },
    codes=("the report has rows", "the store has no GPUs in the time range"),
    cell=_cell,
    read=_read,
)
