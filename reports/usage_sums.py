"""Reads the store day by day, and yields sums of time: of whom, on which devices, as which kind.

Here DuckDB is asked; what is asked is `charging_sql`'s, and nothing of money is known. A day at a
time is in memory. An hour that has rows in `usage_hourly` is taken from there, any other from the
minutes of `usage`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any, Final, NamedTuple

import duckdb
import msgspec

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.query import files_of, files_sql, gaps_sql, version_of
from gpuledger.store.schema import GAPS, PODS
from gpuledger.store.usage_schema import INVENTORY, NAMESPACES, NODES, USAGE, USAGE_HOURLY
from reports import charging_sql as sql
from reports.charging_sql import HOUR_US, UNITS
from reports.presence import InventoryRow, Node, NodeVersion, Stay, stays_of
from reports.tenants import NamespaceVersion, PartyKey, PartyKind, PodVersion

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


class UsageReader:
    """A store, as bills read it. One connection, for one thread."""

    def __init__(
        self,
        store_uri: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        distinguishes_gpus: bool = False,
    ) -> None:
        self._uri, self._options = store_uri, storage_options
        self._files = {t.name: files_of(store_uri, t.name, storage_options) for t in _INPUTS}
        if not (self._files[USAGE.name] or self._files[USAGE_HOURLY.name]):
            raise UserError(
                f"no usage in the store at {mask_address(store_uri)}; give the store.uri of a"
                " `gpuledger-sink store` that has written events there"
            )
        self._keeps_boards = distinguishes_gpus
        self._class_nodes: dict[tuple[str, object], str] = {}
        self._duckdb = duckdb.connect()
        self._duckdb.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        # Each file is read a few times within a second, which the system's own cache is for.
        self._duckdb.execute("SET enable_external_file_cache = false")

    def versions(self) -> dict[str, int | None]:
        """Return the versions of the tables that are read, by name."""
        return {t.name: version_of(self._uri, t.name, self._options) for t in _INPUTS}

    @cached_property
    def valid_through_us(self) -> int:
        """Up to when there is usage: the end of the last hour, or of the last minute."""
        ends = [
            self._ask(f"SELECT epoch_us(max({period})) + {length_us} FROM {files_sql(files)}")[0][0]  # noqa: S608  # quoted files
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

    def gaps(self, window: Window) -> list[tuple[str, int, str, int | None]]:
        """Return what was gone before it was stored: topic, partition, reason, missed offsets."""
        return self._ask(
            "SELECT topic, kafka_partition, reason, missed_offsets"  # noqa: S608  # quoted files
            f" FROM {gaps_sql(self._uri, self._options)}"
            f" WHERE epoch_us(coalesce(time_after, detected_at)) >= {window.begin_us}"
            f" AND (time_before IS NULL OR epoch_us(time_before) < {window.end_us}) ORDER BY ALL"
        )

    def days(
        self,
        window: Window,
        *,
        changes: Sequence[Change],
        basis_of: Callable[[PartyKey, int], PartyBasis],
        needs: Needs = ALL_NEEDED,
    ) -> Iterator[DaySums]:
        """Yield each day of a time, in order.

        `changes` are times at which something that the bill is made by changed, with cluster and
        node: on such a day a node's hours are told apart.
        """
        self._load_stays()
        for day in self._days(window, changes, needs):
            yield day.sums(basis_of)

    def _days(self, window: Window, changes: Sequence[Change], needs: Needs) -> Iterator["_Day"]:
        by_day: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
        for time_us, cluster, node in changes:
            # What changes at a day's begin holds for all of it.
            if time_us % DAY_US:
                by_day[time_us // DAY_US].append((cluster, node))
        for number in range(window.begin_us // DAY_US, -(-window.end_us // DAY_US)):
            begin_us = max(window.begin_us, number * DAY_US)
            day = Window(begin_us, min(window.end_us, (number + 1) * DAY_US))
            yield _Day(self, day, by_day.get(number, ()), needs)

    def rows(
        self,
        window: Window,
        *,
        changes: Sequence[Change],
        belongs: Callable[[UsageSum], bool],
    ) -> Iterator[UsageRow]:
        """Yield the rows of usage of which the sums belong to something, by hour, node and GPU."""
        for day in self._days(window, changes, ALL_NEEDED):
            yield from day.rows(belongs)

    def rows_relation(self, day: Window) -> str | None:
        """Return the SQL of a day's rows of usage; absent where it has none."""
        name = day_of(day.begin_us).isoformat()
        hourly, minutes = (
            [*self._files[table].get(name, ()), *self._files[table].get(None, ())]
            for table in (USAGE_HOURLY.name, USAGE.name)
        )
        within = f"epoch_us({{}}) >= {day.begin_us} AND epoch_us({{}}) < {day.end_us}"
        hours = f"(SELECT * FROM {files_sql(hourly)} WHERE {within.format('hour', 'hour')})"  # noqa: S608  # quoted files
        parts = [sql.rows_sql(hours, period="hour")] if hourly else []
        if minutes:
            known = self._hours_in(hours) if hourly else frozenset()
            missing = sorted(set(range(day.begin_us, day.end_us, HOUR_US)) - known)
            if missing:
                wanted = " OR ".join(
                    within.format("minute", "minute")
                    for day in (Window(hour, min(hour + HOUR_US, day.end_us)) for hour in missing)
                    for within in [
                        f"epoch_us({{}}) >= {day.begin_us} AND epoch_us({{}}) < {day.end_us}"
                    ]
                )
                relation = f"(SELECT * FROM {files_sql(minutes)} WHERE {wanted})"  # noqa: S608  # quoted files
                parts.append(sql.rows_sql(relation, period="minute"))
        return " UNION ALL BY NAME ".join(parts) or None

    def _hours_in(self, hours: str) -> frozenset[int]:
        found = self._ask(f"SELECT DISTINCT epoch_us(hour) FROM {hours}")  # noqa: S608  # quoted files
        return frozenset(hour for (hour,) in found)

    def _load_stays(self) -> None:
        kinds = ("VARCHAR", "VARCHAR", "VARCHAR", "VARCHAR", "BIGINT", "BIGINT")
        names = ("cluster", "node", "board", "model", "begin_us", "end_us")
        rows = [(*s.node, s.board, s.model, s.begin_us, s.end_us) for s in self.stays]
        self._load("stays", dict(zip(names, kinds, strict=True)), rows)

    def _load(self, table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> None:
        # As one text: of each value in a list DuckDB asks anew whether numpy is installed.
        shape = msgspec.json.encode([dict(columns)]).decode()
        named = [dict(zip(columns, row, strict=True)) for row in rows]
        self._ask(
            f"CREATE OR REPLACE TEMP TABLE {table} AS"
            f" SELECT unnest(from_json($rows, '{shape}'), recursive := true)",  # our own names
            {"rows": msgspec.json.encode(named).decode()},
        )

    def _versions_in(self, table: str, columns: str, condition: str = "true") -> list[Any]:
        files = [file for of_day in self._files[table].values() for file in of_day]
        if not files:
            return []
        return self._ask(
            f"SELECT {columns} FROM {files_sql(files)} WHERE {condition} GROUP BY ALL ORDER BY ALL"  # noqa: S608  # quoted files
        )

    def _ask(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[Any]:
        return self._duckdb.execute(query, parameters or {}).fetchall()


class _Day:
    """One day's questions."""

    def __init__(
        self,
        reader: UsageReader,
        window: Window,
        changing: Sequence[tuple[str, str | None]],
        needs: Needs,
    ) -> None:
        self._reader, self._window, self._changing = reader, window, frozenset(changing)
        self._ask = reader._ask  # noqa: SLF001  # a part of the reader
        self._needs = needs
        keeps_boards = reader._keeps_boards  # noqa: SLF001  # as above
        self._detail = sql.Detail(
            since=self._since(),
            gpu="gpu_uuid" if keeps_boards else "NULL::VARCHAR",
            board="board" if keeps_boards else "NULL::VARCHAR",
            by_names=needs.by_names,
            names_pods=needs.names_pods,
        )
        self._classes: dict[Node, str] = {}
        self._parties: list[tuple[PartyKey, int]] = []

    def sums(self, basis_of: Callable[[PartyKey, int], PartyBasis]) -> DaySums:
        usage: list[UsageSum] = []
        charges: list[PartyCharge] = []
        idle: list[IdleCharge] = []
        covered: dict[tuple[DeviceClass, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        if self._open_rows():
            window = {"begin_us": self._window.begin_us, "end_us": self._window.end_us}
            self._ask(sql.DEVICES, window)
            usage = self._usage("usage_rows")
            same = sql.BY_UUID if self._is_plain() else sql.BY_ALL
            self._ask(sql.hours_sql(same_device=same), window)
            charges, idle = self._charges(same, basis_of)
            query = sql.covered_sql(self._detail)
            for cluster, node, model, since_us, gpu, known, capped, excess in self._ask(query):
                found = covered[DeviceClass(cluster, node, model, gpu=gpu), since_us]
                found[:] = (found[0] + known, found[1] + capped, found[2] + excess)
        return DaySums(usage, charges, idle, self._boards(covered))

    def rows(self, belongs: Callable[[UsageSum], bool]) -> Iterator[UsageRow]:
        if not self._open_rows():
            return
        wanted = [
            (*row.device, row.since_us, *_named(row.party), row.is_idle)
            for row in self._usage("usage_rows")
            if belongs(row)
        ]
        if not wanted:
            return
        kinds = {"is_idle": "BOOLEAN", "w": "BIGINT", "s": "BIGINT", "since_us": "BIGINT"}
        columns = {name: kinds.get(name, "VARCHAR") for name in sql.WANTED}
        self._reader._load("wanted", columns, wanted)  # noqa: SLF001  # as above
        query = sql.rows_in_sql(since=self._detail.since, gpu=self._detail.gpu)
        for row in self._ask(query):
            yield UsageRow._make(row)

    def _open_rows(self) -> bool:
        """Make the day's rows and classes of nodes known to SQL; return whether there are rows."""
        relation = self._reader.rows_relation(self._window)
        if not relation:
            return False
        self._ask(f"CREATE OR REPLACE TEMP VIEW usage_rows AS {relation}")
        nodes = self._ask("SELECT DISTINCT cluster, node FROM usage_rows ORDER BY ALL")
        rows = [(*node, self._class_of(node)) for node in nodes]
        columns = dict.fromkeys(("cluster", "node", "class_node"), "VARCHAR")
        self._reader._load("node_classes", columns, rows)  # noqa: SLF001  # as above
        return True

    def _class_of(self, node: Node) -> str:
        """Return the node that stands for all nodes that are like this one."""
        class_of = self._needs.class_of
        if class_of is None or node in self._changing or (node[0], None) in self._changing:
            return node[1]
        if node not in self._classes:
            first = self._reader._class_nodes.setdefault(  # noqa: SLF001  # as above
                (node[0], class_of(*node, self._window.begin_us)), node[1]
            )
            self._classes[node] = first
        return self._classes[node]

    def _since(self) -> str:
        """Return the SQL of the time from which a row's facts hold: its hour where they change."""
        if not self._changing:
            return str(self._window.begin_us)
        of_nodes = [_quoted(c, n) for c, n in sorted(self._changing, key=str) if n is not None]
        of_clusters = [_quoted(c) for c, n in sorted(self._changing, key=str) if n is None]
        conditions = [f"(cluster, node) IN ({', '.join(of_nodes)})"] if of_nodes else []
        conditions += [f"cluster IN ({', '.join(of_clusters)})"] if of_clusters else []
        return f"CASE WHEN {' OR '.join(conditions)} THEN hour_us ELSE {self._window.begin_us} END"

    def _is_plain(self) -> bool:
        return bool(self._ask("SELECT count(*) = count(DISTINCT gpu_uuid) FROM devices")[0][0])

    def _usage(self, rows: str) -> list[UsageSum]:
        return [
            UsageSum(
                DeviceClass._make(row[:7]),
                row[7],
                _party(row[0], row[1], *row[9:17]),
                row[8],
                *(int(amount) * row[17] for amount in row[18:22]),
                *map(int, row[22:]),
            )
            for row in self._ask(sql.sums_sql(rows, self._detail))
        ]

    def _charges(
        self, same: str, basis_of: Callable[[PartyKey, int], PartyBasis]
    ) -> tuple[list[PartyCharge], list[IdleCharge]]:
        is_special = False
        if not self._needs.by_names:
            parties = self._ask(sql.parties_sql("usage_rows", self._detail))
            is_special = self._load_parties(parties, basis_of)
        if is_special:
            self._ask(sql.mark_special_sql(same_device=same))
        odd, excess = self._ask(
            "SELECT count(*) FILTER (is_odd), count(*) FILTER (NOT is_odd AND covered > there)"
            " FROM device_hours"
        )[0]
        charges = self._excess(same) if excess else []
        if not odd:
            return charges, []
        if not is_special:
            rows = sql.rows_of_hours("is_odd", same_device=same)
            self._load_parties(self._ask(sql.parties_sql(rows, self._detail)), basis_of)
        # What the plain sums have of these hours is taken back first.
        for row in self._usage(sql.rows_of_hours("is_odd AND is_idle", same_device=same)):
            own = PartyCharge(row.device, row.since_us, row.party, row.silent - row.held)
            charges += [own, own._replace(units=-row.silent, is_silent=True)]
        self._ask(sql.odd_sql(same_device=same))
        for found in self._ask(sql.odd_parties_sql(self._detail)):
            party, since_us = self._parties[found[8] - 1]
            device = DeviceClass._make(found[:7])
            charges.append(PartyCharge(device, max(found[7], since_us), party, int(found[9])))
        idle = [
            IdleCharge(DeviceClass._make(found[:7]), found[7], *map(int, found[8:]))
            for found in self._ask(sql.odd_idle_sql(self._detail))
        ]
        return charges, idle

    def _excess(self, same: str) -> list[PartyCharge]:
        found = self._ask(sql.excess_sql(self._detail, same_device=same))
        return [
            PartyCharge(
                DeviceClass._make(row[:7]),
                row[7],
                _party(row[0], row[1], *row[8:16]),
                -int(row[16]),
            )
            for row in found
        ]

    def _load_parties(
        self, found: Sequence[Any], basis_of: Callable[[PartyKey, int], PartyBasis]
    ) -> bool:
        """Load who is who; return whether somebody is not charged by held time."""
        seen = []
        for cluster, node, kind, uid, *names, job, named_us, namespace, pod, since_us in found:
            party = PartyKey(cluster, node, kind, uid, namespace, pod, job)
            at_us = named_us if named_us is not None else since_us
            key = (cluster, node, kind, uid, *names, job, named_us)
            seen.append((basis_of(party, at_us), key, party, at_us))
        # In an order of their own, on which ties of largest remainders depend.
        seen.sort(key=lambda each: (each[0].identity, tuple(map(str, each[1]))))
        numbers: dict[tuple[str, ...], int] = {}
        self._parties = []
        rows = []
        for basis, key, party, at_us in seen:
            identity = basis.identity
            if identity not in numbers:
                numbers[identity] = len(numbers) + 1
                if identity[0] == "pod":
                    # Whoever was found by a name is that pod from here on.
                    self._parties.append((party._replace(uid=identity[-1]), 0))
                else:
                    self._parties.append((party, at_us if party.pod is not None else 0))
            rows.append((*key, numbers[identity], basis.basis, basis.weight, basis.weight_of))
        kinds = ["VARCHAR"] * 7 + ["BIGINT", "INTEGER", "VARCHAR", "BIGINT", "BIGINT"]
        names = "cluster node kind uid named_namespace named_pod job named_us party basis weight"
        columns = dict(zip([*names.split(), "weight_of"], kinds, strict=True))
        self._reader._load("parties", columns, rows)  # noqa: SLF001  # as above
        return any(basis.basis != "held" for basis, *_ in seen)

    def _boards(self, covered: dict[tuple[DeviceClass, int], list[int]]) -> list[BoardTime]:
        there: dict[tuple[DeviceClass, int], int] = defaultdict(int)
        for stay in self._reader.stays:
            begin = max(stay.begin_us, self._window.begin_us)
            end = min(stay.end_us, self._window.end_us)
            if begin >= end:
                continue
            gpu = stay.board if self._reader._keeps_boards else None  # noqa: SLF001  # as above
            device = DeviceClass(stay.node[0], self._class_of(stay.node), stay.model, gpu=gpu)
            if stay.node in self._changing or (stay.node[0], None) in self._changing:
                for hour in range(begin - begin % HOUR_US, end, HOUR_US):
                    length = min(end, hour + HOUR_US) - max(begin, hour)
                    there[device, max(hour, self._window.begin_us)] += length * 1000 * UNITS
            else:
                there[device, self._window.begin_us] += (end - begin) * 1000 * UNITS
        boards = []
        for key in {**dict.fromkeys(there), **dict.fromkeys(covered)}:
            known, capped, excess = covered.get(key, (0, 0, 0))
            # What the inventory has never had is there for as long as ticks cover it.
            total = there.get(key, 0) + int(capped - known)
            boards.append(BoardTime(*key, total, int(capped), int(excess)))
        return boards


def _party(  # the columns of `charging_sql.Detail.party`, in their order
    cluster: str,
    node: str,
    kind: PartyKind,
    uid: str | None,
    *others: Any,  # noqa: ANN401  # named namespace and pod, job, is_told, namespace, pod
) -> PartyKey:
    named_namespace, named_pod, job, is_told, namespace, pod = others
    if uid is None:
        namespace, pod = named_namespace, named_pod
    return PartyKey(cluster, node, kind, uid, namespace, pod, job, is_told)


def _named(party: PartyKey) -> tuple[str | None, ...]:
    """Return whose a row is as `charging_sql.PARTY` has it: names only where there is no UID."""
    if party.uid is not None:
        return (party.kind, party.uid, None, None, party.job)
    return (party.kind, None, party.namespace, party.pod, party.job)


def _quoted(*texts: str) -> str:
    literals = ", ".join("'" + text.replace("'", "''") + "'" for text in texts)
    return f"({literals})" if len(texts) > 1 else literals
