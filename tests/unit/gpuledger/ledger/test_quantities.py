"""Quantities: what the chip's counters say of the device, apportioned by busy seconds."""

import pytest

from gpuledger.ledger.quantities import BOOKED, QUANTITIES, UNKNOWN, Amounts, Quantity, apportion
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method

SECONDS = 2.0


def entry(account: Account, busy_seconds: float | None) -> Entry:
    return Entry(account=account, busy_seconds=busy_seconds, method=Method.PROCESS_UTILIZATION)


def split(
    *entries: Entry, sm: float | None = 0.4, tensor: float | None = 0.2, mig: bool | None = None
) -> list[Amounts]:
    reading = GpuReading(
        uuid="GPU-a", index=0, sm_active_ratio=sm, tensor_active_ratio=tensor, mig_enabled=mig
    )
    return apportion(GpuBooks(reading=reading, entries=list(entries)), SECONDS)


POD, OTHER = entry(Account.POD, 1.2), entry(Account.HOST, 0.4)
REST, NOBODY, IDLE = (
    entry(Account.POD, 0.0),
    entry(Account.UNATTRIBUTED, 0.0),
    entry(Account.IDLE, 0.4),
)


def test_active_seconds_go_by_busy_seconds_and_idle_has_none() -> None:
    found = split(POD, OTHER, IDLE)
    assert found[0] == pytest.approx((0.6, 0.3, None))
    assert found[1] == pytest.approx((0.2, 0.1, None))
    assert found[2] == UNKNOWN


def test_without_counters_there_is_no_activity() -> None:
    assert set(split(POD, IDLE, sm=None, tensor=None)) == {UNKNOWN}


@pytest.mark.parametrize("busy", [0.0, None])
def test_activity_where_nobody_was_seen_to_be_busy_is_nobodys(busy: float | None) -> None:
    found = split(entry(Account.POD, busy), entry(Account.UNATTRIBUTED, busy), IDLE)
    assert found == [(0.0, 0.0, None), (0.8, 0.4, None), UNKNOWN]


def test_activity_of_a_gpu_on_which_nothing_is_booked_but_idle_stays_there() -> None:
    assert split(IDLE) == [(0.8, 0.4, None)]


def test_a_cut_gpus_activity_is_its_instances() -> None:
    assert set(split(POD, IDLE, mig=True)) == {UNKNOWN}


def test_a_tick_without_entries_has_no_activity() -> None:
    assert split(sm=None, tensor=None) == []


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_a_quantitys_name_ends_in_its_unit(quantity: Quantity) -> None:
    ending = {"s": "_seconds", "By.s": "byte_seconds", "J": "joules"}[quantity.unit]

    assert quantity.name.endswith(ending)


@pytest.mark.parametrize("quantity", BOOKED, ids=lambda quantity: quantity.name)
def test_a_quantity_that_is_booked_is_a_field_of_an_entry(quantity: Quantity) -> None:
    assert hasattr(IDLE, quantity.name)
