"""A node whose new ticks are all skipped is reported, however little a tick ran ahead."""

import pytest
from structlog.testing import capture_logs

from gpuledger.bus.protocol import Record
from gpuledger_enricher.join.stage import JoinStage
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, record, sample

HOUR_MS = 3_600_000
UNBOOKED = "gpuledger_join_nodes_unprocessed"
Line = tuple[object, object]


class Node:
    """A node that ticks every second, and what the stage books and logs for it."""

    def __init__(self, given: Given, *, name: str = "node-a") -> None:
        self.stage: JoinStage = given.stage
        self.given, self.name = given, name

    def tick(self, *, seq: int, late_seconds: float = 0.0, **changes: object) -> int:
        """Return how many events a tick makes if it is read `late_seconds` after it was written."""
        written_ms = (self.given.now_ns - round(late_seconds * SECOND_NS)) // 10**6
        read: Record = record(sample(node=self.name, seq=seq, **changes), offset=seq)
        return len(self.stage.take_samples([read._replace(timestamp_ms=written_ms)]))

    def tick_for(self, seconds: int, *, late_seconds: float = 0.0) -> tuple[int, list[Line]]:
        """Return how many events this many honest ticks make, and the nodes logged meanwhile."""
        with capture_logs() as logs:
            booked = 0
            for _ in range(seconds):
                self.given.wait(1)
                uptime_ms = (self.given.now_ns - T_NS) // 10**6 + 1000
                booked += self.tick(seq=uptime_ms, late_seconds=late_seconds)
        lines = [line for line in logs if line["event"] == "node_seq_leapt"]
        return booked, [(one["node"], one["by_seconds"]) for one in lines]


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.mark.parametrize("ahead_ms", [20 * HOUR_MS, HOUR_MS, 5 * 60_000])
def test_a_leap_of_seq_is_logged_once_after_a_minute_with_its_length(
    given: Given, ahead_ms: int
) -> None:
    node = Node(given)
    assert node.tick_for(3) == (3, [])
    assert node.tick(seq=4000 + ahead_ms) == 1
    assert node.tick_for(60) == (0, [])
    assert value_of(UNBOOKED) == 0
    assert node.tick_for(100) == (0, [("node-a", (ahead_ms - 61_000) / 1000)])
    assert value_of(UNBOOKED) == 1


def test_a_node_that_is_booked_again_or_unresponsive_is_not_unbooked(given: Given) -> None:
    node, other = Node(given), Node(given, name="node-b")
    assert node.tick_for(1) == (1, [])
    assert node.tick(seq=HOUR_MS) == 1
    assert len(node.tick_for(90)[1]) == 1
    assert node.tick(seq=5, boot_id="the next") == 1
    assert other.tick(seq=5) == 1
    assert value_of(UNBOOKED) == 0
    assert node.tick(seq=HOUR_MS, boot_id="the next") == 1
    node.given.wait(60)
    for _ in range(70):
        node.given.wait(1)
        assert node.tick(seq=6, boot_id="the next") == 0
    assert value_of(UNBOOKED) == 1
    node.given.wait(100)
    assert other.tick(seq=100_000) == 1
    assert value_of(UNBOOKED) == 0


def test_unbooked_nodes_of_a_revoked_partition_are_forgotten(given: Given) -> None:
    node = Node(given)
    assert node.tick(seq=HOUR_MS) == 1
    node.tick_for(90)
    assert value_of(UNBOOKED) == 1
    given.stage.forget(3)
    assert value_of(UNBOOKED) == 0


def test_ticks_that_are_sent_or_read_again_do_not_make_a_node_unbooked(given: Given) -> None:
    """They were written long ago, and what is reread at once is through within a minute."""
    node = Node(given)
    assert node.tick(seq=HOUR_MS) == 1
    assert node.tick_for(300, late_seconds=90) == (0, [])
    assert value_of(UNBOOKED) == 0


def test_a_node_whose_ticks_are_all_refused_as_running_ahead_counts_as_unbooked(
    given: Given,
) -> None:
    """Its boot was restarted with a small `seq` that it never had; a reboot ends that."""
    node, uptime_ms = Node(given), 10 * 24 * HOUR_MS
    assert node.tick(seq=1) == 1
    for second in range(61):
        given.wait(1)
        assert node.tick(seq=uptime_ms + second * 1000) == 0
        assert value_of(UNBOOKED) == (second == 60)
    assert node.tick(seq=5, boot_id="the next") == 1
    assert value_of(UNBOOKED) == 0


def test_refused_forged_ticks_do_not_make_a_node_unbooked_while_its_own_are_booked(
    given: Given,
) -> None:
    node = Node(given)
    for _ in range(100):
        assert node.tick_for(1)[0] == 1
        assert node.tick(seq=100 * 24 * HOUR_MS) == 0
    assert value_of(UNBOOKED) == 0
