"""Reads files that people or Kubernetes provide, up to a maximum size."""

import errno
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 64 * 1024
"""Maximum size of a secret or a configuration file."""
MAX_PEM_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a file of certificates; a system's CA bundle has about 200 KiB."""


def read_small_file(file: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file; raise `OSError` if it cannot be read or is larger."""
    with file.open("rb") as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 1024} KiB")
    return content
