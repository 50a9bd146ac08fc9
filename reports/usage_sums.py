"""Reads the store day by day, and yields sums of time: of whom, on which devices, as which kind.

Here DuckDB is asked; what is asked is `charging_sql`'s, and nothing of money is known. A day at a
time is in memory. An hour that has rows in `usage_hourly` is taken from there, any other from the
minutes of `usage`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any, Final, NamedTuple

import duckdb
import msgspec

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.object_files import open_object_files
from gpuledger.store.query import files_of, gaps_sql, relation, version_of
from gpuledger.store.schema import GAPS, PODS
from gpuledger.store.usage_schema import INVENTORY, NAMESPACES, NODES, USAGE, USAGE_HOURLY
from reports import charging_sql as sql
from reports.charging_sql import HOUR_US
from reports.presence import InventoryRow, Node, NodeVersion, Stay, stays_of
from reports.tenants import NamespaceVersion, PartyKey, PodVersion

DAY_US: Final = 24 * HOUR_US
_INPUTS: Final = (USAGE, USAGE_HOURLY, INVENTORY, NODES, PODS, NAMESPACES, GAPS)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Window(NamedTuple):
    """From one time up to and without another, in microseconds since the epoch; whole hours."""

    begin_us: int
    end_us: int


class DeviceClass(NamedTuple):
    """Devices that are alike, as their rows say it; `gpu` where GPUs are distinguished."""

    cluster: str
    node: str
    model: str | None
    mig_profile: str | None = None
    compute_slices: int | None = None
    board_compute_slices: int | None = None
    gpu: str | None = None


class UsageSum(NamedTuple):
    """What the rows of a party on devices of a class sum to, from a time on; times in units."""

    device: DeviceClass
    since_us: int
    party: PartyKey
    is_idle: bool
    """Whether it is of time that the party held and nobody used, or of use."""
    held: int
    silent: int
    busy: int
    measured_busy: int
    energy_millijoules: int
    memory_byte_ns: int


class UsageRow(NamedTuple):
    """A row of usage, as an explanation shows it; times in nanoseconds of the device."""

    hour_us: int
    node: str
    gpu_uuid: str
    pod: str | None
    held_ns: int
    silent_ns: int
    busy_ns: int
    is_idle: bool
    kafka_partition: int
    first_offset: int
    last_offset: int


class PartyCharge(NamedTuple):
    """Time that a party is charged, or no longer charged where it is below zero; in units."""

    device: DeviceClass
    since_us: int
    party: PartyKey
    units: int
    is_silent: bool = False


class IdleCharge(NamedTuple):
    """Idle time of odd hours, in units."""

    device: DeviceClass
    since_us: int
    silent: int
    held_idle: int
    unallocated: int


class BoardTime(NamedTuple):
    """For how long boards of a class were there, from a time on, and what of it ticks cover."""

    device: DeviceClass
    since_us: int
    there: int
    covered: int
    excess: int
    """Covered time beyond the boards' own: clocks that were set, boards that had gone."""


class DaySums(NamedTuple):
    """A day of the store."""

    usage: list[UsageSum]
    charges: list[PartyCharge]
    """What is charged otherwise than by held time less silent time."""
    idle: list[IdleCharge]
    boards: list[BoardTime]


Change = tuple[int, str, str | None]
"""A time in microseconds, a cluster, and a node; absent where it is of all nodes."""


class Needs(NamedTuple):
    """What a bill has to know of rows; the less that is, the fewer sums there are."""

    by_names: bool
    """Whether a pod that a row names needs no more than that; else its record is looked up."""
    names_pods: bool
    """Whether pods and jobs of a namespace are told apart."""
    class_of: Callable[[str, str, int], object] | None
    """Returns what is known of a node at a time: nodes of which it is equal are not told apart.

    Absent where each node is told apart.
    """


ALL_NEEDED: Final = Needs(by_names=False, names_pods=True, class_of=None)


class PartyBasis(NamedTuple):
    """By what a party is charged."""

    identity: tuple[str, ...]
    """Equal for those whose use and holding are one's."""
    basis: str = "held"
    weight: int = 0
    weight_of: int = 1
    """Of `blended`: held time counts `weight` of so many parts."""


def day_of(time_us: int) -> date:
    """Return the day of a time, in UTC."""
    return (_EPOCH + timedelta(microseconds=time_us)).date()


def begin_of(day: date) -> int:
    """Return when a day begins, in microseconds."""
    return (datetime(day.year, day.month, day.day, tzinfo=UTC) - _EPOCH).days * DAY_US


def table_versions(
    store_uri: str, storage_options: Mapping[str, str] | None = None
) -> dict[str, int | None]:
    """Return the versions of the tables that bills are made of, by name; absent where none is."""
    return {t.name: version_of(store_uri, t.name, storage_options) for t in _INPUTS}


class UsageReader:
    """A store, as bills read it. One connection, for one thread."""

    def __init__(
        self,
        store_uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        distinguishes_gpus: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """Open a store; DuckDB takes `memory_bytes` at most, and most of the machine's without.

        Raises `UserError` where there is no usage in it.
        """
        self._uri, self._options = store_uri, storage_options
        self._files = {t.name: files_of(store_uri, t.name, storage_options) for t in _INPUTS}
        if not (self._files[USAGE.name] or self._files[USAGE_HOURLY.name]):
            raise UserError(
                f"no usage in the store at {mask_address(store_uri)}; give the store.uri of a"
                " `gpuledger-sink store` that has written events there"
            )
        self.keeps_boards = distinguishes_gpus
        self._duckdb = duckdb.connect()
        open_object_files(self._duckdb, store_uri, storage_options)
        self._duckdb.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        # Each file is read a few times within a second, which the system's own cache is for.
        self._duckdb.execute("SET enable_external_file_cache = false")
        if memory_bytes is not None:
            # Nothing is spilled either: whoever sets a bound may have no disk to write to.
            self._duckdb.execute(f"SET memory_limit = '{memory_bytes}B'")
            self._duckdb.execute("SET temp_directory = ''")

    def versions(self) -> dict[str, int | None]:
        """Return the versions of the tables that are read, by name."""
        return table_versions(self._uri, self._options)

    @cached_property
    def valid_through_us(self) -> int:
        """Up to when there is usage: the end of the last hour, or of the last minute."""
        # The newest day alone is read: no other can end later.
        ends = [
            self.ask(f"SELECT epoch_us(max({period})) + {length_us} FROM {relation(files)}")[0][0]  # noqa: S608  # quoted files
            for name, period, length_us in (
                (USAGE_HOURLY.name, "hour", HOUR_US),
                (USAGE.name, "minute", 60_000_000),
            )
            if (files := self._newest(name))
        ]
        return max(int(end) for end in ends if end is not None)

    def _newest(self, table: str) -> list[str]:
        days = self._files[table]
        return days[max(days, key=lambda day: day or "")] if days else []

    def pods(self, window: Window) -> list[PodVersion]:
        """Return all versions of the pods that there may have been in a time."""
        return [
            PodVersion(*row)
            for row in self._versions_in(
                PODS.name,
                "cluster, node, pod_uid, epoch_us(in_force_from), namespace, pod, owner_kind,"
                " owner_name, labels, epoch_us(created_time), epoch_us(deleted_time),"
                " resource_version, min(kafka_offset), config_hash",
                # A kubelet lists a pod for a while after its end; a day is more than that.
                f"created_time < make_timestamptz({window.end_us + HOUR_US})"
                " AND (deleted_time IS NULL"
                f" OR deleted_time > make_timestamptz({window.begin_us - DAY_US}))",
            )
        ]

    def namespaces(self) -> list[NamespaceVersion]:
        """Return all versions of namespaces."""
        columns = "cluster, namespace, epoch_us(in_force_from), labels, annotations"
        return [NamespaceVersion(*row) for row in self._versions_in(NAMESPACES.name, columns)]

    @cached_property
    def nodes(self) -> Mapping[Node, Sequence[NodeVersion]]:
        """All versions of each node, in the order in which they came into force."""
        columns = (
            "cluster, node, epoch_us(in_force_from) AS since_us, max(epoch_us(deleted_time)),"
            " node_pool, instance_type, zone, region, capacity_type, labels"
        )
        nodes: dict[Node, list[NodeVersion]] = defaultdict(list)
        for cluster, node, *version in self._versions_in(NODES.name, columns):
            nodes[cluster, node].append(NodeVersion(*version))
        for versions in nodes.values():
            versions.sort(key=lambda version: version.since_us)
        return nodes

    @cached_property
    def stays(self) -> list[Stay]:
        """When each board was in the inventory."""
        columns = "cluster, node, epoch_us(in_force_from), min(kafka_offset), gpu_uuid, max(model)"
        rows = (InventoryRow(*row) for row in self._versions_in(INVENTORY.name, columns))
        return stays_of(rows, self.nodes)

    @cached_property
    def alike_stays(self) -> list[tuple[tuple[Node, str | None, str | None, int, int], int]]:
        """How many boards stayed alike: by node, board where those are told apart, model, times."""
        counts = Counter(
            (
                stay.node,
                stay.board if self.keeps_boards else None,
                stay.model,
                stay.begin_us,
                stay.end_us,
            )
            for stay in self.stays
        )
        return list(counts.items())

    def gaps(self, window: Window) -> list[tuple[str, int, str, int | None]]:
        """Return what was gone before it was stored: topic, partition, reason, missed offsets."""
        return self.ask(
            "SELECT topic, kafka_partition, reason, missed_offsets"  # noqa: S608  # quoted files
            f" FROM {gaps_sql(self._uri, self._options)}"
            f" WHERE epoch_us(coalesce(time_after, detected_at)) >= {window.begin_us}"
            f" AND (time_before IS NULL OR epoch_us(time_before) < {window.end_us}) ORDER BY ALL"
        )

    def rows_relation(self, day: Window) -> str | None:
        """Return the SQL of a day's rows of usage; absent where it has none."""
        name = day_of(day.begin_us).isoformat()
        hourly, minutes = (
            [*self._files[table].get(name, ()), *self._files[table].get(None, ())]
            for table in (USAGE_HOURLY.name, USAGE.name)
        )
        within = f"epoch_us({{}}) >= {day.begin_us} AND epoch_us({{}}) < {day.end_us}"
        hours = f"(SELECT * FROM {relation(hourly)} WHERE {within.format('hour', 'hour')})"  # noqa: S608  # quoted files
        parts = [sql.rows_sql(hours, period="hour")] if hourly else []
        if minutes:
            known = self._hours_in(hours) if hourly else frozenset()
            # The minutes of an hour are read where no hourly sum of it is there, and else never: an
            # hour that is summed is summed whole, and again when something late comes.
            missing = sorted(set(range(day.begin_us, day.end_us, HOUR_US)) - known)
            if missing:
                wanted = " OR ".join(
                    within.format("minute", "minute")
                    for day in (Window(hour, min(hour + HOUR_US, day.end_us)) for hour in missing)
                    for within in [
                        f"epoch_us({{}}) >= {day.begin_us} AND epoch_us({{}}) < {day.end_us}"
                    ]
                )
                rows = f"(SELECT * FROM {relation(minutes)} WHERE {wanted})"  # noqa: S608  # quoted files
                parts.append(sql.rows_sql(rows, period="minute"))
        return " UNION ALL BY NAME ".join(parts) or None

    def _hours_in(self, hours: str) -> frozenset[int]:
        found = self.ask(f"SELECT DISTINCT epoch_us(hour) FROM {hours}")  # noqa: S608  # quoted files
        return frozenset(hour for (hour,) in found)

    def load_stays(self) -> None:
        """Make the boards' stays known to SQL, as the table `stays`."""
        kinds = ("VARCHAR", "VARCHAR", "VARCHAR", "VARCHAR", "BIGINT", "BIGINT")
        names = ("cluster", "node", "board", "model", "begin_us", "end_us")
        rows = [(*s.node, s.board, s.model, s.begin_us, s.end_us) for s in self.stays]
        self.load("stays", dict(zip(names, kinds, strict=True)), rows)

    def load(self, table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> None:
        """Make a table of rows; `columns` have DuckDB's type of each."""
        # As one text: of each value in a list DuckDB asks anew whether numpy is installed.
        shape = msgspec.json.encode([dict(columns)]).decode()
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self.ask(
            f"CREATE OR REPLACE TEMP TABLE {table} AS"
            f" SELECT unnest(from_json($rows, '{shape}'), recursive := true)",  # our own names
            {"rows": msgspec.json.encode(named).decode()},
        )

    def _versions_in(self, table: str, columns: str, condition: str = "true") -> list[Any]:
        files = [file for of_day in self._files[table].values() for file in of_day]
        if not files:
            return []
        return self.ask(
            f"SELECT {columns} FROM {relation(files)} WHERE {condition} GROUP BY ALL ORDER BY ALL"  # noqa: S608  # quoted files
        )

    def ask(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Return all rows of a query's answer."""
        return self._duckdb.execute(query, parameters or {}).fetchall()
