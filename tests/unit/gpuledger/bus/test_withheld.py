"""For how long an open transaction keeps a consumer from what is there."""

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


def test_it_is_counted_from_when_it_was_seen_first_also_while_nobody_polls() -> None:
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


def test_nothing_is_withheld_at_the_end_or_while_there_is_something_to_read() -> None:
    for offsets in NOT_WITHHELD.values():
        seconds = Seconds()
        withheld = of(seconds)
        withheld.observe({HERE: offsets})
        seconds.now = 60.0
        assert withheld.seconds() == 0.0


def test_one_transaction_after_another_is_none_that_stays_open() -> None:
    """Each one that ends moves the offset up to which can be read."""
    seconds = Seconds()
    withheld = of(seconds)
    for number in range(100):
        seconds.now = number * 1.0
        withheld.observe({HERE: (number, number, number + 1)})

    assert withheld.seconds() == 0.0


def test_a_partition_that_was_given_up_is_withheld_from_nobody_here() -> None:
    seconds = Seconds()
    withheld = of(seconds)
    withheld.observe({HERE: (5, 5, 9)})
    seconds.now = 60.0
    withheld.observe({})

    assert (withheld.seconds(), shown(TOPIC)) == (0.0, 0.0)
