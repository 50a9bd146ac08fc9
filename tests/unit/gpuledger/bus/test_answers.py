"""How long ago brokers answered a consumer's fetches."""

from gpuledger.bus.kafka_fetch import Answers
from gpuledger.bus.protocol import TopicPartition

HERE, THERE = TopicPartition("events", 0), TopicPartition("events", 1)


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_new_answer_ends_the_silence_of_its_partition_only() -> None:
    """The leader of one partition may be unavailable while others answer."""
    seconds = Seconds()
    answers = Answers(clock_seconds=seconds)
    for seconds.now in (0.0, 1.0, 60.0):
        answers.observe({HERE: round(seconds.now * 1000), THERE: 0})
    assert answers.seconds() == 60.0
    answers.observe({HERE: 60_000, THERE: 60_000})
    assert answers.seconds() == 0.0


def test_silence_grows_without_observations() -> None:
    seconds = Seconds()
    answers = Answers(clock_seconds=seconds)
    seconds.now = 7.0
    assert answers.seconds() == 7.0
    answers.observe({HERE: 1})
    seconds.now = 20.0
    assert answers.seconds() == 13.0


def test_a_partition_that_is_not_fetched_is_not_silent() -> None:
    """It is paused, was revoked, or has records that the next poll returns."""
    seconds = Seconds()
    answers = Answers(clock_seconds=seconds)
    answers.observe({HERE: 1})
    seconds.now = 3600.0
    answers.observe({})
    assert answers.seconds() == 0.0
    answers.observe({HERE: 1})
    assert answers.seconds() == 0.0


def test_a_new_partition_is_silent_from_its_assignment_until_its_first_answer() -> None:
    seconds = Seconds()
    answers = Answers(clock_seconds=seconds)
    for seconds.now in (100.0, 130.0):
        answers.observe({HERE: None})
    assert answers.seconds() == 30.0
