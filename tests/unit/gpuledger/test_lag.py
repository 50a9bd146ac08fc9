"""How far behind a consumer is: lag grows during an outage and is zero if nothing waits."""

import pytest

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.lag import Lag
from tests.unit.sinks.builders import SECOND_NS, START_NS, ManualClock

AT, OTHER = TopicPartition("events", 0), TopicPartition("events", 1)
START_MS = START_NS // 1_000_000


def record(offset: int, *, age_seconds: float, at: TopicPartition = AT) -> Record:
    return Record(*at, offset, START_MS - round(age_seconds * 1000), None, b"")


def test_waiting_records_age_with_the_clock() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.polled({AT: [record(0, age_seconds=2), record(1, age_seconds=1)]})
    assert lag.seconds() == 2
    clock.now_ns += 300 * SECOND_NS
    assert lag.seconds() == 302


def test_without_work_there_is_no_lag_however_long_ago_the_last_event_was() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    assert lag.seconds() == 0
    lag.polled({AT: [record(0, age_seconds=1)]})
    lag.done(AT, 1, time_ms=START_MS - 1000)
    lag.polled({}, at_end=[AT])
    clock.now_ns += 3600 * SECOND_NS
    assert lag.seconds() == 0
    assert lag.newest_seconds() == START_NS / 1e9 - 1


def test_between_polls_of_a_backlog_the_lag_is_that_of_the_last_processed_record() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=500)]})
    lag.done(AT, 1, time_ms=START_MS - 500_000)
    assert lag.seconds() == 500


def test_the_lag_of_a_backlog_is_that_of_the_partition_furthest_behind() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=500)], OTHER: [record(0, age_seconds=1, at=OTHER)]})
    lag.done(AT, 1, time_ms=START_MS - 500_000)
    lag.done(OTHER, 1, time_ms=START_MS - 1000)
    lag.polled({OTHER: [record(1, age_seconds=1, at=OTHER)]}, at_end=[OTHER])
    assert lag.seconds() == 500
    lag.polled({})
    assert lag.seconds() == 500
    lag.drop([AT.partition])
    assert lag.seconds() == 1


def test_a_partition_at_its_end_is_not_behind_while_others_bring_records() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=500)]})
    lag.done(AT, 1, time_ms=START_MS - 500_000)
    lag.polled({OTHER: [record(0, age_seconds=2, at=OTHER)]}, at_end=[AT])
    assert lag.seconds() == 2


def test_a_record_after_a_long_pause_is_not_older_than_the_last_poll_without_it() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.polled({AT: [record(0, age_seconds=1)]}, at_end=[AT])
    lag.done(AT, 1, time_ms=START_MS - 1000)
    clock.advance(3600)
    lag.polled({}, at_end=[AT])
    clock.advance(1)
    lag.polled({})
    assert lag.seconds() == 1


def test_old_records_that_arrive_late_show_their_age_between_polls_too() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=1)]}, at_end=[AT])
    lag.done(AT, 1, time_ms=START_MS - 1000)
    lag.polled({}, at_end=[AT])
    lag.polled({AT: [record(1, age_seconds=500)]})
    assert lag.seconds() == 500
    lag.done(AT, 2, time_ms=START_MS - 500_000)
    assert lag.seconds() == 500


def test_a_backlog_keeps_its_lag_while_its_records_wait_to_be_polled_again() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=500)]})
    lag.done(AT, 1, time_ms=START_MS - 500_000)
    lag.polled({AT: [record(1, age_seconds=400)]})
    lag.forget([AT])
    assert lag.seconds() == 500


def test_processing_one_partition_leaves_the_others_waiting() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=9)], OTHER: [record(5, age_seconds=3, at=OTHER)]})
    lag.done(AT, 1)
    assert lag.seconds() == 3
    lag.keep([AT])
    lag.polled({})
    assert lag.seconds() == 0


def test_records_that_are_read_again_are_not_waited_for_twice() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(7, age_seconds=9)]})
    lag.polled({AT: [record(3, age_seconds=5)]})
    lag.done(AT, 4)
    lag.polled({})
    assert lag.seconds() == 0


def test_a_clock_behind_the_events_gives_no_negative_lag() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(0, age_seconds=-30)]})
    assert lag.seconds() == 0


def test_records_that_the_bus_withholds_count_as_lag_although_none_was_polled() -> None:
    """If an open transaction withholds records, there is still work to do."""
    lag = Lag(clock=ManualClock())
    lag.follow(lambda: 40.0)
    lag.polled({})
    assert lag.seconds() == 40.0
    lag.polled({AT: [record(0, age_seconds=90)]})
    assert lag.seconds() == 90.0


def test_records_that_arrive_without_polls_count_as_lag_from_the_time_they_were_seen() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.polled({})
    lag.ends({AT: 7, OTHER: 3})
    clock.advance(100)
    assert lag.seconds() == 0
    lag.ends({AT: 8, OTHER: 3})
    clock.advance(100)
    lag.ends({AT: 9, OTHER: 4})
    clock.advance(10)
    assert lag.seconds() == 110
    lag.keep([OTHER])
    assert lag.seconds() == 10
    lag.polled({})
    assert lag.seconds() == 0


def test_records_that_will_be_polled_again_are_not_waited_for_meanwhile() -> None:
    lag = Lag(clock=ManualClock())
    lag.polled({AT: [record(7, age_seconds=9)], OTHER: [record(5, age_seconds=3, at=OTHER)]})
    lag.forget([AT])
    assert lag.seconds() == 3


def test_while_the_bus_does_not_answer_the_lag_is_the_time_since_its_last_answer() -> None:
    """Polls are empty in an outage, too; they do not mean that nothing waits."""
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.answered()
    shown = []
    for _ in range(9):
        lag.polled({})
        clock.advance(60)
        shown.append(lag.seconds())
    assert shown == [60 * minute for minute in range(1, 10)]
    lag.answered()
    assert lag.seconds() == 0


@pytest.mark.parametrize("set_by_seconds", [-3600, 3600])
def test_setting_the_clock_is_not_taken_for_silence_and_does_not_hide_it(
    set_by_seconds: int,
) -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.answered()
    clock.set_by_ns = set_by_seconds * SECOND_NS
    assert lag.seconds() == 0
    clock.advance(60)
    assert lag.seconds() == 60


def test_a_bus_that_answers_between_polls_is_not_silent() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    for _ in range(100):
        lag.answered()
        lag.polled({})
        clock.advance(30)
        assert lag.seconds() == 0


def test_a_record_that_is_older_than_the_silence_decides_the_lag() -> None:
    clock = ManualClock()
    lag = Lag(clock=clock)
    lag.answered()
    lag.polled({AT: [record(0, age_seconds=500)]})
    clock.advance(100)
    assert lag.seconds() == 600
