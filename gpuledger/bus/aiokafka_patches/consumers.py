"""Private state of aiokafka's consumer, and stopping it while brokers are unavailable."""

import time
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import IllegalStateError

from gpuledger.bus.aiokafka_patches.ending import end, ends_well


def mark_polled(client: AIOKafkaConsumer) -> None:
    """Record that the client was polled just now and no longer fetches.

    This corrects two errors. After a cancelled or failed `getmany`, the client never counts as idle
    again, because `fetch_context` has no `finally`. A member without partitions fetches nothing, so
    it counts as idle and leaves the group, even if it is polled. Remove once `fetch_context` resets
    its counter in a `finally`, and a poll without partitions counts as a poll.
    """
    client._subscription._fetch_count = 0
    client._subscription._last_fetch_ended = time.monotonic()


def has_coordinator(client: AIOKafkaConsumer) -> bool:
    """Return whether the group has a coordinator; without one, `getmany` just returns nothing.

    Remove once `getmany` raises while the brokers are unavailable.
    """
    return client._coordinator.coordinator_id is not None


def inner_client(client: AIOKafkaConsumer) -> AIOKafkaClient:
    """Return the underlying client, which is public in a producer but not in a consumer.

    Remove once `AIOKafkaConsumer` has a public `client`.
    """
    return client._client


def raise_group_errors(client: AIOKafkaConsumer) -> None:
    """Raise the group's errors; needed if the consumer has no partitions and calls no `getmany`.

    Remove once `getmany` raises these errors if it is called without partitions.
    """
    client._coordinator.check_errors()


def reset_to_beginning(client: AIOKafkaConsumer, partition: Any) -> None:  # noqa: ANN401  # untyped
    """Seek to the first record like `seek_to_beginning`, but without waiting for the answer.

    Raises `IllegalStateError` if the partition is not assigned. Remove once `seek_to_beginning`
    does not wait for brokers.
    """
    if not client._subscription.is_assigned(partition):
        raise IllegalStateError(f"{partition} is not assigned")
    client._fetcher.request_offset_reset([partition], OffsetResetStrategy.EARLIEST)


def seek_or_leave(client: AIOKafkaConsumer, partition: Any, offset: int | None) -> None:  # noqa: ANN401  # untyped
    """Seek to an offset, or to the beginning for `None`; ignore an unassigned partition."""
    if partition not in client.assignment():
        return
    if offset is None:
        reset_to_beginning(client, partition)
    else:
        client.seek(partition, offset)


def position_or_none(client: AIOKafkaConsumer, partition: Any) -> int | None:  # noqa: ANN401  # untyped
    """Return the position without waiting for it; `None` if there is none now.

    Remove once `position` takes a deadline.
    """
    if not client._subscription.is_assigned(partition):
        return None
    state = client._subscription.subscription.assignment.state_value(partition)
    return state.position if state.has_valid_position else None


def observed_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, int, int]]:
    """Return each partition's position, and its last known stable and end offsets.

    Only includes partitions that are being fetched and whose offsets a broker has reported. The
    public methods `last_stable_offset` and `highwater` return the same offsets, but raise during a
    rebalance. Remove once these methods return `None` during a rebalance.
    """
    assignment = client._subscription.subscription and client._subscription.subscription.assignment
    found = {}
    for partition in partitions if assignment is not None else ():
        if partition not in assignment.tps:
            continue
        state = assignment.state_value(partition)
        if state.paused:
            continue  # not fetched, so the last reported offsets may be out of date
        if state.has_valid_position and state.lso is not None and state.highwater is not None:
            found[partition] = state.position, state.lso, state.highwater
    return found


def answer_times(client: AIOKafkaConsumer, partitions: Iterable[Any]) -> dict[Any, int | None]:
    """Return when a broker last answered a fetch of each partition, in ms since the epoch.

    Only includes partitions that are being fetched: not paused, and without fetched records that no
    poll has returned. The time is `None` before the first answer. Remove once `getmany` raises
    while a partition cannot be fetched.
    """
    assignment = client._subscription.subscription and client._subscription.subscription.assignment
    found = {}
    for partition in partitions if assignment is not None else ():
        if partition not in assignment.tps or partition in client._fetcher._records:
            continue
        state = assignment.state_value(partition)
        if not state.paused:
            found[partition] = state.timestamp
    return found


def serve_last(client: AIOKafkaConsumer, partitions: Iterable[Any]) -> None:
    """Make `getmany` return records of these partitions after the records of all others.

    `getmany` returns all fetched records of one partition before those of the next partition. If a
    partition has a backlog of small, highly compressed records, the other partitions wait for
    minutes. Remove once `getmany` serves partitions in turn.
    """
    fetched = client._fetcher._records
    for partition in partitions:
        if partition in fetched:
            fetched.move_to_end(partition)


def is_dead(client: AIOKafkaConsumer) -> bool:
    """Return whether the consumer can no longer read because a background task has ended.

    Remove once such a consumer raises an error: aio-libs/aiokafka#983 only fixed one cause.
    """
    return bool(client._coordinator._coordination_task.done() or client._fetcher._fetch_task.done())


async def stop_consumer(client: AIOKafkaConsumer) -> None:
    """Leave the group and close, even if the brokers do not answer in time.

    aiokafka's `stop` waits for a rebalance to end, and ends early if a task that it waits for is
    cancelled. Remove once `stop` takes a deadline: aio-libs/aiokafka#659 only fixed one of its
    waits.
    """
    if await ends_well(client.stop()):
        return
    coordinator, fetcher = client._coordinator, client._fetcher
    for owner, name in (
        (coordinator, "_coordination_task"),
        (coordinator, "_heartbeat_task"),
        (coordinator, "_commit_refresh_task"),
        (fetcher, "_fetch_task"),
    ):
        await end(getattr(owner, name, None))
    await ends_well(client._client.close())
