"""Stands between the agent and a library or `/proc`, and writes down what is said.

Answers and errors pass through as they are. Where it is asked for, what names a machine, a program
or a pod is replaced by a pseudonym, the same one for the same name; models, versions and every
number that is measured stay as they are.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pynvml

from agent.host.procfs import Procfs
from agent.recording.format import RecordingFile, RecordingLine, write_line
from agent.recording.serialize import Handles, to_json
from gpuledger.clock import Clock


class Recorder:
    """Writes lines with their times."""

    def __init__(self, recording: RecordingFile, clock: Clock, *, began_monotonic_ns: int) -> None:
        self._file = recording
        self._clock = clock
        self._began_ns = began_monotonic_ns

    def now_ns(self) -> int:
        """Nanoseconds since the begin."""
        return self._clock.monotonic_ns() - self._began_ns

    def put(self, at_ns: int, **facts: Any) -> None:  # noqa: ANN401  # the fields of a line
        """Write what began at `at_ns` and has ended now."""
        self._file.put(RecordingLine(at_ns=at_ns, took_ns=self.now_ns() - at_ns, **facts))


class RecordingLibrary:
    """Has the functions of the library behind it."""

    def __init__(self, library: Any, recorder: Recorder) -> None:  # noqa: ANN401  # pynvml is an untyped module
        self._library = library
        self._recorder = recorder
        self._handles = Handles()
        self._functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as the library has it
        """Return a function that records its calls, raises AttributeError as the library does."""
        if name not in self._functions:
            self._functions[name] = self._wrap(name)
        return self._functions[name]

    def _wrap(self, name: str) -> Any:  # noqa: ANN401  # as above
        try:
            found = getattr(self._library, name)
        except AttributeError:
            self._recorder.put(self._recorder.now_ns(), call=name, failure="missing")
            raise
        if not callable(found):
            return found
        return lambda *arguments, **named: self._call(name, found, [*arguments, *named.values()])

    def _call(self, name: str, function: Callable[..., Any], arguments: list[Any]) -> Any:  # noqa: ANN401  # as above
        at_ns = self._recorder.now_ns()
        before = self._written(arguments)
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
            after = self._written(arguments)
            filled = (
                after
                if any(isinstance(one, dict) and "handle" not in one for one in after)
                else None
            )
            self._recorder.put(at_ns, call=name, arguments=before, filled=filled, **facts)
        return result

    def _written(self, arguments: list[Any]) -> list[Any]:
        return [to_json(one, self._handles) for one in arguments]


class RecordingProcfs:
    """Has the files behind it."""

    def __init__(self, procfs: Procfs, recorder: Recorder) -> None:
        self._procfs = procfs
        self._recorder = recorder

    def read(self, path: str) -> bytes:
        """Return a file's bytes; raises OSError as the files behind it do."""
        at_ns = self._recorder.now_ns()
        try:
            content = self._procfs.read(path)
        except OSError as error:
            self._recorder.put(at_ns, read=path, error=error.errno or 0)
            raise
        self._recorder.put(at_ns, read=path, result=content.decode("latin-1"))
        return content


_UUID: Final = re.compile(rb"[0-9a-f]{8}([-_])(?:[0-9a-f]{4}\1){3}[0-9a-f]{12}", re.IGNORECASE)
_CONTAINER: Final = re.compile(rb"\b[0-9a-f]{64}\b")
_BUS_ID: Final = re.compile(rb"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]\b")
_BUS_NUMBERS: Final = re.compile(rb'"(domain|bus|device)":\d+')
_CLUSTER: Final = re.compile(rb'"clusterUuid":(?:\{[^}]*\}|"[^"]*")')
_COMMAND: Final = re.compile(r"\(.*\)", re.DOTALL)
_SECRET_CALLS: Final = frozenset(
    {"nvmlDeviceGetSerial", "nvmlSystemGetProcessName", "nvmlDeviceGetBoardPartNumber"}
)
_PROGRAM_FILES: Final = ("/comm", "/cmdline", "/environ")
_NOBODY: Final = b'"clusterUuid":{"array":[' + b",".join([b"0"] * 16) + b"]}"


class Redactor:
    """Writes lines without identities."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], int] = {}

    def write(self, line: RecordingLine) -> bytes:
        """Return a line as it stands in the file."""
        text = write_line(self._without_names(line))
        text = _UUID.sub(self._replace("uuid", _uuid), text)
        text = _CONTAINER.sub(self._replace("container", lambda n, _: f"{n:064x}".encode()), text)
        text = _BUS_ID.sub(self._replace("bus", _bus_id), text)
        if b"busId" in text:
            text = _BUS_NUMBERS.sub(rb'"\1":0', text)
        return _CLUSTER.sub(_NOBODY, text)

    def _without_names(self, line: RecordingLine) -> RecordingLine:
        if not isinstance(line.result, str):
            return line
        result = line.result
        if line.call in _SECRET_CALLS:
            result = f"name-{self._number(line.call or '', result.encode())}"
        elif line.read and line.read.endswith("/stat"):
            # The name in parentheses is a program's.
            result = _COMMAND.sub(lambda found: f"({self._program(found[0][1:-1])})", result)
        elif line.read and line.read.endswith(_PROGRAM_FILES):
            result = f"{self._program(result.strip())}\n"
        return msgspec.structs.replace(line, result=result)

    def _program(self, name: str) -> str:
        return f"program-{self._number('program', name.encode())}"

    def _replace(
        self, kind: str, name: Callable[[int, bytes], bytes]
    ) -> "Callable[[re.Match[bytes]], bytes]":
        # Cgroups and the driver write one identity in different ways.
        return lambda found: name(
            self._number(kind, found[0].lower().replace(b"_", b"-")), found[0]
        )

    def _number(self, kind: str, identity: bytes) -> int:
        return self._known.setdefault((kind, identity), len(self._known) + 1)


def _uuid(number: int, found: bytes) -> bytes:
    return f"00000000-0000-4000-8000-{number:012d}".encode().replace(b"-", found[8:9])


def _bus_id(number: int, found: bytes) -> bytes:
    domain = len(found.partition(b":")[0])
    return f"{0:0{domain}x}:{number % 256:02x}:00.0".encode()
