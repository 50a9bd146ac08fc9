"""Stands between the agent and a library or `/proc`, and writes down what is said.

Answers and errors pass through as they are.
"""

from collections.abc import Callable
from typing import Any

import pynvml

from agent.host.procfs import Procfs
from agent.recording.format import RecordingLine, Tape
from agent.recording.serialize import Handles, to_json
from gpuledger.clock import Clock


class Recorder:
    """Writes lines with their times."""

    def __init__(self, tape: Tape, clock: Clock, *, began_monotonic_ns: int) -> None:
        self._tape = tape
        self._clock = clock
        self._began_ns = began_monotonic_ns

    def now_ns(self) -> int:
        """Nanoseconds since the begin."""
        return self._clock.monotonic_ns() - self._began_ns

    def put(self, at_ns: int, **facts: Any) -> None:  # noqa: ANN401  # the fields of a line
        """Write what began at `at_ns` and has ended now."""
        self._tape.put(RecordingLine(at_ns=at_ns, took_ns=self.now_ns() - at_ns, **facts))


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
