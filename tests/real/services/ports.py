"""Ports for processes that the tests start."""

from __future__ import annotations

import random
import socket

# Below Linux' ephemeral ports: no outgoing connection can take one before the part starts.
FIRST_PORT = 20_000
LAST_PORT = 32_000


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that nobody listens on."""
    drawn = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT), count * 50)
    free = [port for port in drawn if _is_free(port)]
    return free[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Else a port whose last connection lingers in TIME_WAIT would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
