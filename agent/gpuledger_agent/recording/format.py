"""The format of a recording: JSON Lines with a header, then one line per call, ordered by start.

A file is compressed if its name ends in `.gz`. Recordings come from trusted machines: the header
and the structure of the lines are validated, but the recorded answers are not.
"""

import gzip
import zlib
from pathlib import Path
from typing import IO, Annotated, Any, Final, TypeVar

import msgspec

from gpuledger.errors import UserError
from gpuledger.texts import shorten_middle

T = TypeVar("T")

FORMAT: Final = "gpuledger-nvml-recording"
VERSION: Final = 1
READ: Final = "read"
"""The value of `RecordingLine.call` for reading a file of `/proc`."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a recording: the recorded machine, and its clocks at the start."""

    format: str = FORMAT
    """The format's name, always `gpuledger-nvml-recording`."""
    version: Annotated[int, msgspec.Meta(ge=1)] = VERSION
    """Version of the format."""
    time_ns: int
    """Start of the recording, in nanoseconds since the epoch."""
    monotonic_ns: int
    """Start of the recording, in nanoseconds of the clock that is never set."""
    boottime_ns: int
    """Start of the recording, in nanoseconds since boot."""
    sampling_interval_seconds: Annotated[float, msgspec.Meta(gt=0)]
    """Time between two ticks of the recorded agent."""
    is_simulated: bool
    """Whether the recorded machine was simulated from a scenario."""
    is_redacted: bool
    """Whether the identities of machines, programs and pods were replaced by pseudonyms."""
    driver_version: str | None = None
    """The driver's version, if it returns one."""
    nvml_version: str | None = None
    """The version of the NVML library."""
    nvidia_ml_py_version: str | None = None
    """The version of the Python binding, nvidia-ml-py."""
    gpus: list[str] = []
    """Product names of the GPUs, in the driver's order."""


class RecordingLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a function of NVML, or one file of `/proc` that was read."""

    at_ns: int
    """Start of the call, in nanoseconds since the start of the recording."""
    took_ns: int = 0
    """Duration of the call."""
    call: str
    """Name of the function; `read` for a file."""
    arguments: list[Any] = []
    """The function's arguments as they were before the call, or the file's path."""
    filled: list[Any] | None = None
    """The arguments after the call, if one of them is a struct, which the function may fill."""
    error: int | None = None
    """The driver's error code, or the operating system's error number."""
    failure: str | None = None
    """An error without a number: `mismatch` (the driver's library lacks the function), `missing`
    (the Python binding lacks it) or `not_text` (a text that cannot be decoded)."""
    result: Any = None
    """The function's answer, or a file's content as text with one character per byte."""
    is_probe: bool = False
    """Whether the recorder, not the agent, made the call."""


def read_recording(file: Path) -> tuple[RecordingHeader, list[RecordingLine]]:
    """Return a recording's header, and its lines except calls of the recorder itself.

    Raise `UserError` if the file cannot be read or is invalid.
    """
    try:
        with open_file(file, "rb") as opened:
            first, *rest = opened.read().splitlines() or [b""]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read the recording {file}: {error}") from error
    header = _decode(first, RecordingHeader, f"{file}, line 1")
    if header.format != FORMAT or header.version > VERSION:
        raise UserError(
            f"{file}: expected format {FORMAT} up to version {VERSION}, got {header.format[:80]}"
            f" version {header.version}"
        )
    lines = [
        _decode(text, RecordingLine, f"{file}, line {number}")
        for number, text in enumerate(rest, start=2)
    ]
    return header, [line for line in lines if not line.is_probe]


def open_file(file: Path, mode: str) -> IO[bytes]:
    """Open a recording; a file whose name ends in `.gz` is compressed. Raises `OSError`."""
    if file.suffix == ".gz":
        return gzip.GzipFile(file, mode)  # type: ignore[return-value]  # it reads and writes bytes
    return file.open(mode)


def _decode(text: bytes, shape: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(
            f"{where}: invalid line of a recording: {shorten_middle(str(error))};"
            " record the machine again with record-nvml"
        ) from error
