"""Forwards the agent's calls to NVML or `/proc`, and records the calls and their answers.

A `Redactor` replaces the identities of machines, programs and pods by pseudonyms; equal identities
get the same pseudonym. Models, versions and measured numbers are recorded unchanged.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import pynvml

from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger_agent.host.procfs import Procfs
from gpuledger_agent.recording.format import READ, RecordingHeader, RecordingLine, open_file
from gpuledger_agent.recording.serialize import Handles, to_json


def write_line(line: RecordingLine) -> bytes:
    """Return a line of a recording as JSON, without a line break."""
    return orjson.dumps(msgspec.to_builtins(line))


class Recorder:
    """Writes a recording; may be used from several threads."""

    def __init__(
        self,
        file: Path,
        header: RecordingHeader,
        clock: Clock,
        *,
        redact: Callable[[RecordingLine], bytes] | None = None,
    ) -> None:
        self.lines = 0
        """Number of lines written, without the header."""
        self.is_probing = False
        """Whether the calls that are recorded now come from the recorder, not from the agent."""
        self._path = file
        self._clock = clock
        self._began_ns = header.monotonic_ns
        self._error: OSError | None = None
        self._lock = threading.Lock()
        self._write = redact or write_line
        try:
            self._file = open_file(file, "wb")
        except OSError as error:
            raise self._explain(error) from error
        self._write_text(orjson.dumps(msgspec.to_builtins(header)))

    @property
    def has_failed(self) -> bool:
        """Whether writing a line has failed; later lines are then not written."""
        return self._error is not None

    def now_ns(self) -> int:
        """Return nanoseconds since the start of the recording."""
        return self._clock.monotonic_ns() - self._began_ns

    def put(self, at_ns: int, **facts: Any) -> None:  # noqa: ANN401  # the fields of a line
        """Write the line of a call that began at `at_ns` and has just ended.

        `facts` are the line's other fields. If the file is closed, nothing is written. If writing
        fails, `close` raises the error.
        """
        took_ns = self.now_ns() - at_ns
        line = RecordingLine(at_ns=at_ns, took_ns=took_ns, is_probe=self.is_probing, **facts)
        with self._lock:
            if not (self.has_failed or self._file.closed):
                self._write_text(self._write(line))
                self.lines += 1

    def flush(self) -> None:
        """Write all buffered lines to the file.

        Call it before a call of the driver that may end the process.
        """
        with self._lock:
            try:
                if not (self.has_failed or self._file.closed):
                    self._file.flush()
            except OSError as error:
                self._error = self._error or error

    def close(self) -> None:
        """Close the file; raise `UserError` if it is incomplete because writing failed."""
        with self._lock:
            try:
                # Writing the remaining buffers may fail.
                self._file.close()
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise self._explain(self._error) from self._error

    def _write_text(self, text: bytes) -> None:
        try:
            self._file.write(text + b"\n")
        except OSError as error:
            self._error = self._error or error

    def _explain(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {error.strerror}; give another --output")


class RecordingLibrary:
    """Forwards calls to the functions of a library like pynvml, and records the calls."""

    def __init__(self, library: Any, recorder: Recorder) -> None:  # noqa: ANN401  # pynvml is an untyped module
        self._library = library
        self._recorder = recorder
        self._handles = Handles()
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as the library has it
        """Return the library's function with this name, wrapped so that its calls are recorded.

        Raise `AttributeError` if the library lacks the function; that is recorded too.
        """
        # Only the wrapped library itself calls its private functions.
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._functions:
            try:
                found = getattr(self._library, name)
            except AttributeError:
                # Record that the binding lacks the function.
                self._recorder.put(self._recorder.now_ns(), call=name, failure="missing")
                raise
            self._functions[name] = (
                (lambda *arguments, **named: self._call(name, found, [*arguments, *named.values()]))
                if callable(found)
                else found
            )
        return self._functions[name]

    def _call(self, name: str, function: Callable[..., Any], arguments: list[Any]) -> Any:  # noqa: ANN401  # as above
        at_ns = self._recorder.now_ns()
        # Convert the arguments before the call, because the function may modify them.
        before = [to_json(argument, self._handles) for argument in arguments]
        facts: dict[str, Any] = {}
        try:
            result = function(*arguments)
            facts["result"] = to_json(result, self._handles)
        except pynvml.NVMLLibraryMismatchError:
            facts["failure"] = "mismatch"
            raise
        except pynvml.NVMLError as error:
            facts["error"] = error.value
            raise
        except UnicodeDecodeError:
            facts["failure"] = "not_text"
            raise
        finally:
            after = [to_json(argument, self._handles) for argument in arguments]
            # A handle is written as a mapping too, but functions never modify it.
            has_struct = any(isinstance(item, dict) and "handle" not in item for item in after)
            self._recorder.put(
                at_ns, call=name, arguments=before, filled=after if has_struct else None, **facts
            )
        return result


class RecordingProcfs:
    """Reads files of `/proc`, and records their contents."""

    def __init__(self, procfs: Procfs, recorder: Recorder) -> None:
        self._procfs = procfs
        self._recorder = recorder

    def read(self, path: str) -> bytes:
        """Return a file's bytes; raises `OSError` as the wrapped reader does."""
        at_ns = self._recorder.now_ns()
        try:
            content = self._procfs.read(path)
        except OSError as error:
            self._recorder.put(at_ns, call=READ, arguments=[path], error=error.errno or 0)
            raise
        self._recorder.put(at_ns, call=READ, arguments=[path], result=content.decode("latin-1"))
        return content


_UUID: Final = re.compile(rb"[0-9a-f]{8}([-_])(?:[0-9a-f]{4}\1){3}[0-9a-f]{12}", re.IGNORECASE)
_CONTAINER: Final = re.compile(rb"\b[0-9a-f]{64}\b")
_BUS_ID: Final = re.compile(rb"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\b")
_BUS_NUMBERS: Final = re.compile(rb'"(domain|bus|device)":\d+')
_CLUSTER: Final = re.compile(rb'"clusterUuid":(?:\{[^}]*\}|"[^"]*")')
# Identities of a chassis and of its GPUs in the fabric: texts, or bytes that are not text.
_RACK: Final = re.compile(
    rb'"(chassisSerialNumber|rackGuid|ibGuid)":(?:\{[^}]*\}|"(?:[^"\\]|\\.)*")'
)
_COMMAND: Final = re.compile(r"\(.*\)", re.DOTALL)
_SECRET_CALLS: Final = frozenset(
    {"nvmlDeviceGetSerial", "nvmlSystemGetProcessName", "nvmlDeviceGetBoardPartNumber"}
)
_PROGRAM_FILES: Final = ("/comm", "/cmdline", "/environ")
_NO_CLUSTER: Final = b'"clusterUuid":{"array":[' + b",".join([b"0"] * 16) + b"]}"


class Redactor:
    """Replaces the identities of machines, programs and pods in a recording by pseudonyms."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], int] = {}

    def write(self, line: RecordingLine) -> bytes:
        """Return a line of a recording as JSON, with pseudonyms instead of identities."""
        text = write_line(self._without_names(line))

        def number(kind: str, found: re.Match[bytes]) -> int:
            # Cgroups and the driver write the same identity in different formats.
            return self._number(kind, found[0].lower().replace(b"_", b"-"))

        def uuid(found: re.Match[bytes]) -> bytes:
            pseudonym = f"00000000-0000-4000-8000-{number('uuid', found):012d}"
            return pseudonym.encode().replace(b"-", found[1])

        def bus_id(found: re.Match[bytes]) -> bytes:
            # Keep the domain's number of digits: 4 in /proc, 8 in NVML.
            digits = len(found[0].partition(b":")[0])
            return f"{0:0{digits}x}:{number('bus', found) % 256:02x}:00.0".encode()

        text = _UUID.sub(uuid, text)
        text = _CONTAINER.sub(lambda found: f"{number('container', found):064x}".encode(), text)
        text = _BUS_ID.sub(bus_id, text)
        # The struct also contains the PCI address as numbers.
        if b"busId" in text:
            text = _BUS_NUMBERS.sub(rb'"\1":0', text)
        text = _RACK.sub(lambda found: b'"%s":{"ascii":""}' % found[1], text)
        return _CLUSTER.sub(_NO_CLUSTER, text)

    def _without_names(self, line: RecordingLine) -> RecordingLine:
        if not isinstance(line.result, str):
            return line
        result = line.result
        path = str(line.arguments[0]) if line.call == READ else ""
        if line.call in _SECRET_CALLS:
            result = f"name-{self._number(line.call, result.encode())}"
        elif path.endswith("/stat"):
            # The program's name is in parentheses and may contain parentheses itself.
            result = _COMMAND.sub(
                lambda found: f"(program-{self._number('program', found[0][1:-1].encode())})",
                result,
            )
        elif path.endswith(_PROGRAM_FILES):
            result = f"program-{self._number('program', result.strip().encode())}\n"
        return msgspec.structs.replace(line, result=result)

    def _number(self, kind: str, identity: bytes) -> int:
        return self._known.setdefault((kind, identity), len(self._known) + 1)
