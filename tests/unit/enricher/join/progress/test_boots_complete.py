"""A node's watermark follows the boot that continues; a boot that does not continue is ignored.

A tick of another boot may be forged, or come from a broken agent. It is booked, but moves the
partition's watermark neither forwards nor backwards.
"""

import pytest

from gpuledger_enricher.join.progress.passage import Reached
from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import SECOND_NS

NODES_NS = T_NS - SECOND_NS
"""The end of the node's last tick: a second behind the worker's clock."""
REPORTED_TIMES = pytest.mark.parametrize(
    "reported_ns", [T_NS - 3600 * SECOND_NS, T_NS - 3 * SECOND_NS, T_NS + 86_400 * SECOND_NS]
)


@pytest.fixture
def given() -> Given:
    """Return a stage that has booked a node's tick."""
    given = Given()
    given.take(boot_id="own", seq=1000, time_ns=NODES_NS)
    return given


def complete_ns(given: Given) -> int:
    """Return the time through which the partition is complete."""
    return given.stage.find_complete(3, is_at_end=True)["default"].until_ns


def hand_over(given: Given) -> None:
    """Let another worker take over the partition."""
    written = given.stage.drain_progress(3)
    given.stage.forget(3)
    given.read_watermarks(written)


@REPORTED_TIMES
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_boot_that_appears_once_neither_delays_nor_advances_its_node(
    given: Given, reported_ns: int, *, is_handed_over: bool
) -> None:
    """Also if another worker has the partition next."""
    given.wait(1)
    given.take(boot_id="made-up", seq=7, time_ns=reported_ns)
    if is_handed_over:
        hand_over(given)
    assert complete_ns(given) == NODES_NS
    given.take(boot_id="own", seq=2000, time_ns=NODES_NS + SECOND_NS)
    assert complete_ns(given) == NODES_NS + SECOND_NS


def test_made_up_boots_delay_no_node_however_many_there_are(given: Given) -> None:
    for number in range(20):
        given.wait(1)
        given.take(boot_id=f"made-up-{number}", seq=7, time_ns=0)
        at_ns = NODES_NS + (number + 1) * SECOND_NS
        given.take(boot_id="own", seq=1000 * (number + 2), time_ns=at_ns)
        assert complete_ns(given) == at_ns


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_rebooted_node_advances_with_the_second_tick_of_its_boot(
    given: Given, *, is_handed_over: bool
) -> None:
    given.wait(60)
    given.take(boot_id="next", seq=1000, time_ns=NODES_NS + 60 * SECOND_NS)
    assert complete_ns(given) == NODES_NS
    if is_handed_over:
        hand_over(given)
    given.wait(1)
    given.take(boot_id="next", seq=2000, time_ns=NODES_NS + 61 * SECOND_NS)
    assert complete_ns(given) == NODES_NS + 61 * SECOND_NS


def test_a_node_that_was_down_for_two_minutes_advances_with_its_boots_first_tick(
    given: Given,
) -> None:
    """There is no wait to see whether the previous boot continues."""
    given.wait(120)
    given.take(boot_id="next", seq=1000, time_ns=NODES_NS + 120 * SECOND_NS)
    assert complete_ns(given) == NODES_NS + 120 * SECOND_NS


@pytest.mark.parametrize("forged", [2, 9])
def test_a_made_up_boot_with_several_ticks_delays_its_node_for_two_minutes(
    given: Given, forged: int
) -> None:
    """By then it has sent nothing for that long, while the node's own boot continued."""
    for number in range(forged):
        at_ns = T_NS - (10 - number) * SECOND_NS
        given.take(boot_id="made-up", seq=1000 * (number + 1), time_ns=at_ns)
    for second in range(121):
        given.take(boot_id="own", seq=1000 * (second + 2), time_ns=T_NS + second * SECOND_NS)
        given.wait(1)
    assert complete_ns(given) == T_NS + 120 * SECOND_NS


def test_a_late_tick_of_an_earlier_boot_delays_nothing(given: Given) -> None:
    for second in (1, 2):
        given.wait(1)
        given.take(boot_id="next", seq=1000 * second, time_ns=NODES_NS + second * SECOND_NS)
    given.take(boot_id="own", seq=2500, time_ns=NODES_NS - 50 * SECOND_NS)
    assert complete_ns(given) == NODES_NS + 2 * SECOND_NS


def test_a_cluster_that_no_longer_ticks_advances_with_the_others_of_its_partition(
    given: Given,
) -> None:
    """Although records are left to read: its nodes are named as unresponsive and not waited for."""
    given.take(cluster="gone", time_ns=NODES_NS)

    def found(cluster: str) -> Reached:
        return given.stage.find_complete(3, is_at_end=False)[cluster]

    assert found("gone").until_ns == NODES_NS
    for second in range(1, 121):
        given.wait(1)
        given.take(boot_id="own", seq=1000 * (second + 1), time_ns=NODES_NS + second * SECOND_NS)
    assert found("gone").until_ns == NODES_NS + 120 * SECOND_NS
    assert found("gone").unresponsive == [("gone/node-a", NODES_NS)]
    assert found("default").unresponsive == []
