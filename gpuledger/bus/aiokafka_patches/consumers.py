"""What a consumer of aiokafka does not tell in public, and its end while brokers are away."""

import time
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import IllegalStateError

from gpuledger.bus.aiokafka_patches.ending import end, ends_well


def mark_polled(client: AIOKafkaConsumer) -> None:
    """Tell the client that it is polled, which a cancelled or failed `getmany` leaves uncounted.

    `fetch_context` has no `finally`, so after one of those the client would never look idle again;
    and a member without partitions, which fetches nothing, would look idle and leave the group.
    Can go once `fetch_context` counts in a `finally`, and a poll of no partition counts as one.
    """
    client._subscription._fetch_count = 0
    client._subscription._last_fetch_ended = time.monotonic()


def has_coordinator(client: AIOKafkaConsumer) -> bool:
    """Return whether the group has a coordinator; `getmany` only returns nothing without one.

    Can go once `getmany` raises while the brokers are away.
    """
    return client._coordinator.coordinator_id is not None


def inner_client(client: AIOKafkaConsumer) -> AIOKafkaClient:
    """Return the client below, which a producer has in public and a consumer has not.

    Can go once `AIOKafkaConsumer` has a public `client`.
    """
    return client._client


def raise_group_errors(client: AIOKafkaConsumer) -> None:
    """Raise what went wrong in the group, as `getmany` does; for members that fetch nothing.

    Can go once `getmany` takes no partitions and raises all the same.
    """
    client._coordinator.check_errors()


def reset_to_beginning(client: AIOKafkaConsumer, partition: Any) -> None:  # noqa: ANN401  # untyped
    """Go to the first record without waiting for the answer, as `seek_to_beginning` does.

    Raises IllegalStateError where the partition is not assigned. Can go once `seek_to_beginning`
    does not wait for brokers.
    """
    if not client._subscription.is_assigned(partition):
        raise IllegalStateError(f"{partition} is not assigned")
    client._fetcher.request_offset_reset([partition], OffsetResetStrategy.EARLIEST)


def seek_or_leave(client: AIOKafkaConsumer, partition: Any, offset: int | None) -> None:  # noqa: ANN401  # untyped
    """Seek to an offset, or the beginning; leave a partition that a rebalance took meanwhile."""
    if partition not in client.assignment():
        return
    if offset is None:
        reset_to_beginning(client, partition)
    else:
        client.seek(partition, offset)


def position_or_none(client: AIOKafkaConsumer, partition: Any) -> int | None:  # noqa: ANN401  # untyped
    """Return the position without waiting for one; `None` where there is none now.

    Can go once `position` takes a deadline.
    """
    if not client._subscription.is_assigned(partition):
        return None
    state = client._subscription.subscription.assignment.state_value(partition)
    return state.position if state.has_valid_position else None


def observed_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, int, int]]:
    """Return of each partition the position, and the last stable and the end offset last heard of.

    Of those alone of which a broker has told them, and is asked still. `last_stable_offset` and
    `highwater` say the same in public, and raise in the moment of a rebalance. Can go once they
    return `None` then.
    """
    assignment = client._subscription.subscription and client._subscription.subscription.assignment
    found = {}
    for partition in partitions if assignment is not None else ():
        if partition not in assignment.tps:
            continue
        state = assignment.state_value(partition)
        if state.paused:
            continue  # nothing is asked of the broker: what it said is of then
        if state.has_valid_position and state.lso is not None and state.highwater is not None:
            found[partition] = state.position, state.lso, state.highwater
    return found


def serve_last(client: AIOKafkaConsumer, partitions: Iterable[Any]) -> None:
    """Have what was fetched of these partitions handed out after that of all others.

    `getmany` empties the answer for one partition before it comes to the next one's: with records
    that are small, and many to a byte, that took minutes. Can go once `getmany` serves partitions
    in turn.
    """
    fetched = client._fetcher._records
    for partition in partitions:
        if partition in fetched:
            fetched.move_to_end(partition)


def is_dead(client: AIOKafkaConsumer) -> bool:
    """Return whether a background task of the consumer ended, after which it never reads again.

    Can go once a consumer whose task ended raises: aio-libs/aiokafka#983 was closed for one cause.
    """
    return bool(client._coordinator._coordination_task.done() or client._fetcher._fetch_task.done())


async def stop_consumer(client: AIOKafkaConsumer) -> None:
    """Leave the group and close; go on without the brokers where they do not answer in time.

    `stop` waits for a rebalance to end, and a task that it cancels takes it along. Can go once
    `stop` takes a deadline: aio-libs/aiokafka#659 was closed for one of its waits.
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
