"""How long an open transaction withholds available records from a consumer."""

from prometheus_client import REGISTRY

from gpuledger.bus.gaps import Withheld
from gpuledger.bus.protocol import Subscription, TopicPartition

TOPIC = "gpuledger.events.v1"
HERE, THERE = TopicPartition(TOPIC, 0), TopicPartition("other", 1)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def of(seconds: Seconds) -> Withheld:
    requested = Subscription(group="a-sink", topics=[TOPIC, "other"])
    return Withheld(subscription=requested, clock_seconds=seconds)


def shown(topic: str) -> float | None:
    labels = {"topic": topic, "consumer": "a-sink"}
    return REGISTRY.get_sample_value("gpuledger_open_transaction_seconds", labels)


def test_withheld_time_starts_at_first_sight_even_without_polls() -> None:
    seconds = Seconds()
    withheld = of(seconds)
    for seconds.now in (10.0, 20.0):
        withheld.observe({HERE: (5, 5, 9), THERE: (3, 3, 3)})
    seconds.now = 25.0

    assert withheld.seconds() == 15.0
    assert (shown(TOPIC), shown("other")) == (15.0, 0.0)


NOT_WITHHELD = {
    "at the end": (9, 9, 9),
    "before records that can be read": (4, 5, 9),
}


def test_nothing_is_withheld_at_the_end_or_while_there_are_records_to_read() -> None:
    for offsets in NOT_WITHHELD.values():
        seconds = Seconds()
        withheld = of(seconds)
        withheld.observe({HERE: offsets})
        seconds.now = 60.0
        assert withheld.seconds() == 0.0


def test_a_sequence_of_transactions_is_not_one_that_stays_open() -> None:
    """Each transaction that ends moves the last stable offset."""
    seconds = Seconds()
    withheld = of(seconds)
    for number in range(100):
        seconds.now = number * 1.0
        withheld.observe({HERE: (number, number, number + 1)})

    assert withheld.seconds() == 0.0


def test_a_revoked_partition_is_no_longer_withheld_here() -> None:
    seconds = Seconds()
    withheld = of(seconds)
    withheld.observe({HERE: (5, 5, 9)})
    seconds.now = 60.0
    withheld.observe({})

    assert (withheld.seconds(), shown(TOPIC)) == (0.0, 0.0)
