"""Looks up the prices of devices, and the lines to which devices and parties belong.

Each device, node and pod is looked up only once for each period in which its facts are the same.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from gpuledger_reports.pricing.money import fraction_of
from gpuledger_reports.pricing.policy import (
    IDLE_KINDS,
    BasisRule,
    BillPolicy,
    IdleKind,
    IdleRule,
    SharedRule,
    is_of_device,
)
from gpuledger_reports.pricing.policy_file import ReadPolicy, days_of_change
from gpuledger_reports.pricing.rates import DeviceTraits, PriceBook, Rate
from gpuledger_reports.pricing.tenants import (
    IDLE,
    NO_DATA,
    UNKNOWN,
    UNRESPONSIVE,
    UNUSED,
    Dimensions,
    TenantBook,
    fits_all,
    parts_of,
)
from gpuledger_reports.reading.charging_sql import HOUR_UNITS
from gpuledger_reports.reading.parties import PartyKey
from gpuledger_reports.reading.times import Window, begin_of, day_of
from gpuledger_reports.reading.usage_sums import DeviceClass, Needs, PartyBasis, UsageReader
from gpuledger_reports.reading.versions import effective_versions, version_at

IDLE_WORDS: Final[dict[IdleKind, str]] = {
    "idle": IDLE,
    "unused": UNUSED,
    "overhead": UNRESPONSIVE,
    "no_data": NO_DATA,
}
Values = tuple[str, ...]


def names_suffice(dimensions: Sequence[str], policy: BillPolicy) -> bool:
    """Return whether usage rows contain all that a bill by these dimensions needs about pods.

    If not, the bill also needs the pods' records, for example for their labels.
    """
    # The parts include the dimensions by which teams are matched.
    names = {"namespace", "pod", "job", "team"}
    return not policy.basis and all(
        part in names or part.startswith("namespace-") or is_of_device(part)
        for part in parts_of(dimensions, policy)
    )


class Scope(NamedTuple):
    """A group of similar devices; idle is distributed among the tenants of one group."""

    cluster: str
    node_pool: str | None
    model: str | None


@dataclass(eq=False, kw_only=True)
class Pricing:
    """The terms by which devices are billed: prices and rules.

    Equal terms are always the same object, so that terms can be compared by identity.
    """

    rate: Rate
    physical_gpu_rate: Rate
    """The rate of the physical GPU of a MIG instance; for a whole GPU, the same as `rate`."""
    scope: Scope
    rules: dict[IdleKind, IdleRule | None]
    shared_rules: tuple[SharedRule, ...]
    """The rules for tenants whose costs are shared; the first rule that matches applies."""


@dataclass(kw_only=True)
class Cell:
    """The sums of one tenant, or of one kind of idle, on devices with the same prices and rules.

    Times are in the units of bills.
    """

    billed: int = 0
    allocated: int = 0
    used: int = 0
    waste: int = 0
    """The part of the tenant's billed time that was allocated but not used."""
    energy_millijoules: int = 0
    memory_byte_ns: int = 0

    def cost(self, pricing: Pricing) -> Fraction:
        """Return the cost of the billed time, without energy."""
        return pricing.rate.per_gpu_hour * self.billed / HOUR_UNITS

    def energy_cost(self, pricing: Pricing) -> Fraction:
        """Return the cost of the energy."""
        return pricing.rate.per_millijoule * self.energy_millijoules


@dataclass(kw_only=True)
class OthersCell:
    """The sum of the use without an allocation of a user and an allocatee, in units."""

    units: int = 0
    paid: int = 0
    """The part for which the user pays instead of the allocatee."""

    def add(self, other: "OthersCell") -> None:
        """Add the amounts of another cell."""
        self.units += other.units
        self.paid += other.paid


class CellKey(NamedTuple):
    """Identifies a `Cell` by the values of dimensions and by the kind of idle."""

    values: Values
    """The values of the bill's dimensions, then of the other dimensions that rules match."""
    kind: IdleKind | None


class BillLookup:
    """Finds the prices of devices and the tenants of parties at a time, and caches them."""

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
        self._book, self._policy = book, policy
        self._nodes = {
            node: effective_versions(versions) for node, versions in reader.nodes.items()
        }
        self.prices = PriceBook(policy)
        self.users_pay = policy.use_without_allocation == "user"
        self.dimensions = Dimensions(dimensions, policy=policy, book=book)
        self._of_basis = Dimensions(of_basis, policy=policy, book=book)
        self._window = window
        self._pricing: dict[tuple[object, ...], Pricing] = {}
        self._found_pricing: dict[tuple[DeviceClass, int], Pricing] = {}
        self._found_keys: dict[tuple[DeviceClass, PartyKey, int], CellKey] = {}
        self._found_basis: dict[tuple[PartyKey, int], PartyBasis] = {}
        self._since: dict[tuple[str, str, int], int] = {}
        self._days = sorted(begin_of(day) for day in days_of_change(policy))

    @cached_property
    def changes(self) -> list[tuple[int, str, str | None]]:
        """The time, cluster and node of each change of a fact that affects lines or prices.

        The node is `None` if the change may affect all nodes of the cluster.
        """
        parts = self.dimensions.parts | self._of_basis.parts
        with_namespaces = any(part.startswith("namespace-") for part in parts)
        # Changes of pods matter only if the bill needs more than the pods' names.
        by_names = names_suffice(self.dimensions.names, self._policy)
        found = [
            change
            for change in self._book.changes(with_namespaces=with_namespaces)
            if change[2] is None or not by_names
        ]
        # Labels are the last field and change often. Compare them only if a dimension uses them.
        compared = slice(2, None if self._has_node_labels else -1)
        for (cluster, node), versions in self._nodes.items():
            for before, after in pairwise(versions):
                if before[compared] != after[compared]:
                    found.append((after.since_us, cluster, node))
        return [change for change in found if change[0] < self._window.end_us]

    @property
    def needs(self) -> Needs:
        """The properties by which the bill must distinguish rows."""
        parts = self.dimensions.parts
        by_names = names_suffice(self.dimensions.names, self._policy)
        needs_nodes = bool(parts & {"node", "gpu"})
        return Needs(
            by_names=by_names,
            names_pods=bool(parts & {"pod", "job"}),
            class_of=self._class_of if by_names and not needs_nodes else None,
            has_bases=bool(self._policy.basis),
            is_known_pod=self._book.has_pod,
            is_other_pod=self._book.is_other_pod,
        )

    def _class_of(self, cluster: str, node: str, since_us: int) -> object:
        facts = self.facts_of(DeviceClass(cluster, node, None), since_us)._replace(node="")
        # A node's labels include its name, so nodes with labels are never equal.
        if not self._has_node_labels:
            facts = facts._replace(labels=None)
        # Nodes that are equal now may have differed before, so the class includes the
        # time from which the facts hold.
        return facts, self.since(cluster, node, since_us)

    @cached_property
    def _has_node_labels(self) -> bool:
        return any(part.startswith("node-label:") for part in self.dimensions.parts)

    @cached_property
    def _changes_of(self) -> dict[tuple[str, str | None], list[int]]:
        by_node: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for time_us, cluster, node in self.changes:
            by_node[cluster, node].append(time_us)
        return {key: sorted(times) for key, times in by_node.items()}

    def since(self, cluster: str, node: str, time_us: int) -> int:
        """Return the time since which a node's facts have been the same as at `time_us`.

        The other methods take this time as `since_us`. Days without a change thus have the same
        `since_us`, and share one cached result.
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

    def pricing_of(self, device: DeviceClass, since_us: int) -> Pricing:
        """Return the prices and rules that apply to a device at a time."""
        key = (device, since_us)
        if key not in self._found_pricing:
            self._found_pricing[key] = self._find_pricing(device, since_us)
        return self._found_pricing[key]

    def is_named(self, party: PartyKey, since_us: int) -> bool:
        """Return whether a party is a job, or a pod whose name is known."""
        tenant = self._book.find(party, since_us)
        return tenant.kind == "job" or tenant.namespace is not None

    def facts_of(self, device: DeviceClass, since_us: int) -> DeviceTraits:
        """Return a device's facts, and the facts of its node at a time."""
        facts = DeviceTraits(*device)
        versions = self._nodes.get((device.cluster, device.node))
        if not versions:
            return facts
        version = version_at(versions, since_us)
        return facts._replace(
            node_pool=version.node_pool,
            instance_type=version.instance_type,
            zone=version.zone,
            region=version.region,
            capacity_type=version.capacity_type,
            labels=version.labels,
        )

    def _find_pricing(self, device: DeviceClass, since_us: int) -> Pricing:
        facts, day = self.facts_of(device, since_us), day_of(since_us)
        # Idle time and time without data belong to the whole physical GPU, so their rules use its
        # facts.
        whole = facts._replace(mig_profile=None, compute_slices=None, gpu_compute_slices=None)
        rules = {kind: self.prices.idle_rule_of(kind, whole, day) for kind in IDLE_KINDS}
        shared_rules = self.prices.shared_rules_of(facts, day)
        rate, physical_gpu_rate = self.prices.rate_of(facts, day), self.prices.rate_of(whole, day)
        scope = Scope(facts.cluster, facts.node_pool, facts.model)
        names = [row and row.name for row in (rate.price, physical_gpu_rate.price, rate.energy)]
        dates = [row and row.since for row in (rate.exchange, physical_gpu_rate.exchange)]
        numbers = (rate.per_gpu_hour, physical_gpu_rate.per_gpu_hour, rate.per_millijoule)
        # Rules are identified by address, because their mappings cannot be hashed.
        numbers_of_rules = tuple(id(rule) for rule in (*rules.values(), *shared_rules))
        key = (*names, *dates, *numbers, scope, *numbers_of_rules)
        return self._pricing.setdefault(
            key,
            Pricing(
                rate=rate,
                physical_gpu_rate=physical_gpu_rate,
                scope=scope,
                rules=rules,
                shared_rules=shared_rules,
            ),
        )

    def key_of(
        self, device: DeviceClass, party: PartyKey, since_us: int, requested_us: int
    ) -> CellKey:
        """Return the key of the `Cell` to which a party's use of a device is added."""
        # A name without a UID refers to the pod that had the name in the row's hour.
        at = requested_us if party.uid is None and party.pod is not None else since_us
        key = (device, party, at)
        found = self._found_keys.get(key)
        if found is None:
            found = self._found_keys[key] = self._find_key(device, party, since_us, at)
        return found

    def _find_key(self, device: DeviceClass, party: PartyKey, since_us: int, at: int) -> CellKey:
        if party.kind == "nobody":
            return CellKey(self.idle_values(IDLE, device, since_us), "idle")
        if party.kind == "unknown":
            return CellKey(self.idle_values(UNKNOWN, device, since_us), "no_data")
        tenant = self._book.find(party, at)
        facts = self.facts_of(device, since_us)
        values = self.dimensions.of_tenant(tenant, facts, since_us=at, day=day_of(since_us))
        return CellKey(values, "overhead" if tenant.kind in ("host", "unattributed") else None)

    def idle_values(self, word: str, device: DeviceClass, since_us: int) -> Values:
        """Return the values of an idle line; dimensions of tenants have `word` as their value."""
        facts = self.facts_of(device, since_us)
        return self.dimensions.of_idle(word, facts, day=day_of(since_us))

    def basis_of(self, party: PartyKey, requested_us: int) -> PartyBasis:
        """Return the identity of a party's tenant, and the basis by which it is billed at a time.

        The basis is, for example, allocated or used time.
        """
        is_named = party.uid is None and party.pod is not None
        since_us = requested_us if is_named else self.since(party.cluster, party.node, requested_us)
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
    weight = fraction_of(rule.allocated_weight or Decimal(0))
    return PartyBasis(identity, rule.basis, weight.numerator, weight.denominator)
