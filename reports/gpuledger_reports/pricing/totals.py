"""Sums the days of a bill by line and price, and distributes shared idle."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gpuledger.errors import GpuledgerError
from gpuledger_reports.pricing.lookup import (
    IDLE_WORDS,
    BillLookup,
    Cell,
    CellKey,
    OthersCell,
    Pricing,
    Scope,
)
from gpuledger_reports.pricing.money import fraction_of
from gpuledger_reports.pricing.policy import IDLE_KINDS, IdleKind, IdleRule, SharedRule
from gpuledger_reports.pricing.tenants import (
    IDLE,
    SHARED,
    UNALLOCATED,
    UNKNOWN,
    UNRESPONSIVE,
    UNUSED,
    fits_all,
)
from gpuledger_reports.reading.charging_sql import HOUR_UNITS
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.parties import PartyKey
from gpuledger_reports.reading.usage_sums import DaySums, DeviceClass


class UnbalancedBillError(GpuledgerError):
    """The line items do not sum to the asset cost, so no bill is made: an internal error."""


@dataclass(frozen=True, kw_only=True)
class DayCost:
    """The cost of a day before idle is distributed; all days sum to the asset cost."""

    begin_us: int
    costs: Mapping[IdleKind | None, Fraction]
    """The cost by kind of idle; the cost of tenants has the key `None`."""


class DailyCosts:
    """Calculates the cost of each day from the amounts that the day adds to a tally."""

    def __init__(self) -> None:
        self.days: list[DayCost] = []
        self._before: dict[tuple[IdleKind | None, Pricing], tuple[int, int]] = {}

    def add(self, tally: "BillTally", begin_us: int) -> None:
        """Append the cost of the latest day in `tally`; `begin_us` is the day's start."""
        # Integers are summed over cells before they are priced, which is faster than pricing each
        # cell.
        now: dict[tuple[IdleKind | None, Pricing], tuple[int, int]] = {}
        for key, cells in tally.cells.items():
            for pricing, cell in cells.items():
                units, energy = now.get((key.kind, pricing), (0, 0))
                units, energy = units + cell.billed, energy + cell.energy_millijoules
                now[key.kind, pricing] = (units, energy)
        costs: dict[IdleKind | None, Fraction] = defaultdict(Fraction)
        for (kind, pricing), (units, energy) in now.items():
            before_units, before_energy = self._before.get((kind, pricing), (0, 0))
            grown = Cell(billed=units - before_units, energy_millijoules=energy - before_energy)
            costs[kind] += grown.cost(pricing) + grown.energy_cost(pricing)
        self._before = now
        in_order = {kind: costs[kind] for kind in (None, *IDLE_KINDS) if kind in costs}
        self.days.append(DayCost(begin_us=begin_us, costs=in_order))


class BillTally:
    """Sums the days of a bill by line, and by the prices and rules of the devices."""

    def __init__(self, lookup: BillLookup) -> None:
        self._lookup = lookup
        self.cells: dict[CellKey, dict[Pricing, Cell]] = {}
        self.present = self.covered = self.excess = self.used = self.measured = self.unlisted = 0
        self.unknown = 0
        self.unlisted_gpus: set[tuple[Node, str]] = set()
        self.scaled_gpus: set[tuple[Node, str]] = set()
        self.duplicate_gpus: set[tuple[Node, str]] = set()
        self.by_others: dict[tuple[CellKey, CellKey], dict[Pricing, OthersCell]] = {}
        """Use without an allocation, by the cells of the user and the allocatee."""
        self._physical_units: dict[Pricing, int] = defaultdict(int)
        self._device_units: dict[Pricing, int] = defaultdict(int)
        self._millijoules: dict[Pricing, int] = defaultdict(int)

    def add(self, day: DaySums) -> None:
        """Add the sums of a day."""
        since = self._lookup.since
        for row in day.usage:
            cluster, node = row.device[:2]
            since_us = since(cluster, node, row.since_us)
            pricing = self._lookup.pricing_of(row.device, since_us)
            cell = self._party_cell(row.device, row.party, since_us, row.since_us, pricing)
            cell.energy_millijoules += row.energy_millijoules
            cell.memory_byte_ns += row.memory_byte_ns
            self._millijoules[pricing] += row.energy_millijoules
            # In plain hours, tenants are billed by their allocation rows, regardless of use.
            if row.is_allocated:
                cell.billed += row.allocated - row.unresponsive
                self._device_units[pricing] += row.allocated
                if row.unresponsive:
                    self._idle_cell(
                        "overhead", row.device, since_us, pricing
                    ).billed += row.unresponsive
                if row.party.kind == "unknown":
                    self.unknown += row.allocated - row.unresponsive
                elif row.party.kind != "nobody":
                    cell.allocated += row.allocated
                    # Unused time is waste in so far as the tenant's basis bills allocated time.
                    basis = self._lookup.basis_of(row.party, row.since_us)
                    if basis.basis != "used":
                        paid = basis.weight if basis.basis == "blended" else basis.weight_of
                        cell.waste += row.busy * paid // basis.weight_of
            else:
                cell.used += row.busy
                self.used += row.busy
                self.measured += row.measured_busy
        self._add_charges(day)
        self._add_by_others(day)
        # Time without ticks has no rows, so it is derived from the time of the physical GPUs.
        for row_ in day.physical_gpus:
            since_us = since(*row_.device[:2], row_.since_us)
            pricing = self._lookup.pricing_of(row_.device, since_us)
            self._physical_units[pricing] += row_.present
            self.present += row_.present
            self.covered += row_.covered
            self.excess += row_.excess
            self.unlisted += row_.unlisted
            if row_.present != row_.covered:
                cell = self._idle_cell("no_data", row_.device, since_us, pricing)
                cell.billed += row_.present - row_.covered
        self.unlisted_gpus.update((gpu.node, gpu.physical_gpu) for gpu in day.unlisted)
        self.scaled_gpus.update((gpu.node, gpu.physical_gpu) for gpu in day.scaled)
        self.duplicate_gpus.update((gpu.node, gpu.physical_gpu) for gpu in day.duplicate)

    def _add_charges(self, day: DaySums) -> None:
        # These charges correct the sums above, for excess time and for complex hours.
        for charge in day.charges:
            since_us = self._lookup.since(*charge.device[:2], charge.since_us)
            pricing = self._lookup.pricing_of(charge.device, since_us)
            self._device_units[pricing] += charge.units
            if charge.is_unresponsive:
                self._idle_cell("overhead", charge.device, since_us, pricing).billed += charge.units
            else:
                cell = self._party_cell(
                    charge.device, charge.party, since_us, charge.since_us, pricing
                )
                cell.billed += charge.units
                if charge.party.kind == "unknown":
                    self.unknown += charge.units
        for idle in day.idle:
            since_us = self._lookup.since(*idle.device[:2], idle.since_us)
            pricing = self._lookup.pricing_of(idle.device, since_us)
            parts: tuple[tuple[IdleKind, str, int], ...] = (
                ("overhead", UNRESPONSIVE, idle.unresponsive),
                ("unused", UNUSED, idle.unused),
                ("no_data", UNKNOWN, idle.unknown),
                ("idle", IDLE, idle.idle),
            )
            self.unknown += idle.unknown
            for kind, word, units in parts:
                self._device_units[pricing] += units
                if units:
                    values = self._lookup.idle_values(word, idle.device, since_us)
                    self._cell(CellKey(values, kind), pricing).billed += units

    def _add_by_others(self, day: DaySums) -> None:
        for use in day.by_others:
            if not self._lookup.is_named(use.user, use.user_since_us):
                continue  # the pod may be an allocatee, whose allocation has only its name
            keys = []
            for party, at_us in (
                (use.user, use.user_since_us),
                (use.allocatee, use.allocatee_since_us),
            ):
                since_us = self._lookup.since(*use.device[:2], at_us)
                keys.append(self._lookup.key_of(use.device, party, since_us, at_us))
            since_us = self._lookup.since(*use.device[:2], use.since_us)
            pricing = self._lookup.pricing_of(use.device, since_us)
            user, allocatee = keys
            paid = use.billed if self._lookup.users_pay else 0
            found = self.by_others.setdefault((user, allocatee), {})
            found.setdefault(pricing, OthersCell()).add(OthersCell(units=use.units, paid=paid))
            # Both have the same terms, so the sum of the costs stays the same.
            if paid:
                self._cell(user, pricing).billed += paid
                self._cell(allocatee, pricing).billed -= paid

    def _party_cell(
        self,
        device: DeviceClass,
        party: PartyKey,
        since_us: int,
        requested_us: int,
        pricing: Pricing,
    ) -> Cell:
        return self._cell(self._lookup.key_of(device, party, since_us, requested_us), pricing)

    def _idle_cell(
        self, kind: IdleKind, device: DeviceClass, since_us: int, pricing: Pricing
    ) -> Cell:
        values = self._lookup.idle_values(IDLE_WORDS[kind], device, since_us)
        return self._cell(CellKey(values, kind), pricing)

    def _cell(self, key: CellKey, pricing: Pricing) -> Cell:
        by_pricing = self.cells.setdefault(key, {})
        cell = by_pricing.get(pricing)
        if cell is None:
            cell = by_pricing[pricing] = Cell()
        return cell

    @property
    def unpriced(self) -> dict[str, int]:
        """Units by model that are billed but cost nothing, because no price matches.

        A MIG instance may have a price even if its physical GPU has none.
        """
        found: dict[str, int] = defaultdict(int)
        for cells in self.cells.values():
            for pricing, cell in cells.items():
                if pricing.rate.price is None:
                    found[pricing.scope.model or UNALLOCATED] += cell.billed
        return {model: units for model, units in sorted(found.items()) if units}

    def check_balance(self) -> None:
        """Raise `UnbalancedBillError` unless the billed time equals the physical GPUs' time."""
        # Rows and GPUs are summed by different queries, so rows that one query loses are detected.
        billed = sum(cell.billed for cells in self.cells.values() for cell in cells.values())
        if billed != self.present:
            raise UnbalancedBillError(
                f"{billed} units are billed, but the GPUs had {self.present} units"
            )

    def asset_cost(self) -> Fraction:
        """Return the cost of all physical GPUs, calculated from their time and not from lines."""
        physical_gpus = sum(
            (pricing.rate.per_gpu_hour * units for pricing, units in self._physical_units.items()),
            Fraction(0),
        )
        # A MIG instance with its own price costs this price instead of its part of the GPU's price.
        instances = sum(
            (
                (pricing.rate.per_gpu_hour - pricing.physical_gpu_rate.per_gpu_hour) * units
                for pricing, units in self._device_units.items()
            ),
            Fraction(0),
        )
        energy = sum(
            (pricing.rate.per_millijoule * mj for pricing, mj in self._millijoules.items()),
            Fraction(0),
        )
        return (physical_gpus + instances) / HOUR_UNITS + energy

    def cost_of(self, key: CellKey) -> Fraction:
        """Return the cost of the cells with this key, before costs are shared."""
        found = self.cells.get(key, {}).items()
        return sum(
            (cell.cost(pricing) + cell.energy_cost(pricing) for pricing, cell in found), Fraction(0)
        )

    def shares(self, *, shown: int) -> tuple[dict[CellKey, Fraction], dict[CellKey, Fraction]]:
        """Return how sharing changes the costs of existing cells, and the costs of new cells.

        A change is negative if other cells pay a cell's cost. The policy's rules distribute idle,
        and the costs of tenants that serve all others. Rules with `share: table` make new cells.
        `shown` is the number of the bill's own dimensions, with which the key of a cell begins.
        """
        pools: dict[tuple[Scope, int], list[tuple[CellKey, Fraction]]] = {}
        rules: dict[int, IdleRule | SharedRule] = {}
        # Tenants whose own costs are shared pay no shared costs.
        takers: dict[tuple[str | None, ...], dict[CellKey, list[Cell]]] = defaultdict(dict)
        # Costs are pooled by rule and by scope of similar GPUs.
        for key, cells in self.cells.items():
            for pricing, cell in cells.items():
                rule = self._rule_of(key, pricing)
                if rule is None:
                    if key.kind is None:
                        takers[pricing.scope].setdefault(key, []).append(cell)
                    continue
                rules[id(rule)] = rule
                cost = cell.cost(pricing) + cell.energy_cost(pricing)
                pools.setdefault((pricing.scope, id(rule)), []).append((key, cost))
        added: dict[CellKey, Fraction] = defaultdict(Fraction)
        extra: dict[CellKey, Fraction] = defaultdict(Fraction)
        for (scope, number), given in pools.items():
            rule = rules[number]
            total = sum((cost for _, cost in given), Fraction(0))
            if rule.share == "table":
                taken = self._taken_by_table(rule, given)
            else:
                taken = _taken(rule, takers[scope], total, shown=shown)
            for key, cost in taken.items():
                target = extra if rule.share == "table" else added
                target[key] += cost
            # If no tenant can take the cost, it stays on its line.
            if taken:
                for key, cost in given:
                    added[key] -= cost
        return dict(added), dict(extra)

    def _rule_of(self, key: CellKey, pricing: Pricing) -> IdleRule | SharedRule | None:
        """Return the rule by which a cell's cost is shared, or `None` if it stays on its line."""
        names = self._lookup.dimensions.names
        rule: IdleRule | SharedRule | None
        if key.kind:
            rule = pricing.rules[key.kind]
        else:
            fitting = (r for r in pricing.shared_rules if fits_all(r.match, names, key.values))
            rule = next(fitting, None)
        return None if rule is None or rule.share == "own_line" else rule

    def _taken_by_table(
        self, rule: IdleRule | SharedRule, given: Sequence[tuple[CellKey, Fraction]]
    ) -> dict[CellKey, Fraction]:
        """Return the new cells that pay the given costs by a rule's table, each with its cost.

        A new cell has the kind of idle and the GPU dimensions of the cell whose cost it pays.
        """
        weights = {value: fraction_of(weight) for value, weight in sorted(rule.weights.items())}
        sum_of_weights = sum(weights.values(), Fraction(0))
        taken: dict[CellKey, Fraction] = defaultdict(Fraction)
        if not sum_of_weights:
            return taken
        dimensions = self._lookup.dimensions
        kind = rule.kind if isinstance(rule, IdleRule) else None
        word = IDLE_WORDS[kind] if kind else SHARED
        for key, cost in given:
            of_gpu = [
                value if dimensions.is_of_device(name) else word
                for name, value in zip(dimensions.names, key.values, strict=True)
            ]
            for value, weight in weights.items():
                values = tuple(
                    value if name == rule.by else known
                    for name, known in zip(dimensions.names, of_gpu, strict=True)
                )
                taken[CellKey(values, kind)] += cost * weight / sum_of_weights
        return taken


def _taken(
    rule: IdleRule | SharedRule,
    takers: Mapping[CellKey, Sequence[Cell]],
    total: Fraction,
    *,
    shown: int,
) -> dict[CellKey, Fraction]:
    """Return the part of the cost `total` that each cell in `takers` pays by a rule.

    The result is empty if all weights are zero.
    """
    if rule.share == "even":
        # Each line that is shown gets the same amount, which is divided evenly among the line's
        # cells.
        counts = Counter(key.values[:shown] for key in takers)
        weights = {key: Fraction(1, counts[key.values[:shown]]) for key in takers}
    else:
        weights = {
            key: Fraction(
                sum(cell.allocated if rule.share == "allocated" else cell.used for cell in cells)
            )
            for key, cells in takers.items()
        }
    sum_of_weights = sum(weights.values(), Fraction(0))
    if not sum_of_weights:
        return {}
    return {key: total * weight / sum_of_weights for key, weight in weights.items()}
