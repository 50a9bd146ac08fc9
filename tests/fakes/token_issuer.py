"""A token endpoint over TLS; its tokens verify with the keys that it publishes as a file."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.real.services.certificates import Authority

ISSUER = "https://issuer.test"
AUDIENCE = "kafka"
CLIENT_SECRET = "s3cret &+%of-the-client"


def in_base64(data: bytes) -> str:
    """Return bytes in the base64 form of JWTs."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class TokenKeys:
    """The key that signs tokens."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def publish(self, file: Path) -> None:
        """Write the public key as a JWKS."""
        numbers = self._key.public_key().public_numbers()
        key = {"kty": "RSA", "kid": "one", "use": "sig", "alg": "RS256"}
        for name, number in (("n", numbers.n), ("e", numbers.e)):
            key[name] = in_base64(number.to_bytes((number.bit_length() + 7) // 8, "big"))
        file.write_text(json.dumps({"keys": [key]}))

    def sign(
        self, subject: str, *, for_seconds: float, audience: str = AUDIENCE, at: float | None = None
    ) -> str:
        """Return a JWT with this subject."""
        now = time.time() if at is None else at
        head = {"alg": "RS256", "typ": "JWT", "kid": "one"}
        # Brokers read whole seconds.
        claims = {
            "iss": ISSUER,
            "aud": audience,
            "sub": subject,
            "iat": int(now) - 5,
            "exp": int(now + for_seconds),
            "jti": in_base64(str(time.perf_counter_ns()).encode()),
        }
        signed = ".".join(in_base64(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{in_base64(signature)}"


class TokenIssuer:
    """The endpoint's next response, and the requests that it received."""

    def __init__(self, keys: TokenKeys, *, for_seconds: float = 600.0) -> None:
        self.keys, self.for_seconds = keys, for_seconds
        self.subject, self.audience = "gpuledger", AUDIENCE
        self.raw: bytes | None = None
        """Sent instead of a response, unchanged."""
        self.hangs = False
        self.status = 200
        self.answer: Any = None
        """The JSON body to send instead of a token."""
        self.requests: list[tuple[dict[str, str], str]] = []
        """The headers and the form of each request."""
        self.tokens: list[str] = []

    @asynccontextmanager
    async def serve(self, authority: Authority, *, host: str | None = None) -> AsyncIterator[str]:
        """Serve over TLS, with a certificate for `host` if given; yield the address."""
        pair = authority.issue("token-endpoint", host=host)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        serving: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                serving.add(task)
            # asyncio logs a cancelled handler as an error.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._handle(reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        try:
            yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/oauth/token"
        finally:
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(":") for line in head.split("\r\n")[1:] if line]
        headers = {name.lower(): value.strip() for name, _, value in lines}
        form = (await reader.readexactly(int(headers["content-length"]))).decode()
        self.requests.append((headers, form))
        if self.hangs:
            await asyncio.Event().wait()
        writer.write(self.raw if self.raw is not None else self._answer())
        await writer.drain()
        await asyncio.sleep(0.05)  # let the last byte arrive before the connection closes

    def next_token(self) -> str:
        """Return the token of the next response."""
        return self.keys.sign(self.subject, for_seconds=self.for_seconds, audience=self.audience)

    def _answer(self) -> bytes:
        found = self.answer
        if found is None:
            token = self.next_token()
            self.tokens.append(token)
            found = {"access_token": token, "token_type": "Bearer", "expires_in": self.for_seconds}
        body = json.dumps(found).encode()
        head = f"HTTP/1.1 {self.status} x\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body
