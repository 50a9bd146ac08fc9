"""Where replayed events go: a file of JSON lines, another topic, or nowhere.

Each output is a context that gives a `write`; leaving it by an error leaves no half of a file.
"""

import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from gpuledger.bus.protocol import Bus, Message
from gpuledger.errors import TopicsError, UserError
from gpuledger.topics import BY_NAME, EVENTS

Write = Callable[[int, Sequence[Message]], Awaitable[None]]
"""Takes a partition and its next events."""
_PACKING_LEVEL: Final = 1


@asynccontextmanager
async def to_nowhere() -> AsyncIterator[Write]:
    """Yield an output that drops everything, for comparing only."""

    async def write(_partition: int, _events: Sequence[Message]) -> None:
        return

    yield write


@asynccontextmanager
async def to_file(path: Path) -> AsyncIterator[Write]:
    """Write one event a line, packed where the name ends in `.gz`; `UserError` if not writable.

    The file gets its name when all is written.
    """
    part = path.with_name(f"{path.name}.part")
    with _telling(path):
        raw = part.open("wb")
    try:
        with raw, _packed(raw) if path.suffix == ".gz" else raw as file:

            async def write(_partition: int, events: Sequence[Message]) -> None:
                with _telling(path):
                    file.writelines((event.value or b"") + b"\n" for event in events)

            yield write
        with _telling(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@asynccontextmanager
async def to_topic(bus: Bus, topic: str) -> AsyncIterator[Write]:
    """Publish each event to the partition of the same number; raises `TopicsError`."""
    if topic in BY_NAME:
        raise TopicsError(
            f"--topic {topic}: this topic is read by others as what happened first; replay into"
            " one of another name"
        )
    count, wanted = await bus.partitions(topic), await bus.partitions(EVENTS.name)
    if count != wanted:
        raise TopicsError(
            f"--topic {topic}: it has {count} partitions and needs {wanted}, as {EVENTS.name} has"
        )
    async with bus.producer() as producer:

        async def write(partition: int, events: Sequence[Message]) -> None:
            if events:
                await producer.publish(topic, partition, events)

        yield write


@contextmanager
def _packed(raw: BinaryIO) -> Iterator[BinaryIO]:
    # Without name and time, so that the same events give the same bytes.
    with gzip.GzipFile(
        filename="", mode="wb", compresslevel=_PACKING_LEVEL, fileobj=raw, mtime=0
    ) as packed:
        yield cast("BinaryIO", packed)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror or error}") from error
