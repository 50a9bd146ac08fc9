"""Brokers that serve one test after another, because a start takes longer than most tests.

A test gets a broker as empty as a new one. The pool discards a broker if a test stopped or
restarted it, if a test's client is still a member of a group, or if a transaction is open.
"""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import DeleteAclsRequest, DeleteGroupsRequest
from aiokafka.protocol.group import LeaveGroupRequest

from tests.real.services.kafka import Kafka, request_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KafkaT = TypeVar("KafkaT", bound=Kafka)

CLEAN_SECONDS: Final = 30.0
RECHECK_SECONDS: Final = 0.1
UNDER_WAY: Final = (b"Ongoing", b"PrepareCommit", b"PrepareAbort")
ANY: Final = 1
"""Kafka's number for any kind of resource, pattern, operation or permission."""


class KafkaPool(Generic[KafkaT]):
    """Lends brokers of one kind; starts one if none is free."""

    def __init__(self, make: Callable[[], KafkaT]) -> None:
        self._make = make
        self._free: list[tuple[KafkaT, int]] = []
        self._lent: dict[KafkaT, int] = {}

    def lend(self) -> KafkaT:
        """Return a running, empty broker."""
        kafka = self._find_free() or self._start()
        self._lent[kafka] = kafka.process.pid
        return kafka

    def _find_free(self) -> KafkaT | None:
        while self._free:
            # Not when it is returned: its clients may end later.
            kafka, pid = self._free.pop()
            if kafka.process.is_running() and kafka.process.pid == pid and _is_emptied(kafka):
                return kafka
            kafka.discard()
        return None

    def _start(self) -> KafkaT:
        kafka = self._make()
        try:
            kafka.start()
        except BaseException:
            kafka.discard()
            raise
        return kafka

    def take_back(self, kafka: KafkaT) -> None:
        """Take back a broker, whatever its state."""
        self._free.append((kafka, self._lent.pop(kafka)))

    def discard(self) -> None:
        """End all brokers."""
        for kafka in [*self._lent, *(kafka for kafka, _ in self._free)]:
            kafka.discard()


def lending(pool: KafkaPool[KafkaT]) -> Iterator[Callable[[], KafkaT]]:
    """Yield a function that lends brokers, and take them back at the end."""
    lent: list[KafkaT] = []

    def lend() -> KafkaT:
        lent.append(pool.lend())
        return lent[-1]

    yield lend
    for kafka in lent:
        pool.take_back(kafka)


def _is_emptied(kafka: Kafka) -> bool:
    """Remove all topics, groups and permissions; return whether nothing of a test is left."""
    # In a thread, because the test may run in an event loop of its own.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _empty(kafka)).result()


async def _empty(kafka: Kafka) -> bool:
    servers = f"127.0.0.1:{kafka.port}"
    try:
        async with asyncio.timeout(CLEAN_SECONDS):
            if has_transactions(kafka.port):
                return False
            admin = AIOKafkaAdminClient(bootstrap_servers=servers)
            await admin.start()
            try:
                return await _remove_all(admin)
            finally:
                await admin.close()
    except (KafkaError, OSError, TimeoutError):
        return False


async def _remove_all(admin: AIOKafkaAdminClient) -> bool:
    send = admin._send_request  # noqa: SLF001  # it has no method for these requests
    groups = [name for name, _ in await admin.list_consumer_groups()]
    for answer in await admin.describe_consumer_groups(groups) if groups else ():
        for group in answer.groups:
            for member in group[5]:
                await send(LeaveGroupRequest(group[1], member[0]))
    if groups:
        deleted = await send(DeleteGroupsRequest(groups))
        if any(code for _, code in deleted.results):
            return False
    topics = [name for name in await admin.list_topics() if not name.startswith("__")]
    if topics:
        await admin.delete_topics(topics)
        while set(topics) & set(await admin.list_topics()):  # noqa: ASYNC110  # brokers send no event
            await asyncio.sleep(RECHECK_SECONDS)
    # A broker without access lists returns an error, which is as good.
    await send(DeleteAclsRequest(ANY, None, ANY, None, None, ANY, ANY))
    return True


def has_transactions(port: int) -> bool:
    """Return whether a transaction is open or about to end."""
    # ListTransactions v0, correlation id 1, no client id, these states, any producer.
    states = b"".join(struct.pack(">B", len(state) + 1) + state for state in UNDER_WAY)
    body = struct.pack(">B", len(UNDER_WAY) + 1) + states + b"\x01\x00"
    answer = request_raw("127.0.0.1", port, struct.pack(">hhihB", 66, 0, 1, -1, 0) + body)
    # Tags, throttle time, error, unknown states (empty), and the number of transactions plus one.
    tags, _, error, unknown, found = struct.unpack_from(">BihBB", answer, 4)
    if (tags, error, unknown) != (0, 0, 1):
        raise OSError(f"no list of transactions: {answer!r}")
    return bool(found != 1)
