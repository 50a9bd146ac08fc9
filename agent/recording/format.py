"""The file of a recording: a header, then one line a call, in the order in which calls began.

A name that ends in `.gz` means a compressed file.
"""

import gzip
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final, TypeVar

import msgspec
import orjson

from agent.recording.serialize import build
from agent.recording.shapes import is_played, refuse_arguments, refuse_result
from gpuledger.errors import UserError
from gpuledger.texts import shorten_middle

T = TypeVar("T")

FORMAT: Final = "gpuledger-nvml-recording"
VERSION: Final = 1
_MAX_TICK_SECONDS: Final = 3600
_MAX_ERROR: Final = 9999  # NVML's and the operating system's numbers have three digits


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of. Clocks are those at its begin."""

    format: str = FORMAT
    """Always `gpuledger-nvml-recording`."""
    version: Annotated[int, msgspec.Meta(ge=1)] = VERSION
    """Of the format."""
    time_ns: int
    """Nanoseconds since the epoch."""
    monotonic_ns: int
    """Nanoseconds of the clock that is never set."""
    boottime_ns: int
    """Nanoseconds since boot."""
    tick_seconds: Annotated[float, msgspec.Meta(gt=0, le=_MAX_TICK_SECONDS)]
    """Time between two ticks of the agent that was recorded."""
    is_simulated: bool
    """Whether a scenario was played instead of a machine read."""
    is_redacted: bool
    """Whether identities were replaced."""
    driver_version: str | None = None
    """The driver, where it says so."""
    nvml_version: str | None = None
    """The library."""
    nvidia_ml_py_version: str | None = None
    """The Python binding."""
    gpus: list[str] = []
    """Product names, in the driver's order."""


class RecordingLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of the library, or one file that was read."""

    at_ns: int
    """When it began, since the begin of the recording, by the monotonic clock."""
    took_ns: int = 0
    """How long it took."""
    call: str | None = None
    """The function; `None` where a file was read."""
    read: str | None = None
    """The file; `None` where a function was called."""
    arguments: list[Any] = []
    """Behind the function's name, as they were before the call."""
    filled: list[Any] | None = None
    """The arguments after the call, where the function wrote into one."""
    error: Annotated[int, msgspec.Meta(ge=0, le=_MAX_ERROR)] | None = None
    """The driver's error code, or the number of the operating system's error."""
    failure: str | None = None
    """What went wrong without such a number: `mismatch`, `missing` or `not_text`."""
    result: Any = None
    """The answer; the text of a file."""
    is_probe: bool = False
    """Whether it was asked for the record's sake and not by the agent."""


class RecordingFile:
    """A recording that is being made; safe to write to from several threads."""

    def __init__(
        self,
        file: Path,
        header: RecordingHeader,
        *,
        redact: Callable[[RecordingLine], bytes] | None = None,
    ) -> None:
        self.lines = 0
        """Lines written, the header's not counted."""
        self.is_probing = False
        """Whether what is called now is no call of the agent."""
        self.has_failed = False
        """Whether the disk has refused a line; then no later one is kept."""
        self._path = file
        self._error: OSError | None = None
        self._lock = threading.Lock()
        self._write = redact or write_line
        try:
            self._file = _open(file, "wb")
        except OSError as error:
            raise self._explain(error) from error
        self._write_text(orjson.dumps(msgspec.to_builtins(header)))

    def put(self, line: RecordingLine) -> None:
        """Write a line; one that comes after the end is too late to be kept.

        A disk that refuses it fails nobody's call of the library: `close` tells.
        """
        if self.is_probing:
            line = msgspec.structs.replace(line, is_probe=True)
        with self._lock:
            if not (self.has_failed or self._file.closed):
                self._write_text(self._write(line))
                self.lines += 1

    def close(self) -> None:
        """End the file; raises UserError where it is not whole."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self._fail(error)
        if self._error is not None:
            raise self._explain(self._error) from self._error

    def _write_text(self, text: bytes) -> None:
        try:
            self._file.write(text + b"\n")
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.has_failed = True
        self._error = self._error or error

    def _explain(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {error.strerror}; give --out another place")


def write_line(line: RecordingLine) -> bytes:
    """Return a line as it stands in the file."""
    return orjson.dumps(msgspec.to_builtins(line))


def read_recording(file: Path) -> tuple[RecordingHeader, list[RecordingLine]]:
    """Read a recording, the probes left out; raises UserError where it is none."""

    def read_lines() -> Iterator[bytes]:
        # Whatever the file is, gzip may say so at any line.
        try:
            with _open(file, "rb") as opened:
                yield from opened
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"cannot read the recording {file}: {error}") from error

    lines = read_lines()
    header = _decode(next(lines, b""), RecordingHeader, f"{file}, line 1")
    if header.format != FORMAT or header.version > VERSION:
        raise UserError(
            f"{file}: expected format {FORMAT} up to version {VERSION}, got {header.format[:80]}"
            f" version {header.version}"
        )
    read = [_decode_line(line, f"{file}, line {at}") for at, line in enumerate(lines, start=2)]
    return header, [line for line in read if _is_played(line)]


def _is_played(line: RecordingLine) -> bool:
    return not line.is_probe and (line.call is None or is_played(line.call))


def _decode_line(text: bytes, where: str) -> RecordingLine:
    line = _decode(text, RecordingLine, where)
    if _is_played(line):
        try:
            _refuse_impossible(line)
        except ValueError as error:
            raise UserError(
                f"{where}: {shorten_middle(str(error))}; record the machine again with record-nvml"
            ) from error
    return line


def _refuse_impossible(line: RecordingLine) -> None:
    """Raise ValueError where a line holds what no library and no file can have given."""
    has_answer = line.error is None and line.failure is None
    if line.read is not None and has_answer:
        _refuse_text(line.result)
    if line.call is None:
        return
    refuse_arguments(line.call, line.arguments)
    for filled in line.filled or ():
        build(filled)
    if has_answer:
        refuse_result(line.call, line.result)


def _refuse_text(result: object) -> None:
    """Raise ValueError where this is no file's content, a character a byte."""
    if not isinstance(result, str) or any(character > "\xff" for character in result):
        raise ValueError("a file's text is written a character a byte")


def _decode(text: bytes, shape: type[T], where: str) -> T:
    try:
        return msgspec.convert(orjson.loads(text), shape)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise UserError(
            f"{where}: no line of a recording: {shorten_middle(str(error))}; record-nvml makes them"
        ) from error


def _open(file: Path, mode: str) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.GzipFile(file, mode)  # type: ignore[return-value]  # it reads and writes bytes
    return file.open(mode)
