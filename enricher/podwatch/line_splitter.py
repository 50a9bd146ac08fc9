"""Lines out of chunks: pure apart from the waiting. Lines of several megabytes are no exception."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from enricher.podwatch.api import KubernetesError

# etcd refuses objects above 1.5 MiB by default and nobody runs it with more than a few times that.
MAX_LINE_BYTES: Final = 32 * 2**20
# Of a longer line: what it is and whose, which stands at its begin. It is no JSON any more.
HEAD_BYTES: Final = 4096


async def split_lines(
    chunks: AsyncGenerator[bytes], *, max_bytes: int = MAX_LINE_BYTES
) -> AsyncGenerator[bytes]:
    """Yield each whole line without its end, empty ones left out.

    Of a line longer than `max_bytes` its first `HEAD_BYTES` are given, and no more is held.
    Raises `KubernetesError` where the body ends within a line.
    """
    kept: list[bytes] = []
    line_bytes = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                if line_bytes <= max_bytes:
                    kept.append(line)
                if joined := b"".join(kept):
                    yield joined
                kept.clear()
                line_bytes = 0
            if rest:
                if line_bytes <= max_bytes:
                    kept.append(rest)
                line_bytes += len(rest)
                if line_bytes > max_bytes:
                    kept[:] = [b"".join(kept)[:HEAD_BYTES]]
    if kept:
        raise KubernetesError(f"the connection ended within a line, after {line_bytes} bytes of it")
