"""Bills in FOCUS 1.2, the FinOps Foundation's cost format, with the allocation columns of 1.3.

A row is the part of a line with one price, so that unit price times quantity is the row's cost. The
rows of a line sum to the line's cost. Distributed idle is a row of category Adjustment without a
quantity. The rows of a closed bill show the first revision, and one row for each correction line.
Each of them has the prices, the coverage and the invoice of its own revision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from gpuledger_reports.pricing.billing import Bill
from gpuledger_reports.pricing.closing import ClosedLine
from gpuledger_reports.pricing.line_parts import (
    QUANTITY_DIGITS,
    RATIO_DIGITS,
    ChargePart,
    decode_parts,
    parts_of,
)
from gpuledger_reports.pricing.lookup import Values
from gpuledger_reports.pricing.money import fraction_of, minor_digits, rounded
from gpuledger_reports.pricing.periods import month_of
from gpuledger_reports.pricing.policy import FocusNames
from gpuledger_reports.pricing.policy_file import ReadPolicy
from gpuledger_reports.pricing.tenants import ABSENT
from gpuledger_reports.reading.times import day_of, time_text

DECIMAL, STRING, TIME, JSON = "decimal", "string", "date/time", "json"
_SECONDS_PER_HOUR: Final = 3600
_UNPRICED: Final = "unpriced"


class FocusColumn(NamedTuple):
    """A column of the FOCUS specification, or one of gpuledger's own, which begin with `x_`."""

    name: str
    kind: str
    is_nullable: bool


def _of_kind(kind: str, names: str, *, is_nullable: bool) -> Iterator[FocusColumn]:
    for name in names.split():
        yield FocusColumn(name, kind, is_nullable)


# The columns that apply to a bill of GPUs. The specification allows leaving out conditional columns
# that never apply: those of commitments and capacity reservations. CommitmentDiscountStatus is
# included, always null, because the rules of ConsumedQuantity refer to it.
COLUMNS: Final = (
    *_of_kind(DECIMAL, "BilledCost ContractedCost EffectiveCost ListCost", is_nullable=False),
    *_of_kind(DECIMAL, "ListUnitPrice ContractedUnitPrice", is_nullable=True),
    *_of_kind(DECIMAL, "PricingQuantity ConsumedQuantity", is_nullable=True),
    *_of_kind(STRING, "PricingUnit ConsumedUnit PricingCategory", is_nullable=True),
    *_of_kind(STRING, "BillingAccountId BillingCurrency", is_nullable=False),
    *_of_kind(STRING, "BillingAccountName InvoiceId", is_nullable=True),
    *_of_kind(
        TIME,
        "BillingPeriodStart BillingPeriodEnd ChargePeriodStart ChargePeriodEnd",
        is_nullable=False,
    ),
    *_of_kind(STRING, "ChargeCategory ChargeFrequency", is_nullable=False),
    *_of_kind(STRING, "ChargeClass ChargeDescription", is_nullable=True),
    *_of_kind(
        STRING,
        "InvoiceIssuerName ProviderName PublisherName ServiceCategory ServiceName",
        is_nullable=False,
    ),
    *_of_kind(STRING, "ServiceSubcategory", is_nullable=False),
    *_of_kind(STRING, "RegionId RegionName AvailabilityZone", is_nullable=True),
    *_of_kind(STRING, "ResourceId ResourceName ResourceType", is_nullable=True),
    *_of_kind(STRING, "SkuId SkuMeter SkuPriceId", is_nullable=True),
    *_of_kind(JSON, "SkuPriceDetails", is_nullable=True),
    *_of_kind(STRING, "CommitmentDiscountStatus", is_nullable=True),
    *_of_kind(STRING, "PricingCurrency", is_nullable=False),
    *_of_kind(DECIMAL, "PricingCurrencyEffectiveCost", is_nullable=False),
    *_of_kind(
        DECIMAL,
        "PricingCurrencyListUnitPrice PricingCurrencyContractedUnitPrice",
        is_nullable=True,
    ),
    *_of_kind(STRING, "SubAccountId SubAccountName SubAccountType", is_nullable=True),
    *_of_kind(JSON, "Tags", is_nullable=True),
    *_of_kind(STRING, "x_Line x_PolicyHash", is_nullable=False),
    *_of_kind(STRING, "x_IdleKind x_Revision", is_nullable=True),
    *_of_kind(DECIMAL, "x_AllocatedGpuHours x_UsedGpuHours", is_nullable=False),
    *_of_kind(DECIMAL, "x_UsedByOthersGpuHours", is_nullable=False),
    *_of_kind(DECIMAL, "x_DataCoverageRatio", is_nullable=True),
)
ALLOCATION_COLUMNS: Final = (
    *_of_kind(STRING, "AllocatedMethodId AllocatedResourceId", is_nullable=True),
    *_of_kind(STRING, "AllocatedResourceName", is_nullable=True),
    *_of_kind(JSON, "AllocatedMethodDetails AllocatedTags", is_nullable=True),
)


class _LineOf(NamedTuple):
    """The line to which a row belongs."""

    id: str
    values: Values
    idle_kind: str | None
    invoice: str | None = None


def focus_rows(
    bill: Bill, *, allocations: bool, closed: Sequence[ClosedLine] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the FOCUS rows of a bill, each as values by column.

    `allocations` adds the allocation columns.

    `closed` contains the lines of all revisions if the bill is closed; otherwise it is empty.
    """
    for made, line, part in _closed_parts(bill, closed) if closed else _parts(bill):
        row = _row(made, line, part)
        if allocations:
            row |= _allocation(made, line, part)
        yield row
    for each in closed:
        if each.charge_class:
            row = _correction(_as_closed(bill, each), each, _line_of(bill, each, closed))
            yield row | (dict.fromkeys(c.name for c in ALLOCATION_COLUMNS) if allocations else {})


def focus_columns(*, allocations: bool) -> tuple[FocusColumn, ...]:
    """Return the columns of the rows of `focus_rows`."""
    return (*COLUMNS, *ALLOCATION_COLUMNS) if allocations else COLUMNS


def _parts(bill: Bill) -> Iterator[tuple[Bill, _LineOf, ChargePart]]:
    parts = parts_of(bill)
    for line in bill.lines:
        for part in parts[line.key]:
            yield bill, _LineOf(line.id, line.values, line.idle_kind), part


def _closed_parts(
    bill: Bill, closed: Sequence[ClosedLine]
) -> Iterator[tuple[Bill, _LineOf, ChargePart]]:
    # An open bill has its lines in the same order.
    for line, each in sorted(
        ((_line_of(bill, each, closed), each) for each in closed),
        key=lambda pair: (pair[0].values, pair[0].idle_kind or ""),
    ):
        for part in decode_parts(each.parts) if each.parts else ():
            yield _as_closed(bill, each), line, part


def _as_closed(bill: Bill, closed: ClosedLine) -> Bill:
    """Return a closed bill with the metadata of a line's revision instead of the last one."""
    ratio = closed.data_coverage_ratio
    return replace(
        bill,
        end_us=closed.valid_through_us,
        data_coverage_ratio=None if ratio is None else Fraction(ratio),
        policy=ReadPolicy(bill.policy.policy, closed.policy_sha256, closed.policy_name),
        revision=closed.revision,
    )


def _line_of(bill: Bill, line: ClosedLine, closed: Sequence[ClosedLine]) -> _LineOf:
    return _LineOf(
        line.line, line.key.values, line.idle_kind, f"{_invoices_of(bill, closed)}-{line.revision}"
    )


def _invoices_of(bill: Bill, closed: Sequence[ClosedLine]) -> str:
    """Return the beginning of the bill's invoice ids; later revisions do not change it."""
    # The time of the first revision distinguishes bills of the same period in several stores.
    meaning = "\0".join(map(str, (*bill.window, *bill.by, closed[0].closed_time_us)))
    return f"{day_of(bill.window.begin_us)}-{sha256(meaning.encode()).hexdigest()[:12]}"


def _correction(bill: Bill, closed: ClosedLine, line: _LineOf) -> dict[str, Any]:
    """Return the row of a correction line: a cost without a price."""
    allocated, used, by_others = (
        rounded(fraction_of(seconds) / _SECONDS_PER_HOUR, digits=QUANTITY_DIGITS)
        for seconds in (
            closed.allocated_gpu_seconds,
            closed.used_gpu_seconds,
            closed.used_by_others_gpu_seconds,
        )
    )
    # The store keeps more digits than the currency has.
    cost = rounded(fraction_of(closed.cost), digits=minor_digits(closed.currency))
    part = ChargePart(
        cost=cost, allocated_hours=allocated, used_hours=used, used_by_others_hours=by_others
    )
    return _row(bill, line, part) | {
        "ChargeCategory": "Usage",
        "ChargeClass": "Correction",
        "ChargeDescription": f"Correction {closed.revision}, {_description(bill, line)}",
        "ConsumedQuantity": used,
        "ConsumedUnit": "Hours",
        **_place(bill, line, part),
    }


def _row(bill: Bill, line: _LineOf, part: ChargePart) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    costs = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")
    row |= dict.fromkeys((*costs, "PricingCurrencyEffectiveCost"), part.cost)
    # A FOCUS billing period is a month; a bill that does not fit into one is its own period.
    month = month_of(bill.end_us)
    period = month if month.begin_us <= bill.window.begin_us else bill.window
    row |= {
        "BillingPeriodStart": time_text(period.begin_us),
        "BillingPeriodEnd": time_text(max(period.end_us, bill.end_us)),
        "ChargePeriodStart": time_text(bill.window.begin_us),
        "ChargePeriodEnd": time_text(bill.end_us),
        "InvoiceId": line.invoice,
        "BillingCurrency": bill.currency,
        "PricingCurrency": bill.currency,
        "ChargeCategory": "Usage" if part.unit else "Adjustment",
        "ChargeFrequency": "Usage-Based",
        "ChargeDescription": _description(bill, line),
        "ServiceCategory": "Compute",
        "ServiceSubcategory": "Other (Compute)",
        "ServiceName": "GPU",
        "Tags": _tags(bill, line),
        "x_Line": line.id,
        "x_IdleKind": line.idle_kind,
        "x_Revision": None if bill.revision is None else str(bill.revision),
        "x_PolicyHash": bill.policy.sha256,
        "x_AllocatedGpuHours": part.allocated_hours,
        "x_UsedGpuHours": part.used_hours,
        "x_UsedByOthersGpuHours": part.used_by_others_hours,
        "x_DataCoverageRatio": None
        if bill.data_coverage_ratio is None
        else rounded(bill.data_coverage_ratio, digits=RATIO_DIGITS),
        **_of_names(bill.policy.policy.focus),
        **_sub_account(bill, line),
    }
    if part.unit:
        row |= _priced(part) | _place(bill, line, part)
    return row


def _priced(part: ChargePart) -> dict[str, Any]:
    """Return the pricing columns of a part, which the specification requires for usage."""
    is_time = part.unit == "Hours"
    details: dict[str, str | int] = {"GpuCount": 1} if is_time else {}
    if part.mig_profile:
        # An instance's price is for a part of a GPU, so there is no GPU count.
        details = {"x_MigProfile": part.mig_profile}
    sku = (part.model if is_time else None) or ("GPU" if is_time else "energy")
    found: dict[str, Any] = {
        "PricingQuantity": part.quantity,
        "PricingUnit": part.unit,
        "PricingCategory": "Dynamic" if part.is_spot else "Standard",
        "ListUnitPrice": part.unit_price,
        "ContractedUnitPrice": part.unit_price,
        "PricingCurrencyListUnitPrice": part.unit_price,
        "PricingCurrencyContractedUnitPrice": part.unit_price,
        "SkuId": sku,
        "SkuMeter": "GPU hours" if is_time else "Energy",
        # One price row may match several models, but in FOCUS a price belongs to one SKU.
        "SkuPriceId": f"{sku}/{part.price or _UNPRICED}",
        "SkuPriceDetails": msgspec.json.encode(details).decode() if details else None,
        "ConsumedQuantity": part.used_hours if is_time else part.quantity,
        "ConsumedUnit": part.unit,
    }
    if part.pricing_currency:
        found |= {
            "PricingCurrency": part.pricing_currency,
            "PricingCurrencyEffectiveCost": part.pricing_cost,
            "PricingCurrencyListUnitPrice": part.pricing_unit_price,
            "PricingCurrencyContractedUnitPrice": part.pricing_unit_price,
        }
    return found


def _place(bill: Bill, line: _LineOf, part: ChargePart) -> dict[str, Any]:
    named = zip(bill.by, line.values, strict=True)
    # FOCUS has null for unknown values, a bill has special values.
    values = {name: value for name, value in named if value not in ABSENT}
    gpu = values.get("gpu")
    return {
        "RegionId": values.get("region"),
        "RegionName": values.get("region"),
        "AvailabilityZone": values.get("zone"),
        "ResourceId": gpu,
        "ResourceName": gpu and (part.model or values.get("model")),
        "ResourceType": gpu and "GPU",
    }


def _of_names(names: FocusNames) -> dict[str, str]:
    return {
        "BillingAccountId": names.billing_account_id,
        "BillingAccountName": names.billing_account_name,
        "InvoiceIssuerName": names.invoice_issuer_name,
        "ProviderName": names.provider_name,
        "PublisherName": names.publisher_name,
    }


def _sub_account(bill: Bill, line: _LineOf) -> dict[str, str]:
    """Return the sub account, which is the value of the first tenant dimension."""
    # Dimensions of devices, such as a node or a model, are not accounts.
    for name, value in zip(bill.by, line.values, strict=True):
        if not bill.policy.policy.is_of_device(name):
            return {"SubAccountId": value, "SubAccountName": value, "SubAccountType": name}
    return {}


def _description(bill: Bill, line: _LineOf) -> str:
    named = ", ".join(f"{name} {value}" for name, value in zip(bill.by, line.values, strict=True))
    return f"GPUs, {line.idle_kind}: {named}" if line.idle_kind else f"GPUs: {named}"


def _tags(bill: Bill, line: _LineOf) -> str:
    return msgspec.json.encode(dict(zip(bill.by, line.values, strict=True))).decode()


def _allocation(bill: Bill, line: _LineOf, part: ChargePart) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(column.name for column in ALLOCATION_COLUMNS)
    if part.allocated_ratio is None:
        return row
    element = {
        "AllocatedRatio": part.allocated_ratio,
        "UsageUnit": "Hours",
        "UsageQuantity": part.quantity or Decimal(0),
    }
    encoder = msgspec.json.Encoder(decimal_format="number")
    return row | {
        "AllocatedMethodId": "gpuledger-gpu-time",
        "AllocatedMethodDetails": encoder.encode({"Elements": [element]}).decode(),
        "AllocatedResourceId": "/".join(line.values),
        "AllocatedResourceName": "/".join(line.values),
        "AllocatedTags": _tags(bill, line),
    }
