"""Stopping a run while it starts."""

import asyncio

import pytest

from gpuledger_cli.demo.interruption import unless_stopped


async def gives(value: int) -> int:
    """Return the value immediately."""
    return value


async def fails() -> int:
    """Fail immediately."""
    raise ValueError("no such machine")


async def test_without_a_stop_the_work_completes() -> None:
    assert await unless_stopped(gives(7), asyncio.Event()) == 7
    with pytest.raises(ValueError, match="no such machine"):
        await unless_stopped(fails(), asyncio.Event())


async def test_a_stop_ends_work_that_waits() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> int:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 7

    assert await unless_stopped(waits(), stop) is None
    assert ended.is_set()
