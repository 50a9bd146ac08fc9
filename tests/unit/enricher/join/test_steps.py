"""What a poll brought is worked through in bounded steps, between which others have their turn."""

import asyncio
from itertools import chain

import pytest

from enricher.join.polling import STEP_BYTES, step_through, steps_of
from gpuledger.bus.protocol import Record
from tests.default_topics import SAMPLES

HALF = STEP_BYTES // 2


def records(*sizes: int | None) -> list[Record]:
    return [
        Record(SAMPLES.name, 0, offset, 0, b"default/node-a", None if size is None else b"x" * size)
        for offset, size in enumerate(sizes)
    ]


STEPS = [
    ("nothing", [], []),
    ("a poll of small ones", [2_000] * 100, [100]),
    ("tombstones", [None] * 500, [500]),
    ("as much as a step may have", [HALF, HALF], [2]),
    ("a byte more", [HALF, HALF, 1], [2, 1]),
    ("one that is larger than a step", [8_000_000], [1]),
    ("large ones, each by itself", [1, 900_000, 900_000, 1, 1], [1, 1, 1, 2]),
]


@pytest.mark.parametrize(("case", "sizes", "lengths"), STEPS)
def test_a_step_is_one_record_or_a_bounded_number_of_bytes(
    case: str, sizes: list[int], lengths: list[int]
) -> None:
    given = records(*sizes)
    steps = list(steps_of(given))
    assert [len(step) for step in steps] == lengths, case
    assert list(chain.from_iterable(steps)) == given, case


async def test_between_two_steps_everything_else_has_a_turn() -> None:
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
