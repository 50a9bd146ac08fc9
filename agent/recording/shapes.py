"""Which answers a function of NVML may have had, so that a recording can hold nothing else.

A recording may come from anybody, and what is played goes where the driver's own answers go: an
answer of another kind would end a GPU's thread there, or be followed as an address.
"""

import ctypes
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pynvml

from agent.recording.serialize import Json, build, is_handle

METRICS: Final = "nvmlGpmMetricsGet"
SAMPLES: Final[Mapping[str, int]] = MappingProxyType(
    {"nvmlGpmSampleGet": 1, "nvmlGpmMigSampleGet": 2}
)
"""Functions that fill a sample of the chip's counters, with the sample's place."""
BUFFERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "nvmlDeviceGetSamples": 2,
        "nvmlDeviceGetProcessUtilization": 1,
        "nvmlDeviceGetProcessesUtilizationInfo": 1,
    }
)
"""Functions that read the driver's buffers, with the place of the newest time stamp seen."""
_MAX_TEXT_CHARACTERS: Final = 1024  # NVML's own longest text has 256 bytes

Shape = Callable[[Any], bool]


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_whole_or_none(value: object) -> bool:
    return value is None or _is_whole(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_CHARACTERS


def _is_list(*items: Shape) -> Shape:
    """Take a list or tuple of just these items."""
    return lambda value: (
        isinstance(value, list | tuple)
        and len(value) == len(items)
        and all(shape(item) for shape, item in zip(items, value, strict=True))
    )


def _is_list_of(item: Shape) -> Shape:
    return lambda value: isinstance(value, list | tuple) and all(map(item, value))


def _is_struct(*names: str) -> Shape:
    return lambda value: isinstance(value, ctypes.Structure) and type(value).__name__ in names


def _is_object(**parts: Shape) -> Shape:
    """Take an object that the binding made of a struct, with these parts at least."""
    return lambda value: (
        isinstance(value, pynvml.nvmlFriendlyObject)
        and all(
            name in vars(value) and shape(getattr(value, name)) for name, shape in parts.items()
        )
    )


def _is_mapping(*keys: str) -> Shape:
    return lambda value: (
        isinstance(value, dict) and set(value) == set(keys) and all(map(_is_whole, value.values()))
    )


_TWO: Final = _is_list(_is_whole, _is_whole)
_PROCESSES: Final = _is_list_of(
    _is_object(
        pid=_is_whole,
        usedGpuMemory=_is_whole_or_none,
        gpuInstanceId=_is_whole_or_none,
        computeInstanceId=_is_whole_or_none,
    )
)
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
        is_handle,
    ),
    # What they return is not looked at: it is the driver's code, or nothing.
    **dict.fromkeys(
        (
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetSramEccErrorStatus",
            "nvmlDeviceRegisterEvents",
            "nvmlEventSetFree",
            "nvmlEventSetWait_v3",
            "nvmlGpmSampleFree",
            "nvmlInit",
            "nvmlShutdown",
            "nvmlSystemEventSetFree",
            "nvmlSystemRegisterEvents",
        ),
        _is_whole_or_none,
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
        _is_text,
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
        _is_whole,
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlDeviceGetDecoderUtilization",
            "nvmlDeviceGetEccMode",
            "nvmlDeviceGetEncoderUtilization",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetPowerManagementLimitConstraints",
        ),
        _TWO,
    ),
    **dict.fromkeys(
        (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ),
        _PROCESSES,
    ),
    "nvmlDeviceGetAccountingPids": _is_list_of(_is_whole),
    "nvmlDeviceGetAccountingStats": _is_struct("c_nvmlAccountingStats_t"),
    "nvmlDeviceGetAccountingStats_v2": _is_struct("c_nvmlAccountingStats_v2_t"),
    "nvmlDeviceGetAttributes_v2": _is_struct("c_nvmlDeviceAttributes"),
    "nvmlDeviceGetBAR1MemoryInfo": _is_struct("c_nvmlBAR1Memory_t"),
    "nvmlDeviceGetFieldValues": _is_list_of(_is_struct("c_nvmlFieldValue_t")),
    "nvmlDeviceGetGridLicensableFeatures_v4": _is_struct("c_nvmlGridLicensableFeatures_v4_t"),
    "nvmlDeviceGetMemoryInfo": _is_struct("c_nvmlMemory_t", "c_nvmlMemory_v2_t"),
    "nvmlDeviceGetPciInfo_v3": _is_struct("nvmlPciInfo_t"),
    "nvmlDeviceGetProcessUtilization": _is_list_of(_is_struct("c_nvmlProcessUtilizationSample_t")),
    "nvmlDeviceGetRemappedRows": _is_list(*[_is_whole] * 4),
    "nvmlDeviceGetRowRemapperHistogram": _is_struct("c_nvmlRowRemapperHistogramValues"),
    "nvmlDeviceGetSamples": _is_list(_is_whole_or_none, _is_list_of(_is_struct("c_nvmlSample_t"))),
    "nvmlDeviceGetUtilizationRates": _is_struct("c_nvmlUtilization_t"),
    "nvmlEventSetWait_v2": _is_struct("c_nvmlEventData_t"),
    "nvmlGpmMetricsGet": _is_struct("c_nvmlGpmMetricsGet_t"),
    "nvmlGpmQueryDeviceSupport": _is_struct("c_nvmlGpmSupport_t"),
    "nvmlGpuInstanceGetInfo": _is_struct("c_nvmlGpuInstanceInfo_t"),
    "nvmlSystemEventSetWait": _is_list_of(_is_mapping("eventType", "gpuId")),
}


def is_played(function: str) -> bool:
    """Return whether the agent calls a function."""
    return function in _SHAPES


def refuse_arguments(function: str, arguments: list[Json]) -> None:
    """Raise ValueError where a call cannot have had these arguments."""
    built = [build(argument) for argument in arguments]
    place = BUFFERS.get(function, SAMPLES.get(function, 0 if function == METRICS else -1))
    if place >= len(arguments):
        raise ValueError(f"{function} is recorded with {len(arguments)} arguments")
    if function in SAMPLES and not is_handle(built[place]):
        raise ValueError(f"{function} is recorded without the handle of its sample")
    if function == METRICS and not _has_samples(arguments[0]):
        raise ValueError(f"{function} is recorded without its samples")


def _has_samples(argument: Json) -> bool:
    # As written: of a struct of metrics nothing else is filled when it is read.
    struct = argument.get("byref", argument) if isinstance(argument, dict) else {}
    fields = struct.get("fields", {})
    return all(is_handle(build(fields.get(name))) for name in ("sample1", "sample2"))


def refuse_result(function: str, result: Json) -> None:
    """Raise ValueError where a function cannot have given this."""
    if not _SHAPES[function](build(result)):
        raise ValueError(f"{function} cannot have given this result")
