"""Producer failures that no task awaits, and stopping a producer while brokers are unavailable."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.producer.transaction_manager import TransactionState

from gpuledger.bus.aiokafka_patches.ending import end, ends_well


async def send_batch(
    client: AIOKafkaProducer, batch: BatchBuilder, topic: str, partition: int
) -> asyncio.Future[Any]:
    """Queue a batch; return a cancellable future that is done when the batch is acknowledged.

    aiokafka returns a shield around the batch's own future. If the shield is cancelled and the
    batch fails later, for example because its topic was deleted, nothing retrieves that failure.
    Remove once `send_batch` returns a future that may be cancelled.
    """
    sent: asyncio.Future[Any] = await client.send_batch(batch, topic, partition=partition)
    queued = client._message_accumulator._batches[topic, partition][-1]
    queued.future.add_done_callback(_retrieve_failure)
    return sent


async def begin_transaction(client: AIOKafkaProducer) -> None:
    """Begin a transaction, and retrieve its exception if it fails later.

    For example, a revoked permission makes a transaction fail. The client stores the exception in a
    future, and replaces that future when it aborts. Remove once the client retrieves the exception.
    """
    await client.begin_transaction()
    client._txn_manager._transaction_waiter.add_done_callback(_retrieve_failure)


@contextmanager
def naming_what_failed(client: AIOKafkaProducer) -> Iterator[None]:
    """Raise the error that ended the open transaction, instead of aiokafka's `AssertionError`.

    A rejected batch ends the client's transaction, but when the next batch is sent, the client
    asserts that a transaction is open. Remove once the client raises the original error.
    """
    try:
        yield
    except AssertionError as error:
        ended = client._txn_manager._transaction_waiter
        if ended is not None and ended.done() and not ended.cancelled() and ended.exception():
            raise ended.exception() from error
        raise


def _retrieve_failure(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, because asyncio logs exceptions that are never retrieved."""
    if future.done() and not future.cancelled():
        future.exception()


async def abandon_transaction(client: AIOKafkaProducer) -> None:
    """Abort an open transaction; if that is no longer possible, leave it to the brokers.

    Aborting after the client was fenced, or while it commits, violates an assertion in aiokafka.
    Remove once `abort_transaction` raises the transaction's error instead.
    """
    manager = client._txn_manager
    if manager.state in (TransactionState.IN_TRANSACTION, TransactionState.ABORTABLE_ERROR):
        await ends_well(client.abort_transaction())
    ended = manager._transaction_waiter
    if ended is not None:
        _retrieve_failure(ended)  # the task that awaited it may have been cancelled


async def stop_producer(client: AIOKafkaProducer, *, flush_seconds: float) -> None:
    """Flush for at most `flush_seconds`, give up the remaining batches, and close.

    aiokafka's own `stop` may wait without limit. Remove once `stop` takes a deadline and gives up
    unsent batches (aio-libs/aiokafka#1101).
    """
    sender = client._sender.sender_task
    if flush_seconds and sender is not None and not sender.done():
        await ends_well(client.flush(), seconds=flush_seconds)
    # Waiting batches must not be sent any more, because their publishers already received an error.
    # The sender is stopped before its batches are failed, or it would fail on them.
    await end(sender)
    accumulator = client._message_accumulator
    waiting = [batch for batches in accumulator._batches.values() for batch in batches]
    waiting += accumulator._pending_batches
    # When a batch ends, its callback removes it from the pending batches. Batches that were
    # re-enqueued for a retry are not pending, so they are added: asyncio would log the failed
    # removal as an error.
    accumulator._pending_batches.update(batch for batch in waiting if batch.retry_count)
    accumulator.fail_all(KafkaError("given up"))
    for batch in waiting:
        for future in (batch.future, batch._drain_waiter):
            _retrieve_failure(future)
    if not await ends_well(client.stop()):
        await ends_well(client.client.close())
