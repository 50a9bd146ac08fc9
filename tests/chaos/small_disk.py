"""A small file system for one component. Filling it simulates a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Final

from gpuledger.errors import UnavailableError

_BYTES: Final = 64 * 1024 * 1024
_BLOCK: Final = bytes(64 * 1024)


class SmallDisk:
    """A tmpfs; only root can mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def mount(self) -> None:
        """Mount it; raises UnavailableError if this machine does not permit it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "none"]
        try:
            done = subprocess.run(
                [*command, self.folder], check=False, capture_output=True, text=True
            )
        except FileNotFoundError as error:
            raise UnavailableError("cannot mount a small disk: no program mount") from error
        if done.returncode:
            raise UnavailableError(f"cannot mount a small disk: {done.stderr.strip()}")

    def fill(self) -> None:
        """Fill it to the last byte."""
        file = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            size = len(_BLOCK)
            while size:
                try:
                    os.write(file, _BLOCK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        finally:
            os.close(file)

    def free(self) -> None:
        """Make space again."""
        self._filler.unlink(missing_ok=True)

    def discard(self) -> None:
        """Unmount it, with all files."""
        if self.folder.is_mount():
            command: list[str | Path] = ["umount", "--lazy", self.folder]
            subprocess.run(command, check=False)
