"""A poll ends in time, and its records are processed in steps between which other tasks run."""

import asyncio
import math
from itertools import chain
from typing import cast

import pytest

from gpuledger.bus.protocol import Consumer, Polled, Record, TopicPartition
from gpuledger.errors import BusError, BusUnavailableError
from gpuledger.runtime import Check, RetryingCaller
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.polling import STEP_BYTES, poll, step_through, steps_of
from tests.default_topics import SAMPLES

HALF = STEP_BYTES // 2


def records(*sizes: int | None) -> list[Record]:
    return [
        Record(SAMPLES.name, 0, offset, 0, b"default/node-a", None if size is None else b"x" * size)
        for offset, size in enumerate(sizes)
    ]


STEPS = [
    ("nothing", [], []),
    ("small records", [2_000] * 100, [100]),
    ("tombstones", [None] * 500, [500]),
    ("exactly the limit of a step", [HALF, HALF], [2]),
    ("one byte more", [HALF, HALF, 1], [2, 1]),
    ("a record larger than a step", [8_000_000], [1]),
    ("large records, each in its own step", [1, 900_000, 900_000, 1, 1], [1, 1, 1, 2]),
]


@pytest.mark.parametrize(("case", "sizes", "lengths"), STEPS)
def test_a_step_is_one_record_or_a_bounded_number_of_bytes(
    case: str, sizes: list[int], lengths: list[int]
) -> None:
    given = records(*sizes)
    steps = list(steps_of(given))
    assert [len(step) for step in steps] == lengths, case
    assert list(chain.from_iterable(steps)) == given, case


async def test_between_two_steps_every_other_task_has_a_turn() -> None:
    turns: list[str] = []

    async def other() -> None:
        while True:
            turns.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async for (record,) in step_through(records(900_000, 900_000, 900_000)):
        turns += [f"step {record.offset}"]
    task.cancel()
    assert turns == ["step 0", "other", "step 1", "other", "step 2", "other"]


class Unreachable:
    """A consumer that fails at first, and records the timeouts of its polls."""

    def __init__(self, *, failures: int) -> None:
        self.waits: list[float] = []
        self._failures = failures

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        self.waits.append(timeout_seconds)
        if len(self.waits) <= self._failures:
            raise BusUnavailableError("no broker")
        return {TopicPartition(SAMPLES.name, 0): records(1)}


class Sleeps:
    """A clock that does not wait, and remembers how long it should have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def polled(consumer: Unreachable, clock: Sleeps, *, max_seconds: float) -> Polled:
    retry = RetryingCaller(on=BusError, check=Check(), clock=clock)
    tuning = JoinTuning(poll_timeout_seconds=0.5)
    return await poll(
        cast("Consumer", consumer), retry=retry, tuning=tuning, max_seconds=max_seconds
    )


async def test_a_poll_ends_in_time_without_records_if_the_bus_does_not_answer() -> None:
    consumer, clock = Unreachable(failures=5), Sleeps()
    assert await polled(consumer, clock, max_seconds=0.1) == {}
    assert 0 < sum(clock.slept) <= 0.1


async def test_a_poll_without_max_seconds_is_repeated_until_the_bus_answers() -> None:
    consumer, clock = Unreachable(failures=5), Sleeps()
    assert await polled(consumer, clock, max_seconds=math.inf)
    assert len(clock.slept) == 5


@pytest.mark.parametrize(("max_seconds", "longest"), [(0.1, 0.1), (9.0, 0.5), (math.inf, 0.5)])
async def test_an_attempt_waits_no_longer_than_max_seconds_and_the_settings_allow(
    max_seconds: float, longest: float
) -> None:
    consumer = Unreachable(failures=0)
    assert await polled(consumer, Sleeps(), max_seconds=max_seconds)
    (waited,) = consumer.waits
    assert 0 < waited <= longest
