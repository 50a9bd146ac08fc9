"""A newcomer displaces who waits longest, of the address that holds the most."""

import pickle

import pytest

from gpuledger.runtime.http.server import ConnectionSlots, client_of


def slots(*holders: tuple[str, str]) -> ConnectionSlots[str]:
    found: ConnectionSlots[str] = ConnectionSlots(max_total=4, max_per_address=3)
    for holder, address in holders:
        found.enter(holder, address)
    return found


def test_while_there_is_room_nobody_goes() -> None:
    assert slots().find_displaced("a") is None
    assert slots(("1", "a"), ("2", "a"), ("3", "b")).find_displaced("a") is None


def test_who_waits_longest_goes_of_an_address_that_holds_all_it_may() -> None:
    found = slots(("0", "b"), ("1", "a"), ("2", "a"), ("3", "a"))
    assert found.find_displaced("a") == "1"
    found.wait("1")
    assert found.find_displaced("a") == "2"


def test_where_all_is_taken_the_address_goes_back_that_holds_the_most() -> None:
    found = slots(("1", "a"), ("2", "b"), ("3", "b"), ("4", "c"))
    assert found.find_displaced("d") == "2"
    assert found.find_displaced("a") == "2"


def test_who_works_is_left_to_it() -> None:
    found = slots(("1", "a"), ("2", "b"), ("3", "b"), ("4", "c"))
    found.work("2")
    assert found.find_displaced("d") == "3"
    for holder in ("1", "3", "4"):
        found.work(holder)
    with pytest.raises(LookupError):
        found.find_displaced("d")
    found.wait("4")
    assert found.find_displaced("d") == "4"


def test_who_has_left_holds_nothing_whatever_comes_of_it_later() -> None:
    found = slots(("1", "a"), ("2", "b"), ("3", "b"), ("4", "c"))
    for _ in range(2):
        found.leave("1")
        found.wait("1")
        found.work("1")
    assert len(found) == 3
    assert found.find_displaced("a") is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "10.0.0.1", False),
        ("", "10.0.0.1", False),
    ],
)
def test_a_network_of_ipv6_is_one_client(one: str, other: str, *, same: bool) -> None:
    assert (client_of(one) == client_of(other)) is same


def test_an_address_from_which_all_have_left_takes_no_memory() -> None:
    found = slots()
    before = len(pickle.dumps(found))
    for number in range(1000):
        found.enter("1", f"10.0.0.{number}")
        found.work("1")
        found.leave("1")

    assert len(pickle.dumps(found)) == before
