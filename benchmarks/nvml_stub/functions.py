"""The stub's functions, and the conversion of the simulator's answers to the C interface's bytes.

`stub.c` explains the letters of a pattern.
"""

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pynvml

Answer = Callable[..., Any]
_RESULTS: Final = re.compile(r"([so])(\d*)")
_NUMBER: Final = "o4"
_LONG: Final = "o8"
_TEXT: Final = "s-"


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function of the C library."""

    name: str
    """Its name in C."""
    pattern: str
    """Its arguments."""
    python: str
    """The function of nvidia-ml-py that calls it."""
    more: tuple[Any, ...] = ()
    """Arguments of the Python function that have no counterpart in the C function."""
    item: Any = None
    """The struct of an item, if the answer is a list."""
    fills: Any = None
    """The struct that the caller provides to be filled."""
    member: tuple[Any, str] | None = None
    """The struct that the Python function provides, and its member that it returns."""


def _one(name: str, pattern: str, **more: Any) -> Function:  # noqa: ANN401  # fields of Function
    return Function(name=name, pattern=pattern, **{"python": name, **more})


def _of_struct(name: str, struct: Any, **more: Any) -> Function:  # noqa: ANN401  # nvidia-ml-py is untyped
    return _one(name, f"do{ctypes.sizeof(struct)}", **more)


def _filled(name: str, struct: Any) -> Function:  # noqa: ANN401  # as above
    return _of_struct(name, struct, fills=struct)


def _processes(name: str) -> Function:
    struct = pynvml.c_nvmlProcessInfo_v2_t
    return _one(name, f"dcl{ctypes.sizeof(struct)}", item=struct)


_SAMPLE: Final = pynvml.c_nvmlSample_t
_PROCESS_SAMPLE: Final = pynvml.c_nvmlProcessUtilizationSample_t

_MARGIN: Final = pynvml.c_nvmlMarginTemperature_v1_t
_PROFILE: Final = pynvml.c_nvmlGpuInstanceProfileInfo_t

FUNCTIONS: Final = (
    *(
        _one(name, _TEXT)
        for name in (
            "nvmlSystemGetDriverVersion",
            "nvmlSystemGetNVMLVersion",
        )
    ),
    _one("nvmlSystemGetCudaDriverVersion_v2", _NUMBER),
    *(
        _one(name, f"d{_TEXT}")
        for name in (
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetName",
            "nvmlDeviceGetSerial",
            "nvmlDeviceGetVbiosVersion",
            "nvmlDeviceGetBoardPartNumber",
            "nvmlDeviceGetInforomImageVersion",
        )
    ),
    _one("nvmlDeviceGetInforomVersion", f"di{_TEXT}"),
    *(
        _one(name, f"d{_NUMBER}")
        for name in (
            "nvmlDeviceGetPowerUsage",
            "nvmlDeviceGetEnforcedPowerLimit",
            "nvmlDeviceGetPowerManagementLimit",
            "nvmlDeviceGetPowerManagementDefaultLimit",
            "nvmlDeviceGetPerformanceState",
            "nvmlDeviceGetFanSpeed",
            "nvmlDeviceGetPcieReplayCounter",
            "nvmlDeviceGetCurrPcieLinkGeneration",
            "nvmlDeviceGetMaxPcieLinkGeneration",
            "nvmlDeviceGetCurrPcieLinkWidth",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetRetiredPagesPendingStatus",
            "nvmlDeviceGetAccountingMode",
            "nvmlDeviceGetAccountingBufferSize",
            "nvmlDeviceGetBrand",
            "nvmlDeviceGetMinorNumber",
            "nvmlDeviceGetArchitecture",
            "nvmlDeviceGetPersistenceMode",
            "nvmlDeviceGetComputeMode",
            "nvmlDeviceGetVirtualizationMode",
            "nvmlDeviceGetNumGpuCores",
            "nvmlDeviceGetMaxMigDeviceCount",
            "nvmlDeviceIsMigDeviceHandle",
            "nvmlDeviceGetMemoryBusWidth",
            "nvmlDeviceGetIndex",
            "nvmlDeviceGetMultiGpuBoard",
            "nvmlDeviceGetBoardId",
        )
    ),
    *(
        _one(name, f"d{_LONG}")
        for name in (
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            "nvmlDeviceGetSupportedClocksEventReasons",
            "nvmlDeviceGetSupportedEventTypes",
        )
    ),
    *(
        _one(name, f"d{_NUMBER}{_NUMBER}")
        for name in (
            "nvmlDeviceGetEncoderUtilization",
            "nvmlDeviceGetDecoderUtilization",
            "nvmlDeviceGetJpgUtilization",
            "nvmlDeviceGetOfaUtilization",
            "nvmlDeviceGetPowerManagementLimitConstraints",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetEccMode",
            "nvmlDeviceGetCudaComputeCapability",
        )
    ),
    _one("nvmlDeviceGetRemappedRows", f"d{_NUMBER * 4}"),
    *(
        _one(name, f"di{_NUMBER}")
        for name in (
            "nvmlDeviceGetTemperature",
            "nvmlDeviceGetTemperatureThreshold",
            "nvmlDeviceGetClockInfo",
            "nvmlDeviceGetMaxClockInfo",
            "nvmlDeviceGetPcieThroughput",
            "nvmlDeviceGetNvLinkState",
        )
    ),
    _one("nvmlDeviceGetP2PStatus", f"dei{_NUMBER}"),
    _of_struct("nvmlDeviceGetGridLicensableFeatures_v4", pynvml.c_nvmlGridLicensableFeatures_v4_t),
    _one("nvmlDeviceGetTotalEccErrors", f"dii{_LONG}"),
    _one("nvmlDeviceGetMigDeviceHandleByIndex", f"di{_LONG}"),
    _one(
        "nvmlDeviceGetGpuInstanceProfileInfo",
        f"dio{ctypes.sizeof(_PROFILE)}",
        more=(1,),  # the version of its struct, by which the Python function finds the C function
    ),
    _of_struct("nvmlDeviceGetUtilizationRates", pynvml.c_nvmlUtilization_t),
    _of_struct(
        "nvmlDeviceGetMemoryInfo_v2",
        pynvml.c_nvmlMemory_v2_t,
        python="nvmlDeviceGetMemoryInfo",
        more=(pynvml.nvmlMemory_v2,),
    ),
    _of_struct("nvmlDeviceGetBAR1MemoryInfo", pynvml.c_nvmlBAR1Memory_t),
    _of_struct("nvmlDeviceGetPciInfo_v3", pynvml.nvmlPciInfo_t, python="nvmlDeviceGetPciInfo_v3"),
    _of_struct("nvmlDeviceGetRowRemapperHistogram", pynvml.c_nvmlRowRemapperHistogramValues),
    _of_struct("nvmlGpmQueryDeviceSupport", pynvml.c_nvmlGpmSupport_t),
    _filled("nvmlDeviceGetSramEccErrorStatus", pynvml.c_nvmlEccSramErrorStatus_v1_t),
    _filled("nvmlDeviceGetGpuFabricInfoV", pynvml.c_nvmlGpuFabricInfo_v2_t),
    _filled("nvmlDeviceGetPlatformInfo", pynvml.c_nvmlPlatformInfo_v2_t),
    _of_struct("nvmlDeviceGetMarginTemperature", _MARGIN, member=(_MARGIN, "marginTemperature")),
    _processes("nvmlDeviceGetComputeRunningProcesses_v3"),
    _processes("nvmlDeviceGetGraphicsRunningProcesses_v3"),
    _processes("nvmlDeviceGetMPSComputeRunningProcesses_v3"),
    _one("nvmlDeviceGetRetiredPages", "dicl8", item=ctypes.c_ulonglong),
    _one("nvmlDeviceGetSamples", f"diq0tcl{ctypes.sizeof(_SAMPLE)}", item=_SAMPLE),
    _one(
        "nvmlDeviceGetProcessUtilization",
        f"dl{ctypes.sizeof(_PROCESS_SAMPLE)}cq8",
        item=_PROCESS_SAMPLE,
    ),
)
FIELD_VALUES: Final = len(FUNCTIONS) + 1
GPM_METRICS: Final = len(FUNCTIONS) + 2


def as_header(functions: Iterable[Function] = FUNCTIONS) -> str:
    """Return `functions.inc`; indices start at 1, because 0 marks an empty slot."""
    return "".join(
        f'X({index}, {function.name}, "{function.pattern}")\n'
        for index, function in enumerate(functions, start=1)
    )


def as_bytes(function: Function, answer: Any) -> bytes:  # noqa: ANN401  # as the library has it
    """Return an answer in its memory layout."""
    if function.item is not None:
        items = answer[1] if function.name == "nvmlDeviceGetSamples" else answer
        return b"".join(_item(function.item, each) for each in items)
    if function.member is not None:
        struct, name = function.member
        return bytes(struct(**{name: answer}))
    results = _RESULTS.findall(function.pattern)
    answers: Sequence[Any] = answer if isinstance(answer, list | tuple) else [answer]
    return b"".join(
        _result(each, int(size or 0)) for each, (_, size) in zip(answers, results, strict=False)
    )


def _result(value: Any, size: int) -> bytes:  # noqa: ANN401  # as the library has it
    if isinstance(value, ctypes.Structure):
        return bytes(value)
    if isinstance(value, str | bytes):
        return (value.encode() if isinstance(value, str) else value) + b"\0"
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def _item(struct: Any, value: Any) -> bytes:  # noqa: ANN401  # as the library has it
    if isinstance(value, ctypes.Structure):
        return bytes(value)
    if isinstance(value, int):
        return bytes(struct(value))
    made = struct()
    for name, *_ in struct._fields_:
        given = getattr(value, name)
        setattr(made, name, (1 << 64) - 1 if given is None else given)
    return bytes(made)
