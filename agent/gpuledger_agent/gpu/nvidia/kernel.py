"""Reads which GPUs the kernel driver lists, with their UUIDs; works without NVML.

The kernel module lists each GPU in `/proc/driver/nvidia/gpus/<PCI address>/information`. Before the
driver has initialized a GPU, the UUID in the file consists of question marks.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuledger_agent.core.incidents import Bus, read_bus

_GPUS: Final = "driver/nvidia/gpus"
_UUID: Final = re.compile(
    r"^GPU UUID:\s*(GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\s*$", re.MULTILINE
)


def list_kernel_gpus(procfs_root: Path) -> Mapping[Bus, str | None]:
    """Return the UUID of each GPU by its PCI address; `None` if the kernel does not know the UUID.

    May block while the kernel initializes a GPU.
    """
    try:
        directories = sorted((procfs_root / _GPUS).iterdir())
    except OSError:
        return {}
    return {bus: _read_uuid(each) for each in directories if (bus := read_bus(each.name))}


def _read_uuid(directory: Path) -> str | None:
    try:
        found = _UUID.search((directory / "information").read_text(errors="replace"))
    except OSError:
        return None
    return found and found[1]
