"""Helpers of the spool's tests: bundles, spools, and a bus that can be unavailable."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from gpuledger.bus.protocol import (
    Consumer,
    Message,
    Producer,
    Subscription,
    TopicDescription,
)
from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import NodeId, key_in
from gpuledger_agent.metrics import SPOOL_DROPPED
from gpuledger_agent.publish.disk import IoThread
from gpuledger_agent.publish.message_bundle import BundledMessage, MessageBundle
from gpuledger_agent.publish.spool import FILE_NAME, Spool, connect
from gpuledger_agent.settings import SpoolSettings
from tests.default_topics import PROCESSES, SAMPLES, TOPICS
from tests.metric_values import value_of

T = TypeVar("T")
NODE = "node-1"
NOW_SECONDS = 1_000_000


def bundle_of(number: int, *, size_bytes: int = 0) -> MessageBundle:
    """Return the bundle of a second; every third one has a process record."""
    value = b"%d" % number
    value += b" " + number.to_bytes(8, "big") * (size_bytes // 8) if size_bytes else b""
    message = Message(
        key=key_in("default", NODE).encode(),
        value=value,
        timestamp_ms=1000 * (NOW_SECONDS + number),
    )
    topics = (SAMPLES.name, *((PROCESSES.name,) if number % 3 == 0 else ()))
    return tuple(BundledMessage(topic, message) for topic in topics)


def number_of(bundle: MessageBundle) -> int:
    return int((bundle[0].message.value or b"").split()[0])


EARLIER_BOOT = "0c1de0c8-9d0f-4f7a-8ad8-0f0c55f5a6b1"
BOOT = "6f0b5f7c-2f0e-4b62-9a3d-0d5f6f1f4d11"


class Uptime:
    """The time since boot, set by a test."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return round(self.seconds * NS_PER_SECOND)


class FlakyDisk:
    """SQLite on a disk that fails on demand."""

    def __init__(self) -> None:
        self.error: int | None = None
        """The SQLite error code of every call, such as `sqlite3.SQLITE_IOERR`."""
        self.attempts = 0

    def connect(self, file: Path) -> sqlite3.Connection:
        self.work()
        disk = self

        class Connection(sqlite3.Connection):
            @override
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                disk.work()
                return super().execute(*arguments)

        return sqlite3.connect(
            file, timeout=0, isolation_level=None, check_same_thread=False, factory=Connection
        )

    def work(self) -> None:
        if self.error is not None:
            self.attempts += 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self.error
            raise error

    @contextmanager
    def failing(self, error: int = sqlite3.SQLITE_IOERR) -> Iterator[None]:
        self.error = error
        yield
        self.error = None


def spool_in(
    folder: Path,
    *,
    up_seconds: float | Uptime = 0,
    boot_id: str = BOOT,
    disk: FlakyDisk | None = None,
    **settings: float,
) -> Spool:
    """Return the spool of a node that booted `up_seconds` ago."""
    clock = up_seconds if isinstance(up_seconds, Uptime) else Uptime(up_seconds)
    return Spool(
        settings_in(folder, **settings),
        node=NodeId("default", NODE),
        boot_id=boot_id,
        boottime_ns=clock,
        connect=disk.connect if disk else connect,
    )


def settings_in(folder: Path, **settings: float) -> SpoolSettings:
    return SpoolSettings(**{"min_free_bytes": 0, "directory": str(folder)} | settings)  # type: ignore[arg-type]  # names and types are those of the settings


def database_in(folder: Path) -> Path:
    return folder / f"default_{NODE}" / FILE_NAME


def fill(spool: Spool, *numbers: int, size_bytes: int = 0) -> None:
    for number in numbers:
        spool.append([bundle_of(number, size_bytes=size_bytes)])


def drain(spool: Spool) -> list[int]:
    """Read and acknowledge everything, like a publisher."""
    found: list[int] = []
    while reading := spool.read(max_bundles=60):
        bundles, position = reading
        found += map(number_of, bundles)
        spool.ack(position)
    return found


def reopened(
    spool: Spool, folder: Path, *, up_seconds: "float | Uptime" = 0, **settings: float
) -> Spool:
    """Return the spool as the next process opens it; the former one releases the lock."""
    spool.close()
    other = spool_in(folder, up_seconds=up_seconds, boot_id=BOOT, disk=None, **settings)
    other.open()
    return other


def dropped(reason: str) -> float:
    return float(value_of(SPOOL_DROPPED.labels(reason=reason)))


class ImmediateDisk(IoThread):
    """Runs work at once, in the same thread."""

    @override
    async def run(self, work: Callable[[], T]) -> T:
        return work()


class FickleBus:
    """A bus that is available or not, and may become unavailable right after a publication."""

    def __init__(self) -> None:
        self.topics = TOPICS
        self.is_away = False
        self.is_deaf = False
        """It takes records, but its acknowledgements get lost."""
        self.published: list[tuple[str, bytes]] = []
        self.id_of_topics: str | None = "first"

    async def partitions(self, topic: str) -> int:
        return (await self.describe(topic)).partitions

    async def describe(self, topic: str) -> TopicDescription:
        self._raise_if(self.is_away)
        return TopicDescription(12, self.id_of_topics)

    async def topic_id(self, topic: str) -> str | None:
        return (await self.describe(topic)).topic_id

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        yield self

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        raise NotImplementedError

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        self._raise_if(self.is_away)
        self.published += [(topic, message.value or b"") for message in messages]
        self._raise_if(self.is_deaf)

    def numbers(self, topic: str = SAMPLES.name) -> list[int]:
        """Return the numbers on a topic, each at its first occurrence."""
        return list(
            dict.fromkeys(int(value.split()[0]) for one, value in self.published if one == topic)
        )

    def _raise_if(self, condition: bool) -> None:  # noqa: FBT001  # a condition
        if condition:
            raise BusUnavailableError("no broker answers")
