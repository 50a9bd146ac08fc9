"""Finds a device's price on a given day in the price book. Pure; all amounts are exact fractions.

For prices, energy and idle rules, the first row in the file that matches the device and the day
applies. For exchange rates, the newest one up to that day applies.
"""

from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

from gpuledger.errors import UserError
from gpuledger_reports.pricing.money import fraction_of
from gpuledger_reports.pricing.policy import (
    BillPolicy,
    EnergyPrice,
    ExchangeRate,
    IdleKind,
    IdleRule,
    Price,
    Scoped,
    SharedRule,
)

GPU_WEIGHT: Final = 9
"""The weight of a GPU in a machine's price. A vCPU has 0.9, and a gigabyte of memory 0.1."""
_VCPU_WEIGHT: Final = Fraction(9, 10)
_GB_WEIGHT: Final = Fraction(1, 10)
MILLIJOULES_PER_KILOWATT_HOUR: Final = 3_600_000_000
R = TypeVar("R", bound=Scoped)


class DeviceTraits(NamedTuple):
    """Facts about a class of similar devices, which at any time have the same price."""

    cluster: str
    node: str
    model: str | None
    mig_profile: str | None = None
    compute_slices: int | None = None
    gpu_compute_slices: int | None = None
    gpu: str | None = None
    """The GPU's UUID, if the bill distinguishes GPUs."""
    node_pool: str | None = None
    instance_type: str | None = None
    zone: str | None = None
    region: str | None = None
    capacity_type: str | None = None
    labels: str | None = None

    def by_name(self) -> dict[str, str | None]:
        """Return the facts except labels, by their names in prices and dimensions."""
        return {name: value for name, value in self._asdict().items() if name != "labels"}


class Rate(NamedTuple):
    """A device's cost per hour and per millijoule, and the rows that determine it."""

    price: Price | None
    """`None` if no row matches: the device then costs nothing, and the bill reports it."""
    exchange: ExchangeRate | None
    per_gpu_hour: Fraction
    """For a whole physical GPU, in the bill's currency; a MIG instance's price is scaled up."""
    energy: EnergyPrice | None = None
    per_millijoule: Fraction = Fraction(0)


def gpu_hour_of(price: Price) -> Fraction:
    """Return a price row's cost of a GPU-hour, in the row's currency."""
    if price.instance is not None:
        instance = price.instance
        units = (
            GPU_WEIGHT * instance.gpus
            + _VCPU_WEIGHT * instance.vcpus
            + _GB_WEIGHT * fraction_of(instance.memory_gb)
        )
        return fraction_of(instance.per_hour) * GPU_WEIGHT / units
    if price.purchase is not None:
        bought = price.purchase
        written_off = fraction_of(bought.capital - bought.residual) / bought.lifetime_hours
        running = fraction_of(bought.hosting_per_hour + bought.support_per_hour)
        return (written_off + running) / bought.gpus
    return fraction_of(price.per_gpu_hour or Decimal(0))


class PriceBook:
    """Finds prices and rules in a policy."""

    def __init__(self, policy: BillPolicy) -> None:
        self._policy = policy
        self._found: dict[tuple[DeviceTraits, date], Rate] = {}

    def rate_of(self, facts: DeviceTraits, day: date) -> Rate:
        """Return a device's rate on a day; raises UserError if an exchange rate is missing."""
        # Cached: a period has few combinations of device class and day.
        key = (facts, day)
        if key not in self._found:
            self._found[key] = self._find(facts, day)
        return self._found[key]

    def idle_rule_of(self, kind: IdleKind, facts: DeviceTraits, day: date) -> IdleRule | None:
        """Return the rule by which a device's idle is shared, or `None` if no rule matches."""
        if kind not in self._shared_kinds:
            return None
        named = facts.by_name()
        rules = (rule for rule in self._policy.idle if rule.kind == kind and rule.holds_on(day))
        return next((rule for rule in rules if rule.fits(named)), None)

    def shared_rules_of(self, facts: DeviceTraits, day: date) -> tuple[SharedRule, ...]:
        """Return the rules for shared tenants that apply to a device, in the file's order."""
        named = facts.by_name()
        return tuple(r for r in self._policy.shared if r.holds_on(day) and r.fits(named))

    @cached_property
    def _shared_kinds(self) -> frozenset[str]:
        return frozenset(rule.kind for rule in self._policy.idle)

    def _find(self, facts: DeviceTraits, day: date) -> Rate:
        named = facts.by_name()
        rate = Rate(None, None, Fraction(0))
        if price := _first(self._policy.prices, named, day):
            exchange = self._exchange(price.currency, day)
            amount = gpu_hour_of(price) * _factor(exchange)
            rate = Rate(price, exchange, amount * _physical_gpus_of(price, facts))
        # Energy is billed in addition to hours if the file has a price for it.
        if energy := _first(self._policy.energy, named, day):
            factor = _factor(self._exchange(energy.currency, day))
            cost = fraction_of(energy.per_kilowatt_hour) * fraction_of(energy.pue) * factor
            rate = rate._replace(energy=energy, per_millijoule=cost / MILLIJOULES_PER_KILOWATT_HOUR)
        return rate

    def _exchange(self, currency: str | None, day: date) -> ExchangeRate | None:
        """Return a currency's exchange rate on a day; `None` for the bill's own currency.

        Raises UserError if there is none.
        """
        if currency in (None, self._policy.currency):
            return None
        rates = [rate for rate in self._policy.exchange_rates if rate.currency == currency]
        known = [rate for rate in rates if rate.since <= day]
        if not known:
            raise UserError(
                f"no exchange rate for {currency} on {day}; add one to exchange_rates with a `from`"
                " on or before that day"
            )
        return max(known, key=lambda rate: rate.since)


def _factor(exchange: ExchangeRate | None) -> Fraction:
    return fraction_of(exchange.rate) if exchange else Fraction(1)


def _physical_gpus_of(price: Price, facts: DeviceTraits) -> Fraction:
    """Return the factor that scales a price up to a whole physical GPU.

    A price for a MIG profile is per instance, but time is counted in whole physical GPUs. For
    example, an hour of a `1g` instance of seven slices is a seventh of a GPU-hour, so its price is
    multiplied by seven.
    """
    is_of_instance = price.mig_profile is not None and facts.mig_profile is not None
    if is_of_instance and facts.compute_slices and facts.gpu_compute_slices:
        return Fraction(facts.gpu_compute_slices, facts.compute_slices)
    return Fraction(1)


def _first(rows: Sequence[R], named: Mapping[str, str | None], day: date) -> R | None:
    return next((row for row in rows if row.holds_on(day) and row.fits(named)), None)
