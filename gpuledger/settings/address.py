"""An address to listen on, `host:port`. Nothing here opens a socket."""

import re
from typing import Final

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]*)):(?P<port>\d{1,5})"
)
_MOST_PORT: Final = 65535


def parse_listen(listen: str) -> tuple[str, int]:
    """Take `host:port` or `[ipv6]:port` apart; no host means all interfaces, 0 any free port.

    Raises `ValueError` naming the value where it is neither.
    """
    found = _ADDRESS.fullmatch(listen)
    if not found or int(found["port"]) > _MOST_PORT:
        raise ValueError(f"expected host:port such as 0.0.0.0:9820, got {listen!r}")
    return found["six"] or found["host"] or "0.0.0.0", int(found["port"])  # noqa: S104  # that is what an empty host asks for
