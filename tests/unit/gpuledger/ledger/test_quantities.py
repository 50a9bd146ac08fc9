"""Quantities: what the chip's counters say of the device, apportioned by busy seconds."""

import pytest

from gpuledger.ledger.quantities import APPORTIONED, BOOKED, QUANTITIES, Quantity, apportion
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method

SECONDS = 2.0


def entry(account: Account, busy_seconds: float | None) -> Entry:
    return Entry(account=account, busy_seconds=busy_seconds, method=Method.PROCESS_UTILIZATION)


def split(
    *entries: Entry, sm: float | None = 0.4, tensor: float | None = 0.2, mig: bool | None = None
) -> list[dict[str, float]]:
    """Return the known amounts of each entry by name, of however many the table has."""
    reading = GpuReading(
        uuid="GPU-a", index=0, sm_active_ratio=sm, tensor_active_ratio=tensor, mig_enabled=mig
    )
    found = apportion(GpuBooks(reading=reading, entries=list(entries)), SECONDS)
    names = [quantity.name for quantity in APPORTIONED]
    return [
        {name: amount for name, amount in zip(names, amounts, strict=True) if amount is not None}
        for amounts in found
    ]


def active(sm: float, tensor: float) -> dict[str, float]:
    return {"sm_active_seconds": sm, "tensor_active_seconds": tensor}


POD, OTHER = entry(Account.POD, 1.2), entry(Account.HOST, 0.4)
REST, NOBODY, IDLE = (
    entry(Account.POD, 0.0),
    entry(Account.UNATTRIBUTED, 0.0),
    entry(Account.IDLE, 0.4),
)


def test_active_seconds_go_by_busy_seconds_and_idle_has_none() -> None:
    found = split(POD, OTHER, IDLE)
    assert found[0] == pytest.approx(active(0.6, 0.3))
    assert found[1] == pytest.approx(active(0.2, 0.1))
    assert found[2] == {}


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
    ending = {"s": "_seconds", "By.s": "byte_seconds", "J": "joules"}[quantity.unit]

    assert quantity.name.endswith(ending)


@pytest.mark.parametrize("quantity", BOOKED, ids=lambda quantity: quantity.name)
def test_a_quantity_that_is_booked_is_a_field_of_an_entry(quantity: Quantity) -> None:
    assert hasattr(IDLE, quantity.name)
