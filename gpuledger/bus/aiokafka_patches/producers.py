"""Failures of a producer that nobody waits for, and its end while brokers are away."""

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
    """Queue a batch; return what is done when it is acknowledged, and may be cancelled.

    The client gives out a shield of the batch's own future. Where nobody waits behind the shield
    any more and the batch fails later, as when its topic is gone, nobody would look at that. Can go
    once `send_batch` returns a future that may be cancelled.
    """
    sent: asyncio.Future[Any] = await client.send_batch(batch, topic, partition=partition)
    queued = client._message_accumulator._batches[topic, partition][-1]
    queued.future.add_done_callback(_retrieve_failure)
    return sent


async def begin_transaction(client: AIOKafkaProducer) -> None:
    """Begin one; where it fails by itself, as a right is taken, that is no unread failure.

    The client keeps its failure in a future, and takes another one when it aborts. Can go once it
    looks at that failure itself.
    """
    await client.begin_transaction()
    client._txn_manager._transaction_waiter.add_done_callback(_retrieve_failure)


@contextmanager
def naming_what_failed(client: AIOKafkaProducer) -> Iterator[None]:
    """Raise what the open transaction has failed with, in the place of what that leads to.

    A client that was refused one batch takes no other: it asserts that there is a transaction. Can
    go once it raises the refusal.
    """
    try:
        yield
    except AssertionError as error:
        ended = client._txn_manager._transaction_waiter
        if ended is not None and ended.done() and not ended.cancelled() and ended.exception():
            raise ended.exception() from error
        raise


def _retrieve_failure(future: asyncio.Future[Any]) -> None:
    """Retrieve what a future failed with, as asyncio logs what nobody retrieved."""
    if future.done() and not future.cancelled():
        future.exception()


async def abandon_transaction(client: AIOKafkaProducer) -> None:
    """Abort an open transaction; where that is not possible any more, leave it to the brokers.

    Aborting after the client was shut out, or while it commits, breaks a promise of its own. Can go
    once `abort_transaction` raises the error of the transaction then.
    """
    manager = client._txn_manager
    if manager.state in (TransactionState.IN_TRANSACTION, TransactionState.ABORTABLE_ERROR):
        await ends_well(client.abort_transaction())
    ended = manager._transaction_waiter
    if ended is not None:
        _retrieve_failure(ended)  # whoever waited may be gone


async def stop_producer(client: AIOKafkaProducer, *, flush_seconds: float) -> None:
    """Flush for so long, give up what is left, and close; `stop` alone may wait for ever.

    Can go once `stop` takes a deadline, and gives up what it cannot send (aio-libs/aiokafka#1101).
    """
    sender = client._sender.sender_task
    if flush_seconds and sender is not None and not sender.done():
        await ends_well(client.flush(), seconds=flush_seconds)
    # Nothing that still waits may be sent any more: its publisher was told that it was not. The
    # sender ends before its batches do, or it would stumble over them.
    await end(sender)
    accumulator = client._message_accumulator
    waiting = [batch for batches in accumulator._batches.values() for batch in batches]
    waiting += accumulator._pending_batches
    # A batch that waits for its next attempt takes itself out of the pending ones when it ends,
    # where it is not any more: asyncio would log that as an error.
    accumulator._pending_batches.update(batch for batch in waiting if batch.retry_count)
    accumulator.fail_all(KafkaError("given up"))
    for batch in waiting:
        for future in (batch.future, batch._drain_waiter):
            _retrieve_failure(future)
    if not await ends_well(client.stop()):
        await ends_well(client.client.close())
