"""The few things that only aiokafka's insides can tell or do, held to the pinned minor version.

Each says why it is needed. Beside `kafka_unpacking`, `kafka_fetch` and `kafka_requests`, nothing
else in the project looks inside.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import zstd_encode
from aiokafka.conn import AIOKafkaConnection, SaslPlainAuthenticator
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import (
    IllegalStateError,
    KafkaError,
    NoError,
    SaslAuthenticationFailed,
    for_code,
)
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.producer.transaction_manager import TransactionState
from aiokafka.protocol.admin import SaslAuthenticateRequest, SaslHandShakeRequest
from aiokafka.record import default_records

from gpuledger.runtime.tasks import end_tasks

STOP_SECONDS: Final = 1.5
CANCEL_SECONDS: Final = 0.5
ZSTD_LEVEL: Final = 1
# Powers of two, found by trying on events: how far back is looked, and in how many places.
_WINDOW_LOG: Final = 18
_HASH_LOG: Final = 12

# ruff: noqa: SLF001  # this module is for what has no public name


def mark_polled(client: AIOKafkaConsumer) -> None:
    """Tell the client that it is polled, which a cancelled or failed `getmany` leaves uncounted.

    `fetch_context` has no `finally`, so after one of those the client would never look idle again;
    and a member without partitions, which fetches nothing, would look idle and leave the group.
    """
    client._subscription._fetch_count = 0
    client._subscription._last_fetch_ended = time.monotonic()


def has_coordinator(client: AIOKafkaConsumer) -> bool:
    """Return whether the group has a coordinator; `getmany` only returns nothing without one."""
    return client._coordinator.coordinator_id is not None


def inner_client(client: AIOKafkaConsumer) -> AIOKafkaClient:
    """Return the client below, which a producer has in public and a consumer has not."""
    return client._client


def raise_group_errors(client: AIOKafkaConsumer) -> None:
    """Raise what went wrong in the group, as `getmany` does; for members that fetch nothing."""
    client._coordinator.check_errors()


def reset_to_beginning(client: AIOKafkaConsumer, partition: Any) -> None:  # noqa: ANN401  # untyped
    """Go to the first record without waiting for the answer, as `seek_to_beginning` does.

    Raises IllegalStateError where the partition is not assigned.
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
    """Return the position without waiting for one; `None` where there is none now."""
    if not client._subscription.is_assigned(partition):
        return None
    state = client._subscription.subscription.assignment.state_value(partition)
    return state.position if state.has_valid_position else None


def observed_offsets(
    client: AIOKafkaConsumer, partitions: Iterable[Any]
) -> dict[Any, tuple[int, int, int]]:
    """Return of each partition the position, and the last stable and the end offset last heard of.

    Of those alone of which a broker has told them, and is asked still. `last_stable_offset` and
    `highwater` say the same in public, and raise in the moment of a rebalance.
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
    that are small, and many to a byte, that took minutes.
    """
    fetched = client._fetcher._records
    for partition in partitions:
        if partition in fetched:
            fetched.move_to_end(partition)


def is_dead(client: AIOKafkaConsumer) -> bool:
    """Return whether a background task of the consumer ended, after which it never reads again."""
    return bool(client._coordinator._coordination_task.done() or client._fetcher._fetch_task.done())


async def stop_consumer(client: AIOKafkaConsumer) -> None:
    """Leave the group and close; go on without the brokers where they do not answer in time.

    `stop` waits for a rebalance to end, and a task that it cancels takes it along.
    """
    if await _ends_well(client.stop()):
        return
    coordinator, fetcher = client._coordinator, client._fetcher
    for owner, name in (
        (coordinator, "_coordination_task"),
        (coordinator, "_heartbeat_task"),
        (coordinator, "_commit_refresh_task"),
        (fetcher, "_fetch_task"),
    ):
        await _end(getattr(owner, name, None))
    await _ends_well(client._client.close())


def pack_at_least_cost() -> None:
    """Have every batch packed at zstd's level 1; aiokafka has no setting and always takes 3.

    On batches of ticks and events that halves the time, and makes them smaller besides.
    """
    pack = packer()
    for module in modules_of_records():
        vars(module)["zstd_encode"] = pack


@cache
def packer() -> Callable[[Any], bytes]:
    """Return the packer that costs least: one kept context, and a table that fits the cache.

    Beside aiokafka's way at the same level that is a quarter off a batch of events and five sixths
    off one of a single event, for 1 % more bytes.
    """
    try:
        from zstandard import ZstdCompressionParameters, ZstdCompressor  # noqa: PLC0415  # as below
    except ImportError:  # an agent packs one batch a second: not worth a library on each node
        return partial(zstd_encode, level=ZSTD_LEVEL)
    tuned = ZstdCompressionParameters.from_level(
        ZSTD_LEVEL, window_log=_WINDOW_LOG, hash_log=_HASH_LOG
    )
    kept = threading.local()  # a context is one thread's at a time

    def pack(records: Any) -> bytes:  # noqa: ANN401  # any buffer
        if not hasattr(kept, "context"):
            kept.context = ZstdCompressor(compression_params=tuned)
        packed: bytes = kept.context.compress(records)
        return packed

    return pack


def modules_of_records() -> set[ModuleType]:
    """Return where batches are packed and unpacked: the module in C keeps names of its own."""
    classes = (default_records.DefaultRecordBatchBuilder, default_records.DefaultRecordBatch)
    return {default_records, *(sys.modules[class_.__module__] for class_ in classes)}


async def send_batch(
    client: AIOKafkaProducer, batch: BatchBuilder, topic: str, partition: int
) -> asyncio.Future[Any]:
    """Queue a batch; return what is done when it is acknowledged, and may be cancelled.

    The client gives out a shield of the batch's own future. Where nobody waits behind the shield
    any more and the batch fails later, as when its topic is gone, nobody would look at that.
    """
    sent: asyncio.Future[Any] = await client.send_batch(batch, topic, partition=partition)
    queued = client._message_accumulator._batches[topic, partition][-1]
    queued.future.add_done_callback(_look_at_failure)
    return sent


async def begin_transaction(client: AIOKafkaProducer) -> None:
    """Begin one; where it fails by itself, as a right is taken, that is no unread failure.

    The client keeps its failure in a future, and takes another one when it aborts.
    """
    await client.begin_transaction()
    client._txn_manager._transaction_waiter.add_done_callback(_look_at_failure)


@contextmanager
def naming_what_failed(client: AIOKafkaProducer) -> Iterator[None]:
    """Raise what the open transaction has failed with, in the place of what that leads to.

    A client that was refused one batch takes no other: it asserts that there is a transaction.
    """
    try:
        yield
    except AssertionError as error:
        ended = client._txn_manager._transaction_waiter
        if ended is not None and ended.done() and not ended.cancelled() and ended.exception():
            raise ended.exception() from error
        raise


def _look_at_failure(future: asyncio.Future[Any]) -> None:
    """Retrieve what a future failed with, as asyncio logs what nobody retrieved."""
    if future.done() and not future.cancelled():
        future.exception()


async def abandon_transaction(client: AIOKafkaProducer) -> None:
    """Abort an open transaction; where that is not possible any more, leave it to the brokers.

    Aborting after the client was shut out, or while it commits, breaks a promise of its own.
    """
    manager = client._txn_manager
    if manager.state in (TransactionState.IN_TRANSACTION, TransactionState.ABORTABLE_ERROR):
        await _ends_well(client.abort_transaction())
    ended = manager._transaction_waiter
    if ended is not None:
        _look_at_failure(ended)  # whoever waited may be gone


async def stop_producer(client: AIOKafkaProducer, *, flush_seconds: float) -> None:
    """Flush for so long, give up what is left, and close; `stop` alone may wait for ever."""
    sender = client._sender.sender_task
    if flush_seconds and sender is not None and not sender.done():
        await _ends_well(client.flush(), seconds=flush_seconds)
    # Nothing that still waits may be sent any more: its publisher was told that it was not. The
    # sender ends before its batches do, or it would stumble over them.
    await _end(sender)
    accumulator = client._message_accumulator
    waiting = [batch for batches in accumulator._batches.values() for batch in batches]
    waiting += accumulator._pending_batches
    # A batch that waits for its next attempt takes itself out of the pending ones when it ends,
    # where it is not any more: asyncio would log that as an error.
    accumulator._pending_batches.update(batch for batch in waiting if batch.retry_count)
    accumulator.fail_all(KafkaError("given up"))
    for batch in waiting:
        for future in (batch.future, batch._drain_waiter):
            _look_at_failure(future)
    if not await _ends_well(client.stop()):
        await _ends_well(client.client.close())


async def _ends_well(work: Coroutine[Any, Any, object], *, seconds: float = STOP_SECONDS) -> bool:
    """Run something to its end, its failure or the deadline, and say whether it ended well."""
    task = asyncio.create_task(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        await _end(task)
        return False
    return not task.cancelled() and task.exception() is None


async def _end(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task until it ends: once lets it finish what is on its way, twice does not."""
    for _ in range(2):
        await end_tasks(task, seconds=CANCEL_SECONDS)


@cache
def encode_password_at_login() -> None:
    """Have the password of PLAIN encoded when a connection logs in, as that of SCRAM is.

    A password may say another one by then (`CurrentPassword`); PLAIN would join its first text.
    """

    def authenticator_plain(connection: Any) -> Any:  # noqa: ANN401  # aiokafka publishes no types
        return SaslPlainAuthenticator(
            loop=connection._loop,
            sasl_plain_username=connection._sasl_plain_username,
            sasl_plain_password=connection._sasl_plain_password.encode().decode(),
        )

    AIOKafkaConnection.authenticator_plain = authenticator_plain


@cache
def hand_logins_to_providers() -> None:
    """Have each login by OAUTHBEARER done by its token's provider, whose `log_in` it calls.

    aiokafka takes a refusal, which comes as an answer without an error, for a login; and it keeps
    to itself what a connection is, that is to log in again, and for how long it may stay.
    """

    def authenticator_oauth(connection: AIOKafkaConnection) -> TokenLogin:
        # A function: a class in its place would not be given the connection.
        return TokenLogin(connection)

    AIOKafkaConnection.authenticator_oauth = authenticator_oauth


class TokenLogin:
    """A connection's login: all of it at the first step."""

    def __init__(self, connection: AIOKafkaConnection) -> None:
        self._connection = connection

    async def step(self, _answer: bytes | None) -> None:
        """Log in; raises aiokafka's errors."""
        await self._connection._sasl_oauth_token_provider.log_in(self._connection)


async def log_in_by_token(connection: AIOKafkaConnection, token: str, *, is_again: bool) -> float:
    """Log a connection in; return for how many seconds, infinite where the broker does not say.

    A living connection logs in again (KIP-368) in the midst of its other requests: aiokafka sends
    at once what it is given, so that nothing comes between the two requests, as brokers want it.
    Raises aiokafka's errors, `SaslAuthenticationFailed` where the token is refused.
    """
    requests: list[Any] = [SaslHandShakeRequest("OAUTHBEARER")] if is_again else []
    requests.append(SaslAuthenticateRequest(f"n,,\x01auth=Bearer {token}\x01\x01".encode()))
    answers = await asyncio.gather(*map(connection.send, requests), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if for_code(answer.error_code) is not NoError:
            said = getattr(answer, "error_message", None) or ""
            raise for_code(answer.error_code)(f"OAUTHBEARER: {said}")
    last: Any = answers[-1]
    if last.sasl_auth_bytes:
        said = last.sasl_auth_bytes.decode(errors="replace")
        raise SaslAuthenticationFailed(f"OAUTHBEARER: {said}")
    lifetime_ms = getattr(last, "session_lifetime_ms", 0)
    return lifetime_ms / 1000 if lifetime_ms > 0 else math.inf
