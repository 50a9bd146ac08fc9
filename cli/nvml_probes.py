"""Calls that the agent does not make, to learn what a driver supports and how it behaves.

Each probe answers one question that public sources leave open. Answers go to the recording; here
they are also put into one sentence each.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pynvml
from typing_extensions import override

_POLLS: Final = 100
_POLL_SECONDS: Final = 0.05
_WAIT_MILLISECONDS: Final = 20
_PCIE_FIELDS: Final = (197, 198)
_PLAIN: Final = (
    "nvmlDeviceGetAccountingMode",
    "nvmlDeviceGetAccountingBufferSize",
    "nvmlDeviceGetAccountingPids",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetVirtualizationMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetRowRemapperHistogram",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)


@dataclass(frozen=True, kw_only=True)
class ProbeOutcome:
    """What a call gave."""

    value: Any = None
    """The answer."""
    error: str | None = None
    """The driver's name of its refusal."""

    @override
    def __str__(self) -> str:
        return self.error or "supported"


def ask(library: object, name: str, *arguments: object) -> ProbeOutcome:
    """Call a function, whatever it says."""
    try:
        return ProbeOutcome(value=getattr(library, name)(*arguments))
    except AttributeError:
        return ProbeOutcome(error="not in this nvidia-ml-py")
    except pynvml.NVMLLibraryMismatchError:
        return ProbeOutcome(error="library mismatch")
    except pynvml.NVMLError as error:
        return ProbeOutcome(error=type(error).__name__.removeprefix("NVMLError_"))


def probe_all(library: object, *, say: Callable[[str], None]) -> list[str]:
    """Ask everything, one GPU after the other; gives what was found, a sentence each."""
    started = ask(library, "nvmlInit")
    if started.error:
        return [f"NVML does not start again: {started}"]
    try:
        findings = _probe_system(library)
        for index in range(ask(library, "nvmlDeviceGetCount").value or 0):
            handle = ask(library, "nvmlDeviceGetHandleByIndex", index).value
            if handle is not None:
                say(f"probing GPU {index}, about {_POLLS * _POLL_SECONDS * 2:.0f} s")
                findings += [f"GPU {index}: {one}" for one in _probe_gpu(library, handle)]
        return findings
    finally:
        ask(library, "nvmlShutdown")


def _probe_system(library: object) -> list[str]:
    version = getattr(pynvml, "nvmlSystemEventSetCreateRequest_v1", None)
    made = ask(library, "nvmlSystemEventSetCreate", version)
    if made.value is not None:
        ask(library, "nvmlSystemEventSetFree", version, made.value)
    versions = [
        f"{name}: {ask(library, name).value}"
        for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
    ]
    return [*versions, f"system event sets (driver unbind): {made}"]


def _probe_gpu(library: object, handle: object) -> list[str]:
    plain = [f"{name}: {_short(ask(library, name, handle))}" for name in _PLAIN]
    return [
        *plain,
        *_probe_accounting(library, handle),
        *_probe_events(library, handle),
        *_probe_pcie(library, handle),
        _probe_gpm(library, handle),
        _probe_period(library, handle, "nvmlDeviceGetProcessUtilization", ()),
        _probe_period(
            library, handle, "nvmlDeviceGetSamples", (pynvml.NVML_GPU_UTILIZATION_SAMPLES,)
        ),
    ]


def _probe_accounting(library: object, handle: object) -> list[str]:
    listed = ask(library, "nvmlDeviceGetComputeRunningProcesses_v3", handle).value or ()
    pid = listed[0].pid if listed else 1
    names = ("nvmlDeviceGetAccountingStats", "nvmlDeviceGetAccountingStats_v2")
    return [f"{name}({pid}): {ask(library, name, handle, pid)}" for name in names]


def _probe_events(library: object, handle: object) -> list[str]:
    made = ask(library, "nvmlEventSetCreate")
    if made.value is None:
        return [f"event set: {made}"]
    supported = ask(library, "nvmlDeviceGetSupportedEventTypes", handle).value or 0
    registered = ask(library, "nvmlDeviceRegisterEvents", handle, supported, made.value)
    second = ask(library, "nvmlEventSetWait_v2", made.value, _WAIT_MILLISECONDS)
    third = _wait_v3(library, made.value)
    ask(library, "nvmlEventSetFree", made.value)
    return [
        f"events {supported:#x} registered: {registered}",
        f"nvmlEventSetWait_v2: {second}",
        f"nvmlEventSetWait_v3: {third}",
    ]


def _wait_v3(library: object, event_set: object) -> ProbeOutcome:
    shape = getattr(pynvml, "c_nvmlEventSetWait_v3_t", None)
    if shape is None:
        return ProbeOutcome(error="not in this nvidia-ml-py")
    parameters = shape()
    parameters.timeoutMs = _WAIT_MILLISECONDS
    return ask(library, "nvmlEventSetWait_v3", event_set, parameters)


def _probe_pcie(library: object, handle: object) -> list[str]:
    """Read the byte counters twice: what they count in, and how wide they are, shows in time."""
    found = []
    for _ in range(2):
        values = ask(library, "nvmlDeviceGetFieldValues", handle, list(_PCIE_FIELDS))
        found.append(values)
        time.sleep(_POLL_SECONDS)
    if found[0].error:
        return [f"PCIe byte counters: {found[0]}"]
    return [
        f"PCIe byte counter {first.fieldId}: code {first.nvmlReturn}, type {first.valueType},"
        f" {first.value.ullVal} then {second.value.ullVal}"
        for first, second in zip(found[0].value, found[1].value or (), strict=False)
    ]


def _probe_gpm(library: object, handle: object) -> str:
    support = ask(library, "nvmlGpmQueryDeviceSupport", handle)
    if support.error:
        return f"GPM: {support}"
    sample = ask(library, "nvmlGpmSampleAlloc").value
    whole = ask(library, "nvmlGpmSampleGet", handle, sample)
    outcomes = [f"whole GPU {whole}"]
    for index in range(ask(library, "nvmlDeviceGetMaxMigDeviceCount", handle).value or 0):
        instance = ask(library, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index).value
        if instance is None:
            continue
        number = ask(library, "nvmlDeviceGetGpuInstanceId", instance).value
        by_parent = ask(library, "nvmlGpmMigSampleGet", handle, number, sample)
        by_handle = ask(library, "nvmlGpmSampleGet", instance, sample)
        outcomes.append(f"instance {number} by its parent {by_parent}, by its handle {by_handle}")
    ask(library, "nvmlGpmSampleFree", sample)
    return f"GPM is {support.value.isSupportedDevice}: {', '.join(outcomes)}"


def _probe_period(library: object, handle: object, name: str, more: tuple[int, ...]) -> str:
    """Read a buffer often: its time stamps show the driver's period, its errors how it is empty."""
    stamps: set[int] = set()
    errors: dict[str, int] = {}
    for _ in range(_POLLS):
        outcome = ask(library, name, handle, *more, max(stamps, default=0))
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
        else:
            items = outcome.value[1] if more else outcome.value
            stamps |= {item.timeStamp for item in items}
        time.sleep(_POLL_SECONDS)
    steps = sorted(after - before for before, after in pairwise(sorted(stamps)))
    median = f"{steps[len(steps) // 2]} us" if steps else "unknown"
    return f"{name}: {len(stamps)} time stamps, period {median}, errors {errors or 'none'}"


def _short(outcome: ProbeOutcome) -> str:
    if outcome.error:
        return outcome.error
    if isinstance(outcome.value, Sequence) and not isinstance(outcome.value, str):
        return f"{len(outcome.value)} values"
    return str(outcome.value) if isinstance(outcome.value, int | str) else "supported"
