"""A broker that refuses a login may quote the password, which must not be shown anywhere."""

import asyncio
import base64
import html
import json
import logging
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.errors import BusUnavailableError
from gpuledger.settings import KafkaSettings, Secret
from tests.errors import has_words

PASSWORD = "Kafka&<Pw>-4711"
_REFUSED = 58
_VERSIONS = [(18, 0, 0), (17, 0, 1), (36, 0, 1), (3, 0, 5), (0, 0, 7), (1, 0, 11)]
"""API keys that the broker supports, with their versions."""


@asynccontextmanager
async def refusing_broker(message: str) -> AsyncIterator[str]:
    """Serve a broker that refuses each login with this message; yield its address."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = struct.unpack(">i", await reader.readexactly(4))
                key, _, number = struct.unpack(">hhi", (await reader.readexactly(length))[:8])
                answer = struct.pack(">i", number) + _answer(key, message.encode())
                writer.write(struct.pack(">i", len(answer)) + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, serving))


def _answer(key: int, message: bytes) -> bytes:
    match key:
        case 18:  # supported versions
            versions = b"".join(struct.pack(">hhh", *each) for each in _VERSIONS)
            return struct.pack(">hi", 0, len(_VERSIONS)) + versions
        case 17:  # SASL mechanisms
            return struct.pack(">hi", 0, 1) + struct.pack(">h", 5) + b"PLAIN"
        case _:  # the login
            return struct.pack(">hh", _REFUSED, len(message)) + message + struct.pack(">iq", 0, 0)


QUOTED: dict[str, Callable[[str], str]] = {
    "as it was sent": str,
    "as HTML": html.escape,
    "as JSON": lambda text: json.dumps(text)[1:-1],
    "in base64": lambda text: base64.b64encode(text.encode()).decode(),
}


@pytest.mark.parametrize("quoted", QUOTED)
async def test_the_password_is_in_no_error_and_no_log_line(
    quoted: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    words = f"Authentication failed: {QUOTED[quoted](PASSWORD)} is not right"
    async with refusing_broker(words) as address:
        connection = KafkaConnection(
            KafkaSettings(
                bootstrap_servers=address,
                security_protocol="SASL_PLAINTEXT",
                sasl_mechanism="PLAIN",
                sasl_username="me",
                sasl_password=Secret(PASSWORD),
            )
        )
        with pytest.raises(BusUnavailableError, check=has_words("*" * 8)) as caught:
            await connection.describe("gpuledger.events.v1")
    shown = f"{caught.value} {caplog.text}"
    assert "4711" not in shown
    assert QUOTED[quoted](PASSWORD) not in shown
