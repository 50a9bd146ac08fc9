"""FOCUS 1.2: names, types, nullability and values as the specification's tables have them."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from reports.billing import Bill
from reports.focus import ALLOCATION_COLUMNS, COLUMNS, DECIMAL, JSON, TIME, focus_rows
from tests.unit.reports.stores import HOUR_NS, Value, held, inventory_row, used
from tests.unit.reports.test_bill import SEVEN, bill_of, store_of

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
ResourceType SkuId SkuMeter SkuPriceId SubAccountId SubAccountName SubAccountType Tags
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
}


@pytest.fixture
def bill(tmp_path: Path) -> Bill:
    policy = SEVEN + (
        "energy: [{name: grid, per_kilowatt_hour: 0.3}]\nidle: [{kind: unallocated, share: held}]\n"
    )
    store = store_of(
        tmp_path,
        held(0, "a", HOUR_NS // 3, energy_millijoules=5_000_000),
        held(0, "b", HOUR_NS // 3),
        held(0, None, HOUR_NS // 3),
        used(0, "a", HOUR_NS // 7),
        held(2, "a"),
        inventory=[inventory_row()],
    )
    return bill_of(store, policy, by=["pod", "gpu"])


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


def test_every_value_is_of_its_columns_type_and_one_of_those_allowed(bill: Bill) -> None:
    rows = list(focus_rows(bill, allocations=True))
    assert len(rows) > 4
    for row in rows:
        for column in (*COLUMNS, *ALLOCATION_COLUMNS):
            value = row[column.name]
            assert value is not None or column.is_nullable, column.name
            assert value is None or value_is_of(column.kind, value), (column.name, value)
        for name, allowed in VALUES.items():
            assert row[name] in allowed


def test_the_rows_sum_to_the_bill_and_those_of_a_line_to_the_line(bill: Bill) -> None:
    rows = list(focus_rows(bill, allocations=False))
    assert sum(row["BilledCost"] for row in rows) == bill.line_cost == bill.origin_cost
    for line in bill.lines:
        assert sum(row["BilledCost"] for row in rows if row["x_Line"] == line.id) == line.cost


def test_quantity_times_unit_price_is_the_cost_to_a_unit(bill: Bill) -> None:
    for row in focus_rows(bill, allocations=False):
        if row["ListUnitPrice"] is not None:
            product = row["PricingQuantity"] * row["ListUnitPrice"]
            assert abs(product - row["ListCost"]) < Decimal("0.02")


def test_the_allocated_parts_of_an_origin_sum_to_one(bill: Bill) -> None:
    details = [
        json.loads(row["AllocatedMethodDetails"], parse_float=Decimal)["Elements"][0]
        for row in focus_rows(bill, allocations=True)
        if row["AllocatedMethodDetails"]
    ]
    assert sum(Decimal(element["AllocatedRatio"]) for element in details) == 1
