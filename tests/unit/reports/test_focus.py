"""FOCUS 1.2: names, types, nullability and values as in the tables of the specification."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gpuledger.store.bill_table import append_revision
from gpuledger_reports.presenting.focus import (
    ALLOCATION_COLUMNS,
    COLUMNS,
    DECIMAL,
    JSON,
    TIME,
    focus_rows,
)
from gpuledger_reports.pricing.billing import Bill
from gpuledger_reports.pricing.closing import ClosedLine, closed_lines, revision_rows, standing_bill
from gpuledger_reports.reading.times import Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Value,
    allocated,
    inventory_row,
    node_row,
    usage_row,
    used,
    write_store,
)
from tests.unit.reports.test_bill import bill_of, store_of

# A row may differ by as much as its line was rounded.
UNIT = Decimal("0.02")
MANDATORY = """
BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd BillingPeriodStart
ChargeCategory ChargeClass ChargeDescription ChargePeriodEnd ChargePeriodStart ContractedCost
EffectiveCost InvoiceIssuerName ListCost PricingQuantity PricingUnit ProviderName PublisherName
ServiceCategory ServiceName
"""
MAY_BE_NULL = {
    "BillingAccountName",
    "ChargeClass",
    "ChargeDescription",
    "PricingQuantity",
    "PricingUnit",
}
OPTIONAL = """
AvailabilityZone ChargeFrequency InvoiceId ServiceSubcategory ConsumedQuantity ConsumedUnit
ContractedUnitPrice ListUnitPrice PricingCategory RegionId RegionName ResourceId ResourceName
ResourceType SkuId SkuMeter SkuPriceId SkuPriceDetails SubAccountId SubAccountName SubAccountType
Tags CommitmentDiscountStatus PricingCurrency PricingCurrencyContractedUnitPrice
PricingCurrencyEffectiveCost PricingCurrencyListUnitPrice
"""
ALLOCATIONS = """
AllocatedMethodId AllocatedMethodDetails AllocatedResourceId AllocatedResourceName AllocatedTags
"""
VALUES: dict[str, set[str | None]] = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {None, "Correction"},
    "PricingCategory": {None, "Standard", "Committed", "Dynamic", "Other"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "ServiceCategory": {"Compute", "AI and Machine Learning"},
    "ServiceSubcategory": {"Other (Compute)"},
    "CommitmentDiscountStatus": {None, "Used", "Unused"},
    "ConsumedUnit": {None, "Hours", "kWh"},
    "PricingUnit": {None, "Hours", "kWh"},
}
# What the specification requires of usage that is not a correction.
OF_USAGE = [
    "PricingQuantity",
    "PricingUnit",
    "PricingCategory",
    "ListUnitPrice",
    "ContractedUnitPrice",
    "SkuId",
    "SkuPriceId",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingCurrencyListUnitPrice",
    "PricingCurrencyContractedUnitPrice",
]
# The second of each pair is null if and only if the first one is.
NULL_TOGETHER = (
    ("PricingQuantity", "PricingUnit"),
    ("PricingUnit", "PricingQuantity"),
    ("ConsumedQuantity", "ConsumedUnit"),
    ("ConsumedUnit", "ConsumedQuantity"),
    ("SkuId", "SkuMeter"),
    ("SkuId", "SkuPriceId"),
    ("SkuPriceId", "SkuPriceDetails"),
    ("SubAccountId", "SubAccountName"),
    ("SubAccountId", "SubAccountType"),
    ("ResourceId", "ResourceName"),
    ("ResourceId", "ResourceType"),
    ("RegionId", "RegionName"),
)
NOT_NEGATIVE = [
    "ListUnitPrice",
    "ContractedUnitPrice",
    "PricingCurrencyListUnitPrice",
    "PricingCurrencyContractedUnitPrice",
]


def broken_rules(row: Mapping[str, Value]) -> list[str]:
    """Return which conditions between columns a row violates."""
    is_usage = row["ChargeCategory"] == "Usage"
    is_correction = row["ChargeClass"] == "Correction"
    broken = [
        f"{name} of usage is null"
        for name in OF_USAGE
        if is_usage and not is_correction and row[name] is None
    ]
    broken += [
        f"{second} without {first}"
        for first, second in NULL_TOGETHER
        if row[first] is None and row[second] is not None
    ]
    broken += [f"{name} < 0" for name in NOT_NEGATIVE if row[name] is not None and row[name] < 0]
    if not is_usage and row["ConsumedQuantity"] is not None:
        broken.append("ConsumedQuantity of no usage")
    for unit_price, cost in (
        ("ListUnitPrice", "ListCost"),
        ("ContractedUnitPrice", "ContractedCost"),
    ):
        if row[unit_price] is not None and not is_correction:
            product = row[unit_price] * row["PricingQuantity"]
            broken += [f"{unit_price} x quantity"] if abs(product - row[cost]) > UNIT else []
    for begin, end in (
        ("ChargePeriodStart", "ChargePeriodEnd"),
        ("BillingPeriodStart", "BillingPeriodEnd"),
    ):
        broken += [f"{begin} is not before {end}"] if row[begin] >= row[end] else []
    if row["PricingCurrency"] == row["BillingCurrency"]:
        broken += [
            f"{name} is another one in the same currency"
            for name in ("EffectiveCost", "ListUnitPrice", "ContractedUnitPrice")
            if row[name] != row[f"PricingCurrency{name}"]
        ]
    return broken


POLICY = """
prices:
- {name: spot, model: H100, capacity_type: spot, per_gpu_hour: 3}
- {name: h100, model: H100, per_gpu_hour: 7.5, currency: EUR}
- {name: slice, model: A100, mig_profile: 1g, per_gpu_hour: 1}
exchange_rates: [{currency: EUR, rate: 1.07, from: 2026-01-01}]
energy: [{name: grid, per_kilowatt_hour: 0.3}]
idle: [{kind: idle, share: allocated}]
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a store with a spot GPU, a partitioned one, an unpriced one, and idle time of each."""
    slices: dict[str, Value] = {
        "gpu_compute_slices": 7,
        "compute_slices": 1,
        "mig_profile": "1g",
    }
    cut: dict[str, Value] = {"gpu": "MIG-c", "parent_uuid": "GPU-c", "model": "A100", **slices}
    return store_of(
        tmp_path,
        allocated(0, "a", HOUR_NS // 3, energy_millijoules=5_000_000),
        allocated(0, "b", HOUR_NS // 3),
        allocated(0, None, HOUR_NS // 3),
        used(0, "a", HOUR_NS // 7),
        allocated(2, "a"),
        allocated(0, "a", gpu="GPU-s", node="s"),
        allocated(0, "b", **cut),
        allocated(1, "b", gpu="GPU-x", model="X9"),
        usage_row(1, category="host", busy_ns=9, energy_millijoules=7, gpu="GPU-x", model="X9"),
        inventory=[inventory_row()],
        nodes=[node_row(node="s", capacity_type="spot", region="north", zone="north-1")],
    )


@pytest.fixture
def bill(store: str) -> Bill:
    return bill_of(store, POLICY, by=["pod", "gpu", "region", "zone"])


def test_the_columns_are_those_of_the_specification() -> None:
    names = {column.name for column in COLUMNS}
    assert set(MANDATORY.split()) <= names
    known = {*MANDATORY.split(), *OPTIONAL.split()}
    assert {name for name in names - known if not name.startswith("x_")} == set()
    assert {column.name for column in ALLOCATION_COLUMNS} == set(ALLOCATIONS.split())
    not_null = {column.name for column in COLUMNS if not column.is_nullable}
    assert set(MANDATORY.split()) - MAY_BE_NULL <= not_null
    assert not MAY_BE_NULL & (not_null - {"BillingAccountName"})


def value_is_of(kind: str, value: Value) -> bool:
    if kind == DECIMAL:
        return isinstance(value, Decimal) and value.is_finite()
    if kind == TIME:
        return re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value) is not None
    if kind == JSON:
        return isinstance(json.loads(str(value)), dict)
    return isinstance(value, str) and bool(value)


def test_every_value_has_its_columns_type_and_is_one_of_the_allowed_ones(bill: Bill) -> None:
    rows = list(focus_rows(bill, allocations=True))
    assert len(rows) > 4
    for row in rows:
        for column in (*COLUMNS, *ALLOCATION_COLUMNS):
            value = row[column.name]
            assert value is not None or column.is_nullable, column.name
            assert value is None or value_is_of(column.kind, value), (column.name, value)
        for name, allowed in VALUES.items():
            assert row[name] in allowed


def test_the_rows_sum_to_the_bill_and_the_rows_of_a_line_to_the_line(bill: Bill) -> None:
    rows = list(focus_rows(bill, allocations=False))
    assert sum(row["BilledCost"] for row in rows) == bill.line_cost == bill.asset_cost
    for line in bill.lines:
        assert sum(row["BilledCost"] for row in rows if row["x_Line"] == line.id) == line.cost


@pytest.mark.parametrize("by", ["pod,gpu,region,zone", "node", "namespace,model", "zone,pod"])
def test_every_row_satisfies_the_conditions_between_columns(store: str, by: str) -> None:
    rows = list(focus_rows(bill_of(store, POLICY, by=by.split(",")), allocations=True))
    assert [rule for row in rows for rule in broken_rules(row)] == []
    assert {row["PricingCategory"] for row in rows} == {"Standard", "Dynamic", None}
    assert {row["PricingCurrency"] for row in rows} == {"USD", "EUR"}
    # Each price has one SKU, even if a row of the price book covers several models.
    skus = defaultdict(set)
    for row in rows:
        skus[row["SkuPriceId"]].add(row["SkuId"])
    assert all(len(of_price) == 1 for of_price in skus.values())


def test_an_unknown_region_or_zone_is_null(bill: Bill) -> None:
    rows = [row for row in focus_rows(bill, allocations=False) if row["ResourceId"] is not None]
    places = {
        (row["ResourceId"], row["RegionId"], row["RegionName"], row["AvailabilityZone"])
        for row in rows
        if row["ResourceId"] in ("GPU-a", "GPU-s")
    }
    assert places == {("GPU-a", None, None, None), ("GPU-s", "north", "north", "north-1")}


def test_a_custom_dimension_of_gpus_is_not_a_sub_account(store: str) -> None:
    policy = POLICY + "dimensions: {place: [zone]}\n"
    rows = list(focus_rows(bill_of(store, policy, by=["place", "pod"]), allocations=False))
    assert {row["SubAccountType"] for row in rows} == {"pod"}


def test_the_allocated_ratios_of_an_asset_cost_sum_to_one(bill: Bill) -> None:
    ratios: dict[str, Decimal] = defaultdict(Decimal)
    for row in focus_rows(bill, allocations=True):
        if row["AllocatedMethodDetails"]:
            details = json.loads(row["AllocatedMethodDetails"], parse_float=Decimal)
            ratios[row["SkuPriceId"]] += Decimal(details["Elements"][0]["AllocatedRatio"])
    assert set(ratios) > {"H100/spot", "A100/slice"}
    assert set(ratios.values()) == {1}


def test_a_closed_bill_has_its_closed_rows_and_a_row_for_each_correction(store: str) -> None:
    first = bill_of(store, POLICY, by=["pod"])
    kept = list(focus_rows(first, allocations=True))
    append(store, revision_rows(first, [], closed_time_us=0))
    write_store(
        Path(store), usage_hourly=[allocated(3, "a", HOUR_NS // 2), allocated(3, "b", gpu="GPU-s")]
    )
    again = bill_of(store, POLICY, by=["pod"])
    second = replace(again, policy=again.policy._replace(sha256="1" * 64))
    append(store, revision_rows(second, closed_of(store), closed_time_us=1))
    closed = closed_of(store)
    standing = standing_bill(closed, window=first.window, by=first.by, policy=first.policy.policy)
    rows = list(focus_rows(standing, allocations=True, closed=closed))
    corrections = [row for row in rows if row["ChargeClass"] == "Correction"]
    others = [row for row in rows if row["ChargeClass"] is None]
    changing = {"InvoiceId", "x_Revision"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in others] == [
        {k: v for k, v in row.items() if k not in changing} for row in kept
    ]
    assert corrections
    assert sum(row["BilledCost"] for row in rows) == second.line_cost == standing.line_cost
    assert [rule for row in rows for rule in broken_rules(row)] == []
    assert {row["x_Revision"] for row in corrections} == {"2"}
    assert {row["x_PolicyHash"] for row in corrections} == {"1" * 64}
    # Late costs belong to the month of their use.
    month = {("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")}
    assert {(row["BillingPeriodStart"], row["BillingPeriodEnd"]) for row in rows} == month
    # All rows have the digits of the currency, as texts show them.
    assert {row["BilledCost"].as_tuple().exponent for row in rows} == {-2}


def test_each_revision_of_a_closed_bill_is_an_invoice_whose_id_and_sum_never_change(
    store: str,
) -> None:
    invoices: dict[str, Decimal] = {}
    for revision, price in enumerate((3, 4, 5), 1):
        policy = POLICY.replace("per_gpu_hour: 3", f"per_gpu_hour: {price}")
        bill = bill_of(store, policy, by=["pod"])
        assert {row["InvoiceId"] for row in focus_rows(bill, allocations=False)} == {None}
        earlier = closed_of(store)
        added = revision_rows(bill, earlier, closed_time_us=revision)
        append(store, added)
        closed = closed_of(store)
        stands = standing_bill(closed, window=bill.window, by=bill.by, policy=bill.policy.policy)
        sums: dict[str, Decimal] = defaultdict(Decimal)
        for row in focus_rows(stands, allocations=False, closed=closed):
            sums[row["InvoiceId"]] += row["BilledCost"]
        assert sums == {**invoices, f"{min(sums)[:-1]}{revision}": sum(r["cost"] for r in added)}
        invoices = dict(sums)


def append(store: str, rows: list[dict[str, Value]]) -> None:
    append_revision(store, rows, stream="bill", revision=rows[0]["revision"])


def closed_of(store: str) -> list[ClosedLine]:
    return closed_lines(store, Window(BEGIN_US, BEGIN_US + 4 * HOUR_US), ["pod"])
