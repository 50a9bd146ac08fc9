"""Running the outside programs that fetch and build: go, mvn, java, apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tools.errors import MissingToolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAIL_LINES = 15


def which(program: str) -> Path | None:
    """Find a program on PATH, or where its usual installation puts it."""
    usual = f"{os.environ.get('PATH', os.defpath)}:/usr/local/go/bin:/usr/sbin"
    found = shutil.which(program, path=usual)
    return Path(found) if found else None


def run(
    argv: Sequence[str | Path],
    *,
    name: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = 1800,
) -> str:
    """Run a command to its end and give its output; raises MissingToolError with its last lines."""
    try:
        done = subprocess.run(
            [str(part) for part in argv],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingToolError(
            name, f"`{argv[0]}` was not done after {limit_seconds:.0f} s"
        ) from error
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-TAIL_LINES:])
        raise MissingToolError(name, f"`{argv[0]}` ended with status {done.returncode}:\n{tail}")
    return done.stdout
