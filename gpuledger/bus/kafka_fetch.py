"""Waits for fetched records, or for a rebalance, whichever comes first."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiokafka
from aiokafka import AIOKafkaConsumer

from gpuledger.bus.kafka_internals import raise_group_errors, serve_last
from gpuledger.bus.kafka_rebalances import Rebalances
from gpuledger.bus.protocol import Polled, Record, TopicPartition

GRACE_SECONDS: Final = 0.5
"""`getmany` ends by itself at its deadline, except while the group is being rebalanced."""


async def fetch(
    client: AIOKafkaConsumer, rebalances: Rebalances, *, deadline: float, max_records: int
) -> Polled:
    """Return what is there, or wait for it; nothing at the deadline or where a rebalance is due.

    Partitions take turns: whoever was served goes last, so that a backlog in one, whatever its
    records are, keeps no other waiting for longer than one poll.
    """
    places = [named(place) for place in rebalances.held]
    raise_group_errors(client)
    if places and not rebalances.changed.is_set():
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                found = await client.getmany(*places, timeout_ms=0, max_records=max_records)
        except TimeoutError:
            return {}
        if found:
            serve_last(client, found)
            return _records(found)
    left_seconds = deadline - asyncio.get_running_loop().time()
    if left_seconds <= 0 or rebalances.changed.is_set():
        return {}
    changed = asyncio.create_task(rebalances.changed.wait())
    if not places:
        return await _first_of(None, changed, client=client, seconds=left_seconds)
    getting = client.getmany(*places, timeout_ms=int(left_seconds * 1000), max_records=max_records)
    fetching = asyncio.create_task(getting)
    seconds = left_seconds + GRACE_SECONDS
    return await _first_of(fetching, changed, client=client, seconds=seconds)


async def _first_of(
    fetching: asyncio.Task[Any] | None,
    changed: asyncio.Task[Any],
    *,
    client: AIOKafkaConsumer,
    seconds: float,
) -> Polled:
    """Return what was fetched; nothing where the assignment changed or the time is over before."""
    waiting = [changed] if fetching is None else [fetching, changed]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        if fetching is not None:
            _put_back(client, fetching)
        raise
    finally:
        for task in waiting:
            task.cancel()
    if fetching is None or not fetching.done():
        return {}
    found = fetching.result()
    serve_last(client, found)
    return _records(found)


def _put_back(client: AIOKafkaConsumer, fetching: asyncio.Task[Any]) -> None:
    """Let records that nobody will see be fetched again: the position is already behind them."""
    if fetching.done() and not fetching.cancelled() and fetching.exception() is None:
        for place, records in fetching.result().items():
            client.seek(place, records[0].first_offset)


def named(place: TopicPartition) -> Any:  # noqa: ANN401  # aiokafka is untyped
    """Return aiokafka's own partition: equal to ours, but it asks for its type."""
    return aiokafka.TopicPartition(*place)


def _records(found: Mapping[Any, Sequence[Record]]) -> Polled:
    return {TopicPartition(*place): records for place, records in found.items()}
