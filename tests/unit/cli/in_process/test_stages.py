"""The tasks of a run: watched, reported if they fail, and ended without errors left for asyncio."""

import asyncio
import gc

import pytest

from gpuledger.errors import BusError, BusUnavailableError
from gpuledger_cli.in_process.stages import Stages


async def fails(error: Exception, *, once: asyncio.Event) -> None:
    """Fail when told to."""
    await once.wait()
    raise error


async def lasts() -> None:
    """Run until cancelled."""
    await asyncio.Event().wait()


async def test_a_component_that_fails_ends_the_wait_with_its_error() -> None:
    stages, now = Stages(), asyncio.Event()
    now.set()
    stages.start("store", fails(RuntimeError("no room"), once=now))
    with pytest.raises(RuntimeError, match="no room"):
        await stages.wait(asyncio.Event())


async def test_a_component_that_fails_while_the_run_stops_is_reported() -> None:
    stages, stop, draining = Stages(), asyncio.Event(), asyncio.Event()
    stages.start("store", fails(RuntimeError("no room"), once=draining))
    stages.start("join", lasts())
    stages.start_agent("the agent", lasts())
    stop.set()
    await stages.wait(stop)
    draining.set()
    await asyncio.sleep(0)
    await stages.end()
    assert stages.failures() == ["store failed: RuntimeError('no room')"]


async def test_an_outage_of_the_brokers_is_not_repeated_for_each_component() -> None:
    """The join's errors arrive as a group."""
    now = asyncio.Event()
    now.set()
    group = ExceptionGroup("both", [BusUnavailableError("brokers away"), ValueError("a defect")])
    stages = Stages()
    stages.start("join", fails(group, once=now))
    await asyncio.sleep(0)
    await stages.end()
    assert stages.failures() == [
        "join failed: brokers away",
        "join failed: ValueError('a defect')",
    ]
    assert stages.failures(known=BusError) == ["join failed: ValueError('a defect')"]


async def test_a_component_that_does_not_end_is_reported() -> None:
    stages = Stages()
    stages.start("store", lasts())
    assert stages.failures() == ["store did not end within 8 s"]
    assert stages.failures(known=BusError) == []
    await stages.end()
    assert stages.failures() == []


async def test_failed_components_are_ended_and_leave_no_error_for_asyncio_to_log() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["message"])
    )
    stages, now = Stages(), asyncio.Event()
    now.set()
    stages.start_agent("the agent", lasts())
    stages.start("store", fails(ValueError("a stage failed"), once=now))
    await asyncio.sleep(0)

    await stages.end_agents()
    await stages.end()

    assert asyncio.all_tasks() == {asyncio.current_task()}
    del stages
    gc.collect()
    assert reported == []


async def test_a_cancelled_wait_leaves_no_task_behind() -> None:
    stages = Stages()
    waiting = asyncio.create_task(stages.wait(asyncio.Event()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert asyncio.all_tasks() == {asyncio.current_task()}
