"""Tasks are ended, however they end, and asyncio has nothing left to complain about."""

import asyncio
import gc

import pytest

from gpuledger.runtime.tasks import end_tasks, run_tasks, wait_event

FOR_EVER_SECONDS = 3600.0


async def work() -> None:
    await asyncio.sleep(FOR_EVER_SECONDS)


async def fail() -> None:
    raise ValueError("it failed before")


async def fail_at_its_end() -> None:
    try:
        await work()
    finally:
        raise ValueError("it failed in its clean-up")


async def hang(let_go: asyncio.Event) -> None:
    while not let_go.is_set():
        try:
            await let_go.wait()
        except asyncio.CancelledError:
            continue


async def test_tasks_are_ended_and_no_failure_is_left_for_asyncio_to_log() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["message"])
    )
    tasks = [asyncio.create_task(each()) for each in (work, fail, fail_at_its_end)]
    await asyncio.sleep(0)

    await end_tasks(None, *tasks)

    assert all(task.done() for task in tasks)
    del tasks
    gc.collect()
    assert reported == []


async def test_a_task_that_does_not_end_is_abandoned_after_its_timeout() -> None:
    let_go = asyncio.Event()
    task = asyncio.create_task(hang(let_go))
    await asyncio.sleep(0)

    await end_tasks(task, seconds=0.01)

    assert not task.done()
    let_go.set()
    await task


async def test_a_task_may_end_on_its_own_during_its_grace_period() -> None:
    gate = asyncio.Event()
    gated, endless = asyncio.create_task(gate.wait()), asyncio.create_task(work())
    asyncio.get_running_loop().call_soon(gate.set)

    await end_tasks(gated, endless, grace_seconds=0.01)

    assert gated.result()
    assert endless.cancelled()


async def test_cancelling_the_wait_during_a_grace_period_cancels_the_task() -> None:
    endless = asyncio.create_task(work())
    ending = asyncio.create_task(end_tasks(endless, grace_seconds=FOR_EVER_SECONDS))
    await asyncio.sleep(0)

    ending.cancel()
    await asyncio.wait([ending, endless])

    assert (ending.cancelled(), endless.cancelled()) == (True, True)


@pytest.mark.parametrize("tasks", [(), (None,)])
async def test_without_tasks_there_is_nothing_to_wait_for(tasks: tuple[None, ...]) -> None:
    with pytest.raises(StopIteration):  # it has ended without yielding to the event loop
        end_tasks(*tasks, grace_seconds=FOR_EVER_SECONDS).send(None)


async def test_a_background_task_ends_with_its_context_and_keeps_its_exception() -> None:
    async with run_tasks(work(), fail()) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in tasks] == [False, True]

    assert tasks[0].cancelled()
    assert isinstance(tasks[1].exception(), ValueError)


async def test_a_background_task_that_does_not_end_is_abandoned_after_its_timeout() -> None:
    let_go = asyncio.Event()

    async with run_tasks(hang(let_go), end_seconds=0.01) as (task,):
        await asyncio.sleep(0)

    assert not task.done()
    let_go.set()
    await task


async def test_an_event_is_waited_for_until_it_is_set_or_the_timeout_expires() -> None:
    event = asyncio.Event()
    assert await wait_event(event, 0.0) is False
    assert await wait_event(event, 0.001) is False

    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_event(event, None) is True
    assert await wait_event(event, 0.0) is True
