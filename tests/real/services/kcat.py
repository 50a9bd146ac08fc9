"""kcat, a Kafka client that shares no code with the project's own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120.0
END_WAIT_MS = 10
# Sizes before the bytes, so that a value cannot be mistaken for the next record.
FORMAT = "%t %p %o %K %S\n%k%s"
ABSENT = -1


class KcatError(Exception):
    """kcat ended with an error; the message contains its output."""


@dataclass(frozen=True, kw_only=True)
class KcatMessage:
    """One record as kcat printed it; a missing key or value is None."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Kcat:
    """Runs kcat against a broker."""

    def __init__(self, *, binary: Path) -> None:
        self.binary = binary

    def consume(
        self,
        bootstrap_servers: str,
        topic: str,
        *,
        partition: int | None = None,
        from_offset: str | int = "beginning",
    ) -> list[KcatMessage]:
        """Read a topic to its end; raises KcatError."""
        where = [] if partition is None else ["-p", str(partition)]
        # A broker reports a topic's end with an empty answer, which it delays for this long.
        soon = ["-X", f"fetch.wait.max.ms={END_WAIT_MS}"]
        begin = ["-C", "-t", topic, "-o", str(from_offset)]
        arguments = [*begin, "-e", "-q", "-f", FORMAT, *soon, *where]
        return _messages(self._run(bootstrap_servers, arguments))

    def produce(
        self,
        bootstrap_servers: str,
        topic: str,
        value: bytes,
        *,
        key: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Write one record and wait until it is acknowledged; raises KcatError."""
        where = [] if partition is None else ["-p", str(partition)]
        keyed = [] if key is None else ["-k", key]
        # kcat splits standard input into one record per line; a file is one whole record.
        with tempfile.NamedTemporaryFile() as file:
            file.write(value)
            file.flush()
            self._run(bootstrap_servers, ["-P", "-t", topic, *where, *keyed, file.name])

    def metadata(self, bootstrap_servers: str) -> dict[str, Any]:
        """Return brokers and topics."""
        found: dict[str, Any] = json.loads(self._run(bootstrap_servers, ["-L", "-J"]))
        return found

    def _run(self, bootstrap_servers: str, arguments: list[str]) -> bytes:
        argv = [str(self.binary), "-b", bootstrap_servers, *arguments]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise KcatError(f"{' '.join(argv)}: {done.stderr.decode(errors='replace')}")
        return done.stdout


def _messages(printed: bytes) -> list[KcatMessage]:
    messages, at = [], 0
    while at < len(printed):
        end = printed.index(b"\n", at)
        topic, partition, offset, *sizes = printed[at:end].decode().split()
        at = end + 1
        parts: list[bytes | None] = []
        for size in map(int, sizes):
            parts.append(None if size == ABSENT else printed[at : at + size])
            at += max(0, size)
        key, value = parts
        messages.append(
            KcatMessage(
                topic=topic, partition=int(partition), offset=int(offset), key=key, value=value
            )
        )
    return messages
