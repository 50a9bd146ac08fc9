"""Ports for processes that the tests start.

A port is free until whoever drew it has started its part, which takes seconds: long enough for
another process of tests to draw it, too. So each process locks what it has drawn until it ends: a
byte of one file for each port, by locks that the kernel takes back.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

# Below Linux' ephemeral ports: no outgoing connection can take one before the part starts.
FIRST_PORT = 20_000
LAST_PORT = 32_000
_drawn: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that nobody listens on, and nobody else draws."""
    candidates = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if port not in _drawn and _is_free(port) and _lock(port):
            _drawn.add(port)
            found.append(port)
    return found


@cache
def _locks() -> int:
    """Return the file of the locks, open for as long as this process lives."""
    path = Path(tempfile.gettempdir()) / f"gpuledger-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(port: int) -> bool:
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Else a port whose last connection lingers in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
