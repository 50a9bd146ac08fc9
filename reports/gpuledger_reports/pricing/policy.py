"""The structure of the price file, which is YAML: prices, cost sharing, teams, budgets.

This module also checks the parts of a file against each other. `policy_file` reads the file, and
`rates` finds the price of a device. Days are in UTC; `to` is the first day on which a row no longer
applies.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
"""Maximum number of digits before the decimal point. Columns of closed bills have room for sums of
such numbers."""
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
        *("line", "idle_kind", "currency", "period_begin", "period_end", "state", "revision"),
        *("allocated_gpu_seconds", "used_gpu_seconds", "used_by_others_gpu_seconds"),
        "billed_gpu_seconds",
        *("memory_gibibyte_hours", "energy_kilowatt_hours"),
        *("gpu_cost", "energy_cost", "shared_cost", "unused_cost", "cost"),
    }
)
"""The columns of each line in a file, in addition to its dimensions."""
_WORD: Final = re.compile(r"[A-Z0-9]+")
_VGPU_PROFILE: Final = re.compile(r"\d+[ABCQ]")  # memory in GiB and kind of licence
_OF_A_DEVICE: Final = ("node-label",)
_OF_A_TENANT: Final = ("label", "annotation", "namespace-label", "namespace-annotation")


def fits_pattern(value: str, pattern: str) -> bool:
    """Return whether a value matches a pattern; only `*` and `?` have a special meaning."""
    # Model names have brackets, such as A100 [PG506].
    return fnmatchcase(value, pattern.replace("[", "[[]"))


def _has_wildcards(pattern: str | None) -> bool:
    return bool(set("*?").intersection(pattern or ""))


def _covers(pattern: str | None, other: str | None) -> bool:
    """Return whether a pattern certainly matches all values that another pattern matches."""
    if pattern is None or pattern == other:
        return True
    values = "*" if other is None else other
    # The wildcards of the other pattern are texts here, which only a `*` may match.
    return fits_pattern(values, pattern) and not ("?" in pattern and _has_wildcards(values))


def has_product(model: str, product: str) -> bool:
    """Return whether a GPU's name has all words of a product, in any case.

    `GH200` does not contain the word `H200`. The name of a vGPU contains its profile, such as
    `24Q`, and never matches.
    """
    words = set(_WORD.findall(model.upper()))
    return words.issuperset(_WORD.findall(product.upper())) and not any(
        _VGPU_PROFILE.fullmatch(word) for word in words
    )


def is_dimension(name: str) -> bool:
    """Return whether this is the name of a built-in dimension."""
    prefix, colon, key = name.partition(":")
    if colon:
        return bool(key) and prefix in (*_OF_A_DEVICE, *_OF_A_TENANT)
    return name in (*_DEVICE_DIMENSIONS, *_TENANT_DIMENSIONS)


def is_of_device(name: str) -> bool:
    """Return whether a dimension describes the GPU, not its user."""
    return name in _DEVICE_DIMENSIONS or name.partition(":")[0] in _OF_A_DEVICE


def dimension_names() -> str:
    """Return the names of all built-in dimensions, separated by commas, for messages."""
    prefixed = (f"{prefix}:KEY" for prefix in (*_OF_A_TENANT, *_OF_A_DEVICE))
    return ", ".join((*_DEVICE_DIMENSIONS, *_TENANT_DIMENSIONS, *prefixed))


class _PolicyPart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"since": "from", "until": "to"},
):
    """A part of the price file. Its numbers are finite and not negative."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, Decimal):
                    _check(name, number)


def _check(name: str, number: Decimal) -> None:
    minimum = _AT_LEAST.get(name, Decimal(0))
    if not number.is_finite() or number < minimum:
        raise ValueError(f"`{name}` must be a number of at least {minimum}")
    # Exact arithmetic keeps all digits, so the number of digits must be limited.
    if number.adjusted() >= _MAX_DIGITS or int(number.as_tuple().exponent) < -_MAX_DECIMALS:
        raise ValueError(
            f"`{name}` may have {_MAX_DIGITS} digits before the decimal point and {_MAX_DECIMALS}"
            " after it"
        )
    if name in _AT_MOST_ONE and number > 1:
        raise ValueError(f"`{name}` must be between 0 and 1")


class Dated(_PolicyPart, frozen=True, kw_only=True):
    """A row of the price file that applies only on some days."""

    since: date | None = None
    """The first day on which it applies; absent: no beginning."""
    until: date | None = None
    """The first day on which it no longer applies; absent: no end."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.since and self.until and self.until <= self.since:
            raise ValueError("`to` must be a later day than `from`")

    def holds_on(self, day: date) -> bool:
        """Return whether the row applies on a day."""
        return (self.since is None or self.since <= day) and (
            self.until is None or day < self.until
        )


class Scoped(Dated, frozen=True, kw_only=True):
    """A row that applies only to devices that match all its patterns; `*` and `?` are wildcards."""

    product: str | None = None
    """Words that must all be in the GPU's model, such as `A100 80GB`; profiles of vGPUs never
    match."""

    cluster: str | None = None
    node_pool: str | None = None
    instance_type: str | None = None
    region: str | None = None
    capacity_type: str | None = None
    model: str | None = None
    mig_profile: str | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.product is not None and not _WORD.search(self.product.upper()):
            raise ValueError("`product` must have a word of the GPU's model, such as H100")

    def covers(self, other: "Scoped") -> bool:
        """Return whether this row certainly applies to all devices and days of another row."""
        has_words = self.product is None or has_product(
            # Only a model without wildcards certainly has certain words.
            other.product or ("" if _has_wildcards(other.model) else other.model or ""),
            self.product,
        )
        return (
            has_words
            and all(_covers(getattr(self, name), getattr(other, name)) for name in SCOPE)
            and (self.since is None or bool(other.since and self.since <= other.since))
            and (self.until is None or bool(other.until and other.until <= self.until))
        )

    def fits(self, facts: Mapping[str, str | None]) -> bool:
        """Return whether a device's facts match every pattern that is set."""
        for name in SCOPE:
            pattern = getattr(self, name)
            if pattern is not None and not fits_pattern(facts.get(name) or "", pattern):
                return False
        return self.product is None or has_product(facts.get("model") or "", self.product)


SCOPE: Final = ("cluster", "node_pool", "instance_type", "region", "capacity_type", "model",
    "mig_profile")  # fmt: skip


class InstancePrice(_PolicyPart, frozen=True, kw_only=True):
    """The price of a whole machine; only the part for its GPUs is billed.

    The price is divided by weight among GPUs (9 each), vCPUs (0.9) and gigabytes of memory (0.1).
    """

    per_hour: Decimal
    gpus: Count
    vcpus: Annotated[int, msgspec.Meta(ge=0)]
    memory_gb: Decimal


class Purchase(_PolicyPart, frozen=True, kw_only=True):
    """A purchase, written off evenly over its lifetime."""

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
    """The price of a GPU-hour, or of a MIG instance's hour if `mig_profile` is set."""

    name: str
    """The price's name on bills and in explanations."""
    currency: str | None = None
    """The currency of its amounts; absent: the bill's."""
    per_gpu_hour: Decimal | None = None
    instance: InstancePrice | None = None
    purchase: Purchase | None = None
    source: str | None = None
    """The origin of the amount, for people."""
    as_of: date | None = None
    """The day of the amount at its source, for people; it has no effect."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        # Two amounts would be ambiguous; without any amount, GPUs would accidentally cost nothing.
        given = (self.per_gpu_hour, self.instance, self.purchase)
        if sum(amount is not None for amount in given) != 1:
            raise ValueError("give exactly one of per_gpu_hour, instance and purchase")


class EnergyPrice(Scoped, frozen=True, kw_only=True):
    """The price of measured energy, billed in addition to GPU-hours."""

    name: str
    per_kilowatt_hour: Decimal
    pue: Decimal = Decimal(1)
    """Power usage effectiveness: the building's energy per unit of the machines' energy."""
    currency: str | None = None


class ExchangeRate(_PolicyPart, frozen=True, kw_only=True):
    """The value of one unit of a currency in the bill's currency, from the day `since` on."""

    currency: str
    rate: Decimal
    since: date

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rate:
            raise ValueError("`rate` must be more than 0")


class BasisRule(_PolicyPart, frozen=True, kw_only=True):
    """The basis by which matching tenants are billed; the first rule that matches applies."""

    basis: Basis
    match: dict[str, str] = {}
    """Patterns by dimension; without patterns, all tenants match."""
    allocated_weight: Decimal | None = None
    """For `blended`: the weight of allocated time; used time has the rest."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis == "blended" and self.allocated_weight is None:
            raise ValueError(
                "basis blended needs allocated_weight: the weight of allocated time, 0 to 1"
            )
        if self.basis != "blended" and self.allocated_weight is not None:
            raise ValueError("`allocated_weight` is only valid with basis blended; remove it")


class _Sharing(Scoped, frozen=True, kw_only=True):
    """How costs on matching devices are shared."""

    share: Share
    by: str | None = None
    """For `table`: the dimension whose values have the weights."""
    weights: dict[str, Decimal] = {}

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.share == "table") != bool(self.by and self.weights):
            raise ValueError("share table needs `by` and `weights`; no other share may have them")
        if self.weights and not any(self.weights.values()):
            raise ValueError("`weights` must have a weight above 0")


class IdleRule(_Sharing, frozen=True, kw_only=True):
    """How the cost of idle, unused or other time without a tenant is shared among tenants.

    If several rules match, the first one applies.
    """

    kind: IdleKind


class SharedRule(_Sharing, frozen=True, kw_only=True):
    """How the costs of tenants that serve all others are shared; the first match applies."""

    match: dict[str, str]
    """Patterns by dimension, at least one: the tenants whose costs are shared."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.match:
            raise ValueError(
                "`match` must name the tenants to share, such as {namespace: gpu-operator}"
            )


class TeamRow(Dated, frozen=True, kw_only=True):
    """The members of a team on some days; the first row that matches applies."""

    team: str
    match: dict[str, str]

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.team.strip() or (self.team.startswith("__") and self.team.endswith("__")):
            raise ValueError("`team` must be a name; names such as __idle__ are reserved")


class BudgetRow(_PolicyPart, frozen=True, kw_only=True):
    """The amount that matching tenants may together spend from `since` until `until`."""

    name: str
    amount: Decimal
    since: date
    until: date
    match: dict[str, str] = {}


class CloseRule(_PolicyPart, frozen=True, kw_only=True):
    """The conditions for closing a period."""

    min_data_coverage_ratio: Decimal = Decimal("0.95")
    """The minimum part of the physical GPUs' inventory time that must have ticks."""


class FocusNames(_PolicyPart, frozen=True, kw_only=True):
    """The issuer's names in FOCUS exports."""

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
    """The kind of slices that determines a MIG instance's part of a physical GPU."""
    use_without_allocation: Literal["allocatee", "user"] = "allocatee"
    """The tenant that pays for allocated time that a pod or job without an allocation used. With
    `user`, the user pays instead of an allocatee that pays by allocated time."""
    basis: list[BasisRule] = []
    idle: list[IdleRule] = []
    shared: list[SharedRule] = []
    dimensions: dict[str, list[str]] = {}
    """Custom dimensions: for each, the dimensions that are tried in order. `team` always exists;
    by default, it is the label of the pod, then of its namespace."""
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
        """Return whether a dimension has a key, such as `label:KEY`, which may be misspelt."""
        tried = self.dimensions.get(dimension, (dimension,))
        return any(":" in name for name in tried)

    def is_of_device(self, dimension: str) -> bool:
        """Return whether a dimension, built-in or custom, describes only GPUs, not tenants."""
        tried = self.dimensions.get(dimension)
        return all(map(is_of_device, tried)) if tried else is_of_device(dimension)


def mistakes_of(
    policy: BillPolicy, *, invalid: AbstractSet[str] = frozenset()
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the remedy of each mistake that concerns several parts of a file.

    `invalid` are sections with mistakes of their own. Checks that depend on them are left out.
    """
    if invalid.isdisjoint({"currency", "exchange_rates"}):
        yield from _wrong_currencies(policy)
    if "dimensions" not in invalid:
        yield from _wrong_dimensions(policy)
    names = [price.name for price in policy.prices]
    for at, name in enumerate(names):
        if name in names[:at]:
            yield ("prices", at, "name"), f"duplicate name {name!r}; give each price its own name"
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
            yield path, f"unknown currency {currency!r}; use an ISO 4217 code, such as USD"
        elif currency not in (policy.currency, *rated):
            yield path, f"missing exchange rate for {currency}; add it to exchange_rates"
    for at, rate in enumerate(policy.exchange_rates):
        if rate.currency not in CURRENCIES:
            yield ("exchange_rates", at, "currency"), f"unknown currency {rate.currency!r}"


def _wrong_dimensions(policy: BillPolicy) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for own, all_tried in policy.dimensions.items():
        for at, tried in enumerate(all_tried):
            # Custom dimensions cannot refer to each other, because they could form a cycle.
            if not is_dimension(tried) or tried == "team":
                path = ("dimensions", own, at)
                yield path, f"unknown dimension {tried!r}; use one of {dimension_names()}"
    for name in policy.dimensions:
        if is_dimension(name) and name != "team":
            yield ("dimensions", name), "is already a dimension; give yours another name"
        if name in OWN_COLUMNS:
            yield ("dimensions", name), "is a column of every bill; give yours another name"
    for at, rule in enumerate(policy.idle):
        if rule.mig_profile:
            # All tenants of a physical GPU's instances share its idle.
            yield ("idle", at, "mig_profile"), "idle is of whole physical GPUs; remove this field"
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
                yield (section, at, "by"), f"{each.by!r} is not a dimension of tenants"


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
    """Return why rows of a section cannot match by a dimension, or `None` if they can."""
    if not policy.has_dimension(dimension):
        return f"unknown dimension; use one of {dimension_names()}"
    if section == "teams" and dimension == "team":
        return "teams cannot be matched by team; use another dimension"
    if section in ("basis", "shared") and policy.is_of_device(dimension):
        return "not a dimension of tenants; match by namespace, team or a label"
    return None
