"""The driver's lists of processes, read by one call into a buffer that is kept.

nvidia-ml-py calls the driver twice for a list: for its size, and for the list. Of two kinds of
drivers it is wrong. Some answer the call for the size with success: then it sees no process at all.
Those of 535.43 to 535.86 write rows of 32 bytes, which it reads as 24: from the second row on it
takes parts of other members for a pid. So the driver is called here, with room for more rows than
there mostly are. What is answered has nvidia-ml-py's form; a library that is nothing but functions
of Python, as the simulator's or a recording, has no function of C to call and goes on as it is.

Threads share a library, and a call that hangs holds its buffer: each thread has one of its own.
"""

import ctypes
import threading
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import pynvml

from agent.gpu.nvidia.catalogue import DriverRange, DriverVersion

# ruff: noqa: N802  # NVML's own names

_ROW: Final = Struct("@IQII")
"""Pid, bytes of memory, GPU instance and compute instance, as a C compiler lays them out."""
_PROTECTED_ROW: Final = Struct("@IQIIQ")
"""The same with the bytes of protected memory behind it."""
_PROTECTED_DRIVERS: Final = DriverRange(DriverVersion(535, 43), DriverVersion(535, 86))
_NOT_AVAILABLE: Final = 2**64 - 1
_FIRST_ROOM_BYTES: Final = 64 * _PROTECTED_ROW.size
# More than run on any GPU: a driver that asks for more is not believed.
_MAX_ROWS: Final = 65_536
_ATTEMPTS: Final = 3
_SUCCESS: Final = pynvml.NVML_SUCCESS
_GREW: Final = pynvml.NVML_ERROR_INSUFFICIENT_SIZE

_Process: Final[Any] = pynvml.nvmlFriendlyObject

CFunction = Callable[..., int]
"""A function of the driver's library; returns NVML's code."""


class _Buffer(threading.local):
    """One thread's room for a list, and how many rows are in it."""

    def __init__(self) -> None:
        self.count = ctypes.c_uint()
        self.count_reference = ctypes.byref(self.count)
        self.rows = ctypes.create_string_buffer(_FIRST_ROOM_BYTES)


class ListingLibrary:
    """Has the functions of nvidia-ml-py behind it, and its own for the lists of processes."""

    def __init__(self, library: object) -> None:
        self._library: Any = library
        self._buffer = _Buffer()
        self._row = _ROW

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as the library has it
        """Return a function of the library; raises AttributeError where it has none."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        found = getattr(self._library, name)
        # Kept, so that the next call finds it without coming here.
        self.__dict__[name] = found
        return found

    def nvmlInit(self) -> None:
        """Open the library; the driver's version says how long its rows are."""
        self._library.nvmlInit()
        # At each opening: the driver may be another one since the last.
        try:
            version = DriverVersion.parse(self._library.nvmlSystemGetDriverVersion())
        except (pynvml.NVMLError, UnicodeDecodeError):
            version = None  # whoever needs it asks for it as well, and says what is wrong
        self._row = _PROTECTED_ROW if _PROTECTED_DRIVERS.has(version) else _ROW

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with a compute context; raises NVMLError."""
        return self._list("nvmlDeviceGetComputeRunningProcesses_v3", handle)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with a graphics context; raises NVMLError."""
        return self._list("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with a compute context of MPS; raises NVMLError."""
        return self._list("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)

    def _list(self, name: str, handle: object) -> list[object]:
        # Raises NVMLError where the driver's library has no such function.
        function: CFunction = self._library._nvmlGetFunctionPointer(name)  # noqa: SLF001  # it has no public way
        buffer, row = self._buffer, self._row
        number = buffer.count
        for _ in range(_ATTEMPTS):
            rows = buffer.rows
            number.value = room = len(rows) // row.size
            code = function(handle, buffer.count_reference, rows)
            count = number.value
            if code == _SUCCESS and count <= room:
                # Most lists of graphics and of MPS are empty.
                if not count:
                    return []
                written = memoryview(rows)[: count * row.size]
                return [_process(*values[:4]) for values in row.iter_unpack(written)]
            if code not in (_SUCCESS, _GREW):
                raise pynvml.NVMLError(code)
            if count > _MAX_ROWS:
                break
            # More than are there now: further ones may come before the next call.
            buffer.rows = ctypes.create_string_buffer(max(room, count) * 2 * _PROTECTED_ROW.size)
        raise pynvml.NVMLError(_GREW)


def with_own_lists(library: object) -> object:
    """Return the library, its lists of processes read here where it has functions of C."""
    return ListingLibrary(library) if hasattr(library, "_nvmlGetFunctionPointer") else library


def _process(
    pid: int, memory_bytes: int, gpu_instance: int, compute_instance: int
) -> pynvml.nvmlFriendlyObject:
    """Return a row in nvidia-ml-py's form, so that it can be recorded."""
    # Its own constructor sets each member by a call, which costs more than the driver's list.
    process = _Process.__new__(_Process)
    process.__dict__ = {
        "pid": pid,
        "usedGpuMemory": None if memory_bytes == _NOT_AVAILABLE else memory_bytes,
        "gpuInstanceId": gpu_instance,
        "computeInstanceId": compute_instance,
    }
    return process
