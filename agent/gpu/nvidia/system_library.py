"""NVIDIA's own library on this machine: where it lies, and samples that are read in one call.

`SystemNvml` has all functions of nvidia-ml-py, as the library that a session takes. It adds two
things, and nothing else of the agent knows of them; libraries that are played have nvidia-ml-py's
names alone.

**Where it lies.** nvidia-ml-py asks the dynamic linker alone. In a container the library may be
where no linker looks: the container toolkit mounts it into the image's folders without renewing the
linker's cache, others mount the driver's whole root. So it is looked for in the folders that are
known, at each start of the library: a driver's container may come up after the agent.

**Samples.** nvidia-ml-py asks for the size and then for the samples, in a new array each time.
Here arrays are kept, one set for each thread: a call that hangs in a thread that was left behind
may yet write into its own. What is answered is in the array until the thread's next question.
"""
# ruff: noqa: N802  # the names are NVML's

import ctypes
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pynvml
import structlog

from agent.gpu.protocol import LibraryLostError
from agent.metrics import NVML_ERRORS

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
        tried = f"nvml_library: {candidates[0]} {'cannot be loaded' if refused else 'is not there'}"
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
    """The arrays of one thread; each grows to what was needed."""

    def __init__(self) -> None:
        self.samples: Any = None
        self.processes: Any = (pynvml.c_nvmlProcessUtilizationSample_t * _FIRST_ROOM)()


class SystemNvml:
    """The functions of nvidia-ml-py over the machine's own library."""

    def __init__(
        self,
        configured: Path | None = None,
        *,
        folders: Sequence[Path] = FOLDERS,
        load: Load = ctypes.CDLL,
    ) -> None:
        """Take the path of the library, where a setting names it."""
        self._configured, self._folders, self._load = configured, folders, load
        self._buffers = _Buffers()
        self.path = ""
        """Where the library was found; empty before."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as nvidia-ml-py has it
        """Return nvidia-ml-py's own; raises AttributeError where it has none of that name."""
        found = getattr(pynvml, name)
        # Looked up once: each tick asks hundreds of times.
        self.__dict__[name] = found
        return found

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
        pynvml.nvmlInit()

    def nvmlDeviceGetSamples(
        self, device: object, kind: int, since_us: int
    ) -> tuple[int, Sequence[object]]:
        """Return the value's type and the samples that are newer; raises NVMLError."""
        function = _function("nvmlDeviceGetSamples")
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
            if code not in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_INSUFFICIENT_SIZE):
                raise pynvml.NVMLError(code)
            # An array that is full may have had no room for all: not every driver says so.
            if room is not None and code == pynvml.NVML_SUCCESS and count.value < len(room):
                return value_type.value, room[: count.value]
            self._buffers.samples = _larger(pynvml.c_nvmlSample_t, room, count.value)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    def nvmlDeviceGetProcessUtilization(self, device: object, since_us: int) -> Sequence[object]:
        """Return the samples of processes that are newer; raises NVMLError."""
        function = _function("nvmlDeviceGetProcessUtilization")
        room = self._buffers.processes
        count = ctypes.c_uint(len(room))
        _clear(room)
        code = function(device, room, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            # The caller asks again.
            struct = pynvml.c_nvmlProcessUtilizationSample_t
            self._buffers.processes = _larger(struct, room, count.value)
        if code != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(code)
        found: Sequence[object] = room[: count.value]
        return found


def _function(name: str) -> Any:  # noqa: ANN401  # a function of C
    """Return a function of the library; raises NVMLError where it has none of that name."""
    return pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001  # it has no public way


def _clear(room: Any) -> None:  # noqa: ANN401  # ctypes has no types for arrays
    """Forget the last answer: where a driver counts more rows than it fills, none is of before."""
    if room is not None:
        ctypes.memset(room, 0, ctypes.sizeof(room))


def _larger(struct: Any, room: Any, wanted: int) -> Any:  # noqa: ANN401  # as above
    """Return an array with room for as many and more, twice as many as before at least."""
    had = 0 if room is None else len(room)
    return (struct * min(_MAX_ROOM, max(_FIRST_ROOM, wanted + 1, 2 * had)))()
