"""The few things that only aiokafka's insides can tell or do, held to the pinned minor version.

Each says why it is needed. Nothing else in the project looks inside aiokafka.
"""

import asyncio
import contextlib
import time
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError

STOP_SECONDS: Final = 3.0

# ruff: noqa: SLF001  # this module is for what has no public name


def mark_polled(client: AIOKafkaConsumer) -> None:
    """Tell the client that it is polled, which a cancelled or failed `getmany` leaves uncounted.

    `fetch_context` has no `finally`, so after one of those the client would never look idle again;
    and a member without partitions, which fetches nothing, would look idle and leave the group.
    """
    client._subscription._fetch_count = 0
    client._subscription._last_fetch_ended = time.monotonic()


def has_coordinator(client: AIOKafkaConsumer) -> bool:
    """Say whether the group has a coordinator; `getmany` only returns nothing without one."""
    return client._coordinator.coordinator_id is not None


def inner_client(client: AIOKafkaConsumer) -> AIOKafkaClient:
    """Give the client below, which a producer has in public and a consumer has not."""
    return client._client


def raise_group_errors(client: AIOKafkaConsumer) -> None:
    """Raise what went wrong in the group, as `getmany` does; for members that fetch nothing."""
    client._coordinator.check_errors()


def is_dead(client: AIOKafkaConsumer) -> bool:
    """Say whether a background task of the consumer ended, after which it never reads again."""
    return bool(client._coordinator._coordination_task.done() or client._fetcher._fetch_task.done())


async def stop_consumer(client: AIOKafkaConsumer) -> None:
    """Leave the group and close; go on without the brokers where they do not answer in time."""
    with contextlib.suppress(KafkaError, TimeoutError, OSError):
        await asyncio.wait_for(client.stop(), STOP_SECONDS)
        return
    coordinator, fetcher = client._coordinator, client._fetcher
    tasks = [
        getattr(coordinator, "_coordination_task", None),
        getattr(coordinator, "_heartbeat_task", None),
        getattr(coordinator, "_commit_refresh_task", None),
        getattr(fetcher, "_fetch_task", None),
    ]
    await _cancel([task for task in tasks if task is not None])
    await client._client.close()


async def stop_producer(client: AIOKafkaProducer, *, flush_seconds: float) -> None:
    """Flush for so long, give up what is left, and close; `stop` alone may wait for ever."""
    sender = client._sender.sender_task
    if flush_seconds:
        with contextlib.suppress(KafkaError, TimeoutError):
            await asyncio.wait_for(client.flush(), flush_seconds)
    elif sender is not None:
        # Nothing that waits may be sent any more: its publisher was told that it was not.
        sender.cancel()
    _give_up_batches(client)
    with contextlib.suppress(KafkaError, TimeoutError, OSError):
        await asyncio.wait_for(client.stop(), STOP_SECONDS)
        return
    if sender is not None:
        await _cancel([sender])
    await client.client.close()


def _give_up_batches(client: AIOKafkaProducer) -> None:
    accumulator = client._message_accumulator
    waiting = [batch for batches in accumulator._batches.values() for batch in batches]
    waiting += accumulator._pending_batches
    accumulator.fail_all(KafkaError("given up"))
    for batch in waiting:
        # Whoever waited may be gone, and asyncio logs an exception that nobody looked at.
        batch.future.exception()


async def _cancel(tasks: "list[asyncio.Task[object]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
