"""Replays a recording: the same functions and files, with their answers at the same times.

The recorded answers to a query (a function with its arguments, or a file) are returned in order,
each at the recorded time. Between two answers, the earlier one is returned again, and answers whose
time has passed are skipped. The driver's ring buffers are an exception: no entry is skipped, and a
call returns all entries that the agent has not read yet. After the last line, the replay reports
that the driver is not loaded, so that ticks do not show values that were never measured.

The agent's ticks do not coincide with the recorded ticks, so an answer may be returned half a
sampling interval before its time.
"""

import errno
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import pynvml
import structlog

from gpuledger.clock import NS_PER_SECOND, Clock, SystemClock
from gpuledger_agent.recording.format import (
    READ,
    RecordingHeader,
    RecordingLine,
    read_recording,
)
from gpuledger_agent.recording.serialize import Handles, fill, from_json, to_json

_METRICS: Final = "nvmlGpmMetricsGet"
# Index of the argument that is the sample to fill.
_SAMPLES: Final[Mapping[str, int]] = {"nvmlGpmSampleGet": 1, "nvmlGpmMigSampleGet": 2}
# Functions that read the driver's buffers, with the index of the argument that is the newest time
# stamp seen.
_BUFFERS: Final[Mapping[str, int]] = {
    "nvmlDeviceGetSamples": 2,
    "nvmlDeviceGetProcessUtilization": 1,
    "nvmlDeviceGetProcessesUtilizationInfo": 1,
}
_DAY_US: Final = 86_400_000_000
_TIMES: Final = frozenset(
    {"timeStamp", "timestamp", "timestampUsec", "startTime", "lastSeenTimeStamp"}
)
_ALLOCATION: Final = "nvmlGpmSampleAlloc"
_log = structlog.get_logger(__name__)


class ReplayClock:
    """The clocks of a replay.

    The wall clock shows the present time; the other clocks continue those of the recorded machine.
    """

    def __init__(self, header: RecordingHeader, clock: Clock) -> None:
        self._clock = clock
        self._header = header
        self._time_ns = clock.time_ns()
        self._monotonic_ns = clock.monotonic_ns()
        self.moved_us = (self._time_ns - header.time_ns) // 1000
        """Time between the recording and the replay by the wall clock, in microseconds."""

    def since_begin_ns(self) -> int:
        """Return nanoseconds since the start of the replay."""
        return self._clock.monotonic_ns() - self._monotonic_ns

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch, by the real wall clock."""
        passed = self._clock.time_ns() - self._time_ns
        return self._header.time_ns + self.moved_us * 1000 + passed

    def monotonic_ns(self) -> int:
        """Return nanoseconds of the recorded machine's monotonic clock."""
        return self._header.monotonic_ns + self.since_begin_ns()

    def boottime_ns(self) -> int:
        """Return nanoseconds since the recorded machine's boot."""
        return self._header.boottime_ns + self.since_begin_ns()

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await self._clock.sleep(seconds)


@dataclass
class _Row:
    """The recorded answers to one query, in order, and the position of the replay in them."""

    lines: list[RecordingLine] = field(default_factory=list)
    index: int = -1

    def advance(self, now_ns: int, slack_ns: int) -> tuple[RecordingLine, int]:
        """Return the answer at `now_ns`, and the index of the first answer not returned before.

        An answer may be returned up to `slack_ns` before its time.
        """
        # Advance by at most one answer that is early, and past all answers that are overdue.
        first = self.index + 1
        if self.index < 0:
            self.index = 0
        elif self._is_due(now_ns + slack_ns):
            self.index += 1
        while self._is_due(now_ns - slack_ns):
            self.index += 1
        return self.lines[self.index], first

    def _is_due(self, now_ns: int) -> bool:
        return self.index + 1 < len(self.lines) and self.lines[self.index + 1].at_ns <= now_ns


class _Rows:
    """The recorded answers to all queries; may be used from several threads.

    Each query is identified by a key, its question.
    """

    def __init__(self, clock: ReplayClock, *, slack_ns: int) -> None:
        self._clock = clock
        self._slack_ns = slack_ns
        self._rows: dict[Any, _Row] = {}
        self._lock = threading.Lock()

    def add(self, question: Any, line: RecordingLine) -> None:  # noqa: ANN401  # any key that identifies the query
        self._rows.setdefault(question, _Row()).lines.append(line)

    def next(self, question: Any) -> list[RecordingLine]:  # noqa: ANN401  # as above
        """Return the answers to a query since the last call, ending with the answer at this time.

        The result is empty if no answer was recorded.
        """
        row = self._rows.get(question)
        if row is None:
            return []
        with self._lock:
            line, first = row.advance(self._clock.since_begin_ns(), self._slack_ns)
            return [*row.lines[first : row.index], line]


class ReplayLibrary:
    """A library with the functions of NVML, which return the recorded answers."""

    def __init__(
        self, header: RecordingHeader, lines: list[RecordingLine], clock: ReplayClock
    ) -> None:
        self._clock = clock
        self._header = header
        self._handles = Handles()
        self._devices: dict[int, Any] = {}
        slack_ns = round(header.sampling_interval_seconds * NS_PER_SECOND / 2)
        self._rows = _Rows(clock, slack_ns=slack_ns)
        self._end_ns = max((line.at_ns for line in lines), default=0) + slack_ns
        self._has_ended = False
        self._missing = {line.call for line in lines if line.failure == "missing"}
        recorded_devices: dict[int, Any] = {}
        for line in lines:
            if line.call != READ:
                question = _question(line.call, line.arguments, recorded_devices)
                self._rows.add(question, line)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function with this name, which returns recorded answers.

        Raise `AttributeError` if the recorded library lacked the function.
        """
        if not name.startswith("nvml") or name in self._missing:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401  # as the library has it
        if self._clock.since_begin_ns() > self._end_ns:
            if not self._has_ended:
                self._has_ended = True
                seconds = round(self._end_ns / NS_PER_SECOND, 1)
                _log.warning("recording_ended", recorded_seconds=seconds)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        written = [to_json(argument, self._handles) for argument in arguments]
        lines = self._rows.next(_question(name, written, self._devices))
        if not lines:
            # The recording does not contain this call, so the answer is unknown.
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        # The agent may open the library, and thus allocate samples, more often than recorded.
        if name == _ALLOCATION and lines[-1].error is None:
            return self._handles.another(lines[-1].result.get("of"))
        if name in _BUFFERS:
            return self._buffered(name, lines, arguments[_BUFFERS[name]])
        return self._answer(lines[-1], arguments)

    def _answer(self, line: RecordingLine, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401  # as above
        """Fill structs among the arguments as recorded; return or raise the recorded result."""
        for argument, filled in zip(arguments, line.filled or (), strict=False):
            if isinstance(filled, dict):
                struct = filled.get("byref", filled)
                if isinstance(struct, dict) and "fields" in struct:
                    target = getattr(argument, "_obj", argument)
                    # The installed binding may have another version of the struct.
                    if type(target).__name__ != struct.get("struct"):
                        raise pynvml.NVMLLibraryMismatchError(f"{line.call}: another struct")
                    fill(target, struct["fields"], self._handles, self._move)
        if line.failure == "not_text":
            raise UnicodeDecodeError("utf-8", b"", 0, 0, "as recorded")
        if line.failure:
            raise pynvml.NVMLLibraryMismatchError(f"{line.call}: as recorded")
        if line.error is not None:
            raise pynvml.NVMLError(line.error)
        return from_json(line.result, self._handles, self._move)

    def _buffered(self, name: str, lines: list[RecordingLine], last_seen_us: int) -> Any:  # noqa: ANN401  # as above
        """Return the entries of a ring buffer in `lines` that are newer than `last_seen_us`."""
        answers = [self._answer(line, ()) for line in lines if line.error is None]
        if not answers:
            return self._answer(lines[-1], ())
        # `nvmlDeviceGetSamples` returns the type of the values before the values.
        is_typed = name == "nvmlDeviceGetSamples"
        items = [item for answer in answers for item in (answer[1] if is_typed else answer)]
        newer = [item for item in items if item.timeStamp > last_seen_us]
        # The driver raises this error too if its buffer has no new entries.
        if items and not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return (answers[-1][0], newer) if is_typed else newer

    def _move(self, name: str, value: int) -> int:
        """Return a recorded number; if it is a wall-clock time, move it to the replay's time."""
        # Move times on the wall clock only; times since boot are much smaller numbers.
        near = abs(value - self._header.time_ns // 1000) < _DAY_US
        return value + self._clock.moved_us if name in _TIMES and near else value


class ReplayProcfs:
    """Reads files of `/proc` from a recording."""

    def __init__(
        self, header: RecordingHeader, lines: list[RecordingLine], clock: ReplayClock
    ) -> None:
        self._rows = _Rows(
            clock, slack_ns=round(header.sampling_interval_seconds * NS_PER_SECOND / 2)
        )
        for line in lines:
            if line.call == READ:
                self._rows.add(line.arguments[0], line)

    def read(self, path: str) -> bytes:
        """Return the recorded bytes of a file.

        Raise `OSError` if the recorded agent could not read the file or did not read it.
        """
        lines = self._rows.next(path)
        number = lines[-1].error if lines else errno.ENOENT
        if number is not None:
            raise OSError(number, os.strerror(number), path)
        return str(lines[-1].result).encode("latin-1")


def _question(name: str, arguments: list[Any], devices: dict[int, Any]) -> Any:  # noqa: ANN401  # a key, whose parts are the library's
    """Return the key of a query: the function's name, and its arguments except structs to fill.

    `devices` contains the device of each GPM sample, by the sample's handle; the function adds to
    it.
    """
    if name == _METRICS:
        # The query's device is the device of its second sample.
        struct = arguments[0]
        sample = struct.get("byref", struct)["fields"]["sample2"]
        return name, devices.get(int(sample["handle"]))
    others = list(arguments)
    if name in _BUFFERS:
        # The newest time stamp seen differs between replay and recording.
        del others[_BUFFERS[name]]
    if name in _SAMPLES:
        sample = others.pop(_SAMPLES[name])
        devices[sample["handle"]] = orjson.dumps(others)
    plain = [
        argument
        for argument in others
        if not (isinstance(argument, dict) and ("byref" in argument or "struct" in argument))
    ]
    return name, orjson.dumps(plain)


def open_recording(file: Path) -> tuple[ReplayClock, ReplayLibrary, ReplayProcfs]:
    """Read a recording and start to replay it; raise `UserError` if the file is invalid."""
    header, lines = read_recording(file)
    clock = ReplayClock(header, SystemClock())
    return clock, ReplayLibrary(header, lines, clock), ReplayProcfs(header, lines, clock)
