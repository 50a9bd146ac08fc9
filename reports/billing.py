"""Makes a bill of sums of time: what each line costs, and what all of it cost to begin with.

The store gives whole units of time by device, tenant and kind (`usage_sums`). Here they get their
prices, as fractions; idle that is to be shared is shared; and lines are rounded once, together.
The sum of the lines is the sum of the origin charges: a bill of which that is not so is not made.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple

from gpuledger.errors import GpuledgerError, UserError
from reports.charging_sql import HOUR_UNITS, UNITS
from reports.money import fraction_of, minor_digits, quantize_together
from reports.policy import (
    IDLE_KINDS,
    BasisRule,
    IdleKind,
    IdleRule,
    dimension_names,
    is_of_device,
)
from reports.policy_file import ReadPolicy, days_of_change
from reports.rates import DeviceTraits, PriceBook, Rate
from reports.tenants import (
    IDLE,
    SILENT,
    UNALLOCATED,
    UNATTRIBUTED,
    UNCOVERED,
    Dimensions,
    PartyKey,
    TenantBook,
    fits_all,
)
from reports.usage_sums import (
    DaySums,
    DeviceClass,
    Needs,
    PartyBasis,
    UsageReader,
    UsageRow,
    UsageSum,
    Window,
    begin_of,
    day_of,
)

_SECOND_UNITS: Final = UNITS * 10**9
_WORDS: Final[dict[IdleKind, str]] = {
    "unallocated": UNALLOCATED,
    "held_idle": IDLE,
    "overhead": SILENT,
    "uncovered": UNCOVERED,
}
Values = tuple[str, ...]


class UnbalancedBillError(GpuledgerError):
    """The lines do not sum to the origin charges: a mistake of ours, and no bill."""


@dataclass(eq=False, kw_only=True)
class Terms:
    """What devices cost that are charged alike; one object for each, compared by identity."""

    rate: Rate
    board_rate: Rate
    """Of the board of which an instance is; the device's own for a whole GPU."""
    scope: tuple[str | None, ...]
    """Cluster, node pool and model: idle is shared among those who had these devices."""
    rules: dict[IdleKind, IdleRule | None]


@dataclass(kw_only=True)
class Cell:
    """What a tenant or a kind of idle had of devices with the same terms; times in units."""

    charged: int = 0
    held: int = 0
    used: int = 0
    measured_used: int = 0
    waste: int = 0
    """Of what the tenant is charged: held and used by nobody."""
    energy_millijoules: int = 0
    memory_byte_ns: int = 0

    def cost(self, terms: Terms) -> Fraction:
        """Return what the charged time costs, without energy."""
        return terms.rate.per_gpu_hour * self.charged / HOUR_UNITS

    def energy_cost(self, terms: Terms) -> Fraction:
        """Return what the energy costs."""
        return terms.rate.per_millijoule * self.energy_millijoules


class CellKey(NamedTuple):
    """Whose a cell is."""

    values: Values
    """Of the bill's dimensions, and of those that budgets, shares and bases ask for."""
    kind: IdleKind | None


@dataclass(frozen=True, kw_only=True)
class BillLine:
    """One line: what somebody, or a kind of idle, costs in the period."""

    id: str
    values: Values
    idle_kind: IdleKind | None
    held: int
    used: int
    charged: int
    energy_millijoules: int
    memory_byte_ns: int
    gpu_cost: Fraction
    energy_cost: Fraction
    shared_cost: Fraction
    """Idle that the line pays for others, or below zero what others pay of it."""
    held_idle_cost: Fraction
    """Of `gpu_cost` what was held and used by nobody."""
    cost: Decimal
    """All of it, rounded together with the other lines."""

    @property
    def exact_cost(self) -> Fraction:
        """What the line costs before it is rounded."""
        return self.gpu_cost + self.energy_cost + self.shared_cost


@dataclass(frozen=True, kw_only=True)
class BudgetState:
    """What was spent of a budget, up to where there is usage."""

    name: str
    amount: Decimal
    spent: Fraction
    elapsed: Fraction
    """How much of the budget's time is over, 0 to 1."""

    @property
    def forecast(self) -> Fraction | None:
        """What it will have come to at the end at this pace; absent where it has not begun."""
        return self.spent / self.elapsed if self.elapsed else None


@dataclass(frozen=True, kw_only=True)
class Bill:
    """A bill, and all that it says of itself."""

    window: Window
    end_us: int
    """Up to when there was usage: the end of the window, or before it."""
    by: tuple[str, ...]
    currency: str
    lines: list[BillLine]
    origin_cost: Decimal
    line_cost: Decimal
    exact_origin_cost: Fraction
    covered_ratio: Fraction | None
    """The part of the boards' time that ticks cover; absent where no board was there."""
    measured_ratio: Fraction | None
    """The part of used time that was measured, not apportioned; absent where nothing was used."""
    excess_units: int
    unpriced: dict[str, int]
    """Units of boards without a price, by model."""
    budgets: list[BudgetState]
    gaps: list[tuple[str, int, str, int | None]]
    policy: ReadPolicy
    versions: dict[str, int | None]
    cells: dict[CellKey, dict[Terms, Cell]] = field(repr=False)
    shown: int
    """How many of a cell's values are of the bill's own dimensions."""

    @property
    def is_complete(self) -> bool:
        """Whether there is usage up to the end of the window."""
        return self.end_us >= self.window.end_us


def gpu_seconds(units: int) -> Decimal:
    """Return board-seconds of units, to the millisecond."""
    return quantize_together([Fraction(units, _SECOND_UNITS)], digits=3)[0]


class BillMaker:
    """Makes one bill."""

    def __init__(self, reader: UsageReader, read: ReadPolicy, *, by: Sequence[str]) -> None:
        policy = read.policy
        for name in by:
            if not policy.knows(name):
                raise UserError(f"--by: {name!r} is no dimension; there are {dimension_names()}")
        self._reader, self._read, self._by = reader, read, tuple(dict.fromkeys(by))
        asked = [name for budget in policy.budgets for name in budget.match]
        self._dimensions = tuple(dict.fromkeys((*self._by, *asked)))
        self._of_basis = tuple(dict.fromkeys(n for rule in policy.basis for n in rule.match))
        self._lookup: _Lookup | None = None

    def make(self, window: Window, *, advance: Callable[[int], None] = lambda _: None) -> Bill:
        """Return the bill of a time; `advance` is told of each day that is done."""
        reader, read = self._reader, self._read
        end_us = max(window.begin_us, min(window.end_us, reader.valid_through_us))
        used = Window(window.begin_us, end_us)
        book = TenantBook(
            pods=reader.pods(used), namespaces=reader.namespaces(), policy=read.policy
        )
        lookup = _Lookup(
            reader=reader,
            read=read,
            book=book,
            dimensions=self._dimensions,
            of_basis=self._of_basis,
            window=used,
        )
        tally = _Tally(lookup)
        self._lookup = lookup
        if used.begin_us < used.end_us:
            for day in reader.days(
                used, changes=lookup.changes, basis_of=lookup.basis_of, needs=lookup.needs
            ):
                tally.add(day)
                advance(1)
        tally.check_balance()
        return self._bill(window, used, tally)

    def rows_of(self, bill: Bill, line: BillLine) -> Iterator[UsageRow]:
        """Yield the rows of usage that a line of the bill made last is of."""
        lookup, shown = self._lookup, len(self._by)
        if lookup is None:
            raise RuntimeError("no bill was made")

        def belongs(row: UsageSum) -> bool:
            since_us = lookup.since(row.device.cluster, row.device.node, row.since_us)
            key = lookup.key_of(row.device, row.party, since_us, row.since_us)
            return (key.values[:shown], key.kind) == (line.values, line.idle_kind)

        window = Window(bill.window.begin_us, bill.end_us)
        yield from self._reader.rows(window, changes=lookup.changes, belongs=belongs)

    def _bill(self, window: Window, used: Window, tally: "_Tally") -> Bill:
        policy = self._read.policy
        shares, extra = tally.shares(shown=len(self._by))
        lines = _lines(tally, shares, extra, window=window, by=self._by, currency=policy.currency)
        origin = tally.origin_cost()
        exact = sum((line.exact_cost for line in lines), Fraction(0))
        if origin != exact:
            raise UnbalancedBillError(f"lines of {exact} for origin charges of {origin}")
        digits = minor_digits(policy.currency)
        return Bill(
            window=window,
            end_us=used.end_us,
            by=self._by,
            currency=policy.currency,
            lines=lines,
            origin_cost=quantize_together([origin], digits=digits)[0],
            line_cost=sum((line.cost for line in lines), Decimal(0)),
            exact_origin_cost=origin,
            covered_ratio=_ratio(tally.covered, tally.there),
            measured_ratio=_ratio(tally.measured, tally.used),
            excess_units=tally.excess,
            unpriced=dict(sorted(tally.unpriced.items())),
            budgets=self._budgets(tally, shares, used),
            gaps=self._reader.gaps(used),
            policy=self._read,
            versions=self._reader.versions(),
            cells=tally.cells,
            shown=len(self._by),
        )

    def _budgets(
        self, tally: "_Tally", shares: dict[CellKey, Fraction], used: Window
    ) -> list[BudgetState]:
        states = []
        for budget in self._read.policy.budgets:
            begin, end = begin_of(budget.since), begin_of(budget.until)
            fitting = [
                key for key in tally.cells if fits_all(budget.match, self._dimensions, key.values)
            ]
            spent = sum((tally.cost_of(key) + shares.get(key, 0) for key in fitting), Fraction(0))
            over = Fraction(max(0, min(used.end_us, end) - begin), end - begin)
            states.append(
                BudgetState(name=budget.name, amount=budget.amount, spent=spent, elapsed=over)
            )
        return states


def _ratio(part: int, whole: int) -> Fraction | None:
    return Fraction(part, whole) if whole else None


class _Lookup:
    """What is known of devices and parties at a time, found once for each."""

    def __init__(
        self,
        *,
        reader: UsageReader,
        read: ReadPolicy,
        book: TenantBook,
        dimensions: Sequence[str],
        of_basis: Sequence[str],
        window: Window,
    ) -> None:
        policy = read.policy
        self._nodes, self._book, self._policy = reader.nodes, book, policy
        self.prices = PriceBook(policy)
        self.dimensions = Dimensions(dimensions, policy=policy, book=book)
        self._of_basis = Dimensions(of_basis, policy=policy, book=book)
        self._window = window
        self._terms: dict[tuple[object, ...], Terms] = {}
        self._found_terms: dict[tuple[DeviceClass, int], Terms] = {}
        self._found_keys: dict[tuple[DeviceClass, PartyKey, int], CellKey] = {}
        self._found_basis: dict[tuple[PartyKey, int], PartyBasis] = {}
        self._since: dict[tuple[str, str, int], int] = {}
        self._days = sorted(begin_of(day) for day in days_of_change(policy))

    @cached_property
    def changes(self) -> list[tuple[int, str, str | None]]:
        """When something changed that lines or prices depend on."""
        parts = self.dimensions.parts | self._of_basis.parts
        looks = any(part.startswith("namespace-") for part in parts)
        found = list(self._book.changes(looks_at_namespaces=looks))
        for (cluster, node), versions in self._nodes.items():
            for before, after in pairwise(versions):
                if before[2:] != after[2:]:
                    found.append((after.since_us, cluster, node))
        return [change for change in found if change[0] < self._window.end_us]

    @property
    def needs(self) -> Needs:
        """What the bill has to know of rows."""
        parts = self.dimensions.parts
        names = {"namespace", "pod", "job"}
        is_of_names = all(
            part in names or part.startswith("namespace-") or is_of_device(part) for part in parts
        )
        by_names = is_of_names and not self._policy.basis
        tells_nodes = bool(parts & {"node", "gpu"})
        return Needs(
            by_names=by_names,
            names_pods=bool(parts & {"pod", "job"}),
            class_of=self._class_of if by_names and not tells_nodes else None,
        )

    def _class_of(self, cluster: str, node: str, since_us: int) -> object:
        facts = self.facts_of(DeviceClass(cluster, node, None), since_us)._replace(node="")
        # Labels count where something is made by them; each node has a name among its own.
        has_labels = any(part.startswith("node-label:") for part in self.dimensions.parts)
        # Nodes that are alike now were perhaps not so before: what holds since when is theirs too.
        return facts if has_labels else facts._replace(labels=None), self.since(
            cluster, node, since_us
        )

    @cached_property
    def _changes_of(self) -> dict[tuple[str, str | None], list[int]]:
        by_node: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for time_us, cluster, node in sorted(self.changes, key=str):
            by_node[cluster, node].append(time_us)
        return {key: sorted(times) for key, times in by_node.items()}

    def since(self, cluster: str, node: str, time_us: int) -> int:
        """Return the earliest time of which all is known that is so of a node at a time.

        Days on which nothing changed are so looked up once, not each for itself.
        """
        key = (cluster, node, time_us)
        if key not in self._since:
            earliest = self._window.begin_us
            for times in (
                self._days,
                self._changes_of.get((cluster, node), ()),
                self._changes_of.get((cluster, None), ()),
            ):
                if at := bisect_right(times, time_us):
                    earliest = max(earliest, times[at - 1])
            self._since[key] = earliest
        return self._since[key]

    def terms_of(self, device: DeviceClass, since_us: int) -> Terms:
        key = (device, since_us)
        if key not in self._found_terms:
            self._found_terms[key] = self._find_terms(device, since_us)
        return self._found_terms[key]

    def facts_of(self, device: DeviceClass, since_us: int) -> DeviceTraits:
        """Return what is known of a device, by the version of its node that was in force."""
        facts = DeviceTraits(*device)
        versions = self._nodes.get((device.cluster, device.node), ())
        if not versions:
            return facts
        at = bisect_right(versions, since_us, key=lambda version: version.since_us)
        version = versions[max(0, at - 1)]
        return facts._replace(
            node_pool=version.node_pool,
            instance_type=version.instance_type,
            zone=version.zone,
            region=version.region,
            capacity_type=version.capacity_type,
            labels=version.labels,
        )

    def _find_terms(self, device: DeviceClass, since_us: int) -> Terms:
        facts, day = self.facts_of(device, since_us), day_of(since_us)
        board = facts._replace(mig_profile=None, compute_slices=None, board_compute_slices=None)
        rules = {kind: self.prices.idle_rule_of(kind, board, day) for kind in IDLE_KINDS}
        rate, board_rate = self.prices.rate_of(facts, day), self.prices.rate_of(board, day)
        scope = (facts.cluster, facts.node_pool, facts.model)
        names = [row and row.name for row in (rate.price, board_rate.price, rate.energy)]
        dates = [row and row.since for row in (rate.exchange, board_rate.exchange)]
        numbers = (rate.per_gpu_hour, board_rate.per_gpu_hour, rate.per_millijoule)
        key = (*names, *dates, *numbers, scope, *(id(rule) for rule in rules.values()))
        return self._terms.setdefault(
            key, Terms(rate=rate, board_rate=board_rate, scope=scope, rules=rules)
        )

    def key_of(self, device: DeviceClass, party: PartyKey, since_us: int, asked_us: int) -> CellKey:
        """Return where what a party has of a device is counted."""
        # A name without a UID means a pod in that very hour.
        at = asked_us if party.uid is None and party.pod is not None else since_us
        key = (device, party, at)
        found = self._found_keys.get(key)
        if found is None:
            found = self._found_keys[key] = self._find_key(device, party, since_us, at)
        return found

    def _find_key(self, device: DeviceClass, party: PartyKey, since_us: int, at: int) -> CellKey:
        if party.kind == "nobody":
            return CellKey(self.idle_values(UNALLOCATED, device, since_us), "unallocated")
        tenant = self._book.find(party, at)
        facts = self.facts_of(device, since_us)
        values = self.dimensions.of_tenant(tenant, facts, since_us=at, day=day_of(since_us))
        return CellKey(values, "overhead" if tenant.kind in ("host", "unattributed") else None)

    def idle_values(self, word: str, device: DeviceClass, since_us: int) -> Values:
        facts = self.facts_of(device, since_us)
        return self.dimensions.of_idle(word, facts, day=day_of(since_us))

    def basis_of(self, party: PartyKey, asked_us: int) -> PartyBasis:
        """Return by what a party is charged, and who it is."""
        is_named = party.uid is None and party.pod is not None
        since_us = asked_us if is_named else self.since(party.cluster, party.node, asked_us)
        key = (party, since_us)
        if key not in self._found_basis:
            tenant = self._book.find(party, since_us)
            rule = None
            if self._policy.basis and tenant.kind in ("pod", "job"):
                facts = self.facts_of(DeviceClass(party.cluster, party.node, None), since_us)
                values = self._of_basis.of_tenant(
                    tenant, facts, since_us=since_us, day=day_of(since_us)
                )
                rule = next(
                    (
                        r
                        for r in self._policy.basis
                        if fits_all(r.match, self._of_basis.names, values)
                    ),
                    None,
                )
            self._found_basis[key] = _as_basis(tenant.identity, rule)
        return self._found_basis[key]


def _as_basis(identity: tuple[str, ...], rule: BasisRule | None) -> PartyBasis:
    if rule is None:
        return PartyBasis(identity)
    weight = fraction_of(rule.held_weight or Decimal(0))
    return PartyBasis(identity, rule.basis, weight.numerator, weight.denominator)


class _Tally:
    """All that days add up to."""

    def __init__(self, lookup: _Lookup) -> None:
        self._lookup = lookup
        self.cells: dict[CellKey, dict[Terms, Cell]] = {}
        self.there = self.covered = self.excess = self.used = self.measured = 0
        self.unpriced: dict[str, int] = defaultdict(int)
        self._origin = Fraction(0)
        self._board_units: dict[Terms, int] = defaultdict(int)
        self._device_units: dict[Terms, int] = defaultdict(int)
        self._millijoules: dict[Terms, int] = defaultdict(int)

    def add(self, day: DaySums) -> None:
        """Add a day."""
        since = self._lookup.since
        for row in day.usage:
            cluster, node = row.device[:2]
            since_us = since(cluster, node, row.since_us)
            terms = self._lookup.terms_of(row.device, since_us)
            cell = self._party_cell(row.device, row.party, since_us, row.since_us, terms)
            cell.energy_millijoules += row.energy_millijoules
            cell.memory_byte_ns += row.memory_byte_ns
            self._millijoules[terms] += row.energy_millijoules
            if row.is_idle:
                cell.charged += row.held - row.silent
                self._device_units[terms] += row.held
                if row.silent:
                    self._idle_cell("overhead", row.device, since_us, terms).charged += row.silent
                if row.party.kind != "nobody":
                    cell.held += row.held
                    basis = self._lookup.basis_of(row.party, row.since_us)
                    if basis.basis != "used":
                        paid = basis.weight if basis.basis == "blended" else basis.weight_of
                        cell.waste += row.busy * paid // basis.weight_of
            else:
                cell.used += row.busy
                self.used += row.busy
                self.measured += row.measured_busy
        self._add_charges(day)
        for row_ in day.boards:
            since_us = since(*row_.device[:2], row_.since_us)
            terms = self._lookup.terms_of(row_.device, since_us)
            self._board_units[terms] += row_.there
            self.there += row_.there
            self.covered += row_.covered
            self.excess += row_.excess
            if row_.there != row_.covered:
                cell = self._idle_cell("uncovered", row_.device, since_us, terms)
                cell.charged += row_.there - row_.covered
            if terms.rate.price is None and row_.there:
                self.unpriced[row_.device.model or UNATTRIBUTED] += row_.there

    def _add_charges(self, day: DaySums) -> None:
        for charge in day.charges:
            since_us = self._lookup.since(*charge.device[:2], charge.since_us)
            terms = self._lookup.terms_of(charge.device, since_us)
            self._device_units[terms] += charge.units
            if charge.is_silent:
                self._idle_cell("overhead", charge.device, since_us, terms).charged += charge.units
            else:
                cell = self._party_cell(
                    charge.device, charge.party, since_us, charge.since_us, terms
                )
                cell.charged += charge.units
        for idle in day.idle:
            since_us = self._lookup.since(*idle.device[:2], idle.since_us)
            terms = self._lookup.terms_of(idle.device, since_us)
            parts: tuple[tuple[IdleKind, int], ...] = (
                ("overhead", idle.silent),
                ("held_idle", idle.held_idle),
                ("unallocated", idle.unallocated),
            )
            for kind, units in parts:
                self._device_units[terms] += units
                if units:
                    self._idle_cell(kind, idle.device, since_us, terms).charged += units

    def _party_cell(
        self, device: DeviceClass, party: PartyKey, since_us: int, asked_us: int, terms: Terms
    ) -> Cell:
        return self._cell(self._lookup.key_of(device, party, since_us, asked_us), terms)

    def _idle_cell(self, kind: IdleKind, device: DeviceClass, since_us: int, terms: Terms) -> Cell:
        values = self._lookup.idle_values(_WORDS[kind], device, since_us)
        return self._cell(CellKey(values, kind), terms)

    def _cell(self, key: CellKey, terms: Terms) -> Cell:
        by_terms = self.cells.setdefault(key, {})
        cell = by_terms.get(terms)
        if cell is None:
            cell = by_terms[terms] = Cell()
        return cell

    def check_balance(self) -> None:
        """Raise `UnbalancedBillError` where lines have other time than the boards had."""
        charged = sum(cell.charged for cells in self.cells.values() for cell in cells.values())
        if charged != self.there:
            raise UnbalancedBillError(f"{charged} units are charged, the boards had {self.there}")

    def origin_cost(self) -> Fraction:
        """Return what all boards cost, whoever had them: by their time, and not by the lines."""
        boards = sum(
            (terms.rate.per_gpu_hour * units for terms, units in self._board_units.items()),
            Fraction(0),
        )
        # An instance with a price of its own costs that instead of its part of the board.
        instances = sum(
            (
                (terms.rate.per_gpu_hour - terms.board_rate.per_gpu_hour) * units
                for terms, units in self._device_units.items()
            ),
            Fraction(0),
        )
        energy = sum(
            (terms.rate.per_millijoule * mj for terms, mj in self._millijoules.items()),
            Fraction(0),
        )
        return (boards + instances) / HOUR_UNITS + energy

    def cost_of(self, key: CellKey) -> Fraction:
        """Return what the cells of a key cost, before anything is shared."""
        found = self.cells.get(key, {}).items()
        return sum(
            (cell.cost(terms) + cell.energy_cost(terms) for terms, cell in found), Fraction(0)
        )

    def shares(self, *, shown: int) -> tuple[dict[CellKey, Fraction], dict[CellKey, Fraction]]:
        """Return what idle adds to lines and takes from them, and what it makes new lines of."""
        pools: dict[tuple[tuple[str | None, ...], int], list[tuple[CellKey, Fraction]]] = {}
        rules: dict[int, IdleRule] = {}
        for key, cells in self.cells.items():
            for terms, cell in cells.items():
                rule = terms.rules[key.kind] if key.kind else None
                if rule is None or rule.share == "own_line":
                    continue
                rules[id(rule)] = rule
                cost = cell.cost(terms) + cell.energy_cost(terms)
                pools.setdefault((terms.scope, id(rule)), []).append((key, cost))
        added: dict[CellKey, Fraction] = defaultdict(Fraction)
        extra: dict[CellKey, Fraction] = defaultdict(Fraction)
        for (scope, number), given in pools.items():
            rule = rules[number]
            total = sum((cost for _, cost in given), Fraction(0))
            taken = self._taken(rule, scope, total, shown=shown)
            for key, cost in taken.items():
                target = extra if rule.share == "table" else added
                target[key] += cost
            if taken:
                for key, cost in given:
                    added[key] -= cost
        return dict(added), dict(extra)

    def _taken(
        self, rule: IdleRule, scope: tuple[str | None, ...], total: Fraction, *, shown: int
    ) -> dict[CellKey, Fraction]:
        """Return who takes how much of a pool of idle; nobody where nobody has a weight."""
        weights: dict[CellKey, Fraction] = {}
        if rule.share == "table":
            names = self._lookup.dimensions.names
            for value, weight in sorted(rule.weights.items()):
                word = _WORDS[rule.kind]
                values = tuple(value if name == rule.by else word for name in names)
                weights[CellKey(values, rule.kind)] = fraction_of(weight)
        else:
            for key, cells in self.cells.items():
                mine = [cell for terms, cell in cells.items() if terms.scope == scope]
                if key.kind is not None or not mine:
                    continue
                if rule.share == "even":
                    weights[key] = Fraction(1)
                else:
                    weights[key] = Fraction(sum(getattr(cell, rule.share) for cell in mine))
            if rule.share == "even":
                # Each line has the same; what a budget distinguishes within it shares that.
                counts: dict[Values, int] = defaultdict(int)
                for key in weights:
                    counts[key.values[:shown]] += 1
                weights = {key: Fraction(1, counts[key.values[:shown]]) for key in weights}
        sum_of_weights = sum(weights.values(), Fraction(0))
        if not sum_of_weights:
            return {}
        return {key: total * weight / sum_of_weights for key, weight in weights.items()}


def _lines(
    tally: _Tally,
    shares: dict[CellKey, Fraction],
    extra: dict[CellKey, Fraction],
    *,
    window: Window,
    by: tuple[str, ...],
    currency: str,
) -> list[BillLine]:
    shown: dict[CellKey, list[CellKey]] = defaultdict(list)
    for key in {**tally.cells, **dict.fromkeys(extra)}:
        shown[CellKey(key.values[: len(by)], key.kind)].append(key)
    unrounded = []
    for line, keys in sorted(shown.items(), key=lambda item: (item[0].values, item[0].kind or "")):
        cells = [pair for key in keys for pair in tally.cells.get(key, {}).items()]
        unrounded.append(
            BillLine(
                id=line_id(window, by, line),
                values=line.values,
                idle_kind=line.kind,
                held=sum(cell.held for _, cell in cells),
                used=sum(cell.used for _, cell in cells),
                charged=sum(cell.charged for _, cell in cells),
                energy_millijoules=sum(cell.energy_millijoules for _, cell in cells),
                memory_byte_ns=sum(cell.memory_byte_ns for _, cell in cells),
                gpu_cost=sum((cell.cost(terms) for terms, cell in cells), Fraction(0)),
                energy_cost=sum((cell.energy_cost(terms) for terms, cell in cells), Fraction(0)),
                shared_cost=sum(
                    (shares.get(key, Fraction(0)) + extra.get(key, Fraction(0)) for key in keys),
                    Fraction(0),
                ),
                held_idle_cost=sum(
                    (_waste_cost(terms, cell) for terms, cell in cells), Fraction(0)
                ),
                cost=Decimal(0),
            )
        )
    kept = [line for line in unrounded if line.exact_cost or line.charged or line.used or line.held]
    costs = quantize_together([line.exact_cost for line in kept], digits=minor_digits(currency))
    return [replace(line, cost=cost) for line, cost in zip(kept, costs, strict=True)]


def line_id(window: Window, by: Sequence[str], key: CellKey) -> str:
    """Return by what a line is known: whose it is and of which time, whatever it costs."""
    meaning = "\0".join(map(str, (*window, *by, *key.values, key.kind)))
    return sha256(meaning.encode()).hexdigest()[:12]


def _waste_cost(terms: Terms, cell: Cell) -> Fraction:
    return terms.rate.per_gpu_hour * min(cell.waste, max(0, cell.charged)) / HOUR_UNITS
