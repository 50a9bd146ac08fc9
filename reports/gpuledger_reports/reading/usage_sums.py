"""Reads the store day by day, and yields sums of time: of whom, on which devices, as which kind.

Here DuckDB is asked; what is asked is `charging_sql`'s, and nothing of money is known. A day at a
time is in memory. An hour is taken from `usage_hourly` where that has all of it, any other from the
minutes of `usage`.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from copy import copy
from datetime import date
from functools import cached_property
from os import cpu_count
from typing import Any, Final, Literal, NamedTuple, TypeVar

import duckdb
import msgspec

from gpuledger.errors import UserError
from gpuledger.store.object_files import open_object_files
from gpuledger.store.pod_names import NEWEST_LAST
from gpuledger.store.query import gaps_of_files, no_store, relation, version_of
from gpuledger.store.schema import GAPS, PODS
from gpuledger.store.usage_schema import INVENTORY, NAMESPACES, NODES, USAGE, USAGE_HOURLY
from gpuledger_reports.reading import charging_sql as sql
from gpuledger_reports.reading import pods_sql
from gpuledger_reports.reading.inventory import NEVER_US, InventoryRow, Node, Stay, stays_of
from gpuledger_reports.reading.parties import PartyKey, PodVersion
from gpuledger_reports.reading.snapshot import StoreSnapshot
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window, begin_of, day_of, days_in
from gpuledger_reports.reading.versions import NamespaceVersion, NodeVersion

_MINUTE_US: Final = 60_000_000
_UNSEEN_US: Final = 31 * DAY_US
"""A board that is in the inventory for longer than that before the store's first usage may be a
board of which the node had no clock."""
_INPUTS: Final = (USAGE, USAGE_HOURLY, INVENTORY, NODES, PODS, NAMESPACES, GAPS)
V = TypeVar("V", NodeVersion, NamespaceVersion)
R = TypeVar("R", bound=msgspec.Struct)


class DeviceClass(NamedTuple):
    """Devices that are alike, as their rows say it; `gpu` where GPUs are distinguished."""

    cluster: str
    node: str
    model: str | None
    mig_profile: str | None = None
    compute_slices: int | None = None
    gpu_compute_slices: int | None = None
    gpu: str | None = None


class UsageSum(NamedTuple):
    """What the rows of a party on devices of a class sum to, from a time on; times in units."""

    device: DeviceClass
    since_us: int
    party: PartyKey
    is_allocated: bool
    """Whether it is of time that the party held and nobody used, or of use."""
    allocated: int
    unresponsive: int
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
    allocated_ns: int
    unresponsive_ns: int
    busy_ns: int
    is_allocated: bool
    kafka_partition: int
    first_offset: int
    last_offset: int


class PartyCharge(NamedTuple):
    """Time that a party is charged, or no longer charged where it is below zero; in units."""

    device: DeviceClass
    since_us: int
    party: PartyKey
    units: int
    is_unresponsive: bool = False


class IdleCharge(NamedTuple):
    """Idle time of complex hours, in units."""

    device: DeviceClass
    since_us: int
    unresponsive: int
    unused: int
    idle: int


class PhysicalGpuTime(NamedTuple):
    """For how long boards of a class were there, from a time on, and what of it ticks cover."""

    device: DeviceClass
    since_us: int
    present: int
    covered: int
    excess: int
    """Covered time beyond the boards' own: clocks that were set, boards that had gone."""


class DaySums(NamedTuple):
    """A day of the store."""

    usage: list[UsageSum]
    charges: list[PartyCharge]
    """What is charged otherwise than by held time less unresponsive time."""
    idle: list[IdleCharge]
    physical_gpus: list[PhysicalGpuTime]

    def split(self, begins_us: Sequence[int]) -> Iterator[tuple[int, "DaySums"]]:
        """Yield what is of each of several times that follow one another, by its number.

        Each lasts until the next one begins. Raises ValueError for what begins before all of them.
        """
        parts: dict[int, DaySums] = defaultdict(lambda: DaySums([], [], [], []))
        for name in self._fields:
            for row in getattr(self, name):
                number = bisect_right(begins_us, row.since_us) - 1
                if number < 0:
                    raise ValueError(f"{row.since_us} is before {begins_us[0]}")
                getattr(parts[number], name).append(row)
        yield from sorted(parts.items())


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
    has_bases: bool
    """Whether somebody may be charged otherwise than by held time: a rule asks for it."""
    is_known_pod: Callable[[str, str, str], bool] = lambda *_: False
    """Returns whether there is a record of a pod, by cluster, node and UID."""


ALL_NEEDED: Final = Needs(by_names=False, names_pods=True, class_of=None, has_bases=True)


class PartyBasis(NamedTuple):
    """By what a party is charged."""

    identity: tuple[str, ...]
    """Equal for those whose use and holding are one's."""
    basis: str = "allocated"
    weight: int = 0
    weight_of: int = 1
    """Of `blended`: held time counts `weight` of so many parts."""


def _connect(
    store_uri: str, storage_options: Mapping[str, str] | None, memory_bytes: int | None
) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    open_object_files(connection, store_uri, storage_options)
    connection.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
    # Each file is read a few times within a second, which the system's own cache is for.
    connection.execute("SET enable_external_file_cache = false")
    if memory_bytes is not None:
        connection.execute(memory_bound(memory_bytes))
    return connection


def memory_bound(memory_bytes: int) -> str:
    """Return the SQL by which DuckDB takes no more than that."""
    # Nothing is spilled either: whoever sets a bound may have no disk to write to.
    return f"SET memory_limit = '{memory_bytes}B'; SET temp_directory = ''"


class StoreReadError(UserError):
    """A file of the store cannot be read; the message names it."""


@contextmanager
def reading_files() -> Iterator[None]:
    """Raise StoreReadError where DuckDB cannot read a file: one is gone, cut or away."""
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException) as error:
        # A wrong query of ours is an invalid input, too.
        if isinstance(error, duckdb.InvalidInputException) and "arquet" not in str(error):
            raise
        text = str(error).partition("\n")[0]
        raise StoreReadError(
            f"the store cannot be read: {text}; try again, as a file may have been merged"
            " meanwhile, or repair the table"
        ) from error


def _within(window: Window) -> str:
    """Return the SQL that a column, for which `{0}` stands, is in a time."""
    begin, end = (f"make_timestamptz({time_us})" for time_us in window)
    return f"{{0}} >= {begin} AND {{0}} < {end}"


def table_versions(
    store_uri: str, storage_options: Mapping[str, str] | None = None
) -> dict[str, int | None]:
    """Return the versions of the tables that bills are made of, by name; absent where none is."""
    return {t.name: version_of(store_uri, t.name, storage_options) for t in _INPUTS}


class UsageReader:
    """A store, as bills read it. One connection, for one thread at a time."""

    def __init__(
        self,
        store_uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        distinguishes_gpus: bool = False,
        memory_bytes: int | None = None,
        is_finished: bool = False,
    ) -> None:
        """Open a store; DuckDB takes `memory_bytes` at most, and most of the machine's without.

        Of one that `is_finished` nothing is to come any more, whatever its marks say.

        Raises `UserError` where there is no usage in it.
        """
        self._uri, self._options, self._is_finished = store_uri, storage_options, is_finished
        names = (table.name for table in _INPUTS)
        self._snapshot = StoreSnapshot(store_uri, names, storage_options=storage_options)
        self._files = self._snapshot.files
        if not (self._files[USAGE.name] or self._files[USAGE_HOURLY.name]):
            raise no_store(store_uri, "no usage in the store at")
        self.keeps_gpus = distinguishes_gpus
        self._memory_bytes = memory_bytes
        self._relations: dict[Window, str | None] = {}
        self._slices = "compute"
        self._duckdb = _connect(store_uri, storage_options, memory_bytes)

    def twin(self, *, of: int) -> "UsageReader":
        """Return another reader of the same store, for another thread.

        It has its part of the cores, and of the memory where that is bounded; so has this one.
        """
        other = copy(self)
        other._duckdb = _connect(self._uri, self._options, None)  # noqa: SLF001  # of this very class
        threads = max(1, (cpu_count() or 1) // of)
        for each in (self, other):
            each.query(f"SET threads = {threads}")
            if self._memory_bytes is not None:
                each.query(memory_bound(self._memory_bytes // of))
        other.load_stays()
        return other

    def count_slices(self, kind: Literal["compute", "memory"]) -> None:
        """Have these slices say which part of its board an instance is; before anything is read."""
        self._slices = kind

    def versions(self) -> dict[str, int | None]:
        """Return the versions of the tables that are read, by name."""
        return dict(self._snapshot.versions)

    @property
    def removed_before_us(self) -> int:
        """Up to when the store's retention has removed all usage; 0 where it has removed none."""
        return self._snapshot.removed_before_us

    @cached_property
    def usage_end_us(self) -> int:
        """Up to when there is usage: as far as it is complete, or else its newest minute's end.

        Where minutes are kept no longer it is the end of the last hour.
        """
        known = self._snapshot.complete_until_us
        if known is not None and not self._is_finished:
            return known
        minute_us, hour_us = self._newest_us(USAGE.name), self._newest_us(USAGE_HOURLY.name)
        minute_end_us = minute_us + _MINUTE_US
        # An hour that is summed may be under way: its minutes say how far it has come.
        if hour_us > minute_us or hour_us < self._snapshot.purged_before_us:
            return max(hour_us + HOUR_US, minute_end_us)
        return minute_end_us

    @cached_property
    def usage_begin_us(self) -> int:
        """From when on there is usage: the hour or minute of its oldest row."""
        begins_us = []
        for table, column in ((USAGE.name, "minute"), (USAGE_HOURLY.name, "hour")):
            if days := self._files[table]:
                files = days[min(days, key=lambda day: day or "")]
                begins_us += self.query(f"SELECT epoch_us(min({column})) FROM {relation(files)}")  # noqa: S608  # quoted files
        return min(int(begin_us) for (begin_us,) in begins_us if begin_us is not None)

    def _newest_us(self, table: str) -> int:
        """Return when the newest rows of a table of usage begin; 0 where it has none."""
        days = self._files[table]
        if not days:
            return 0
        # The newest day alone is read: no other can have later ones.
        files = days[max(days, key=lambda day: day or "")]
        column = {USAGE.name: "minute", USAGE_HOURLY.name: "hour"}[table]
        ((begin_us,),) = self.query(f"SELECT epoch_us(max({column})) FROM {relation(files)}")  # noqa: S608  # quoted files
        return int(begin_us or 0)

    def pods(self, window: Window, *, by_names: bool = False) -> list[PodVersion]:
        """Return what is known of the pods that there may have been in a time, or that rows name.

        A pod may be deleted long before its processes end, where its node is cut off. `by_names`
        leaves out those of which all rows say the names themselves: they are most.
        """
        files = self._all_files(PODS.name)
        if not files:
            return []
        # A kubelet lists a pod for a while after its end; a day is more than that.
        times = {"begin_us": window.begin_us - DAY_US, "end_us": window.end_us + HOUR_US}
        self.query(pods_sql.spans_sql(relation(files)), times)
        rows = list(filter(None, map(self.rows_relation, days_in(window))))
        if by_names:
            if not rows:
                return []
            self.query(pods_sql.unnamed_rows_sql(rows))
            uids = pods_sql.unnamed_pods_sql()
        else:
            uids = pods_sql.PODS_THERE
            if rows and self.query("SELECT 1 FROM pod_spans WHERE is_gone LIMIT 1"):
                uids += f" UNION ALL ({pods_sql.gone_pods_sql(rows)})"
        versions = pods_sql.pod_versions_sql(relation(files), uids)
        return [PodVersion(*row) for row in self.query(versions)]

    def namespaces(self) -> Mapping[tuple[str, str], Sequence[NamespaceVersion]]:
        """Return all versions of each namespace, in the order of `effective_versions`."""
        return self._histories_in(NAMESPACES.name, "namespace", NamespaceVersion)

    @cached_property
    def nodes(self) -> Mapping[Node, Sequence[NodeVersion]]:
        """All versions of each node, in the order of `effective_versions`."""
        return self._histories_in(NODES.name, "node", NodeVersion)

    @cached_property
    def stays(self) -> list[Stay]:
        """When each board was in the inventory."""
        columns = "cluster, node, epoch_us(in_force_from), min(kafka_offset), gpu_uuid, max(model)"
        rows = [InventoryRow(*row) for row in self._versions_in(INVENTORY.name, columns)]
        return stays_of(rows, self.nodes, earliest_us=self._earliest_us(rows))

    def _earliest_us(self, inventory: Sequence[InventoryRow]) -> dict[Node, int]:
        """Return since when nodes were there whose inventory says a time long before the store's.

        A node's clock may be unset when it says what it has: as of 1970 its boards would cost money
        in all months before it was bought. Such a node is there from its first usage on, or from
        when Kubernetes had it, if that was before.
        """
        days = {day for table in (USAGE.name, USAGE_HOURLY.name) for day in self._files[table]}
        first = min((day for day in days if day), default=None)
        if first is None or None in days:
            return {}
        bound_us = begin_of(date.fromisoformat(first)) - _UNSEEN_US
        queried = sorted({(row.cluster, row.node) for row in inventory if row.since_us < bound_us})
        # Most such nodes are older than the store, and have usage on its first day.
        found = self._first_usage_us(queried, days={first})
        if unseen := [node for node in queried if node not in found]:
            found |= self._first_usage_us(unseen, days=days)
        for node in queried:
            if versions := self.nodes.get(node):
                found[node] = min(versions[0].since_us, found.get(node, NEVER_US))
        return {node: found.get(node, NEVER_US) for node in queried}

    def _first_usage_us(
        self, nodes: Sequence[Node], *, days: AbstractSet[str | None]
    ) -> dict[Node, int]:
        if not nodes:
            return {}
        self.load("asked_nodes", dict.fromkeys(("cluster", "node"), "VARCHAR"), nodes)
        tables = [
            f"SELECT cluster, node, {column} AS time FROM {relation(files)}"  # noqa: S608  # quoted files
            for table, column in ((USAGE.name, "minute"), (USAGE_HOURLY.name, "hour"))
            if (files := [f for day in days for f in self._files[table].get(day, ())])
        ]
        rows = self.query(
            f"SELECT cluster, node, epoch_us(min(time)) FROM ({' UNION ALL '.join(tables)})"  # noqa: S608  # quoted files
            " SEMI JOIN asked_nodes USING (cluster, node) GROUP BY ALL"
        )
        return {(cluster, node): first_us for cluster, node, first_us in rows}

    @cached_property
    def alike_stays(self) -> list[tuple[Stay, int]]:
        """How many boards stayed alike, with one stay for all; its board counts where it must.

        That is where GPUs are told apart, and where the inventory does not say a board's model.
        """
        counts = Counter(
            stay if self.keeps_gpus or stay.model is None else stay._replace(physical_gpu="")
            for stay in self.stays
        )
        return list(counts.items())

    def gaps(self, window: Window) -> list[tuple[str, int, str, int | None]]:
        """Return what was gone before it was stored: topic, partition, reason, missed offsets."""
        return self.query(
            "SELECT topic, kafka_partition, reason, missed_offsets"  # noqa: S608  # quoted files
            f" FROM {gaps_of_files(self._all_files(GAPS.name))}"
            f" WHERE epoch_us(coalesce(time_after, detected_at)) >= {window.begin_us}"
            f" AND (time_before IS NULL OR epoch_us(time_before) < {window.end_us}) ORDER BY ALL"
        )

    def rows_relation(self, day: Window) -> str | None:
        """Return the SQL of a day's rows of usage; absent where it has none."""
        if day not in self._relations:
            self._relations[day] = self._find_rows(day)
        return self._relations[day]

    def _find_rows(self, day: Window) -> str | None:
        name = day_of(day.begin_us).isoformat()
        hourly, minutes = (
            [*self._files[table].get(name, ()), *self._files[table].get(None, ())]
            for table in (USAGE_HOURLY.name, USAGE.name)
        )
        # By the column itself, which Parquet has the least and the greatest value of.
        within = _within(day)
        hours = f"(SELECT * FROM {relation(hourly)} WHERE {within.format('hour')})"  # noqa: S608  # quoted files
        rows = f"(SELECT * FROM {relation(minutes)} WHERE {within.format('minute')})"  # noqa: S608  # quoted files
        summed = self._hours_in(hours, "hour") if hourly else frozenset()
        stale = self._hours_to_resum(rows, day, summed) if minutes and summed else frozenset()
        parts = []
        if summed - stale:
            if stale:
                listed = ", ".join(f"make_timestamptz({hour})" for hour in sorted(summed - stale))
                hours = f"(SELECT * FROM {hours} WHERE hour IN ({listed}))"  # noqa: S608  # numbers
            parts.append(sql.rows_sql(hours, period="hour", slices=self._slices))
        summed -= stale
        missing = sorted(set(range(day.begin_us, day.end_us, HOUR_US)) - summed)
        if minutes and missing:
            wanted = " OR ".join(
                f"({_within(Window(hour, min(hour + HOUR_US, day.end_us))).format('minute')})"
                for hour in missing
            )
            rows = f"(SELECT * FROM {relation(minutes)} WHERE {wanted})"  # noqa: S608  # quoted files
            parts.append(sql.rows_sql(rows, period="minute", slices=self._slices))
        return " UNION ALL BY NAME ".join(parts) or None

    def _hours_to_resum(self, minutes: str, day: Window, summed: frozenset[int]) -> frozenset[int]:
        """Return the hours of which the minutes are read although there are hourly sums."""
        changed = self._snapshot.changed_hours_us
        wanted = summed if changed is None else summed & changed
        # The last hour may have more than the time that is asked for.
        wanted |= {day.end_us - day.end_us % HOUR_US} - {day.end_us}
        wanted = frozenset(hour for hour in wanted if hour >= self._snapshot.purged_before_us)
        return wanted & self._hours_in(minutes, "minute") if wanted else wanted

    def _hours_in(self, rows: str, period: str) -> frozenset[int]:
        hour = f"epoch_us({period}) // {HOUR_US} * {HOUR_US}"
        return frozenset(hour for (hour,) in self.query(f"SELECT DISTINCT {hour} FROM {rows}"))  # noqa: S608  # quoted files

    def load_stays(self) -> None:
        """Make the boards' stays known to SQL, as the table `stays`."""
        kinds = ("VARCHAR", "VARCHAR", "VARCHAR", "VARCHAR", "BIGINT", "BIGINT")
        names = ("cluster", "node", "physical_gpu", "model", "begin_us", "end_us")
        rows = [(*s.node, s.physical_gpu, s.model, s.begin_us, s.end_us) for s in self.stays]
        self.load("stays", dict(zip(names, kinds, strict=True)), rows)

    def load_containers(self) -> bool:
        """Make known to SQL whose each container is, as `containers`; false without any record."""
        files = self._all_files(PODS.name)
        if files:
            self.query(pods_sql.containers_sql(relation(files)))
        return bool(files)

    def load_row_names(self, unnamed: Sequence[tuple[str, str, str]], day: Window) -> bool:
        """Make known to SQL what rows call these pods, as `row_names`; false where none does.

        All rows of the day are asked, also where a part of it is billed: parts of a time are then
        billed by the same names as all of it.
        """
        self.load("unnamed", dict.fromkeys(("cluster", "node", "uid"), "VARCHAR"), unnamed)
        of_day = day_of(day.begin_us)
        whole, name = Window(begin_of(of_day), begin_of(of_day) + DAY_US), of_day.isoformat()
        rows = [
            f"(SELECT * FROM {relation(files)} WHERE {_within(whole).format(period)})"  # noqa: S608  # quoted files
            for table, period in ((USAGE_HOURLY.name, "hour"), (USAGE.name, "minute"))
            if (files := [*self._files[table].get(name, ()), *self._files[table].get(None, ())])
        ]
        self.query(pods_sql.row_names_sql(rows))
        return bool(self.query("SELECT 1 FROM row_names LIMIT 1"))

    def load(self, table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> None:
        """Make a table of rows; `columns` have DuckDB's type of each."""
        # As one text: of each value in a list DuckDB asks anew whether numpy is installed.
        shape = msgspec.json.encode([dict(columns)]).decode()
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self.query(
            f"CREATE OR REPLACE TEMP TABLE {table} AS"
            f" SELECT unnest(from_json($rows, '{shape}'), recursive := true)",  # our own names
            {"rows": msgspec.json.encode(named).decode()},
        )

    def _histories_in(self, table: str, name: str, kind: type[V]) -> dict[tuple[str, str], list[V]]:
        """Return all versions of each thing of a table, in the order in which they hold."""
        found: dict[tuple[str, str], list[V]] = defaultdict(list)
        if not (files := self._all_files(table)):
            return found
        text = ", ".join(kind._fields[2:])
        rows = self.query(
            f"SELECT cluster, {name}, epoch_us(in_force_from), epoch_us(deleted_time), {text}"  # noqa: S608  # quoted files
            f" FROM {relation(files)} ORDER BY in_force_from, {NEWEST_LAST}"
        )
        for cluster, named, *version in rows:
            found[cluster, named].append(kind._make(version))
        return found

    def _versions_in(self, table: str, columns: str) -> list[Any]:
        files = self._all_files(table)
        if not files:
            return []
        return self.query(
            f"SELECT {columns} FROM {relation(files)} GROUP BY ALL ORDER BY ALL"  # noqa: S608  # quoted files
        )

    def _all_files(self, table: str) -> list[str]:
        return [file for of_day in self._files[table].values() for file in of_day]

    def query_as(self, kind: type[R], query: str) -> list[R]:
        """Return all rows of a query's answer, of which the columns are the fields of `kind`."""
        with reading_files():
            answer = self._duckdb.execute(query)
            rows = answer.fetchall()
        # Rows have their values by position: a column that moved would be taken for another.
        if (columns := tuple(name for name, *_ in answer.description)) != kind.__struct_fields__:
            raise RuntimeError(f"{kind.__name__} has other columns than {columns}")
        return [kind(*row) for row in rows]

    def query(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Return all rows of a query's answer; raises StoreReadError."""
        with reading_files():
            return self._duckdb.execute(query, parameters or {}).fetchall()
