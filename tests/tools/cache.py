"""Where built parts live between runs: a folder per name and version, complete or absent.

Nothing here knows how a part is built.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def root() -> Path:
    """Return the cache's folder, which lies outside the checkout."""
    named = os.environ.get("TESTS_TOOLS_CACHE")
    if named:
        return Path(named)
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "gpuledger" / "tools"


def folder_of(name: str, version: str) -> Path:
    """Return the folder of one version of one part, there or not."""
    return root() / f"{name}-{version}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one run at a time work on `folder`, so that two runs do not build the same part."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` when the block ends well, and else vanishes."""
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        # mkdtemp's 0700 would shut out another user of a shared cache.
        draft.chmod(0o755)
        yield draft
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
