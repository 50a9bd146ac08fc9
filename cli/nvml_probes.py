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

    def shorten(self) -> str:
        """Return the answer in some characters: a list's length, a number or a name."""
        if self.error:
            return self.error
        if isinstance(self.value, Sequence) and not isinstance(self.value, str):
            return f"{len(self.value)} values"
        return str(self.value) if isinstance(self.value, int | str) else "supported"


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
    """Ask everything, one GPU after the other; return what was found, a sentence each."""
    started = ask(library, "nvmlInit")
    if started.error:
        return [f"NVML does not start again: {started}"]
    try:
        version = getattr(pynvml, "nvmlSystemEventSetCreateRequest_v1", None)
        made = ask(library, "nvmlSystemEventSetCreate", version)
        if made.value is not None:
            ask(library, "nvmlSystemEventSetFree", version, made.value)
        names = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
        findings = [f"{name}: {ask(library, name).value}" for name in names]
        findings.append(f"system event sets (driver unbind): {made}")
        for index in range(ask(library, "nvmlDeviceGetCount").value or 0):
            handle = ask(library, "nvmlDeviceGetHandleByIndex", index).value
            if handle is not None:
                say(f"probing GPU {index}, about {_POLLS * _POLL_SECONDS * 2:.0f} s")
                findings += [f"GPU {index}: {found}" for found in GpuProbes(library, handle).all()]
        return findings
    finally:
        ask(library, "nvmlShutdown")


class GpuProbes:
    """The probes of one GPU; each says in a sentence or some what it found."""

    def __init__(self, library: object, handle: object) -> None:
        self._library = library
        self._handle = handle

    def ask(self, name: str, *arguments: object) -> ProbeOutcome:
        """Call a function of the GPU."""
        return ask(self._library, name, self._handle, *arguments)

    def all(self) -> list[str]:
        """Return what every probe finds."""
        return [
            *(f"{name}: {self.ask(name).shorten()}" for name in _PLAIN),
            *self.accounting(),
            *self.events(),
            *self.pcie_counters(),
            self.profiling(),
            self.sampling_period("nvmlDeviceGetProcessUtilization"),
            self.sampling_period("nvmlDeviceGetSamples", pynvml.NVML_GPU_UTILIZATION_SAMPLES),
        ]

    def accounting(self) -> list[str]:
        """Return which of the two calls for a process's account the driver has."""
        listed = self.ask("nvmlDeviceGetComputeRunningProcesses_v3").value or ()
        # Without a process any pid will do: NotFound says that the call itself is there.
        pid = listed[0].pid if listed else 1
        names = ("nvmlDeviceGetAccountingStats", "nvmlDeviceGetAccountingStats_v2")
        return [f"{name}({pid}): {self.ask(name, pid)}" for name in names]

    def events(self) -> list[str]:
        """Return which events can be registered, and which form of waiting the driver has."""
        library = self._library
        made = ask(library, "nvmlEventSetCreate")
        if made.value is None:
            return [f"event set: {made}"]
        supported = self.ask("nvmlDeviceGetSupportedEventTypes").value or 0
        registered = self.ask("nvmlDeviceRegisterEvents", supported, made.value)
        second = ask(library, "nvmlEventSetWait_v2", made.value, _WAIT_MILLISECONDS)
        third = ProbeOutcome(error="not in this nvidia-ml-py")
        # Younger than the oldest nvidia-ml-py that the agent works with.
        if shape := getattr(pynvml, "c_nvmlEventSetWait_v3_t", None):
            parameters = shape()
            parameters.timeoutMs = _WAIT_MILLISECONDS
            third = ask(library, "nvmlEventSetWait_v3", made.value, parameters)
        ask(library, "nvmlEventSetFree", made.value)
        return [
            f"events {supported:#x} registered: {registered}",
            f"nvmlEventSetWait_v2: {second}",
            f"nvmlEventSetWait_v3: {third}",
        ]

    def pcie_counters(self) -> list[str]:
        """Read the byte counters twice: their unit and their width show in time."""
        found = []
        for _ in range(2):
            found.append(self.ask("nvmlDeviceGetFieldValues", list(_PCIE_FIELDS)))
            time.sleep(_POLL_SECONDS)
        if found[0].error:
            return [f"PCIe byte counters: {found[0]}"]
        return [
            f"PCIe byte counter {first.fieldId}: code {first.nvmlReturn}, type {first.valueType},"
            f" {first.value.ullVal} then {second.value.ullVal}"
            for first, second in zip(found[0].value, found[1].value or (), strict=False)
        ]

    def profiling(self) -> str:
        """Return whether GPM samples can be taken: of the GPU, and in which way of an instance."""
        library = self._library
        support = self.ask("nvmlGpmQueryDeviceSupport")
        if support.error:
            return f"GPM: {support}"
        sample = ask(library, "nvmlGpmSampleAlloc").value
        outcomes = [f"whole GPU {self.ask('nvmlGpmSampleGet', sample)}"]
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount").value or 0):
            instance = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", index).value
            if instance is None:
                continue
            # Drivers differ in whether an instance is asked of its parent or by its own handle.
            number = ask(library, "nvmlDeviceGetGpuInstanceId", instance).value
            by_parent = self.ask("nvmlGpmMigSampleGet", number, sample)
            by_handle = ask(library, "nvmlGpmSampleGet", instance, sample)
            outcomes.append(
                f"instance {number} by its parent {by_parent}, by its handle {by_handle}"
            )
        ask(library, "nvmlGpmSampleFree", sample)
        return f"GPM is {support.value.isSupportedDevice}: {', '.join(outcomes)}"

    def sampling_period(self, name: str, *kind: int) -> str:
        """Read a buffer often: its stamps show the driver's period, its errors how it is empty."""
        stamps: set[int] = set()
        errors: dict[str, int] = {}
        for _ in range(_POLLS):
            outcome = self.ask(name, *kind, max(stamps, default=0))
            if outcome.error:
                errors[outcome.error] = errors.get(outcome.error, 0) + 1
            else:
                # The samples of a kind come behind the type of their values.
                items = outcome.value[1] if kind else outcome.value
                stamps |= {item.timeStamp for item in items}
            time.sleep(_POLL_SECONDS)
        steps = sorted(after - before for before, after in pairwise(sorted(stamps)))
        median = f"{steps[len(steps) // 2]} us" if steps else "unknown"
        return f"{name}: {len(stamps)} time stamps, period {median}, errors {errors or 'none'}"
