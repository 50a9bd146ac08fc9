"""The driver's library as the agent calls it: where it lies, and what is read in one call.

`ListingLibrary` has all functions of the library behind it, and its own for the lists of processes.
`SystemNvml` is one over nvidia-ml-py and this machine's own library, which it finds; it reads
samples in one call as well. A library that is played and has functions of C below the binding's has
its lists read here too; one that is nothing but functions of Python, as a recording, goes on as it
is. What is answered has nvidia-ml-py's form, and nothing else of the agent knows of all this.

**Where it lies.** nvidia-ml-py asks the dynamic linker alone. In a container the library may be
where no linker looks: the container toolkit mounts it into the image's folders without renewing the
linker's cache, others mount the driver's whole root. So it is looked for in the folders that are
known, at each start of the library: a driver's container may come up after the agent.

**Lists.** nvidia-ml-py calls the driver twice for a list: for its size, and for the list. Of two
kinds of drivers it is wrong. Some answer the call for the size with success: then it sees no
process at all. Those of 535.43 to 535.86 write rows of 32 bytes, which it reads as 24: from the
second row on it takes parts of other members for a pid. So the driver is called here, with room for
more rows than there mostly are.

**Samples.** nvidia-ml-py asks for the size and then for the samples, in a new array each time.

Buffers and arrays are kept, one set for each thread: a call that hangs in a thread that was left
behind may yet write into its own. Samples are in the array until the thread's next question.
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
        # Where the container toolkit mounts it, by the image's distribution.
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        # The driver's container of the GPU Operator.
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
        "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
        "/run/nvidia/driver/usr/lib64",
        # GKE: as its device plugin mounts it, and on the node.
        "/usr/local/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/lib64",
        # WSL.
        "/usr/lib/wsl/lib",
    )
)
"""Where the library is looked for, after the dynamic linker."""
_MAPS: Final = Path("/proc/self/maps")
_ATTEMPTS: Final = 3
# Of rows; the longest ring buffer that is known has 4,096 samples.
_FIRST_ROOM: Final = 64
_MAX_ROOM: Final = 1 << 16
_ROW: Final = Struct("@IQII")
"""Pid, bytes of memory, GPU instance and compute instance, as a C compiler lays them out."""
_PROTECTED_ROW: Final = Struct("@IQIIQ")
"""The same with the bytes of protected memory behind it."""
_PROTECTED_DRIVERS: Final = DriverRange(DriverVersion(535, 43), DriverVersion(535, 86))
_NOT_AVAILABLE: Final = 2**64 - 1
_FIRST_ROOM_BYTES: Final = 64 * _PROTECTED_ROW.size
# More than run on any GPU: a driver that asks for more is not believed.
_MAX_ROWS: Final = 65_536
_SUCCESS: Final = pynvml.NVML_SUCCESS
_GREW: Final = pynvml.NVML_ERROR_INSUFFICIENT_SIZE

_Process: Final[Any] = pynvml.nvmlFriendlyObject

CFunction = Callable[..., int]
"""A function of the driver's library; returns NVML's code."""

Load = Callable[[str], Any]
"""Loads a library by its name or path; raises OSError."""


class LibraryNotFoundError(LibraryLostError):
    """The driver's library is nowhere, or cannot be loaded."""


def load_library(
    configured: Path | None, *, folders: Sequence[Path] = FOLDERS, load: Load = ctypes.CDLL
) -> tuple[Any, str]:
    """Return the loaded library, and its path as far as that is known.

    Where `configured` names it, a file or its folder, no other one is tried. Raises
    `LibraryNotFoundError`, which says what was tried.
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
            # One that is there and cannot be loaded is what somebody has to look at.
            if Path(candidate).exists():
                refused.append(f"{candidate}: {error}")
    if configured is not None:
        tried = (
            f"nvml_library: {candidates[0]} {'cannot be loaded' if refused else 'is not there'};"
            f" set it to the driver's {LIBRARY} or to the folder in which that is"
        )
    else:
        tried = (
            f"{LIBRARY} is found neither by the dynamic linker nor in"
            f" {', '.join(map(str, folders))}; set nvml_library to its path"
        )
    raise LibraryNotFoundError("; ".join([tried, *refused]))


def _path_of(name: str) -> str:
    """Return where the dynamic linker has found a library; its name where that is not known."""
    stem = name.partition(".so")[0]
    try:
        mapped = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
        paths = (fields[5] for fields in mapped if len(fields) > 5)  # noqa: PLR2004  # the columns of maps
        return next((path for path in paths if Path(path).name.startswith(f"{stem}.so")), name)
    except OSError:
        return name


class _Buffers(threading.local):
    """The buffers of one thread; each grows to what was needed."""

    def __init__(self) -> None:
        self.count = ctypes.c_uint()
        self.count_reference = ctypes.byref(self.count)
        self.rows = ctypes.create_string_buffer(_FIRST_ROOM_BYTES)
        self.samples: Any = None
        self.processes: Any = (pynvml.c_nvmlProcessUtilizationSample_t * _FIRST_ROOM)()


class ListingLibrary:
    """Has the functions of nvidia-ml-py behind it, and its own for the lists of processes."""

    def __init__(self, library: object) -> None:
        self._library: Any = library
        self._buffers = _Buffers()
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
                # Most lists of graphics and of MPS are empty.
                if not count:
                    return []
                written = memoryview(rows)[: count * row.size]
                # Rows that it counted and did not write, as of a process that has just ended, are
                # zeros all through; one of pid 0 that has anything else was read wrongly.
                return [_process(*one[:4]) for one in row.iter_unpack(written) if any(one)]
            if code not in (_SUCCESS, _GREW):
                raise pynvml.NVMLError(code)
            if count > _MAX_ROWS:
                break
            # More than are there now: further ones may come before the next call.
            buffers.rows = ctypes.create_string_buffer(max(room, count) * 2 * _PROTECTED_ROW.size)
        raise pynvml.NVMLError(_GREW)

    def _function(self, name: str) -> CFunction:
        """Return a function of the driver's; raises NVMLError where it has none of that name."""
        found: CFunction = self._library._nvmlGetFunctionPointer(name)  # noqa: SLF001  # it has no public way
        return found


class SystemNvml(ListingLibrary):
    """The functions of nvidia-ml-py over the machine's own library."""

    def __init__(
        self,
        configured: Path | None = None,
        *,
        folders: Sequence[Path] = FOLDERS,
        load: Load = ctypes.CDLL,
    ) -> None:
        """Take the path of the library, where a setting names it."""
        super().__init__(pynvml)
        self._configured, self._folders, self._load = configured, folders, load
        self.path = ""
        """Where the library was found; empty before."""

    @override
    def nvmlInit(self) -> None:
        """Start the library, loaded from where it lies; raises LibraryNotFoundError."""
        # One that is loaded stays: a process cannot exchange it, nor can nvidia-ml-py.
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
        """Return the value's type and the samples that are newer; raises NVMLError."""
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
            # An array that is full may have had no room for all: not every driver says so.
            if room is not None and code == _SUCCESS and count.value < len(room):
                return value_type.value, room[: count.value]
            self._buffers.samples = _larger(pynvml.c_nvmlSample_t, room, count.value)
        raise pynvml.NVMLError(_GREW)

    def nvmlDeviceGetProcessUtilization(self, device: object, since_us: int) -> Sequence[object]:
        """Return the samples of processes that are newer; raises NVMLError."""
        function = self._function("nvmlDeviceGetProcessUtilization")
        room = self._buffers.processes
        count = ctypes.c_uint(len(room))
        _clear(room)
        code = function(device, room, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        if code == _GREW:
            # The caller asks again.
            struct = pynvml.c_nvmlProcessUtilizationSample_t
            self._buffers.processes = _larger(struct, room, count.value)
        if code != _SUCCESS:
            raise pynvml.NVMLError(code)
        found: Sequence[object] = room[: count.value]
        return found


def with_own_lists(library: object) -> object:
    """Return the library, its lists of processes read here where it has functions of C.

    This machine's own, `SystemNvml`, reads them already and shows no such functions.
    """
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


def _clear(room: Any) -> None:  # noqa: ANN401  # ctypes has no types for arrays
    """Forget the last answer: where a driver counts more rows than it fills, none is of before."""
    if room is not None:
        ctypes.memset(room, 0, ctypes.sizeof(room))


def _larger(struct: Any, room: Any, wanted: int) -> Any:  # noqa: ANN401  # as above
    """Return an array with room for as many and more, twice as many as before at least."""
    had = 0 if room is None else len(room)
    return (struct * min(_MAX_ROOM, max(_FIRST_ROOM, wanted + 1, 2 * had)))()
