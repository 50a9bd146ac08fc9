"""One GPU of an open library, asked all its questions.

Whether a value can be true is judged elsewhere. Safe to ask different GPUs from different threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

from agent.nvml.answers import GpuAnswers, LastSeen, ListedProcess, ProcessSample, Sample
from agent.nvml.calls import FailedError, UnsupportedError, call_nvml, none_where_absent
from gpuledger.records import ProcessKind

_VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
}
_LISTS: Final = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses_v3",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}


@dataclass(kw_only=True)
class Gpu:
    """One GPU of an open library; what it does not support is asked once."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    uuid: str
    """Its identity."""
    index: int
    """The driver's index."""
    _unsupported: set[tuple[Any, ...]] = field(default_factory=set)

    def answer(self, last_seen: LastSeen) -> GpuAnswers:
        """Ask everything; raises NvmlLostError where the library must be started again."""
        samples = self._samples(pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
        memory_samples = self._samples(pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us)
        rates = None if samples and memory_samples else self._ask("nvmlDeviceGetUtilizationRates")
        memory = self._ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return GpuAnswers(
            uuid=self.uuid,
            index=self.index,
            model=self._ask("nvmlDeviceGetName"),
            samples=samples,
            memory_samples=memory_samples,
            percent=rates and rates.gpu,
            memory_percent=rates and rates.memory,
            memory_total_bytes=memory and memory.total,
            memory_used_bytes=memory and memory.used,
            memory_reserved_bytes=memory and memory.reserved,
            power_milliwatts=self._ask("nvmlDeviceGetPowerUsage"),
            energy_millijoules=self._ask("nvmlDeviceGetTotalEnergyConsumption"),
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            sm_clock_megahertz=self._ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock_megahertz=self._ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            process_samples=self._process_samples(last_seen.process_us),
            # Last, so that a process with samples is still looked for after they were taken.
            processes=self._processes(),
        )

    def _samples(self, kind: int, last_seen_us: int) -> tuple[Sample, ...] | None:
        def take() -> tuple[Sample, ...]:
            call = ("nvmlDeviceGetSamples", kind)
            value_type, samples = self._ask_once(call, last_seen_us, empty=(None, ()))
            name = _VALUE_FIELDS.get(value_type, "uiVal")
            return tuple(
                Sample(timestamp_us=one.timeStamp, percent=getattr(one.sampleValue, name))
                for one in samples
            )

        return none_where_absent(take)

    def _process_samples(self, last_seen_us: int) -> tuple[ProcessSample, ...] | None:
        def take() -> tuple[ProcessSample, ...]:
            call = ("nvmlDeviceGetProcessUtilization",)
            return tuple(
                ProcessSample(
                    pid=one.pid,
                    timestamp_us=one.timeStamp,
                    sm_percent=one.smUtil,
                    memory_percent=one.memUtil,
                )
                for one in self._ask_once(call, last_seen_us, empty=())
            )

        return none_where_absent(take)

    def _processes(self) -> tuple[ListedProcess, ...] | None:
        listed: list[ListedProcess] | None = None
        for kind, call in _LISTS.items():
            try:
                processes = self._ask_once((call,), empty=())
            except UnsupportedError:
                continue
            except FailedError:
                return None
            listed = [*(listed or ()), *_listed(processes, kind)]
        return None if listed is None else tuple(listed)

    def _ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # as the library has it
        return none_where_absent(lambda: self._ask_once((name, *arguments)))

    def _ask_once(self, call: tuple[Any, ...], *more: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
        """Ask unless it is known to be unsupported; `more` arguments change from call to call."""
        if call in self._unsupported:
            raise UnsupportedError(call[0])
        name, *arguments = call
        try:
            return call_nvml(self.library, name, self.handle, *arguments, *more, empty=empty)
        except UnsupportedError:
            self._unsupported.add(call)
            raise


def _listed(processes: Sequence[Any], kind: ProcessKind) -> list[ListedProcess]:
    return [
        ListedProcess(pid=one.pid, kind=kind, memory_bytes=one.usedGpuMemory) for one in processes
    ]
