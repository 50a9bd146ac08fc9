"""The tasks of a pipeline: watched, and ended without a word left for asyncio to complain of."""

import asyncio
import gc

import pytest

from cli.demo.stages import Stages

FOR_EVER_SECONDS = 3600.0


async def work() -> None:
    await asyncio.sleep(FOR_EVER_SECONDS)


async def fail() -> None:
    raise ValueError("a stage failed")


async def test_stages_that_failed_are_ended_and_no_failure_is_left_for_asyncio_to_log() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(context["message"])
    )
    stages = Stages()
    stages.start_agent(work())
    stages.start(fail())
    await asyncio.sleep(0)

    await stages.end_agents()
    await stages.end()

    assert asyncio.all_tasks() == {asyncio.current_task()}
    del stages
    gc.collect()
    assert told == []


async def test_a_stage_that_fails_is_raised_to_whoever_waits() -> None:
    stages = Stages()
    stages.start(fail())
    with pytest.raises(ValueError, match="a stage failed"):
        await stages.wait(asyncio.Event())


async def test_waiting_that_is_cancelled_leaves_no_task_behind() -> None:
    stages = Stages()
    waiting = asyncio.create_task(stages.wait(asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert asyncio.all_tasks() == {asyncio.current_task()}
