from collections.abc import AsyncGenerator

import pytest

from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.events import split_lines
from tests.errors import has_words


async def given(chunks: list[bytes]) -> AsyncGenerator[bytes]:
    for chunk in chunks:
        yield chunk


async def lines(chunks: list[bytes], *, max_bytes: int = 100) -> list[bytes]:
    return [line async for line in split_lines(given(chunks), max_bytes=max_bytes)]


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], []),
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"a\n", b"", b"\n\nb", b"", b"\n"], [b"a", b"b"]),
        ([bytes([byte]) for byte in b"one\ntwo\n"], [b"one", b"two"]),
    ],
)
async def test_lines_are_whole_however_they_were_split(
    chunks: list[bytes], expected: list[bytes]
) -> None:
    assert await lines(chunks) == expected


async def test_a_body_that_ends_within_a_line_is_a_failure() -> None:
    with pytest.raises(KubernetesError, check=has_words("3 bytes")):
        await lines([b"a\nb", b"cd"])


async def test_a_line_that_is_too_long_is_a_failure_and_does_not_fill_the_memory() -> None:
    with pytest.raises(KubernetesError, check=has_words("10 bytes")):
        await lines([b"a\n", *[b"0123456"] * 2, b"7\nb\n"], max_bytes=10)
