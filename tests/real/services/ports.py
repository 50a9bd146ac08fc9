"""Ports for processes that the tests start.

A port is free until the process that drew it has started its part. This takes seconds, long enough
for another test process to draw the same port. So each process locks its ports until it ends: one
byte of a file per port, with locks that the kernel releases.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

# Below Linux's ephemeral ports: no outgoing connection can take one before the part starts.
FIRST_PORT = 20_000
LAST_PORT = 32_000
_drawn: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports of 127.0.0.1 that no other test process has drawn."""
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
    """Return the lock file, which stays open as long as this process lives."""
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
        # Otherwise a port whose last connection lingers in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
