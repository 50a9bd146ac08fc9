"""The device memory of a GPU or an instance, by the newest question that its driver knows.

Only the second version of the question (driver 510 and newer) tells apart what the driver keeps for
itself; the first one counts that as used. Whether a value can be true is judged elsewhere.
"""

from typing import Any, Final, NamedTuple

import pynvml

from agent.nvml.device import DeviceClient

_CALL: Final = "nvmlDeviceGetMemoryInfo"


class Memory(NamedTuple):
    """What was answered, in bytes; `None` where it was not."""

    total: int | None = None
    """All of it."""
    used: int | None = None
    """What is in use; the driver's own is in it where `reserved` is not known."""
    reserved: int | None = None
    """What the driver and the firmware keep for themselves."""


def ask_memory(asker: DeviceClient) -> Memory:
    """Ask for the memory; raises NvmlLostError."""
    newer: Any = asker.ask(_CALL, pynvml.nvmlMemory_v2)
    if newer is not None:
        return Memory(newer.total, newer.used, newer.reserved)
    # What only failed is not asked in the older way: its `used` means something else.
    if not asker.is_refused((_CALL, pynvml.nvmlMemory_v2)):
        return Memory()
    older: Any = asker.ask(_CALL)
    return Memory() if older is None else Memory(older.total, older.used)
