"""Quantities: what the chip's counters say of the device, apportioned by busy seconds."""

import pytest

from gpuledger.ledger.quantities import APPORTIONED, BOOKED, QUANTITIES, Quantity, apportion
from gpuledger.records import Account, Entry, GpuBooks, GpuReading

INTERVAL_NS = 2_000_000_000


def entry(account: Account, busy_seconds: float | None) -> Entry:
    busy_ns = None if busy_seconds is None else round(busy_seconds * 1e9)
    return Entry(account=account, busy_ns=busy_ns)


def split(
    *entries: Entry, sm: float | None = 0.4, tensor: float | None = 0.2, mig: bool | None = None
) -> list[dict[str, int]]:
    """Return the known amounts of each entry by name, of however many the table has."""
    reading = GpuReading(
        uuid="GPU-a", index=0, sm_active_ratio=sm, tensor_active_ratio=tensor, mig_enabled=mig
    )
    found = apportion(GpuBooks(reading=reading, entries=list(entries)), INTERVAL_NS)
    names = [quantity.name for quantity in APPORTIONED]
    return [
        {name: amount for name, amount in zip(names, amounts, strict=True) if amount is not None}
        for amounts in found
    ]


def active(sm: float, tensor: float) -> dict[str, int]:
    return {"sm_active_ns": round(sm * 1e9), "tensor_active_ns": round(tensor * 1e9)}


POD, OTHER = entry(Account.POD, 1.2), entry(Account.HOST, 0.4)
REST, NOBODY, IDLE = (
    entry(Account.POD, 0.0),
    entry(Account.UNATTRIBUTED, 0.0),
    entry(Account.IDLE, 0.4),
)


def test_active_time_goes_by_busy_time_and_idle_has_none() -> None:
    found = split(POD, OTHER, IDLE)
    assert found == [active(0.6, 0.3), active(0.2, 0.1), {}]


def test_without_counters_there_is_no_activity() -> None:
    assert split(POD, IDLE, sm=None, tensor=None) == [{}, {}]


@pytest.mark.parametrize("busy", [0.0, None])
def test_activity_where_nobody_was_seen_to_be_busy_is_nobodys(busy: float | None) -> None:
    found = split(entry(Account.POD, busy), entry(Account.UNATTRIBUTED, busy), IDLE)
    assert found == [active(0.0, 0.0), active(0.8, 0.4), {}]


def test_activity_of_a_gpu_on_which_nothing_is_booked_but_idle_stays_there() -> None:
    assert split(IDLE) == [active(0.8, 0.4)]


def test_a_cut_gpus_activity_is_its_instances() -> None:
    assert split(POD, IDLE, mig=True) == [{}, {}]


def test_a_tick_without_entries_has_no_activity() -> None:
    assert split(sm=None, tensor=None) == []


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_a_quantitys_name_ends_in_its_unit(quantity: Quantity) -> None:
    ending = {"ns": "_ns", "By": "_bytes", "mJ": "_millijoules"}[quantity.unit]

    assert quantity.name.endswith(ending)


@pytest.mark.parametrize("quantity", BOOKED, ids=lambda quantity: quantity.name)
def test_a_quantity_that_is_booked_is_a_field_of_an_entry(quantity: Quantity) -> None:
    assert hasattr(IDLE, quantity.name)


@pytest.mark.parametrize(
    ("name", "amount", "average"),
    [("busy_ns", 600_000_000, 0.3), ("memory_bytes", 7, 7.0), ("energy_millijoules", 3, 0.0015)],
)
def test_an_average_is_in_base_units_and_what_is_held_is_its_own(
    name: str, amount: int, average: float
) -> None:
    (quantity,) = [one for one in QUANTITIES if one.name == name]
    assert quantity.averaged(amount, INTERVAL_NS) == average


def test_activity_is_divided_to_the_last_nanosecond_and_the_first_of_equals_has_what_is_left() -> (
    None
):
    thirds = [entry(Account.POD, 0.5) for _ in range(3)]
    found = split(*thirds, IDLE, sm=0.5, tensor=None)
    assert [one.get("sm_active_ns") for one in found] == [333333334, 333333333, 333333333, None]
