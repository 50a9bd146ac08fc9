"""Finds and loads the driver's library, and calls it directly for process lists and samples.

`ListingLibrary` forwards calls to a library, but reads the process lists itself. `SystemNvml` is a
`ListingLibrary` for nvidia-ml-py that finds this machine's NVML library and also reads the samples
itself. A simulated library with C functions is wrapped in a `ListingLibrary` too; a library with
only Python functions, such as a recording, is used unchanged. Results have the same types as those
of nvidia-ml-py, so other modules do not depend on these details.

**Location.** nvidia-ml-py only uses the dynamic linker. In a container, the linker may not search
the library's directory: the container toolkit mounts the library into the image's directories
without updating the linker's cache, and other tools mount the driver's whole root. Known
directories are therefore searched as well. They are searched each time the source is opened until
the library is found, because a driver container may start after the agent.

**Lists.** nvidia-ml-py calls the driver twice for a list: for its size, then for its rows. This
fails with two kinds of drivers. Some drivers answer the size call with success, so the binding sees
no processes. Drivers 535.43 to 535.86 write rows of 32 bytes, which the binding reads as 24 bytes,
so from the second row on it takes parts of other members for a pid. This module therefore calls the
driver directly, with a buffer that is usually large enough.

**Samples.** nvidia-ml-py queries the size and then the samples, and allocates a new array each
time. This module usually makes one call.

Buffers and arrays are reused. Each thread has its own set, because a call that hangs in a leaked
thread may still write into that thread's buffers. Returned samples are valid until the thread's
next query.
"""
# ruff: noqa: N802  # NVML's own names

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final

import pynvml
import structlog
from typing_extensions import override

from gpuledger_agent.gpu.nvidia.catalogue import DriverRange, DriverVersion
from gpuledger_agent.gpu.protocol import LibraryLostError
from gpuledger_agent.metrics import NVML_ERRORS

_log = structlog.get_logger(__name__)

LIBRARY: Final = "libnvidia-ml.so.1"
FOLDERS: Final = tuple(
    Path(folder)
    for folder in (
        # The container toolkit's mounts, depending on the image's distribution.
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        # The GPU Operator's driver container.
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
        "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
        "/run/nvidia/driver/usr/lib64",
        # GKE: the device plugin's mount, and the path on the node.
        "/usr/local/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/lib64",
        # WSL.
        "/usr/lib/wsl/lib",
    )
)
"""Directories to search after the dynamic linker."""
_MAPS: Final = Path("/proc/self/maps")
_ATTEMPTS: Final = 3
# In rows. The longest known ring buffer has 4,096 samples.
_FIRST_ROOM: Final = 64
_MAX_ROOM: Final = 1 << 16
_ROW: Final = Struct("@IQII")
"""Pid, bytes of memory, GPU instance and compute instance, in the layout of a C compiler."""
_PROTECTED_ROW: Final = Struct("@IQIIQ")
"""The members of `_ROW`, followed by the bytes of protected memory."""
_PROTECTED_DRIVERS: Final = DriverRange(DriverVersion(535, 43), DriverVersion(535, 86))
_NOT_AVAILABLE: Final = 2**64 - 1
_FIRST_ROOM_BYTES: Final = 64 * _PROTECTED_ROW.size
# More processes than run on any GPU; a larger number from a driver is wrong.
_MAX_ROWS: Final = 65_536
_SUCCESS: Final = pynvml.NVML_SUCCESS
_GREW: Final = pynvml.NVML_ERROR_INSUFFICIENT_SIZE

_Process: Final[Any] = pynvml.nvmlFriendlyObject

CFunction = Callable[..., int]
"""A C function of the driver's library; returns NVML's return code."""

Load = Callable[[str], Any]
"""Loads a library by name or path; raises OSError."""


class LibraryNotFoundError(LibraryLostError):
    """The driver's library does not exist in the known places or cannot be loaded."""


def load_library(
    configured: Path | None, *, folders: Sequence[Path] = FOLDERS, load: Load = ctypes.CDLL
) -> tuple[Any, str]:
    """Return the loaded library, and its path or, if the path is unknown, its name.

    If `configured` is given, a file or a directory, only that location is tried. Raise
    `LibraryNotFoundError` with the locations tried if the library cannot be loaded.
    """
    if configured is not None:
        wanted = configured / LIBRARY if configured.is_dir() else configured
        candidates = [str(wanted)]
    else:
        candidates = [LIBRARY, *(str(folder / LIBRARY) for folder in folders)]
    refused = []
    for candidate in candidates:
        try:
            return load(candidate), candidate if "/" in candidate else _path_of(candidate)
        except OSError as error:
            # Report a library that exists but cannot be loaded, because someone has to repair it.
            if Path(candidate).exists():
                refused.append(f"{candidate}: {error}")
    if configured is not None:
        tried = (
            f"nvml_library: {candidates[0]} {'cannot be loaded' if refused else 'does not exist'};"
            f" set it to the path of the driver's {LIBRARY} or to the directory that contains it"
        )
    else:
        tried = (
            f"{LIBRARY} was not found by the dynamic linker or in"
            f" {', '.join(map(str, folders))}; set nvml_library to its path"
        )
    raise LibraryNotFoundError("; ".join([tried, *refused]))


def _path_of(name: str) -> str:
    """Return the path of a library that the dynamic linker loaded; its name if that is unknown."""
    stem = name.partition(".so")[0]
    try:
        mapped = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
        paths = (fields[5] for fields in mapped if len(fields) > 5)  # noqa: PLR2004  # the columns of maps
        return next((path for path in paths if Path(path).name.startswith(f"{stem}.so")), name)
    except OSError:
        return name


class _Buffers(threading.local):
    """The buffers of one thread; each grows as needed."""

    def __init__(self) -> None:
        self.count = ctypes.c_uint()
        self.count_reference = ctypes.byref(self.count)
        self.rows = ctypes.create_string_buffer(_FIRST_ROOM_BYTES)
        self.samples: Any = None
        self.processes: Any = (pynvml.c_nvmlProcessUtilizationSample_t * _FIRST_ROOM)()


class ListingLibrary:
    """Forwards calls to a library like nvidia-ml-py, but reads the process lists itself."""

    def __init__(self, library: object) -> None:
        self._library: Any = library
        self._buffers = _Buffers()
        self._row = _ROW

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any function of the library
        """Return a function of the library; raise `AttributeError` if the library lacks it."""
        if not name.startswith("nvml"):
            raise AttributeError(name)
        found = getattr(self._library, name)
        # Cache it, so that the next access does not call `__getattr__`.
        self.__dict__[name] = found
        return found

    def nvmlInit(self) -> None:
        """Initialize the library; choose the layout of process rows by the driver's version."""
        self._library.nvmlInit()
        # Query the version each time, because the driver may have been replaced.
        try:
            version = DriverVersion.parse(self._library.nvmlSystemGetDriverVersion())
        except (pynvml.NVMLError, UnicodeDecodeError):
            version = None  # code that needs the version queries it as well and reports the error
        self._row = _PROTECTED_ROW if _PROTECTED_DRIVERS.has(version) else _ROW

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with a compute context; raises NVMLError."""
        return self._list("nvmlDeviceGetComputeRunningProcesses_v3", handle)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with a graphics context; raises NVMLError."""
        return self._list("nvmlDeviceGetGraphicsRunningProcesses_v3", handle)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: object) -> list[object]:
        """Return the processes with an MPS compute context; raises NVMLError."""
        return self._list("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)

    def _list(self, name: str, handle: object) -> list[object]:
        function = self._function(name)
        buffers, row = self._buffers, self._row
        number = buffers.count
        for _ in range(_ATTEMPTS):
            rows = buffers.rows
            number.value = room = len(rows) // row.size
            _clear(rows)
            code = function(handle, buffers.count_reference, rows)
            count = number.value
            if code == _SUCCESS and count <= room:
                # Fast path: most graphics and MPS lists are empty.
                if not count:
                    return []
                written = memoryview(rows)[: count * row.size]
                # Skip rows of zeros: the driver counted but did not write them, for example because
                # the process has just ended. A row with pid 0 and other data is kept, because it
                # shows that the list was read wrongly.
                return [_process(*one[:4]) for one in row.iter_unpack(written) if any(one)]
            if code not in (_SUCCESS, _GREW):
                raise pynvml.NVMLError(code)
            if count > _MAX_ROWS:
                break
            # Larger than needed now, because more processes may start before the next call.
            buffers.rows = ctypes.create_string_buffer(max(room, count) * 2 * _PROTECTED_ROW.size)
        raise pynvml.NVMLError(_GREW)

    def _function(self, name: str) -> CFunction:
        """Return a function of the driver's library; raise `NVMLError` if it does not exist."""
        found: CFunction = self._library._nvmlGetFunctionPointer(name)  # noqa: SLF001  # there is no public function
        return found


class SystemNvml(ListingLibrary):
    """The functions of nvidia-ml-py, with the NVML library found on this machine."""

    def __init__(
        self,
        configured: Path | None = None,
        *,
        folders: Sequence[Path] = FOLDERS,
        load: Load = ctypes.CDLL,
    ) -> None:
        """Create the library without loading it; `configured` is the path in the settings."""
        super().__init__(pynvml)
        self._configured, self._folders, self._load = configured, folders, load
        self.path = ""
        """Where the library was found; empty until it is loaded."""

    @override
    def nvmlInit(self) -> None:
        """Load the library if necessary, and initialize it.

        Raise `LibraryNotFoundError` if it cannot be loaded, and `NVMLError` if the driver fails.
        """
        # A loaded library stays loaded: neither the process nor nvidia-ml-py can replace it.
        if pynvml.nvmlLib is None:
            try:
                library, self.path = load_library(
                    self._configured, folders=self._folders, load=self._load
                )
            except LibraryNotFoundError:
                NVML_ERRORS.labels(call="nvmlInit", error="LibraryNotFound").inc()
                raise
            pynvml.nvmlLib = library
            _log.info("nvml_library_loaded", library=self.path)
        super().nvmlInit()

    def nvmlDeviceGetSamples(
        self, device: object, kind: int, since_us: int
    ) -> tuple[int, Sequence[object]]:
        """Return the type of the values, and the samples newer than `since_us`.

        Raises `NVMLError`.
        """
        function = self._function("nvmlDeviceGetSamples")
        value_type = ctypes.c_uint()
        for _ in range(_ATTEMPTS):
            room = self._buffers.samples
            count = ctypes.c_uint(0 if room is None else len(room))
            _clear(room)
            code = function(
                device,
                ctypes.c_uint(kind),
                ctypes.c_ulonglong(since_us),
                ctypes.byref(value_type),
                ctypes.byref(count),
                room,
            )
            if code not in (_SUCCESS, _GREW):
                raise pynvml.NVMLError(code)
            # A full array may have been too small; not every driver reports this.
            if room is not None and code == _SUCCESS and count.value < len(room):
                return value_type.value, room[: count.value]
            self._buffers.samples = _larger(pynvml.c_nvmlSample_t, room, count.value)
        raise pynvml.NVMLError(_GREW)

    def nvmlDeviceGetProcessUtilization(self, device: object, since_us: int) -> Sequence[object]:
        """Return the process samples newer than `since_us`; raises NVMLError."""
        function = self._function("nvmlDeviceGetProcessUtilization")
        room = self._buffers.processes
        count = ctypes.c_uint(len(room))
        _clear(room)
        code = function(device, room, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        if code == _GREW:
            # `call_by_name` repeats the call.
            struct = pynvml.c_nvmlProcessUtilizationSample_t
            self._buffers.processes = _larger(struct, room, count.value)
        if code != _SUCCESS:
            raise pynvml.NVMLError(code)
        found: Sequence[object] = room[: count.value]
        return found


def with_own_lists(library: object) -> object:
    """Return the library, wrapped in a `ListingLibrary` if it has C functions.

    A `SystemNvml` is returned unchanged: it is a `ListingLibrary` already.
    """
    return ListingLibrary(library) if hasattr(library, "_nvmlGetFunctionPointer") else library


def _process(
    pid: int, memory_bytes: int, gpu_instance: int, compute_instance: int
) -> pynvml.nvmlFriendlyObject:
    """Return a row of a process list as an object of nvidia-ml-py, so that it can be recorded."""
    # Bypass the constructor, which sets each member in a separate call: this would take longer than
    # the driver's call.
    process = _Process.__new__(_Process)
    process.__dict__ = {
        "pid": pid,
        "usedGpuMemory": None if memory_bytes == _NOT_AVAILABLE else memory_bytes,
        "gpuInstanceId": gpu_instance,
        "computeInstanceId": compute_instance,
    }
    return process


def _clear(room: Any) -> None:  # noqa: ANN401  # ctypes has no types for arrays
    """Fill an array with zeros, because some drivers write fewer rows than they report."""
    if room is not None:
        ctypes.memset(room, 0, ctypes.sizeof(room))


def _larger(struct: Any, room: Any, wanted: int) -> Any:  # noqa: ANN401  # as above
    """Return an array with more than `wanted` elements, at least twice as many as `room`."""
    had = 0 if room is None else len(room)
    return (struct * min(_MAX_ROOM, max(_FIRST_ROOM, wanted + 1, 2 * had)))()
