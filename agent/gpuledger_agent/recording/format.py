"""The file of a recording: a header, then one line a call, in the order in which calls began.

A name that ends in `.gz` means a compressed file.

A recording may come from anybody, and what is played goes where the driver's own answers go: an
answer of another kind would end a GPU's thread there, or be followed as an address. So reading
refuses every line whose arguments, or whose answer, its function of NVML cannot have had; `_SHAPES`
says which answers these are.
"""

import ctypes
import errno
import gzip
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import IO, Annotated, Any, Final, TypeVar

import msgspec
import orjson
import pynvml

from gpuledger.errors import UserError
from gpuledger.texts import shorten_middle
from gpuledger_agent.recording.serialize import Json, build, is_handle

T = TypeVar("T")

FORMAT: Final = "gpuledger-nvml-recording"
VERSION: Final = 1
METRICS: Final = "nvmlGpmMetricsGet"
SAMPLES: Final[Mapping[str, int]] = MappingProxyType(
    {"nvmlGpmSampleGet": 1, "nvmlGpmMigSampleGet": 2}
)
"""Functions that fill a sample of the chip's counters, with the index of the sample's argument."""
BUFFERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "nvmlDeviceGetSamples": 2,
        "nvmlDeviceGetProcessUtilization": 1,
        "nvmlDeviceGetProcessesUtilizationInfo": 1,
    }
)
"""Functions that read the driver's buffers, with the index of the newest time stamp seen."""
_MAX_TEXT_CHARACTERS: Final = 1024  # NVML's own longest text has 256 bytes
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


def read_recording(file: Path) -> tuple[RecordingHeader, list[RecordingLine]]:
    """Return a recording, the probes left out; raise UserError where the file is none."""

    def read_lines() -> Iterator[bytes]:
        # Whatever the file is, gzip may say so at any line.
        try:
            with open_file(file, "rb") as opened:
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
    played = []
    for number, text in enumerate(lines, start=2):
        where = f"{file}, line {number}"
        line = _decode(text, RecordingLine, where)
        # A probe, and what the agent does not call, is never played, so it may hold anything.
        if line.is_probe or not (line.call is None or is_played(line.call)):
            continue
        try:
            _refuse_impossible(line)
        except ValueError as error:
            raise UserError(
                f"{where}: {shorten_middle(str(error))}; record the machine again with record-nvml"
            ) from error
        played.append(line)
    return header, played


def open_file(file: Path, mode: str) -> IO[bytes]:
    """Open a recording, compressed where its name says so; raise OSError."""
    # To be read, a FIFO would be waited for, and a device has no end.
    if mode == "rb" and file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    if file.suffix == ".gz":
        return gzip.GzipFile(file, mode)  # type: ignore[return-value]  # it reads and writes bytes
    return file.open(mode)


def _decode(text: bytes, shape: type[T], where: str) -> T:
    try:
        return msgspec.convert(orjson.loads(text), shape)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise UserError(
            f"{where}: no line of a recording: {shorten_middle(str(error))}; record-nvml makes them"
        ) from error


def _refuse_impossible(line: RecordingLine) -> None:
    """Raise ValueError where a line holds a result that no call and no file can have."""
    has_answer = line.error is None and line.failure is None
    if line.read is not None and has_answer:
        text = line.result
        if not isinstance(text, str) or any(character > "\xff" for character in text):
            raise ValueError("a file's text is written a character a byte")
    if line.call is None:
        return
    refuse_arguments(line.call, line.arguments)
    for filled in line.filled or ():
        build(filled)
    if has_answer:
        refuse_result(line.call, line.result)


def is_played(function: str) -> bool:
    """Return whether the agent calls a function."""
    return function in _SHAPES


def refuse_arguments(function: str, arguments: list[Json]) -> None:
    """Raise ValueError where a call cannot have had these arguments."""
    built = [build(argument) for argument in arguments]
    index = BUFFERS.get(function, SAMPLES.get(function, 0 if function == METRICS else -1))
    if index >= len(arguments):
        raise ValueError(f"{function} is recorded with {len(arguments)} arguments")
    if function in SAMPLES and not is_handle(built[index]):
        raise ValueError(f"{function} is recorded without the handle of its sample")
    if function == METRICS:
        # As written: of a struct of metrics nothing else is filled when it is read.
        struct = arguments[0].get("byref", arguments[0]) if isinstance(arguments[0], dict) else {}
        fields = struct.get("fields", {})
        if not all(is_handle(build(fields.get(name))) for name in ("sample1", "sample2")):
            raise ValueError(f"{function} is recorded without its samples")


def refuse_result(function: str, result: Json) -> None:
    """Raise ValueError where a function cannot have returned this."""
    if not _fits(build(result), _SHAPES[function]):
        raise ValueError(f"{function} cannot have given this result")


class Plain(Enum):
    """The shapes of single values."""

    WHOLE = "whole"
    TEXT = "text"
    HANDLE = "handle"


@dataclass(frozen=True)
class Struct:
    """The shape of one of ctypes' structs, by the names that nvidia-ml-py has for it."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, *names: str) -> "Struct":
        """Return the shape of a struct that has one of these names."""
        return cls(names)


@dataclass(frozen=True)
class FriendlyObject:
    """The shape of an object that nvidia-ml-py made of a struct, with these parts at least."""

    parts: Mapping[str, "Shape"]


@dataclass(frozen=True)
class OrNone:
    """A shape that may be missing."""

    shape: "Shape"


Shape = Plain | Struct | FriendlyObject | OrNone | list[Any] | tuple[Any, ...] | Mapping[str, Any]
"""`[shape]` is a list of any length, `(shape, shape)` one of just these, and `{name: shape}` a
mapping with just these names."""


def _fits(value: Any, shape: Shape) -> bool:  # noqa: ANN401  # whatever was built of a recording
    """Return whether a value has a shape."""
    fits = False
    match shape:
        case Plain.WHOLE:
            fits = type(value) is int  # which a bool is not
        case Plain.TEXT:
            fits = isinstance(value, str) and len(value) <= _MAX_TEXT_CHARACTERS
        case Plain.HANDLE:
            fits = is_handle(value)
        case Struct(names):
            fits = isinstance(value, ctypes.Structure) and type(value).__name__ in names
        case FriendlyObject(parts):
            fits = isinstance(value, pynvml.nvmlFriendlyObject) and all(
                name in vars(value) and _fits(getattr(value, name), part)
                for name, part in parts.items()
            )
        case OrNone(inner):
            fits = value is None or _fits(value, inner)
        case list():
            fits = isinstance(value, list | tuple) and all(_fits(item, shape[0]) for item in value)
        case tuple(items):
            fits = (
                isinstance(value, list | tuple)
                and len(value) == len(items)
                and all(map(_fits, value, items))
            )
        case Mapping():
            fits = (
                isinstance(value, dict)
                and value.keys() == shape.keys()
                and all(_fits(value[name], part) for name, part in shape.items())
            )
    return fits


_WHOLE: Final = Plain.WHOLE
_WHOLE_OR_NONE: Final = OrNone(_WHOLE)
_PROCESSES: Final = [
    FriendlyObject(
        {
            "pid": _WHOLE,
            "usedGpuMemory": _WHOLE_OR_NONE,
            "gpuInstanceId": _WHOLE_OR_NONE,
            "computeInstanceId": _WHOLE_OR_NONE,
        }
    )
]
_SHAPES: Final[Mapping[str, Shape]] = {
    **dict.fromkeys(
        (
            "nvmlDeviceGetGpuInstanceById",
            "nvmlDeviceGetHandleByIndex",
            "nvmlDeviceGetMigDeviceHandleByIndex",
            "nvmlEventSetCreate",
            "nvmlGpmMigSampleGet",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleGet",
            "nvmlSystemEventSetCreate",
        ),
        Plain.HANDLE,
    ),
    # What they return is not looked at: it is the driver's code, or nothing.
    **dict.fromkeys(
        (
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetPlatformInfo",
            "nvmlDeviceGetSramEccErrorStatus",
            "nvmlDeviceRegisterEvents",
            "nvmlEventSetFree",
            "nvmlEventSetWait_v3",
            "nvmlGpmSampleFree",
            "nvmlInit",
            "nvmlShutdown",
            "nvmlSystemEventSetFree",
            "nvmlSystemGetConfComputeSettings",
            "nvmlSystemRegisterEvents",
        ),
        _WHOLE_OR_NONE,
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetInforomImageVersion",
            "nvmlDeviceGetInforomVersion",
            "nvmlDeviceGetName",
            "nvmlDeviceGetSerial",
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetVbiosVersion",
            "nvmlSystemGetDriverVersion",
            "nvmlSystemGetNVMLVersion",
        ),
        Plain.TEXT,
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetAccountingMode",
            "nvmlDeviceGetArchitecture",
            "nvmlDeviceGetBrand",
            "nvmlDeviceGetClockInfo",
            "nvmlDeviceGetComputeInstanceId",
            "nvmlDeviceGetComputeMode",
            "nvmlDeviceGetCount",
            "nvmlDeviceGetCurrPcieLinkGeneration",
            "nvmlDeviceGetCurrPcieLinkWidth",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetEnforcedPowerLimit",
            "nvmlDeviceGetFanSpeed",
            "nvmlDeviceGetGpuInstanceId",
            "nvmlDeviceGetMarginTemperature",
            "nvmlDeviceGetMaxClockInfo",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceGetMaxPcieLinkGeneration",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetMinorNumber",
            "nvmlDeviceGetP2PStatus",
            "nvmlDeviceGetPcieReplayCounter",
            "nvmlDeviceGetPcieThroughput",
            "nvmlDeviceGetPerformanceState",
            "nvmlDeviceGetPersistenceMode",
            "nvmlDeviceGetPowerManagementDefaultLimit",
            "nvmlDeviceGetPowerManagementLimit",
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetSupportedEventTypes",
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetTemperatureThreshold",
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetTotalEccErrors",
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlSystemGetCudaDriverVersion_v2",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlDeviceGetDecoderUtilization",
            "nvmlDeviceGetEccMode",
            "nvmlDeviceGetEncoderUtilization",
            "nvmlDeviceGetJpgUtilization",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetOfaUtilization",
            "nvmlDeviceGetPowerManagementLimitConstraints",
        ),
        (_WHOLE, _WHOLE),
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ),
        _PROCESSES,
    ),
    "nvmlDeviceGetAccountingPids": [_WHOLE],
    "nvmlDeviceGetAccountingStats": Struct.of("c_nvmlAccountingStats_t"),
    "nvmlDeviceGetAccountingStats_v2": Struct.of("c_nvmlAccountingStats_v2_t"),
    "nvmlDeviceGetAttributes_v2": Struct.of("c_nvmlDeviceAttributes"),
    "nvmlDeviceGetBAR1MemoryInfo": Struct.of("c_nvmlBAR1Memory_t"),
    "nvmlDeviceGetFieldValues": [Struct.of("c_nvmlFieldValue_t")],
    "nvmlDeviceGetGpuInstanceProfileInfo": Struct.of("c_nvmlGpuInstanceProfileInfo_t"),
    "nvmlDeviceGetGridLicensableFeatures_v4": Struct.of("c_nvmlGridLicensableFeatures_v4_t"),
    "nvmlDeviceGetMemoryInfo": Struct.of("c_nvmlMemory_t", "c_nvmlMemory_v2_t"),
    "nvmlDeviceGetPciInfo_v3": Struct.of("nvmlPciInfo_t"),
    "nvmlDeviceGetProcessUtilization": [Struct.of("c_nvmlProcessUtilizationSample_t")],
    "nvmlDeviceGetRemappedRows": (_WHOLE,) * 4,
    "nvmlDeviceGetRowRemapperHistogram": Struct.of("c_nvmlRowRemapperHistogramValues"),
    "nvmlDeviceGetSamples": (_WHOLE_OR_NONE, [Struct.of("c_nvmlSample_t")]),
    "nvmlDeviceGetUtilizationRates": Struct.of("c_nvmlUtilization_t"),
    "nvmlEventSetWait_v2": Struct.of("c_nvmlEventData_t"),
    "nvmlGpmMetricsGet": Struct.of("c_nvmlGpmMetricsGet_t"),
    "nvmlGpmQueryDeviceSupport": Struct.of("c_nvmlGpmSupport_t"),
    "nvmlGpuInstanceGetInfo": Struct.of("c_nvmlGpuInstanceInfo_t"),
    "nvmlSystemGetConfComputeState": Struct.of("c_nvmlConfComputeSystemState_t"),
    "nvmlSystemEventSetWait": [{"eventType": _WHOLE, "gpuId": _WHOLE}],
}
