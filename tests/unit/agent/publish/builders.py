"""What the tests of the spool begin with: bundles, spools, a bus that can be away."""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from typing_extensions import override

from gpuledger.bus.protocol import Consumer, Message, Producer, Subscription
from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import NodeId, key_in
from gpuledger_agent.metrics import SPOOL_DROPPED
from gpuledger_agent.publish.message_bundle import MessageBundle
from gpuledger_agent.publish.spool import Spool
from gpuledger_agent.publish.spool_file import START
from gpuledger_agent.publish.spool_folder import IoThread
from gpuledger_agent.settings import SpoolSettings
from tests.default_topics import PROCESSES, SAMPLES, TOPICS
from tests.metric_values import value_of

T = TypeVar("T")
NODE = "node-1"
NOW_SECONDS = 1_000_000


def bundle_of(number: int, *, size_bytes: int = 0) -> MessageBundle:
    """Make the bundle of a second; every third one has a process record."""
    value = b"%d" % number
    value += b" " + number.to_bytes(8, "big") * (size_bytes // 8) if size_bytes else b""
    message = Message(
        key=key_in("default", NODE).encode(),
        value=value,
        timestamp_ms=1000 * (NOW_SECONDS + number),
    )
    return ((SAMPLES.name, message), *(((PROCESSES.name, message),) if number % 3 == 0 else ()))


def number_of(bundle: MessageBundle) -> int:
    return int((bundle[0][1].value or b"").split()[0])


EARLIER_BOOT = "0c1de0c8-9d0f-4f7a-8ad8-0f0c55f5a6b1"
BOOT = "6f0b5f7c-2f0e-4b62-9a3d-0d5f6f1f4d11"


class Uptime:
    """The time since boot, moved by hand."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return round(self.seconds * NS_PER_SECOND)


def spool_in(
    folder: Path, *, up_seconds: float | Uptime = 0, boot_id: str = BOOT, **settings: float
) -> Spool:
    """Return the spool of a node that booted `up_seconds` ago."""
    clock = up_seconds if isinstance(up_seconds, Uptime) else Uptime(up_seconds)
    made = settings_in(folder, **settings)
    return Spool(made, node=NodeId("default", NODE), boot_id=boot_id, boottime_ns=clock)


def settings_in(folder: Path, **settings: float) -> SpoolSettings:
    return SpoolSettings(**{"min_free_bytes": 0, "folder": str(folder)} | settings)  # type: ignore[arg-type]  # names and types are the settings' own


def files_in(folder: Path) -> list[Path]:
    return sorted((folder / f"default_{NODE}").glob("*.spool"))


@contextmanager
def unreadable(path: Path, error: int) -> Iterator[list[int]]:
    """Let nobody open a file; the list has an entry for each attempt."""
    truth, attempts = os.open, list[int]()

    def refuse(name: object, *arguments: Any, **keywords: Any) -> int:  # noqa: ANN401  # passed on
        if name != path:
            return truth(name, *arguments, **keywords)  # type: ignore[arg-type]  # as it came
        attempts.append(error)
        raise OSError(error, os.strerror(error), str(path))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", refuse)
        yield attempts


def fill(spool: Spool, *numbers: int, size_bytes: int = 0) -> None:
    for number in numbers:
        spool.append([bundle_of(number, size_bytes=size_bytes)])


class Frame(NamedTuple):
    """Where in which file a frame lies."""

    file: Path
    start: int
    end: int


def fill_frames(spool: Spool, folder: Path, *bundles: Sequence[MessageBundle]) -> list[Frame]:
    """Append each to the spool in this folder; return where each lies."""
    frames = []
    for each in bundles:
        before = {file: file.stat().st_size for file in files_in(folder)}
        spool.append(each)
        file = files_in(folder)[-1]
        frames.append(Frame(file, before.get(file, START), file.stat().st_size))
    return frames


def drain(spool: Spool) -> list[int]:
    """Read and forget everything, as a publisher does."""
    found: list[int] = []
    while reading := spool.read(max_bundles=60):
        bundles, position = reading
        found += map(number_of, bundles)
        spool.ack(position)
    return found


def reopened(
    spool: Spool, folder: Path, *, up_seconds: "float | Uptime" = 0, **settings: float
) -> Spool:
    """Return what the next process finds; the lock goes with the one before."""
    spool.close()
    other = spool_in(folder, up_seconds=up_seconds, boot_id=BOOT, **settings)
    other.open()
    return other


def dropped(reason: str) -> float:
    return float(value_of(SPOOL_DROPPED.labels(reason=reason)))


def change_byte(path: Path, at: int, flip: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= flip
    path.write_bytes(data)


class ImmediateDisk(IoThread):
    """Works at once and in the same thread."""

    @override
    async def run(self, work: Callable[[], T]) -> T:
        return work()


class FickleBus:
    """A bus that is there or away, and may be away right after it has taken something."""

    def __init__(self) -> None:
        self.topics = TOPICS
        self.is_away = False
        self.is_deaf = False
        """It takes what it is given, and its answers get lost."""
        self.published: list[tuple[str, bytes]] = []

    async def partitions(self, topic: str) -> int:
        self._refuse_where(self.is_away)
        return 12

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        yield self

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        raise NotImplementedError

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        self._refuse_where(self.is_away)
        self.published += [(topic, message.value or b"") for message in messages]
        self._refuse_where(self.is_deaf)

    def numbers(self, topic: str = SAMPLES.name) -> list[int]:
        """Return the numbers on a topic, each at its first appearance."""
        return list(
            dict.fromkeys(int(value.split()[0]) for one, value in self.published if one == topic)
        )

    def _refuse_where(self, it_is_so: bool) -> None:  # noqa: FBT001  # the condition of its name
        if it_is_so:
            raise BusUnavailableError("no broker answers")
