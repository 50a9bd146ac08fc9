"""Lines out of chunks: pure apart from the waiting. Lines of several megabytes are no exception."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from enricher.podwatch.api import KubernetesError

# etcd refuses objects above 1.5 MiB by default and nobody runs it with more than a few times that.
MOST_LINE_BYTES: Final = 32 * 2**20


async def split_lines(
    chunks: AsyncGenerator[bytes], *, most_bytes: int = MOST_LINE_BYTES
) -> AsyncGenerator[bytes]:
    """Give each whole line without its end, empty ones left out.

    Raises `KubernetesError` where the body ends within a line or a line is longer than
    `most_bytes`.
    """
    kept: list[bytes] = []
    kept_bytes = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                kept.append(line)
                if joined := b"".join(kept):
                    yield joined
                kept.clear()
                kept_bytes = 0
            if rest:
                kept.append(rest)
                kept_bytes += len(rest)
            if kept_bytes > most_bytes:
                raise KubernetesError(f"the API server sent a line of over {most_bytes} bytes")
    if kept:
        raise KubernetesError(f"the connection ended within a line, after {kept_bytes} bytes of it")
