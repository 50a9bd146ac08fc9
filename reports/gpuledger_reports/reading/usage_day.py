"""Sums the rows of a store day by day, and bills them.

This module defines the order of a day's queries; `charging_sql`, `parts_sql` and `pods_sql` contain
the SQL. Only the rows of two days are in memory at a time.

The relations in DuckDB, each with the function or SQL that makes it, the meaning of one row, and
the results that are made from it ("For"):

- `usage_raw` (`_open_parts`): a row of the store, of an hour or a minute. For the next two.
- `usage_rows` (`ROWS`): the same, with the columns that bills use. For hours and charges.
- `usage_parts` (`parts_sql`): the sum of rows that the bill groups. For sums and parties.
- `node_classes` (`_open_rows`): a node, and the node that represents it. For sums and devices.
- `devices` (`DEVICES`): a GPU or instance, with one shape and model. For all below.
- `elsewhere` (`ELSEWHERE`): an hour that a GPU spent in other nodes. For `usage_raw`.
- `gpu_models` (`GPU_MODELS`): an hour of a GPU whose rows have another model. For `usage_raw`.
- `device_hours` (`hours_sql`): a device's hour, and whether it is complex. For charges and GPUs.
- `parties` (`_load_parties`): a party of rows, with its number and basis. For the next one.
- `complex_charges` (`complex_sql`): a party's charge in a complex hour. For complex sums.

The first three relations are made again if other records contain a container's pod (`containers`),
a pod's name (`row_names`), or a physical GPU's model. They are also made again if an allocation has
the UID of another pod (`other_pods`), or if a GPU with rows of one node may have been in another
node (`elsewhere`). In the last case, and after a change of model, `devices` is also made again. The
other relations are made once a day.
`mark_special_sql` marks further hours as complex by the parties' bases; if all parties pay by
allocated time, only the parties of complex hours are loaded. `mark_other_users_sql` marks hours in
which a party without an allocation used a device; `used_by_others_sql` then divides this use among
the allocatees.

Plain hours are billed by sums over `usage_parts`: their allocatees pay by allocated time, and
unallocated time was not used, so claims never exceed the device's time. Only the physical GPU's
presence may be shorter than the allocated time: `excess_sql` returns the difference, which is
subtracted. Complex hours are subtracted completely, then billed by all rules.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from gpuledger.store.query import quoted
from gpuledger_reports.reading import charging_sql as sql
from gpuledger_reports.reading import pods_sql
from gpuledger_reports.reading.charging_sql import (
    UNITS,
    ComplexIdleRow,
    ComplexPartyRow,
    CoveredRow,
    DeviceRow,
    UsedByOthersRow,
)
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.parties import PartyKey
from gpuledger_reports.reading.parts_sql import (
    PARTS_NOT_NAMED_BY_ROW,
    PARTS_WITHOUT_NAMESPACE,
    DevicePartyRow,
    ExcessRow,
    PartyRow,
    SumRow,
    add_unnamed_sql,
    excess_sql,
    parties_sql,
    parts_sql,
    sums_sql,
)
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window, days_in
from gpuledger_reports.reading.usage_sums import (
    ALL_NEEDED,
    Change,
    DaySums,
    DeviceClass,
    GpuInHour,
    IdleCharge,
    Needs,
    PartyBasis,
    PartyCharge,
    PhysicalGpuTime,
    UsageReader,
    UsageRow,
    UsageSum,
    UsedByOthers,
)

_DAYS_AT_ONCE: Final = 2
"""The number of days that are read in parallel, each with a part of the machine's cores."""
Changing = frozenset[tuple[str, str | None]]
"""Clusters and nodes with a change within a day; `None` means all nodes of the cluster."""
T = TypeVar("T")
R = TypeVar("R")


def days_of(
    reader: UsageReader,
    window: Window,
    *,
    changes: Sequence[Change],
    basis_of: Callable[[PartyKey, int], PartyBasis],
    needs: Needs = ALL_NEEDED,
    borders: Collection[int] = (),
) -> Iterator[DaySums]:
    """Yield the sums of each day of a window, in order.

    `changes` are the times, clusters and nodes of changes that affect the bill. On the day of a
    change, the node's hours are kept separate. If one of the `borders` lies within a day, the hours
    of all nodes are kept separate. Several days are read in parallel, so `basis_of` and the
    functions in `needs` are called from other threads.
    """
    days = list(_days_with_changes(window, changes, borders))
    reader.load_stays()
    # One thread per day. Two days in parallel are faster than two threads for one day, which would
    # wait for each other at the end of each query.
    readers = SimpleQueue[UsageReader]()
    count = max(1, min(_DAYS_AT_ONCE, len(days)))
    for each in (reader, *(reader.twin(of=count) for _ in range(count - 1))):
        readers.put(each)

    def sums_of(day: _Day) -> DaySums:
        mine = readers.get()
        try:
            return _UsageDay(mine, day, needs).sums(basis_of)
        finally:
            readers.put(mine)

    with ThreadPoolExecutor(count) as pool:
        yield from _in_order(pool, sums_of, days, ahead=count)


def _in_order(
    pool: Executor, work: Callable[[T], R], items: Iterable[T], *, ahead: int
) -> Iterator[R]:
    """Yield the results of `work` in order; up to `ahead` further items are processed meanwhile."""
    begun: deque[Future[R]] = deque()
    for item in items:
        begun.append(pool.submit(work, item))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def rows_of(
    reader: UsageReader,
    window: Window,
    *,
    changes: Sequence[Change],
    belongs: Callable[[UsageSum], bool],
    needs: Needs,
) -> Iterator[UsageRow]:
    """Yield the rows behind the sums for which `belongs` is true, ordered by hour, node and GPU.

    Rows are distinguished by all properties. Only the functions about pods are taken from `needs`.
    """
    needs = ALL_NEEDED._replace(is_known_pod=needs.is_known_pod, is_other_pod=needs.is_other_pod)
    for day in _days_with_changes(window, changes):
        yield from _UsageDay(reader, day, needs).rows(belongs)


class _Day(NamedTuple):
    """A day of a window, or the part of the day within the window."""

    window: Window
    changing: Changing
    with_hours: bool
    """Whether hours are kept separate on all nodes."""

    def is_changing(self, node: Node) -> bool:
        """Return whether a fact about a node changes within the day."""
        return node in self.changing or (node[0], None) in self.changing


def _days_with_changes(
    window: Window, changes: Sequence[Change], borders: Collection[int] = ()
) -> Iterator[_Day]:
    """Yield each day of a window, with the nodes that change within it."""
    by_day: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
    for time_us, cluster, node in changes:
        # A change at the start of a day applies to the whole day.
        if time_us % DAY_US:
            by_day[time_us // DAY_US].append((cluster, node))
    split = {border_us // DAY_US for border_us in borders if border_us % DAY_US}
    for day in days_in(window):
        number = day.begin_us // DAY_US
        yield _Day(day, frozenset(by_day.get(number, ())), number in split)


class _UsageDay:
    """The queries of one day."""

    def __init__(
        self,
        reader: UsageReader,
        day: _Day,
        needs: Needs,
    ) -> None:
        self._reader, self._day, self._window = reader, day, day.window
        self._query = reader.query
        self._needs = needs
        keeps_gpus = reader.keeps_gpus
        self._detail = sql.Detail(
            since=self._since(),
            gpu="gpu_uuid" if keeps_gpus else "NULL::VARCHAR",
            physical_gpu="physical_gpu" if keeps_gpus else "NULL::VARCHAR",
            by_names=needs.by_names,
            names_pods=needs.names_pods,
            by_hour=bool(day.changing) or day.with_hours,
        )
        # For this day only, because nodes that are equal today may have differed yesterday.
        self._classes: dict[Node, str] = {}
        self._first_of: dict[tuple[str, object], str] = {}
        self._parties: list[tuple[PartyKey, int]] = []
        self._has_rows = False
        self._may_be_elsewhere = False
        """Whether the inventory of another node lists a GPU of the rows, so `elsewhere` exists."""

    def sums(self, basis_of: Callable[[PartyKey, int], PartyBasis]) -> DaySums:
        usage: list[UsageSum] = []
        charges: list[PartyCharge] = []
        idle: list[IdleCharge] = []
        by_others: list[UsedByOthers] = []
        covered: dict[tuple[DeviceClass, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        # A day without rows may still have physical GPUs; all of their time is `no_data`.
        if self._open_rows():
            window = self._window._asdict()
            usage = self._usage("usage_parts")
            # If nodes share a UUID or a GPU was repartitioned, all columns must be compared, which
            # is slower.
            same = sql.BY_UUID if self._is_plain() else sql.BY_ALL
            self._query(sql.hours_sql(same_device=same), window)
            charges, idle, by_others = self._charges(same, basis_of)
            query = sql.covered_sql(self._detail)
            for row in self._reader.query_as(CoveredRow, query):
                device = DeviceClass(row.cluster, row.node, row.model, gpu=row.gpu)
                found = covered[device, row.since_us]
                found[:] = (found[0] + row.listed, found[1] + row.covered, found[2] + row.excess)
        physical_gpus = self._physical_gpus(covered)
        has_unlisted = any(each.unlisted for each in physical_gpus)
        unlisted = self._gpus_with(sql.UNLISTED) if has_unlisted else []
        scaled = self._gpus_with(sql.SCALED) if self._has_rows else []
        duplicate: list[GpuInHour] = []
        if self._may_be_elsewhere:
            begin = {"begin_us": self._window.begin_us}
            duplicate = _gpus_of(self._query(sql.GPUS_ELSEWHERE, begin))
        return DaySums(usage, charges, idle, by_others, physical_gpus, unlisted, scaled, duplicate)

    def rows(self, belongs: Callable[[UsageSum], bool]) -> Iterator[UsageRow]:
        if not self._open_rows():
            return
        # Make the sums again, and select the rows of the sums that belong to the line.
        wanted = [
            (*row.device, row.since_us, *_named(row.party), row.is_allocated)
            for row in self._usage("usage_parts")
            if belongs(row)
        ]
        if not wanted:
            return
        kinds = {
            "is_allocated": "BOOLEAN",
            "slices": "BIGINT",
            "gpu_slices": "BIGINT",
            "since_us": "BIGINT",
        }
        columns = {name: kinds.get(name, "VARCHAR") for name in sql.WANTED}
        self._reader.load("wanted", columns, wanted)
        query = sql.rows_in_sql(since=self._detail.since, gpu=self._detail.gpu)
        for row in self._query(query):
            yield UsageRow._make(row)

    def _open_rows(self) -> bool:
        """Make the day's relations and node classes in DuckDB; return whether there are rows."""
        relation = self._reader.rows_relation(self._window)
        if not relation:
            return False
        self._has_rows = True
        self._open_parts(relation)
        if self._load_containers(relation):
            relation = pods_sql.with_pods_sql(relation)
            self._open_parts(relation)
        if self._load_other_pods():
            relation = pods_sql.with_allocatees_sql(relation)
            self._open_parts(relation)
        if self._load_row_names():
            relation = pods_sql.with_names_sql(relation)
            self._open_parts(relation)
        nodes = self._query("SELECT DISTINCT cluster, node FROM usage_parts ORDER BY ALL")
        rows = [(*node, self._class_of(node)) for node in nodes]
        columns = dict.fromkeys(("cluster", "node", "class_node"), "VARCHAR")
        self._reader.load("node_classes", columns, rows)
        self._make_devices()
        if self._query(sql.IS_ELSEWHERE, self._window._asdict())[0][0]:
            self._may_be_elsewhere = True
            self._query(sql.ELSEWHERE, self._window._asdict())
            relation = sql.without_elsewhere_sql(relation)
            self._open_parts(relation)
            self._make_devices()
        # A row, its physical GPU and its price must have the same model for the bill to balance.
        if self._query(sql.OTHER_MODELS)[0][0]:
            self._query(sql.GPU_MODELS)
            self._open_parts(sql.with_models_sql(relation))
            self._make_devices()
        return True

    def _make_devices(self) -> None:
        """Make the table `devices` from the rows that are open now."""
        self._query(sql.DEVICES, self._window._asdict())

    def _load_containers(self, relation: str) -> bool:
        """Load the pods of containers if rows need them; return whether any were loaded.

        Only a few rows have a container whose pod was unknown when they were written.
        """
        # On most days, the sums show that there are no such rows, so the rows are not scanned.
        unplaced = f"SELECT count(*) FROM ({relation}) AS each WHERE {pods_sql.UNPLACED}"  # noqa: S608  # quoted files
        unnamed_pods = (
            f"SELECT count(*) FROM usage_parts WHERE NOT is_allocated AND {PARTS_NOT_NAMED_BY_ROW}"  # noqa: S608  # our own names
        )
        if not (self._query(unnamed_pods)[0][0] and self._query(unplaced)[0][0]):
            return False
        return self._reader.load_containers()

    def _load_other_pods(self) -> bool:
        """Load allocations with the UID of another pod; return whether there are any.

        The kubelet reports no UIDs. Until the records of pods arrive, the join assumes that a GPU
        is allocated to the only pod that uses it.
        """
        pods = "SELECT DISTINCT cluster, node, uid, namespace, pod FROM usage_parts"
        rows = self._query(
            f"{pods} WHERE {PARTS_NOT_NAMED_BY_ROW} AND is_allocated AND uid IS NOT NULL"
            " AND namespace IS NOT NULL"
        )
        others = [row for row in rows if self._needs.is_other_pod(*row)]
        columns = dict.fromkeys(("cluster", "node", "uid", "namespace", "pod"), "VARCHAR")
        if others:
            self._reader.load("other_pods", columns, others)
        return bool(others)

    def _load_row_names(self) -> bool:
        """Load pod names that only other rows of the day contain; return whether there are any.

        Most pods have a record with their name. A pod without a record needs one name for all its
        rows.
        """
        pods = "SELECT DISTINCT cluster, node, uid FROM usage_parts"
        rows = self._query(f"{pods} WHERE {PARTS_WITHOUT_NAMESPACE}")
        unnamed = [pod for pod in rows if not self._needs.is_known_pod(*pod)]
        return bool(unnamed) and self._reader.load_row_names(unnamed, self._window)

    def _open_parts(self, relation: str) -> None:
        self._query(f"CREATE OR REPLACE TEMP VIEW usage_raw AS {relation}")
        self._query(sql.ROWS)
        self._query(parts_sql(self._detail))
        unnamed_pods = f"FROM usage_parts WHERE {PARTS_NOT_NAMED_BY_ROW}"
        if self._needs.by_names and self._query(f"SELECT count(*) {unnamed_pods}")[0][0]:
            self._query(f"DELETE {unnamed_pods}")
            self._query(add_unnamed_sql(self._detail))

    def _class_of(self, node: Node) -> str:
        """Return the name of the node that represents all nodes with the same facts."""
        class_of = self._needs.class_of
        if class_of is None or self._day.is_changing(node):
            return node[1]
        if node not in self._classes:
            known = (node[0], class_of(*node, self._window.begin_us))
            self._classes[node] = self._first_of.setdefault(known, node[1])
        return self._classes[node]

    def _since(self) -> str:
        """Return the SQL of the time since which a row's facts are the same.

        It is the row's hour if the facts change within the day, otherwise the start of the day.
        """
        if self._day.with_hours:
            return "hour_us"
        if not self._day.changing:
            return str(self._window.begin_us)
        changing = sorted(self._day.changing, key=str)
        of_nodes = [f"({quoted(c)}, {quoted(n)})" for c, n in changing if n is not None]
        of_clusters = [quoted(c) for c, n in changing if n is None]
        conditions = [f"(cluster, node) IN ({', '.join(of_nodes)})"] if of_nodes else []
        conditions += [f"cluster IN ({', '.join(of_clusters)})"] if of_clusters else []
        return f"CASE WHEN {' OR '.join(conditions)} THEN hour_us ELSE {self._window.begin_us} END"

    def _is_plain(self) -> bool:
        return bool(self._query("SELECT count(*) = count(DISTINCT gpu_uuid) FROM devices")[0][0])

    def _usage(self, rows: str) -> list[UsageSum]:
        return [
            UsageSum(
                device=_device_of(row),
                since_us=row.since_us,
                party=_party_of(row),
                is_allocated=row.is_allocated,
                allocated=int(row.allocated_ns) * row.factor,
                unresponsive=int(row.unresponsive_ns) * row.factor,
                busy=int(row.busy_ns) * row.factor,
                measured_busy=int(row.measured_busy_ns) * row.factor,
                energy_millijoules=int(row.energy_millijoules),
                memory_byte_ns=int(row.memory_byte_ns),
            )
            for row in self._reader.query_as(SumRow, sums_sql(rows, self._detail))
        ]

    def _charges(
        self, same: str, basis_of: Callable[[PartyKey, int], PartyBasis]
    ) -> tuple[list[PartyCharge], list[IdleCharge], list[UsedByOthers]]:
        is_special = False
        if self._needs.has_bases:
            query = parties_sql("usage_parts", self._detail)
            parties = self._reader.query_as(PartyRow, query)
            is_special = self._load_parties(parties, basis_of)
        if is_special:
            self._query(sql.mark_special_sql(self._detail, same_device=same))
        if self._query(sql.has_other_users_sql(same_device=same))[0][0]:
            self._query(sql.mark_other_users_sql(same_device=same))
        complex_hours, excess = self._query(
            "SELECT count(*) FILTER (is_complex),"
            " count(*) FILTER (NOT is_complex AND covered > present) FROM device_hours"
        )[0]
        charges = self._excess(same) if excess else []
        # The sums already contain plain hours.
        if not complex_hours:
            return charges, [], []
        if not is_special:
            rows = sql.rows_of_hours("is_complex", same_device=same)
            query = parties_sql(rows, self._detail)
            self._load_parties(self._reader.query_as(PartyRow, query), basis_of)
        # Subtract the amounts by which the sums of plain hours include these hours.
        for row in self._usage(sql.rows_of_hours("is_complex AND is_allocated", same_device=same)):
            own = PartyCharge(row.device, row.since_us, row.party, row.unresponsive - row.allocated)
            charges += [own, own._replace(units=-row.unresponsive, is_unresponsive=True)]
        self._query(sql.complex_sql(self._detail, same_device=same))
        for billed in self._reader.query_as(ComplexPartyRow, sql.complex_parties_sql(self._detail)):
            # Parties are numbered from 1, because 0 means unallocated.
            party, since_us = self._parties[billed.party - 1]
            since_us = max(billed.since_us, since_us)
            charges.append(PartyCharge(_device_of(billed), since_us, party, int(billed.units)))
        idle = [
            IdleCharge(
                device=_device_of(left),
                since_us=left.since_us,
                unresponsive=int(left.unresponsive),
                unused=int(left.unused),
                unknown=int(left.unknown),
                idle=int(left.idle),
            )
            for left in self._reader.query_as(ComplexIdleRow, sql.complex_idle_sql(self._detail))
        ]
        return charges, idle, self._by_others()

    def _by_others(self) -> list[UsedByOthers]:
        query = sql.used_by_others_sql(self._detail)
        found = []
        for row in self._reader.query_as(UsedByOthersRow, query):
            user, user_us = self._parties[row.user_party - 1]
            allocatee, allocatee_us = self._parties[row.allocatee_party - 1]
            found.append(
                UsedByOthers(
                    device=_device_of(row),
                    since_us=row.since_us,
                    user=user,
                    user_since_us=max(row.since_us, user_us),
                    allocatee=allocatee,
                    allocatee_since_us=max(row.since_us, allocatee_us),
                    units=int(row.units),
                    billed=int(row.billed),
                )
            )
        return found

    def _excess(self, same: str) -> list[PartyCharge]:
        found = self._reader.query_as(ExcessRow, excess_sql(self._detail, same_device=same))
        return [
            PartyCharge(_device_of(row), row.since_us, _party_of(row), -int(row.units))
            for row in found
        ]

    def _load_parties(
        self, found: Sequence[PartyRow], basis_of: Callable[[PartyKey, int], PartyBasis]
    ) -> bool:
        """Load the table `parties`; return whether any party is not billed by allocated time."""
        seen = []
        # A party may have several rows: with its UID, and with only its name.
        for row in found:
            party = PartyKey(
                row.cluster, row.node, row.kind, row.uid, row.namespace, row.pod, row.job
            )
            at_us = row.named_us if row.named_us is not None else row.since_us
            seen.append((basis_of(party, at_us), row.key, party, at_us))
        # Sorted, because ties of largest remainders depend on the order.
        seen.sort(key=lambda each: (each[0].identity, tuple(map(str, each[1]))))
        numbers: dict[tuple[str, ...], int] = {}
        self._parties = []
        rows = []
        for basis, key, party, at_us in seen:
            identity = basis.identity
            if identity not in numbers:
                numbers[identity] = len(numbers) + 1
                if identity[0] == "pod":
                    # A pod that was found by its name is from here on identified by its UID.
                    self._parties.append((party._replace(uid=identity[-1]), 0))
                else:
                    self._parties.append((party, at_us if party.pod is not None else 0))
            rows.append((*key, numbers[identity], basis.basis, basis.weight, basis.weight_of))
        kinds = ["VARCHAR"] * 7 + ["BIGINT"] * 2 + ["INTEGER", "VARCHAR", "BIGINT", "BIGINT"]
        names = (
            "cluster node kind uid named_namespace named_pod job named_us since_us party basis"
            " weight"
        )
        columns = dict(zip([*names.split(), "weight_of"], kinds, strict=True))
        self._reader.load("parties", columns, rows)
        return any(basis.basis != "allocated" for basis, *_ in seen)

    def _physical_gpus(
        self, covered: dict[tuple[DeviceClass, int], list[int]]
    ) -> list[PhysicalGpuTime]:
        there: dict[tuple[DeviceClass, int], int] = defaultdict(int)
        of_rows = self._models_of_rows()
        for stay, gpus_alike in self._reader.alike_stays:
            begin = max(stay.begin_us, self._window.begin_us)
            end = min(stay.end_us, self._window.end_us)
            # A stay of the GPU may be outside this day.
            if begin >= end:
                continue
            node, model = stay.node, stay.model
            if model is None:
                model = of_rows.get((*node, stay.physical_gpu))
            gpu = stay.physical_gpu if self._reader.keeps_gpus else None
            device = DeviceClass(node[0], self._class_of(node), model, gpu=gpu)
            units = gpus_alike * 1000 * UNITS
            if self._day.with_hours or self._day.is_changing(node):
                # Keep hours separate, because each may have another price.
                for hour in range(begin - begin % HOUR_US, end, HOUR_US):
                    length = min(end, hour + HOUR_US) - max(begin, hour)
                    there[device, max(hour, self._window.begin_us)] += length * units
            else:
                there[device, self._window.begin_us] += (end - begin) * units
        physical_gpus = []
        for key in {**dict.fromkeys(there), **dict.fromkeys(covered)}:
            listed, capped, excess = covered.get(key, (0, 0, 0))
            # Ticks prove that a GPU is present, even in hours in which the inventory lacks it.
            unlisted = int(capped - listed)
            total = there.get(key, 0) + unlisted
            physical_gpus.append(PhysicalGpuTime(*key, total, int(capped), int(excess), unlisted))
        return physical_gpus

    def _gpus_with(self, condition: str) -> list[GpuInHour]:
        return _gpus_of(self._query(sql.gpus_sql(condition, self._detail)))

    def _models_of_rows(self) -> dict[tuple[str, str, str], str]:
        """Return the models that rows contain for physical GPUs without a model in the inventory.

        The key is the cluster, the node and the physical GPU's UUID.
        """
        unnamed = {
            (*s.node, s.physical_gpu) for s, _ in self._reader.alike_stays if s.model is None
        }
        if not unnamed or not self._has_rows:
            return {}
        found = self._query("SELECT DISTINCT cluster, node, physical_gpu, gpu_model FROM devices")
        return {
            (*physical_gpu,): model for *physical_gpu, model in found if (*physical_gpu,) in unnamed
        }


def _gpus_of(rows: Iterable[tuple[Any, ...]]) -> list[GpuInHour]:
    return [
        GpuInHour((cluster, node), physical_gpu, since_us)
        for cluster, node, physical_gpu, since_us in rows
    ]


def _device_of(row: DeviceRow) -> DeviceClass:
    return DeviceClass(
        row.cluster, row.node, row.model, row.mig_profile, row.slices, row.gpu_slices, row.gpu
    )


def _party_of(row: DevicePartyRow) -> PartyKey:
    # Names that identify the party take precedence over descriptive names.
    is_named = row.uid is None
    namespace = row.named_namespace if is_named else row.namespace
    pod = row.named_pod if is_named else row.pod
    return PartyKey(
        row.cluster, row.node, row.kind, row.uid, namespace, pod, row.job, row.is_named_by_row
    )


def _named(party: PartyKey) -> tuple[str | None, ...]:
    """Return a party's values for the columns of `charging_sql.PARTY`.

    If the party has a UID, its names are null.
    """
    if party.uid is not None:
        return (party.kind, party.uid, None, None, party.job)
    return (party.kind, None, party.namespace, party.pod, party.job)
