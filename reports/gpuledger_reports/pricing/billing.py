"""Makes a bill from summed times: the cost of each line, and the asset cost.

`usage_sums` provides time in whole units by device, tenant and kind. This module multiplies them by
prices as exact fractions, distributes idle, and rounds all lines together. If the lines do not sum
to the asset cost, it raises an error instead of making a bill.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from typing import Final, NamedTuple

from gpuledger.errors import ArgumentError
from gpuledger.texts import find_near
from gpuledger_reports.pricing.lookup import (
    IDLE_WORDS,
    BillLookup,
    Cell,
    CellKey,
    OthersCell,
    Pricing,
    Values,
    names_suffice,
)
from gpuledger_reports.pricing.money import minor_digits, quantize_together
from gpuledger_reports.pricing.policy import BudgetRow, IdleKind, dimension_names
from gpuledger_reports.pricing.policy_file import ReadPolicy
from gpuledger_reports.pricing.tenants import NO_DATA, TenantBook, fits_all
from gpuledger_reports.pricing.totals import BillTally, DailyCosts, DayCost, UnbalancedBillError
from gpuledger_reports.reading.charging_sql import HOUR_UNITS, UNITS
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.parties import NO_PARTIES
from gpuledger_reports.reading.times import DAY_US, Window, begin_of, days_in
from gpuledger_reports.reading.usage_day import days_of, rows_of
from gpuledger_reports.reading.usage_sums import (
    DaySums,
    Needs,
    PartyBasis,
    PhysicalGpuTime,
    UsageReader,
    UsageRow,
    UsageSum,
)

_SECOND_UNITS: Final = UNITS * 10**9
_FIRST_LETTERS: Final = "ghijklmnopqrstuv"


@dataclass(frozen=True, kw_only=True)
class BillLine:
    """One line: the cost of a tenant, or of a kind of idle, in the period."""

    id: str
    values: Values
    idle_kind: IdleKind | None
    allocated: int
    used: int
    by_others: int
    """Allocated time that a pod or job without an allocation used. It is on the line items of both:
    the user and the allocatee. If both have the same line item, it counts once."""
    billed: int
    energy_millijoules: int
    memory_byte_ns: int
    gpu_cost: Fraction
    energy_cost: Fraction
    shared_cost: Fraction
    """The distributed cost that this line pays; negative if others pay its cost."""
    unused_cost: Fraction
    """The part of `gpu_cost` for time that was allocated but not used."""
    cost: Decimal
    """The total cost, rounded together with the other lines."""

    @property
    def has_amounts(self) -> bool:
        """Whether any amount is not zero, including a cost that others pay."""
        return any(
            (
                *(self.billed, self.used, self.allocated, self.cost),
                *(self.gpu_cost, self.energy_cost, self.shared_cost),
            )
        )

    @property
    def key(self) -> CellKey:
        """The line's unique key; ids are short hashes that may collide."""
        return CellKey(self.values, self.idle_kind)

    @property
    def exact_cost(self) -> Fraction:
        """The line's cost before rounding."""
        return self.gpu_cost + self.energy_cost + self.shared_cost


@dataclass(frozen=True, kw_only=True)
class BudgetState:
    """The spending of a budget, up to the end of usage."""

    name: str
    amount: Decimal
    spent: Fraction
    elapsed: Fraction
    """The elapsed part of the budget's time, from 0 to 1."""

    @property
    def forecast(self) -> Fraction | None:
        """The expected spending at the end of the budget's time; `None` before its beginning."""
        return self.spent / self.elapsed if self.elapsed else None


class Approval(NamedTuple):
    """The remarks with which a person closes a revision."""

    note: str | None = None
    approved_by: str | None = None


class Revision(NamedTuple):
    """A revision of a closed bill."""

    number: int
    closed_time_us: int
    approval: Approval


@dataclass(frozen=True, kw_only=True)
class Bill:
    """A bill and its metadata."""

    window: Window
    end_us: int
    """The end of usage: the end of the window, or earlier."""
    by: tuple[str, ...]
    currency: str
    lines: list[BillLine]
    asset_cost: Decimal
    line_cost: Decimal
    exact_asset_cost: Fraction
    data_coverage_ratio: Fraction | None
    """The part of the physical GPUs' time with ticks; `None` if there was no physical GPU. Ticks of
    GPUs that the inventory does not list do not count, because the GPUs' whole time is unknown."""
    measured_ratio: Fraction | None
    """The part of used time that was measured, not apportioned; `None` if nothing was used."""
    excess_units: int
    unlisted_units: int
    """Billed time in hours in which the inventory does not list the GPU."""
    unlisted_gpus: frozenset[tuple[Node, str]]
    """The GPUs of these hours."""
    scaled_gpus: frozenset[tuple[Node, str]]
    """The GPUs that were allocated more than once at a time."""
    duplicate_gpus: frozenset[tuple[Node, str]]
    """Nodes and GPUs with samples that are not billed, because the GPU was in another node."""
    unknown_units: int
    """Billed time for which the kubelet did not report the allocation."""
    unpriced: dict[str, int]
    """Units that are billed without a price, by model."""
    budgets: list[BudgetState]
    gaps: list[tuple[str, int, str, int | None]]
    policy: ReadPolicy
    versions: dict[str, int | None]
    cells: dict[CellKey, dict[Pricing, Cell]] = field(repr=False)
    shown: int
    """The number of the bill's own dimensions. The key of a cell begins with the values of these;
    the values of dimensions that only rules match follow."""
    by_others: dict[tuple[CellKey, CellKey], dict[Pricing, OthersCell]] = field(
        default_factory=dict, repr=False
    )
    """Use without an allocation, by the lines of the user and the allocatee."""
    removed_until_us: int | None = None
    """The time before which retention removed usage of the window; `None` if it removed none."""
    revision: int | None = None
    """The last revision of a closed bill; `None` if the bill was calculated now."""
    revisions: list[Revision] = field(default_factory=list)
    """All revisions of a closed bill."""
    days: list[DayCost] = field(default_factory=list)
    """The cost of each day, if requested."""
    usage: Window | None = None
    """The time for which the store has usage, if the bill has no lines."""

    @property
    def usage_until_us(self) -> int:
        """The end of usage, which may be before the window."""
        return min(self.end_us, self.usage.end_us) if self.usage else self.end_us

    @property
    def is_complete(self) -> bool:
        """Whether there is usage up to the end of the window."""
        return self.end_us >= self.window.end_us


def gpu_seconds(units: int) -> Decimal:
    """Return units as seconds of a whole physical GPU, with three decimals."""
    return quantize_together([Fraction(units, _SECOND_UNITS)], digits=3)[0]


def gpu_count(gpus: Iterable[tuple[Node, str]]) -> int:
    """Return the number of physical GPUs; several nodes may have the same one."""
    return len({gpu for _, gpu in gpus})


class BillMaker:
    """Makes bills, and finds the rows of usage behind a line of the latest bill."""

    def __init__(self, reader: UsageReader, read: ReadPolicy, *, by: Sequence[str]) -> None:
        policy = read.policy
        for name in by:
            if not policy.has_dimension(name):
                near = find_near(name, [*policy.dimensions, *dimension_names().split(", ")])
                remedy = f"did you mean {near}?" if near else f"dimensions are {dimension_names()}"
                raise ArgumentError("by", f"unknown dimension {name!r}; {remedy}")
        self._reader, self._read, self._by = reader, read, tuple(dict.fromkeys(by))
        reader.count_slices(policy.mig_slices)
        # Rules may match dimensions that the bill does not show. Cells have these dimensions, and
        # lines are sums over them.
        matches = [row.match for row in policy.budgets] + [row.match for row in policy.shared]
        conditions = [name for match in matches for name in match]
        self._dimensions = tuple(dict.fromkeys((*self._by, *conditions)))
        self._of_basis = tuple(dict.fromkeys(n for rule in policy.basis for n in rule.match))
        self._lookup: BillLookup | None = None

    def make(
        self,
        window: Window,
        *,
        advance: Callable[[int], None] = lambda _: None,
        with_days: bool = False,
        with_budgets: bool = True,
    ) -> Bill:
        """Return the bill of a window; `advance` is called with 1 after each day.

        With `with_days`, the bill also contains the cost of each day. With `with_budgets`, the days
        of budgets outside the window are read too. Raises UnbalancedBillError if
        the lines do not sum to the asset cost.
        """
        daily = DailyCosts()
        used, lookup, tally = self._tally_of(window, advance, daily if with_days else None)
        self._lookup = lookup
        return replace(
            self._bill(window, used, tally),
            days=daily.days,
            budgets=self._budgets(window, used, tally) if with_budgets else [],
        )

    def make_each(self, windows: Sequence[Window]) -> Iterator[Bill]:
        """Yield the bills of consecutive windows; the store is read once for all of them.

        These bills have no budgets, because a budget has its own days.
        """
        begins_us = [window.begin_us for window in windows]
        used, lookup = self._look_up(Window(begins_us[0], windows[-1].end_us))
        tallies = [BillTally(lookup) for _ in windows]
        for day in self._days(used, lookup, borders=begins_us):
            for number, part in day.split(begins_us):
                tallies[number].add(part)
        for window, tally in zip(windows, tallies, strict=True):
            tally.check_balance()
            end_us = max(window.begin_us, min(window.end_us, used.end_us))
            yield self._bill(window, Window(window.begin_us, end_us), tally)

    def _tally_of(
        self,
        window: Window,
        advance: Callable[[int], None] = lambda _: None,
        daily: DailyCosts | None = None,
    ) -> tuple[Window, BillLookup, BillTally]:
        """Return the part of a window that has usage, with its lookup and the sums of its days."""
        used, lookup = self._look_up(window)
        tally = BillTally(lookup)
        for number, day in enumerate(self._days(used, lookup), used.begin_us // DAY_US):
            tally.add(day)
            if daily is not None:
                daily.add(tally, number * DAY_US)
            advance(1)
        tally.check_balance()
        return used, lookup, tally

    def _look_up(self, window: Window) -> tuple[Window, BillLookup]:
        """Return the part of a window that has usage, with the lookup of its prices and tenants."""
        reader, read = self._reader, self._read
        # Time after the last usage is not billed at all, not even as `__no_data__`.
        end_us = max(window.begin_us, min(window.end_us, reader.usage_end_us))
        used = Window(window.begin_us, end_us)
        by_names = names_suffice(self._dimensions, read.policy)
        book = TenantBook(
            pods=reader.pods(used, by_names=by_names),
            namespaces=reader.namespaces(),
            policy=read.policy,
        )
        return used, BillLookup(
            reader=reader,
            read=read,
            book=book,
            dimensions=self._dimensions,
            of_basis=self._of_basis,
            window=used,
        )

    def _days(
        self,
        used: Window,
        lookup: BillLookup,
        *,
        borders: Sequence[int] = (),
        needs: Needs | None = None,
    ) -> Iterator[DaySums]:
        if used.begin_us == used.end_us:
            return iter(())
        return days_of(
            self._reader,
            used,
            changes=lookup.changes,
            basis_of=lookup.basis_of,
            needs=needs or lookup.needs,
            borders=borders,
        )

    def rows_of(self, bill: Bill, line: BillLine) -> Iterator[UsageRow]:
        """Yield the rows of usage that belong to a line of the bill that `make` returned last."""
        lookup, shown = self._lookup, len(self._by)
        if lookup is None:
            raise RuntimeError("no bill was made")

        def belongs(row: UsageSum) -> bool:
            since_us = lookup.since(row.device.cluster, row.device.node, row.since_us)
            key = lookup.key_of(row.device, row.party, since_us, row.since_us)
            if (key.values[:shown], key.kind) == (line.values, line.idle_kind):
                return True
            # A part of an allocated row's time may be billed on an idle line.
            kinds = _idle_kinds_of(row, lookup.basis_of(row.party, row.since_us))
            return (
                line.idle_kind in kinds
                and line.values
                == lookup.idle_values(IDLE_WORDS[line.idle_kind], row.device, since_us)[:shown]
            )

        window = Window(bill.window.begin_us, bill.end_us)
        rows = rows_of(
            self._reader,
            window,
            changes=lookup.changes,
            belongs=belongs,
            needs=lookup.needs,
        )
        for row in rows:
            # `rows_of` yields all rows of a sum, and some of them may have no unresponsive time.
            if line.idle_kind != "overhead" or not row.is_allocated or row.unresponsive_ns > 0:
                yield row

    def no_data_of(self, bill: Bill, line: BillLine) -> Iterator[PhysicalGpuTime]:
        """Yield the time without data in a line of the latest bill, by node and hour."""
        lookup = self._lookup
        if lookup is None:
            raise RuntimeError("no bill was made")
        window = Window(bill.window.begin_us, bill.end_us)
        # A border within each day keeps all hours separate.
        borders = [day.begin_us + 1 for day in days_in(window)]
        needs = lookup.needs._replace(class_of=None)
        for day in self._days(window, lookup, borders=borders, needs=needs):
            for gpu in day.physical_gpus:
                since_us = lookup.since(*gpu.device[:2], gpu.since_us)
                values = lookup.idle_values(NO_DATA, gpu.device, since_us)[: len(self._by)]
                if gpu.present != gpu.covered and values == line.values:
                    yield gpu

    def _bill(self, window: Window, used: Window, tally: "BillTally") -> Bill:
        policy = self._read.policy
        shares, extra = tally.shares(shown=len(self._by))
        by_others = _by_lines(tally, shown=len(self._by))
        lines = _lines(
            tally,
            shares,
            extra,
            window=window,
            by=self._by,
            currency=policy.currency,
            by_others=by_others,
        )
        # The asset cost is not calculated from the lines, so that the comparison is independent.
        origin = tally.asset_cost()
        exact = sum((line.exact_cost for line in lines), Fraction(0))
        if origin != exact:
            raise UnbalancedBillError(f"line items of {exact} for an asset cost of {origin}")
        digits = minor_digits(policy.currency)
        removed_us = min(self._reader.removed_before_us, window.end_us)
        return Bill(
            window=window,
            end_us=used.end_us,
            removed_until_us=removed_us if removed_us > window.begin_us else None,
            by=self._by,
            currency=policy.currency,
            lines=lines,
            asset_cost=quantize_together([origin], digits=digits)[0],
            line_cost=sum((line.cost for line in lines), Decimal(0)),
            exact_asset_cost=origin,
            data_coverage_ratio=_ratio(tally.covered - tally.unlisted, tally.present),
            measured_ratio=_ratio(tally.measured, tally.used),
            excess_units=tally.excess,
            unlisted_units=tally.unlisted,
            unlisted_gpus=frozenset(tally.unlisted_gpus),
            scaled_gpus=frozenset(tally.scaled_gpus),
            duplicate_gpus=frozenset(tally.duplicate_gpus),
            unknown_units=tally.unknown,
            unpriced=tally.unpriced,
            budgets=[],
            gaps=self._reader.gaps(used),
            policy=self._read,
            versions=self._reader.versions(),
            cells=tally.cells,
            shown=len(self._by),
            by_others=by_others,
            usage=None if lines else Window(self._reader.usage_begin_us, self._reader.usage_end_us),
        )

    def _fits(self, budget: BudgetRow, key: CellKey) -> bool:
        return fits_all(budget.match, self._dimensions, key.values)

    def _budgets(self, window: Window, used: Window, tally: BillTally) -> list[BudgetState]:
        """Return the state of each budget that has days in the window.

        A state counts all days of its budget, including the days outside the window.
        """
        tallies = {window: (used, tally)}
        states = []
        for budget in self._read.policy.budgets:
            days = Window(begin_of(budget.since), begin_of(budget.until))
            if days.end_us <= window.begin_us or days.begin_us >= window.end_us:
                continue
            # A separate tally: idle is shared among the tenants of the budget's days.
            if days not in tallies:
                own_used, _, own_tally = self._tally_of(days)
                tallies[days] = (own_used, own_tally)
            over, found = tallies[days]
            states.append(
                BudgetState(
                    name=budget.name,
                    amount=budget.amount,
                    spent=self._cost_of(found, budget),
                    elapsed=Fraction(over.end_us - over.begin_us, days.end_us - days.begin_us),
                )
            )
        return states

    def _cost_of(self, tally: BillTally, budget: BudgetRow) -> Fraction:
        """Return the cost that counts toward a budget, after costs are shared."""
        shares, extra = tally.shares(shown=len(self._by))
        return sum(
            (
                tally.cost_of(key) + shares.get(key, 0) + extra.get(key, 0)
                for key in {**tally.cells, **dict.fromkeys(extra)}
                if self._fits(budget, key)
            ),
            Fraction(0),
        )


def _idle_kinds_of(row: UsageSum, basis: PartyBasis) -> set[IdleKind]:
    """Return the kinds of idle line on which a part of the row's time may be billed."""
    kinds: set[IdleKind] = set()
    if row.is_allocated and row.unresponsive:
        kinds.add("overhead")
    # On the basis `allocated`, unused time is billed to its tenant instead.
    if row.is_allocated and row.party.kind not in NO_PARTIES and basis.basis != "allocated":
        kinds.add("unused")
    return kinds


def _ratio(part: int, whole: int) -> Fraction | None:
    return Fraction(part, whole) if whole else None


def _by_lines(
    tally: BillTally, *, shown: int
) -> dict[tuple[CellKey, CellKey], dict[Pricing, OthersCell]]:
    """Return the use without an allocation by lines instead of cells, which are finer."""
    found: dict[tuple[CellKey, CellKey], dict[Pricing, OthersCell]] = {}
    for cells, by_pricing in tally.by_others.items():
        user, allocatee = (CellKey(key.values[:shown], key.kind) for key in cells)
        of_lines = found.setdefault((user, allocatee), {})
        for pricing, cell in by_pricing.items():
            of_lines.setdefault(pricing, OthersCell()).add(cell)
    return found


def _lines(
    tally: BillTally,
    shares: dict[CellKey, Fraction],
    extra: dict[CellKey, Fraction],
    *,
    window: Window,
    by: tuple[str, ...],
    currency: str,
    by_others: dict[tuple[CellKey, CellKey], dict[Pricing, OthersCell]],
) -> list[BillLine]:
    others_of: dict[CellKey, int] = defaultdict(int)
    for lines, by_pricing in by_others.items():
        for key in set(lines):
            others_of[key] += sum(cell.units for cell in by_pricing.values())
    shown: dict[CellKey, list[CellKey]] = defaultdict(list)
    for key in {**tally.cells, **dict.fromkeys(extra)}:
        shown[CellKey(key.values[: len(by)], key.kind)].append(key)
    # Sorted by values, because ties of the largest remainder depend on the order.
    unrounded = []
    for line, keys in sorted(shown.items(), key=lambda item: (item[0].values, item[0].kind or "")):
        cells = [pair for key in keys for pair in tally.cells.get(key, {}).items()]
        unrounded.append(
            BillLine(
                id=line_id(window, by, line),
                values=line.values,
                idle_kind=line.kind,
                allocated=sum(cell.allocated for _, cell in cells),
                used=sum(cell.used for _, cell in cells),
                by_others=others_of[line],
                billed=sum(cell.billed for _, cell in cells),
                energy_millijoules=sum(cell.energy_millijoules for _, cell in cells),
                memory_byte_ns=sum(cell.memory_byte_ns for _, cell in cells),
                gpu_cost=sum((cell.cost(pricing) for pricing, cell in cells), Fraction(0)),
                energy_cost=sum(
                    (cell.energy_cost(pricing) for pricing, cell in cells), Fraction(0)
                ),
                shared_cost=sum(
                    (shares.get(key, Fraction(0)) + extra.get(key, Fraction(0)) for key in keys),
                    Fraction(0),
                ),
                unused_cost=sum(
                    (_waste_cost(pricing, cell) for pricing, cell in cells), Fraction(0)
                ),
                cost=Decimal(0),
            )
        )
    kept = [line for line in unrounded if line.has_amounts]
    costs = quantize_together([line.exact_cost for line in kept], digits=minor_digits(currency))
    return [replace(line, cost=cost) for line, cost in zip(kept, costs, strict=True)]


def line_id(window: Window, by: Sequence[str], key: CellKey) -> str:
    """Return a line's id: a short hash of its period, dimensions, values and kind.

    Its first digit is written as a letter from g to v, because spreadsheets read some hexadecimal
    texts, such as 1234e5, as numbers.
    """
    meaning = "\0".join(map(str, (*window, *by, *key.values, key.kind)))
    digits = sha256(meaning.encode()).hexdigest()[:12]
    return _FIRST_LETTERS[int(digits[0], 16)] + digits[1:]


def _waste_cost(pricing: Pricing, cell: Cell) -> Fraction:
    return pricing.rate.per_gpu_hour * min(cell.waste, max(0, cell.billed)) / HOUR_UNITS
