"""Quantities: the chip's counters for the device, apportioned by busy time."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.quantities import APPORTIONED, BOOKED, QUANTITIES, Quantity, apportion
from gpuledger.records import Category, Entry, GpuBooks, GpuReading

INTERVAL_NS = 2_000_000_000


def entry(category: Category, busy_ns: int | None) -> Entry:
    return Entry(category=category, busy_ns=busy_ns)


def split(
    *entries: Entry, sm: float | None = 0.4, tensor: float | None = 0.2, mig: bool | None = None
) -> list[dict[str, int]]:
    """Return each entry's known amounts by name, however many the table has."""
    reading = GpuReading(
        uuid="GPU-a", index=0, sm_active_ratio=sm, tensor_active_ratio=tensor, mig_enabled=mig
    )
    found = apportion(GpuBooks(reading=reading, entries=list(entries)), INTERVAL_NS)
    names = [quantity.name for quantity in APPORTIONED]
    return [
        {name: amount for name, amount in zip(names, amounts, strict=True) if amount is not None}
        for amounts in found
    ]


def active(sm: int, tensor: int) -> dict[str, int]:
    return {"sm_active_ns": sm, "tensor_active_ns": tensor}


POD, OTHER = entry(Category.POD, 1_200_000_000), entry(Category.HOST, 400_000_000)
UNATTRIBUTED, IDLE = entry(Category.UNATTRIBUTED, 0), entry(Category.IDLE, 400_000_000)
ALL = active(800_000_000, 400_000_000)
NOTHING = active(0, 0)


def test_active_time_is_split_by_busy_time_and_idle_gets_none() -> None:
    found = split(POD, OTHER, IDLE)

    assert found == [active(600_000_000, 300_000_000), active(200_000_000, 100_000_000), {}]


def test_the_rest_of_a_division_goes_by_largest_remainder_and_nothing_is_lost() -> None:
    third = [
        entry(Category.POD, 7),
        entry(Category.HOST, 7),
        entry(Category.UNATTRIBUTED, 7),
    ]

    found = [amounts["sm_active_ns"] for amounts in split(*third, IDLE)[:3]]

    assert sorted(found) == [266_666_666, 266_666_667, 266_666_667]


@given(
    busy=st.lists(st.none() | st.integers(0, INTERVAL_NS), min_size=1, max_size=8),
    millionths=st.integers(0, 10**6),
)
def test_the_parts_sum_to_the_whole_and_each_is_within_one_of_its_share(
    busy: list[int | None], millionths: int
) -> None:
    entries = [entry(Category.POD, each) for each in busy]

    parts = [
        amounts["sm_active_ns"] for amounts in split(*entries, UNATTRIBUTED, sm=millionths / 10**6)
    ]

    total = Fraction(INTERVAL_NS * millionths, 10**6)
    assert sum(parts) == round(total)
    worked = sum(each or 0 for each in busy)
    for part, each in zip(parts, busy, strict=False):
        assert abs(part - total * (each or 0) / (worked or 1)) <= 1


def test_without_counters_there_is_no_activity() -> None:
    assert split(POD, IDLE, sm=None, tensor=None) == [{}, {}]


@pytest.mark.parametrize("busy_ns", [0, None])
def test_activity_is_unattributed_if_no_process_was_seen_to_be_busy(busy_ns: int | None) -> None:
    found = split(entry(Category.POD, busy_ns), entry(Category.UNATTRIBUTED, busy_ns), IDLE)
    assert found == [NOTHING, ALL, {}]


def test_activity_of_a_gpu_with_only_an_idle_entry_is_idle() -> None:
    assert split(IDLE) == [ALL]


def test_a_partitioned_gpus_activity_is_that_of_its_instances() -> None:
    assert split(POD, IDLE, mig=True) == [{}, {}]


def test_a_tick_without_entries_has_no_activity() -> None:
    assert split(sm=None, tensor=None) == []


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_a_quantitys_name_ends_in_its_unit(quantity: Quantity) -> None:
    ending = {"ns": "_ns", "By": "_bytes", "mJ": "_millijoules"}[quantity.unit]

    assert quantity.name.endswith(ending)


@pytest.mark.parametrize("quantity", BOOKED, ids=lambda quantity: quantity.name)
def test_a_booked_quantity_is_a_field_of_an_entry(quantity: Quantity) -> None:
    assert hasattr(IDLE, quantity.name)


AVERAGES = [("busy_ns", "0.5"), ("memory_bytes", "1000000000"), ("energy_millijoules", "500000")]


@pytest.mark.parametrize(("name", "average"), AVERAGES)
def test_an_average_is_in_base_units_per_second(name: str, average: str) -> None:
    """For a level, such as memory in use, the average is the amount itself."""
    (quantity,) = [each for each in QUANTITIES if each.name == name]

    assert 10**9 / quantity.divisor(INTERVAL_NS) == Decimal(average)
