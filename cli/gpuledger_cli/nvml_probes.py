"""NVML calls that the agent does not make, to learn what a driver supports and how it behaves.

Each probe answers a question that public sources do not answer. The results are written to the
recording, and each probe returns its findings as sentences.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median_low
from typing import Any, Final, Protocol, TypeVar

import pynvml
from typing_extensions import override

from gpuledger.clock import NS_PER_MS

T = TypeVar("T")

_POLLS: Final = 100
_POLL_SECONDS: Final = 0.05
_WAIT_MILLISECONDS: Final = 20
_QUESTIONS: Final = 4
_QUESTION_SECONDS: Final = 1.5
_ENERGY_POLLS: Final = 200
_ENERGY_POLL_SECONDS: Final = 0.01
PROBE_SECONDS: Final = (
    2 * _POLLS * _POLL_SECONDS
    + _QUESTIONS * _QUESTION_SECONDS
    + _ENERGY_POLLS * _ENERGY_POLL_SECONDS
)
"""Duration of the probes of a GPU."""
# If nearly every poll sees a step, the true time between two steps may be shorter.
_RESOLVED_POLLS: Final = 1.5
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
    """The result of a call."""

    value: Any = None
    """The returned value."""
    error: str | None = None
    """The name of the driver's error."""

    @override
    def __str__(self) -> str:
        return self.error or "supported"

    def shorten(self) -> str:
        """Return the result in a few characters: a list's length, a number or a name."""
        if self.error:
            return self.error
        if isinstance(self.value, Sequence) and not isinstance(self.value, str):
            return f"{len(self.value)} values"
        return str(self.value) if isinstance(self.value, int | str) else "supported"


def probe(library: object, name: str, *arguments: object) -> ProbeOutcome:
    """Call a function and return its result or error."""
    try:
        return ProbeOutcome(value=getattr(library, name)(*arguments))
    except AttributeError:
        return ProbeOutcome(error="not in this nvidia-ml-py")
    except pynvml.NVMLLibraryMismatchError:
        return ProbeOutcome(error="library mismatch")
    except pynvml.NVMLError as error:
        return ProbeOutcome(error=type(error).__name__.removeprefix("NVMLError_"))


Sleep = Callable[[float], None]
"""Waits for a number of seconds."""


class CallHangsError(Exception):
    """A call of the driver has not returned in time."""


class ProbeRunner(Protocol):
    """Runs a function that calls the library; raises CallHangsError if a call does not return."""

    def __call__(self, do: Callable[[], T], /) -> T:
        """Return the function's result."""


def _run_here(do: Callable[[], T]) -> T:
    return do()


def probe_all(
    library: object,
    *,
    report: Callable[[str], None],
    sleep: Sleep = time.sleep,
    run: ProbeRunner = _run_here,
) -> list[str]:
    """Run all probes, one GPU after the other; return a sentence for each finding.

    If a call to a GPU hangs, only that GPU's findings are lost. Raises CallHangsError if the
    library itself hangs.
    """
    started = run(partial(probe, library, "nvmlInit"))
    if started.error:
        return [f"cannot start NVML again: {started}"]
    findings = run(partial(_probe_library, library))
    hangs = False
    for index in range(run(partial(probe, library, "nvmlDeviceGetCount")).value or 0):
        try:
            found = run(partial(_probe_gpu, library, index, report=report, sleep=sleep))
        except CallHangsError as error:
            found, hangs = [f"{error}; its other probes are skipped"], True
        findings += [f"GPU {index}: {line}" for line in found]
    if not hangs:
        run(partial(probe, library, "nvmlShutdown"))
    return findings


def _probe_library(library: object) -> list[str]:
    version = getattr(pynvml, "nvmlSystemEventSetCreateRequest_v1", None)
    made = probe(library, "nvmlSystemEventSetCreate", version)
    if made.value is not None:
        probe(library, "nvmlSystemEventSetFree", version, made.value)
    names = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion")
    findings = [f"{name}: {probe(library, name).value}" for name in names]
    return [*findings, f"system event sets (driver unbind): {made}"]


def _probe_gpu(
    library: object, index: int, *, report: Callable[[str], None], sleep: Sleep
) -> list[str]:
    handle = probe(library, "nvmlDeviceGetHandleByIndex", index).value
    if handle is None:
        return []
    report(f"probing GPU {index}, about {PROBE_SECONDS:.0f} s")
    return GpuProbes(library, handle, sleep=sleep).all()


class GpuProbes:
    """The probes of a GPU; each returns one or more sentences."""

    def __init__(
        self,
        library: object,
        handle: object,
        *,
        sleep: Sleep = time.sleep,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._library = library
        self._handle = handle
        self._sleep = sleep
        self._monotonic_ns = monotonic_ns

    def probe(self, name: str, *arguments: object) -> ProbeOutcome:
        """Call a function of the library for this GPU; return its result or error."""
        return probe(self._library, name, self._handle, *arguments)

    def all(self) -> list[str]:
        """Return the findings of all probes."""
        return [
            *(f"{name}: {self.probe(name).shorten()}" for name in _PLAIN),
            *self.accounting(),
            *self.events(),
            *self.pcie_counters(),
            self.profiling(),
            self.sampling_period("nvmlDeviceGetProcessUtilization"),
            self.sampling_period("nvmlDeviceGetSamples", pynvml.NVML_GPU_UTILIZATION_SAMPLES),
            self.process_form(),
            self.energy_steps(),
        ]

    def accounting(self) -> list[str]:
        """Return the results of the two calls that query the accounting of a process."""
        listed = self.probe("nvmlDeviceGetComputeRunningProcesses_v3").value or ()
        # If no process runs, any pid will do: the error NotFound shows that the call exists.
        pid = listed[0].pid if listed else 1
        names = ("nvmlDeviceGetAccountingStats", "nvmlDeviceGetAccountingStats_v2")
        return [f"{name}({pid}): {self.probe(name, pid)}" for name in names]

    def events(self) -> list[str]:
        """Return which events can be registered, and which wait functions the driver has."""
        library = self._library
        made = probe(library, "nvmlEventSetCreate")
        if made.value is None:
            return [f"event set: {made}"]
        supported = self.probe("nvmlDeviceGetSupportedEventTypes").value or 0
        registered = self.probe("nvmlDeviceRegisterEvents", supported, made.value)
        second = probe(library, "nvmlEventSetWait_v2", made.value, _WAIT_MILLISECONDS)
        third = ProbeOutcome(error="not in this nvidia-ml-py")
        # Missing in the oldest supported nvidia-ml-py.
        if shape := getattr(pynvml, "c_nvmlEventSetWait_v3_t", None):
            parameters = shape()
            parameters.timeoutMs = _WAIT_MILLISECONDS
            third = probe(library, "nvmlEventSetWait_v3", made.value, parameters)
        probe(library, "nvmlEventSetFree", made.value)
        return [
            f"events {supported:#x} registered: {registered}",
            f"nvmlEventSetWait_v2: {second}",
            f"nvmlEventSetWait_v3: {third}",
        ]

    def pcie_counters(self) -> list[str]:
        """Read the byte counters twice, because the change shows their unit and width."""
        found = []
        for _ in range(2):
            found.append(self.probe("nvmlDeviceGetFieldValues", list(_PCIE_FIELDS)))
            self._sleep(_POLL_SECONDS)
        if found[0].error:
            return [f"PCIe byte counters: {found[0]}"]
        return [
            f"PCIe byte counter {first.fieldId}: code {first.nvmlReturn}, type {first.valueType},"
            f" {first.value.ullVal} then {second.value.ullVal}"
            for first, second in zip(found[0].value, found[1].value or (), strict=False)
        ]

    def profiling(self) -> str:
        """Return whether GPM samples work for the GPU, and how they work for instances."""
        library = self._library
        support = self.probe("nvmlGpmQueryDeviceSupport")
        if support.error:
            return f"GPM: {support}"
        sample = probe(library, "nvmlGpmSampleAlloc").value
        outcomes = [f"whole GPU {self.probe('nvmlGpmSampleGet', sample)}"]
        for index in range(self.probe("nvmlDeviceGetMaxMigDeviceCount").value or 0):
            instance = self.probe("nvmlDeviceGetMigDeviceHandleByIndex", index).value
            if instance is None:
                continue
            # Drivers differ: samples of an instance need its parent's handle or its own.
            number = probe(library, "nvmlDeviceGetGpuInstanceId", instance).value
            by_parent = self.probe("nvmlGpmMigSampleGet", number, sample)
            by_handle = probe(library, "nvmlGpmSampleGet", instance, sample)
            outcomes.append(
                f"instance {number} by its parent {by_parent}, by its handle {by_handle}"
            )
        probe(library, "nvmlGpmSampleFree", sample)
        return f"GPM is {support.value.isSupportedDevice}: {', '.join(outcomes)}"

    def sampling_period(self, name: str, *kind: int) -> str:
        """Read a buffer of samples repeatedly; return the period of its time stamps, and errors."""
        stamps: set[int] = set()
        errors: dict[str, int] = {}
        for _ in range(_POLLS):
            outcome = self.probe(name, *kind, max(stamps, default=0))
            if outcome.error:
                errors[outcome.error] = errors.get(outcome.error, 0) + 1
            else:
                # nvmlDeviceGetSamples returns the type of the values before the samples.
                items = outcome.value[1] if kind else outcome.value
                stamps |= {item.timeStamp for item in items}
            self._sleep(_POLL_SECONDS)
        steps = sorted(after - before for before, after in pairwise(sorted(stamps)))
        median = f"{steps[len(steps) // 2]} us" if steps else "unknown"
        return f"{name}: {len(stamps)} time stamps, period {median}, errors {errors or 'none'}"

    def process_form(self) -> str:
        """Return a sentence on the samples of processes: their number per window, and their sums.

        There are several sampling windows between two queries. Some drivers then return a sample of
        a process for each window, others one sample for all windows. The sum of the processes'
        percentages is compared with the device's percentage. This shows whether waiting counts as
        use, and whether the sum is capped.
        """
        answer = self.probe("nvmlDeviceGetProcessUtilization", 0)
        # NotFound means that nothing was sampled, and is not a failure.
        if answer.error not in (None, "NotFound"):
            return f"process samples: {answer}"
        uses = answer.value or ()
        device = self._device_samples(0)
        pids = {item.pid for item in uses}
        sizes = (
            f"rings of {len(uses)} samples of {len(pids)} processes and {len(device)} of the GPU"
        )
        since, largest, claimed, used = _newest(uses), 0, 0, 0
        for _ in range(_QUESTIONS):
            self._sleep(_QUESTION_SECONDS)
            uses = self.probe("nvmlDeviceGetProcessUtilization", since).value or ()
            percents = {
                item.timeStamp: item.sampleValue.uiVal for item in self._device_samples(since)
            }
            of_each = Counter(item.pid for item in uses)
            largest = max(largest, *of_each.values(), 0)
            together = [item for item in uses if item.timeStamp in percents]
            claimed += sum(item.smUtil for item in together)
            used += sum(percents[stamp] for stamp in {item.timeStamp for item in together})
            since = max(since, _newest(uses))
        if not largest:
            return f"process samples: no process computes; {sizes}"
        if largest == 1:
            # The window of a single sample is unknown, so it cannot be compared with the device's
            # samples.
            return f"process samples: one per process, their sum is unknown; {sizes}"
        sums = f"in sum {claimed} % beside the device's {used} %"
        return f"process samples: one for each window, {sums}; {sizes}"

    def energy_steps(self) -> str:
        """Read the energy counter repeatedly, and return the time between its steps."""
        moved_ns: list[int] = []
        before, polls_ns = None, [self._monotonic_ns()]
        for _ in range(_ENERGY_POLLS):
            outcome = self.probe("nvmlDeviceGetTotalEnergyConsumption")
            if outcome.error:
                return f"energy counter: {outcome}"
            # A poll takes longer than its sleep; the call itself may take as long as the sleep.
            now_ns = self._monotonic_ns()
            if before is not None and outcome.value != before:
                moved_ns.append(now_ns)
            before = outcome.value
            polls_ns.append(now_ns)
            self._sleep(_ENERGY_POLL_SECONDS)
        steps_ns = _gaps(moved_ns)
        if not steps_ns:
            return f"energy counter: stood still for {(polls_ns[-1] - polls_ns[0]) / 1e9:.0f} s"
        step_ns, poll_ns = median_low(steps_ns), median_low(_gaps(polls_ns))
        at_least = "at least " if step_ns < _RESOLVED_POLLS * poll_ns else ""
        return f"energy counter: moves {at_least}every {step_ns / NS_PER_MS:.0f} ms"

    def _device_samples(self, since_us: int) -> Sequence[Any]:
        answer = self.probe("nvmlDeviceGetSamples", pynvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
        return answer.value[1] if answer.value else ()


def _gaps(times_ns: Sequence[int]) -> Sequence[int]:
    return [later - earlier for earlier, later in pairwise(times_ns)]


def _newest(items: Sequence[Any]) -> int:
    return max((item.timeStamp for item in items), default=0)
