"""Reads the store day by day, and yields sums of time by party, device and category.

This module queries DuckDB with the SQL of `charging_sql`; it does not handle money. It reads an
hour from `usage_hourly` if this table is complete for the hour, otherwise from the minutes of
`usage`.
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
from gpuledger.store.bill_table import BILL_LINES
from gpuledger.store.damaged_files import local_folder
from gpuledger.store.object_files import open_object_files
from gpuledger.store.pod_names import NEWEST_LAST
from gpuledger.store.query import check_table, gaps_of_files, no_store, relation
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
"""If a node's inventory begins more than this time before the store's first usage, the node's clock
may have been wrong."""
_INPUTS: Final = (USAGE, USAGE_HOURLY, INVENTORY, NODES, PODS, NAMESPACES, GAPS)
V = TypeVar("V", NodeVersion, NamespaceVersion)
R = TypeVar("R", bound=msgspec.Struct)


class DeviceClass(NamedTuple):
    """A class of similar devices: their usage rows have the same values in these fields.

    `gpu` is set only if the bill distinguishes GPUs.
    """

    cluster: str
    node: str
    model: str | None
    mig_profile: str | None = None
    compute_slices: int | None = None
    gpu_compute_slices: int | None = None
    gpu: str | None = None


class UsageSum(NamedTuple):
    """The sums of the rows of one party on one class of similar devices; times are in units.

    The facts about the party and the devices have been the same since `since_us`.
    """

    device: DeviceClass
    since_us: int
    party: PartyKey
    is_allocated: bool
    """Whether the rows contain allocated time; otherwise they contain used time."""
    allocated: int
    unresponsive: int
    busy: int
    measured_busy: int
    energy_millijoules: int
    memory_byte_ns: int


class UsageRow(NamedTuple):
    """A row of usage, as used to explain a bill. Durations are in nanoseconds of device time."""

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
    is_of_nobody: bool
    """Whether the time was not allocated."""
    factor: int
    """Units per nanosecond of the device."""


class PartyCharge(NamedTuple):
    """Units billed to a party; a negative number reduces its bill."""

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
    unknown: int
    idle: int


class UsedByOthers(NamedTuple):
    """Allocated time of a device that a party without an allocation used, in units."""

    device: DeviceClass
    since_us: int
    user: PartyKey
    user_since_us: int
    """The time since which the user's names and facts have been the same."""
    allocatee: PartyKey
    allocatee_since_us: int
    units: int
    billed: int
    """The part that is billed to an allocatee that pays by allocated time."""


class PhysicalGpuTime(NamedTuple):
    """The times for which a class of physical GPUs was in the inventory, and covered by ticks.

    Times are in the units of bills.
    """

    device: DeviceClass
    since_us: int
    present: int
    covered: int
    excess: int
    """Covered time beyond the presence, for example because a clock was set."""
    unlisted: int
    """The part of `covered` in hours in which the inventory does not list the GPU."""


class GpuInHour(NamedTuple):
    """A physical GPU in an hour to which a bill draws attention."""

    node: Node
    physical_gpu: str
    since_us: int


class DaySums(NamedTuple):
    """The sums of a day of the store."""

    usage: list[UsageSum]
    charges: list[PartyCharge]
    """Corrections of the amounts in `usage`. Without a correction, a party is billed its allocated
    time minus the unresponsive time."""
    idle: list[IdleCharge]
    by_others: list[UsedByOthers]
    physical_gpus: list[PhysicalGpuTime]
    unlisted: list[GpuInHour]
    """GPUs with ticks that the inventory does not list."""
    scaled: list[GpuInHour]
    """GPUs that were allocated more than once at a time."""
    duplicate: list[GpuInHour]
    """GPUs with ticks of one node in hours that they spent in another. These ticks do not count."""

    def split(self, begins_us: Sequence[int]) -> Iterator[tuple[int, "DaySums"]]:
        """Divide the sums by period; yield each period's index in `begins_us`, and its sums.

        `begins_us` are the starts of the periods; each lasts until the next one. Periods without
        rows are left out. Raises ValueError if a row is before the first period.
        """
        parts: dict[int, DaySums] = defaultdict(lambda: DaySums(*([] for _ in self._fields)))
        for name in self._fields:
            for row in getattr(self, name):
                number = bisect_right(begins_us, row.since_us) - 1
                if number < 0:
                    raise ValueError(f"{row.since_us} is before {begins_us[0]}")
                getattr(parts[number], name).append(row)
        yield from sorted(parts.items())


Change = tuple[int, str, str | None]
"""A change: its time in microseconds, the cluster, and the node. `None` instead of a node means all
nodes of the cluster."""


class Needs(NamedTuple):
    """The properties by which a bill distinguishes rows; fewer properties make fewer sums."""

    by_names: bool
    """Whether the names in a row suffice for its pod; otherwise the pod's record is looked up."""
    names_pods: bool
    """Whether pods and jobs of a namespace are distinguished."""
    class_of: Callable[[str, str, int], object] | None
    """Returns a node's facts at a time; nodes with equal facts are not distinguished. `None` if
    each node is distinguished."""
    has_bases: bool
    """Whether a rule may bill a tenant by something other than allocated time."""
    is_known_pod: Callable[[str, str, str], bool] = lambda *_: False
    """Returns whether a pod has a record, by cluster, node and UID."""
    is_other_pod: Callable[[str, str, str, str, str], bool] = lambda *_: False
    """Returns whether a pod's name belongs to another pod, by cluster, node, UID, namespace and
    name."""


ALL_NEEDED: Final = Needs(by_names=False, names_pods=True, class_of=None, has_bases=True)


class PartyBasis(NamedTuple):
    """The basis by which a party is billed."""

    identity: tuple[str, ...]
    """Equal for all parties of one tenant."""
    basis: str = "allocated"
    weight: int = 0
    weight_of: int = 1
    """For `blended`: the weight of allocated time is `weight` divided by this."""


def _connect(
    store_uri: str, storage_options: Mapping[str, str] | None, memory_bytes: int | None
) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    open_object_files(connection, store_uri, storage_options)
    connection.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
    # Each file is read several times within a second, so the operating system's cache suffices.
    connection.execute("SET enable_external_file_cache = false")
    if memory_bytes is not None:
        connection.execute(memory_bound(memory_bytes))
    return connection


def memory_bound(memory_bytes: int) -> str:
    """Return the SQL that limits DuckDB's memory and disables spilling to disk."""
    # A machine with limited memory may have no writable disk.
    return f"SET memory_limit = '{memory_bytes}B'; SET temp_directory = ''"


class StoreReadError(UserError):
    """A file of the store cannot be read; the message contains its name."""


@contextmanager
def reading_files() -> Iterator[None]:
    """Raise StoreReadError if DuckDB cannot read a file: it is missing, cut off or unavailable."""
    try:
        yield
    except (duckdb.IOException, duckdb.InvalidInputException) as error:
        # InvalidInputException may also mean an error in this module's SQL.
        if isinstance(error, duckdb.InvalidInputException) and "arquet" not in str(error):
            raise
        text = str(error).partition("\n")[0]
        raise StoreReadError(
            f"cannot read the store: {text}; try again, because a file may have been merged"
            " meanwhile, or repair the table"
        ) from error


def _within(window: Window) -> str:
    """Return the SQL condition that a time is within a window; `{0}` stands for the column."""
    begin, end = (f"make_timestamptz({time_us})" for time_us in window)
    return f"{{0}} >= {begin} AND {{0}} < {end}"


def check_tables(
    store_uri: str, storage_options: Mapping[str, str] | None = None
) -> dict[str, int | None]:
    """Return the version of each table that reports read, by name; `None` if it is missing.

    Raises `UserError` if the store is missing or damaged.
    """
    folder = local_folder(store_uri)
    if folder is not None and not folder.is_dir():
        raise no_store(store_uri, "")
    tables = (*_INPUTS, BILL_LINES)  # closed bills can be explained too
    return {each.name: check_table(store_uri, each.name, storage_options) for each in tables}


class UsageReader:
    """Reads a store for bills. Has one DuckDB connection, for use by one thread at a time."""

    def __init__(
        self,
        store_uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        distinguishes_gpus: bool = False,
        memory_bytes: int | None = None,
        is_finished: bool = False,
    ) -> None:
        """Open a store.

        DuckDB uses at most `memory_bytes`, or by default most of the machine's memory. If the store
        `is_finished`, all its usage counts as complete, regardless of watermarks. Raises
        `UserError` if the store has no usage.
        """
        self._uri, self._options, self._is_finished = store_uri, storage_options, is_finished
        self._snapshot = StoreSnapshot(store_uri, _INPUTS, storage_options=storage_options)
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

        Each reader then uses the machine's cores divided by `of`. If the memory is limited, each
        also uses the limit divided by `of`.
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
        """Select the kind of slices that determines an instance's part of its GPU.

        Must be called before rows are read.
        """
        self._slices = kind

    def versions(self) -> dict[str, int | None]:
        """Return the versions of the tables that are read, by name; `None` if missing."""
        return dict(self._snapshot.versions)

    @property
    def removed_before_us(self) -> int:
        """The time before which retention removed all usage, in microseconds, or 0."""
        return self._snapshot.removed_before_us

    @cached_property
    def usage_end_us(self) -> int:
        """The end of usage: the time through which it is complete, if known.

        Otherwise the end of the newest minute, or of the last hour if minutes are no longer kept.
        """
        known = self._snapshot.complete_until_us
        if known is not None and not self._is_finished:
            return known
        minute_us, hour_us = self._newest_us(USAGE.name), self._newest_us(USAGE_HOURLY.name)
        minute_end_us = minute_us + _MINUTE_US
        # The last summed hour may not be over; the minutes show how far its usage goes.
        if hour_us > minute_us or hour_us < self._snapshot.purged_before_us:
            return max(hour_us + HOUR_US, minute_end_us)
        return minute_end_us

    @cached_property
    def usage_begin_us(self) -> int:
        """The start of usage: the hour or minute of the oldest row."""
        begins_us = []
        for table, column in ((USAGE.name, "minute"), (USAGE_HOURLY.name, "hour")):
            if days := self._files[table]:
                files = days[min(days, key=lambda day: day or "")]
                begins_us += self.query(f"SELECT epoch_us(min({column})) FROM {relation(files)}")  # noqa: S608  # quoted files
        return min(int(begin_us) for (begin_us,) in begins_us if begin_us is not None)

    def _newest_us(self, table: str) -> int:
        """Return the start time of a usage table's newest rows; 0 if it has none."""
        days = self._files[table]
        if not days:
            return 0
        # Only the newest day is read, because other days cannot have later rows.
        files = days[max(days, key=lambda day: day or "")]
        column = {USAGE.name: "minute", USAGE_HOURLY.name: "hour"}[table]
        ((begin_us,),) = self.query(f"SELECT epoch_us(max({column})) FROM {relation(files)}")  # noqa: S608  # quoted files
        return int(begin_us or 0)

    def pods(self, window: Window, *, by_names: bool = False) -> list[PodVersion]:
        """Return the versions of the pods that may have existed in a window or have rows in it.

        If a node is disconnected, a pod may be deleted long before its processes end. `by_names`
        leaves out the pods whose rows all contain the names.
        """
        files = self._all_files(PODS.name)
        if not files:
            return []
        # The kubelet lists a pod for some time after its end, always less than a day.
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
        """All stays of physical GPUs in the inventory."""
        columns = "cluster, node, epoch_us(in_force_from), min(kafka_offset), gpu_uuid, max(model)"
        rows = [InventoryRow(*row) for row in self._versions_in(INVENTORY.name, columns)]
        return stays_of(rows, self.nodes, earliest_us=self._earliest_us(rows))

    def _earliest_us(self, inventory: Sequence[InventoryRow]) -> dict[Node, int]:
        """Return the earliest plausible time of nodes whose inventory begins long before any usage.

        A node's clock may be wrong when it reports its inventory. With a date in 1970, its GPUs
        would cost money in months before they existed. The presence of the GPUs of such a node
        therefore begins with its first usage or its creation in Kubernetes, whichever is earlier.
        """
        days = {day for table in (USAGE.name, USAGE_HOURLY.name) for day in self._files[table]}
        first = min((day for day in days if day), default=None)
        if first is None or None in days:
            return {}
        bound_us = begin_of(date.fromisoformat(first)) - _UNSEEN_US
        queried = sorted({(row.cluster, row.node) for row in inventory if row.since_us < bound_us})
        # Most of these nodes are older than the store and have usage on its first day.
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
        self.load("queried_nodes", dict.fromkeys(("cluster", "node"), "VARCHAR"), nodes)
        tables = [
            f"SELECT cluster, node, {column} AS time FROM {relation(files)}"  # noqa: S608  # quoted files
            for table, column in ((USAGE.name, "minute"), (USAGE_HOURLY.name, "hour"))
            if (files := [f for day in days for f in self._files[table].get(day, ())])
        ]
        rows = self.query(
            f"SELECT cluster, node, epoch_us(min(time)) FROM ({' UNION ALL '.join(tables)})"  # noqa: S608  # quoted files
            " SEMI JOIN queried_nodes USING (cluster, node) GROUP BY ALL"
        )
        return {(cluster, node): first_us for cluster, node, first_us in rows}

    @cached_property
    def alike_stays(self) -> list[tuple[Stay, int]]:
        """The distinct stays, each with the number of physical GPUs that have it.

        GPUs are distinguished only if the bill needs it, or if the inventory has no model for them.
        """
        counts = Counter(
            stay if self.keeps_gpus or stay.model is None else stay._replace(physical_gpu="")
            for stay in self.stays
        )
        return list(counts.items())

    def gaps(self, window: Window) -> list[tuple[str, int, str, int | None]]:
        """Return the gaps in a window: topic, partition, reason and number of missed offsets."""
        return self.query(
            "SELECT topic, kafka_partition, reason, missed_offsets"  # noqa: S608  # quoted files
            f" FROM {gaps_of_files(self._all_files(GAPS.name))}"
            f" WHERE epoch_us(coalesce(time_after, detected_at)) >= {window.begin_us}"
            f" AND (time_before IS NULL OR epoch_us(time_before) < {window.end_us}) ORDER BY ALL"
        )

    def rows_relation(self, day: Window) -> str | None:
        """Return the SQL of a day's rows of usage, or `None` if there are none."""
        if day not in self._relations:
            self._relations[day] = self._find_rows(day)
        return self._relations[day]

    def _find_rows(self, day: Window) -> str | None:
        name = day_of(day.begin_us).isoformat()
        hourly, minutes = (
            [*self._files[table].get(name, ()), *self._files[table].get(None, ())]
            for table in (USAGE_HOURLY.name, USAGE.name)
        )
        # Filters by the time column, because Parquet files contain its minimum and maximum.
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
        """Return the hours to read from minutes although they have hourly sums."""
        changed = self._snapshot.changed_hours_us
        wanted = summed if changed is None else summed & changed
        # The window may end within its last hour.
        wanted |= {day.end_us - day.end_us % HOUR_US} - {day.end_us}
        wanted = frozenset(hour for hour in wanted if hour >= self._snapshot.purged_before_us)
        return wanted & self._hours_in(minutes, "minute") if wanted else wanted

    def _hours_in(self, rows: str, period: str) -> frozenset[int]:
        hour = f"epoch_us({period}) // {HOUR_US} * {HOUR_US}"
        return frozenset(hour for (hour,) in self.query(f"SELECT DISTINCT {hour} FROM {rows}"))  # noqa: S608  # quoted files

    def load_stays(self) -> None:
        """Load the physical GPUs' stays into DuckDB, into the table `stays`."""
        kinds = ("VARCHAR", "VARCHAR", "VARCHAR", "VARCHAR", "BIGINT", "BIGINT")
        names = ("cluster", "node", "physical_gpu", "model", "begin_us", "end_us")
        rows = [(*s.node, s.physical_gpu, s.model, s.begin_us, s.end_us) for s in self.stays]
        self.load("stays", dict(zip(names, kinds, strict=True)), rows)

    def load_containers(self) -> bool:
        """Load the pods of containers into the table `containers`.

        Returns false if there are no pod records.
        """
        files = self._all_files(PODS.name)
        if files:
            self.query(pods_sql.containers_sql(relation(files)))
        return bool(files)

    def load_row_names(self, unnamed: Sequence[tuple[str, str, str]], day: Window) -> bool:
        """Load the names that rows contain for these pods into the table `row_names`.

        Returns false if there are none. All rows of the day are read, even if only a part is
        billed, so that bills of parts of a day use the same names as a bill of the whole day.
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
        """Create a temporary table with rows; `columns` maps each column to its DuckDB type."""
        # Rows are passed as JSON: for each value of a list, DuckDB checks again whether numpy is
        # installed.
        shape = msgspec.json.encode([dict(columns)]).decode()
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self.query(
            f"CREATE OR REPLACE TEMP TABLE {table} AS"
            f" SELECT unnest(from_json($rows, '{shape}'), recursive := true)",  # our own names
            {"rows": msgspec.json.encode(named).decode()},
        )

    def _histories_in(self, table: str, name: str, kind: type[V]) -> dict[tuple[str, str], list[V]]:
        """Return all versions of each object of a table, in their order of effect."""
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
        """Return all rows of a query as objects of `kind`.

        Raises RuntimeError unless the columns are the fields of `kind`, and StoreReadError if a
        file cannot be read.
        """
        with reading_files():
            answer = self._duckdb.execute(query)
            rows = answer.fetchall()
        # Values are assigned by position, so the order of the columns is checked.
        if (columns := tuple(name for name, *_ in answer.description)) != kind.__struct_fields__:
            raise RuntimeError(f"{kind.__name__} has other columns than {columns}")
        return [kind(*row) for row in rows]

    def query(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        """Return all rows of a query; raises StoreReadError if a file cannot be read."""
        with reading_files():
            return self._duckdb.execute(query, parameters or {}).fetchall()
