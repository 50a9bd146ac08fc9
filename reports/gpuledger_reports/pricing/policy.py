"""What a bill is made by: prices, who pays for what, who belongs to whom. One YAML file.

Here is its shape, with the checks of one part against another. Reading it is `policy_file`'s, and
what a device costs is `rates`'. Days are UTC's; `to` is the first day on which a row does not hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

import msgspec
from typing_extensions import override

from gpuledger_reports.pricing.money import CURRENCIES

Basis = Literal["allocated", "used", "greater", "blended"]
Share = Literal["own_line", "even", "allocated", "used", "table"]
IdleKind = Literal["idle", "unused", "overhead", "no_data"]
IDLE_KINDS: Final[tuple[IdleKind, ...]] = ("idle", "unused", "overhead", "no_data")
_MAX_DIGITS: Final = 18
"""Before the point: a closed bill has room for sums of such amounts."""
_MAX_DECIMALS: Final = 60
_AT_MOST_ONE: Final = ("allocated_weight", "min_data_coverage_ratio")
_AT_LEAST: Final = {"pue": Decimal(1)}
Count = Annotated[int, msgspec.Meta(ge=1)]

_DEVICE_DIMENSIONS: Final = (
    "cluster", "node", "gpu", "model", "mig_profile",
    "node_pool", "instance_type", "zone", "region", "capacity_type",
)  # fmt: skip
_TENANT_DIMENSIONS: Final = ("namespace", "pod", "owner", "owner_kind", "owner_name", "job", "team")
OWN_COLUMNS: Final = frozenset(
    {
        *("line", "idle_kind", "currency"),
        *("allocated_gpu_seconds", "used_gpu_seconds", "billed_gpu_seconds"),
        *("memory_byte_seconds", "energy_kilowatt_hours"),
        *("gpu_cost", "energy_cost", "shared_cost", "unused_cost", "cost"),
    }
)
"""What each line has beside its dimensions."""
_OF_A_DEVICE: Final = ("node-label",)
_OF_A_TENANT: Final = ("label", "annotation", "namespace-label", "namespace-annotation")


def fits_pattern(value: str, pattern: str) -> bool:
    """Return whether a value fits a pattern, of which `*` and `?` alone mean something else."""
    # Models have brackets in their names, such as A100 [PG506].
    return fnmatchcase(value, pattern.replace("[", "[[]"))


def is_dimension(name: str) -> bool:
    """Return whether there is such a dimension without a definition of its own."""
    prefix, colon, key = name.partition(":")
    if colon:
        return bool(key) and prefix in (*_OF_A_DEVICE, *_OF_A_TENANT)
    return name in (*_DEVICE_DIMENSIONS, *_TENANT_DIMENSIONS)


def is_of_device(name: str) -> bool:
    """Return whether a dimension says something of the GPU rather than of its user."""
    return name in _DEVICE_DIMENSIONS or name.partition(":")[0] in _OF_A_DEVICE


def dimension_names() -> str:
    """Return what may stand for a dimension, for messages."""
    prefixed = (f"{prefix}:KEY" for prefix in (*_OF_A_TENANT, *_OF_A_DEVICE))
    return ", ".join((*_DEVICE_DIMENSIONS, *_TENANT_DIMENSIONS, *prefixed))


class _PolicyPart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"since": "from", "until": "to"},
):
    """A part of the file. Its numbers are finite and not below zero."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, Decimal):
                    _check(name, number)


def _check(name: str, number: Decimal) -> None:
    minimum = _AT_LEAST.get(name, Decimal(0))
    if not number.is_finite() or number < minimum:
        raise ValueError(f"`{name}` must be a number that is not below {minimum}")
    # Exact amounts have all their digits, however many somebody asks for.
    if number.adjusted() >= _MAX_DIGITS or int(number.as_tuple().exponent) < -_MAX_DECIMALS:
        raise ValueError(
            f"`{name}` may have {_MAX_DIGITS} digits before the point and {_MAX_DECIMALS} behind it"
        )
    if name in _AT_MOST_ONE and number > 1:
        raise ValueError(f"`{name}` is a part of 1: give 0 to 1")


class Dated(_PolicyPart, frozen=True, kw_only=True):
    """A row that holds for some days."""

    since: date | None = None
    """The first day on which it holds; absent: since ever."""
    until: date | None = None
    """The first day on which it no longer holds; absent: for ever."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.since and self.until and self.until <= self.since:
            raise ValueError("`to` must be a later day than `from`")

    def holds_on(self, day: date) -> bool:
        """Return whether it holds on a day."""
        return (self.since is None or self.since <= day) and (
            self.until is None or day < self.until
        )


class Scoped(Dated, frozen=True, kw_only=True):
    """A row that holds for some devices; each pattern may have `*` and `?`."""

    cluster: str | None = None
    node_pool: str | None = None
    instance_type: str | None = None
    region: str | None = None
    capacity_type: str | None = None
    model: str | None = None
    mig_profile: str | None = None

    def fits(self, facts: Mapping[str, str | None]) -> bool:
        """Return whether a device is meant: each pattern that is given fits what is known of it."""
        for name in SCOPE:
            pattern = getattr(self, name)
            if pattern is not None and not fits_pattern(facts.get(name) or "", pattern):
                return False
        return True


SCOPE: Final = ("cluster", "node_pool", "instance_type", "region", "capacity_type", "model",
    "mig_profile")  # fmt: skip


class InstancePrice(_PolicyPart, frozen=True, kw_only=True):
    """The price of a whole machine, of which the GPUs' part is taken by 9:1."""

    per_hour: Decimal
    gpus: Count
    vcpus: Annotated[int, msgspec.Meta(ge=0)]
    memory_gb: Decimal


class Purchase(_PolicyPart, frozen=True, kw_only=True):
    """What was bought, written off evenly over its lifetime."""

    capital: Decimal
    lifetime_hours: Count
    residual: Decimal = Decimal(0)
    hosting_per_hour: Decimal = Decimal(0)
    support_per_hour: Decimal = Decimal(0)
    gpus: Count = 1
    """How many GPUs the amounts are for."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual > self.capital:
            raise ValueError("`residual` must not be more than `capital`")


class Price(Scoped, frozen=True, kw_only=True):
    """What an hour of a GPU costs; of a MIG instance where `mig_profile` is given."""

    name: str
    """By which bills and explanations call it."""
    currency: str | None = None
    """Of its amounts; absent: the bill's."""
    per_gpu_hour: Decimal | None = None
    instance: InstancePrice | None = None
    purchase: Purchase | None = None
    source: str | None = None
    """Where the amount is from, for people."""
    as_of: date | None = None
    """The day on which it was true there, for people: it decides nothing."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        # Two of them would be two prices, and none a GPU for nothing by mistake.
        given = (self.per_gpu_hour, self.instance, self.purchase)
        if sum(amount is not None for amount in given) != 1:
            raise ValueError("give exactly one of per_gpu_hour, instance and purchase")


class EnergyPrice(Scoped, frozen=True, kw_only=True):
    """What measured energy costs, beside the GPUs' hours."""

    name: str
    per_kilowatt_hour: Decimal
    pue: Decimal = Decimal(1)
    """Power usage effectiveness: what the building draws for each joule of the machines."""
    currency: str | None = None


class ExchangeRate(_PolicyPart, frozen=True, kw_only=True):
    """What one unit of a currency is in the bill's, from a day on."""

    currency: str
    rate: Decimal
    since: date

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rate:
            raise ValueError("`rate` must be more than 0")


class BasisRule(_PolicyPart, frozen=True, kw_only=True):
    """The time billed to the tenants that match; the first rule that matches applies."""

    basis: Basis
    match: dict[str, str] = {}
    """Patterns by dimension; none fits everybody."""
    allocated_weight: Decimal | None = None
    """Of `blended`: the weight of allocated time; the rest is that of used time."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis == "blended" and self.allocated_weight is None:
            raise ValueError(
                "give allocated_weight, as basis is blended: the weight of allocated time, 0 to 1"
            )
        if self.basis != "blended" and self.allocated_weight is not None:
            raise ValueError("`allocated_weight` belongs to basis blended alone; take it out")


class _Sharing(Scoped, frozen=True, kw_only=True):
    """Who pays for what somebody or nobody had of the devices that fit."""

    share: Share
    by: str | None = None
    """Of `table`: the dimension whose values have the weights."""
    weights: dict[str, Decimal] = {}

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.share == "table") != bool(self.by and self.weights):
            raise ValueError("share table, and no other, needs `by` and `weights`")


class IdleRule(_Sharing, frozen=True, kw_only=True):
    """Who pays for a kind of idle; the first rule that fits holds."""

    kind: IdleKind


class SharedRule(_Sharing, frozen=True, kw_only=True):
    """Who pays in the place of tenants that work for all others; the first rule that fits holds."""

    match: dict[str, str]
    """Patterns by dimension, at least one: whose costs are shared."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.match:
            raise ValueError("`match` must name who is shared, such as {namespace: gpu-operator}")


class TeamRow(Dated, frozen=True, kw_only=True):
    """Who belongs to a team, for some days; the first row that fits holds."""

    team: str
    match: dict[str, str]


class BudgetRow(_PolicyPart, frozen=True, kw_only=True):
    """What somebody may spend in some days."""

    name: str
    amount: Decimal
    since: date
    until: date
    match: dict[str, str] = {}


class CloseRule(_PolicyPart, frozen=True, kw_only=True):
    """What a period needs to be closed."""

    min_data_coverage_ratio: Decimal = Decimal("0.95")
    """The least part of the inventory's time that ticks must cover."""


class FocusNames(_PolicyPart, frozen=True, kw_only=True):
    """What FOCUS exports call those who bill."""

    billing_account_id: str = "gpuledger"
    billing_account_name: str = "GPUs"
    invoice_issuer_name: str = "gpuledger"
    provider_name: str = "gpuledger"
    publisher_name: str = "gpuledger"


class BillPolicy(_PolicyPart, frozen=True, kw_only=True):
    """The whole file."""

    currency: str = "USD"
    prices: list[Price] = []
    energy: list[EnergyPrice] = []
    exchange_rates: list[ExchangeRate] = []
    mig_slices: Literal["compute", "memory"] = "compute"
    """The slices by which a MIG instance has its part of a physical GPU."""
    basis: list[BasisRule] = []
    idle: list[IdleRule] = []
    shared: list[SharedRule] = []
    dimensions: dict[str, list[str]] = {}
    """Dimensions of one's own: of each the ones that are tried, in order. `team` is there always,
    by default the label of the pod, then of its namespace."""
    teams: list[TeamRow] = []
    budgets: list[BudgetRow] = []
    close: CloseRule = CloseRule()
    focus: FocusNames = FocusNames()

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        dimensions = {"team": ["label:team", "namespace-label:team"], **self.dimensions}
        msgspec.structs.force_setattr(self, "dimensions", dimensions)

    def has_dimension(self, dimension: str) -> bool:
        """Return whether a bill can be made by this dimension."""
        return dimension in self.dimensions or is_dimension(dimension)

    def may_be_misspelt(self, dimension: str) -> bool:
        """Return whether a dimension is looked up by a key, for which anything may stand."""
        tried = self.dimensions.get(dimension, (dimension,))
        return any(":" in name for name in tried)

    def is_of_device(self, dimension: str) -> bool:
        """Return whether a dimension, also one of the file's own, is of GPUs alone."""
        tried = self.dimensions.get(dimension)
        return all(map(is_of_device, tried)) if tried else is_of_device(dimension)


def mistakes_of(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield what is wrong between the parts of a file: where, and what to do."""
    yield from _wrong_currencies(policy)
    yield from _wrong_dimensions(policy)
    names = [price.name for price in policy.prices]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield ("prices", at, "name"), f"{name!r} stands twice; give each price its own name"
    for at, budget in enumerate(policy.budgets):
        if budget.until <= budget.since:
            yield ("budgets", at, "to"), "must be a later day than `from`"


def _wrong_currencies(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    rated = {rate.currency for rate in policy.exchange_rates}
    used: list[tuple[tuple[str | int, ...], str | None]] = [(("currency",), policy.currency)]
    used += [(("prices", at, "currency"), each.currency) for at, each in enumerate(policy.prices)]
    used += [(("energy", at, "currency"), each.currency) for at, each in enumerate(policy.energy)]
    for path, currency in used:
        if currency is None:
            continue
        if currency not in CURRENCIES:
            yield path, f"{currency!r} is no currency; give its code of ISO 4217, such as USD"
        elif currency not in (policy.currency, *rated):
            yield path, f"there is no rate for {currency}; add one to exchange_rates"
    for at, rate in enumerate(policy.exchange_rates):
        if rate.currency not in CURRENCIES:
            yield ("exchange_rates", at, "currency"), f"{rate.currency!r} is no currency"


def _wrong_dimensions(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for own, all_tried in policy.dimensions.items():
        for at, tried in enumerate(all_tried):
            # One of the file's own may not be made of another: no order could make that plain.
            if not is_dimension(tried) or tried == "team":
                path = ("dimensions", own, at)
                yield path, f"{tried!r} is no dimension here; there are {dimension_names()}"
    for name in policy.dimensions:
        if is_dimension(name) and name != "team":
            yield ("dimensions", name), "is a dimension already; give yours another name"
        if name in OWN_COLUMNS:
            yield ("dimensions", name), "is a column of every bill; give yours another name"
    for at, rule in enumerate(policy.idle):
        if rule.mig_profile:
            # Who shares a board's instances shares its idle.
            yield ("idle", at, "mig_profile"), "idle is of whole physical GPUs; remove it"
    yield from _wrong_tables(policy)
    yield from _wrong_matches(policy)


def _wrong_tables(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    sections: tuple[tuple[str, Sequence[_Sharing]], ...] = (
        ("idle", policy.idle),
        ("shared", policy.shared),
    )
    for section, rules in sections:
        for at, each in enumerate(rules):
            if each.by and (not policy.has_dimension(each.by) or policy.is_of_device(each.by)):
                yield (section, at, "by"), f"{each.by!r} is no dimension of tenants"


def _wrong_matches(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    sections: tuple[tuple[str, Sequence[BasisRule | SharedRule | TeamRow | BudgetRow]], ...] = (
        ("basis", policy.basis),
        ("shared", policy.shared),
        ("teams", policy.teams),
        ("budgets", policy.budgets),
    )
    for section, rows in sections:
        for at, row in enumerate(rows):
            for dimension in row.match:
                if remedy := _wrong_match(policy, section, dimension):
                    yield (section, at, "match", dimension), remedy


def _wrong_match(policy: BillPolicy, section: str, dimension: str) -> str | None:
    """Return why rows of a section cannot be matched by a dimension; nothing where they can."""
    if not policy.has_dimension(dimension):
        return f"is no dimension; there are {dimension_names()}"
    if section == "teams" and dimension == "team":
        return "a team cannot be told by itself; match by another dimension"
    if section in ("basis", "shared") and policy.is_of_device(dimension):
        return "it is of tenants; match by namespace, team or a label"
    return None
