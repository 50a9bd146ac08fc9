"""The questions whose answers are booked: samples, memory, power, energy, processes.

Nothing slow may be asked here. Whether a value can be true is judged elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import pynvml

from agent.nvml.answers import LastSeen, ListedProcess, ProcessSample, Sample
from agent.nvml.asking import Asker
from agent.nvml.calls import FailedError, UnsupportedError, none_where_absent
from agent.nvml.fields import value_name
from agent.nvml.memory import ask_memory
from agent.nvml.structs import peek
from gpuledger.records import ProcessKind

_NO_INSTANCE: Final = 0xFFFFFFFF
_LISTS: Final = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses_v3",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}


def ask_books(asker: Asker, last_seen: LastSeen) -> dict[str, Any]:
    """Ask one GPU, by the fields of `GpuAnswers`; raises NvmlLostError."""
    samples = _samples(asker, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
    memory_samples = _samples(asker, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us)
    rates = None if samples and memory_samples else asker.ask("nvmlDeviceGetUtilizationRates")
    memory = ask_memory(asker)
    return {
        "model": asker.ask("nvmlDeviceGetName"),
        "samples": samples,
        "memory_samples": memory_samples,
        "percent": rates and rates.gpu,
        "memory_percent": rates and rates.memory,
        "memory_total_bytes": memory.total,
        "memory_used_bytes": memory.used,
        "memory_reserved_bytes": memory.reserved,
        "power_milliwatts": asker.ask("nvmlDeviceGetPowerUsage"),
        "energy_millijoules": asker.ask("nvmlDeviceGetTotalEnergyConsumption"),
        "process_samples": _process_samples(asker, last_seen.process_us),
        # Last, so that a process with samples is still looked for after they were taken.
        "processes": list_processes(asker),
    }


def list_processes(asker: Asker) -> tuple[ListedProcess, ...] | None:
    """Give the three lists, one after the other; `None` where one of them failed."""
    listed: list[ListedProcess] | None = None
    for kind, call in _LISTS.items():
        try:
            processes = asker.insist((call,), empty=())
        except UnsupportedError:
            continue
        except FailedError:
            return None
        listed = [*(listed or ()), *_listed(processes, kind)]
    return None if listed is None else tuple(listed)


def _listed(processes: Sequence[Any], kind: ProcessKind) -> list[ListedProcess]:
    return [
        ListedProcess(
            pid=one.pid,
            kind=kind,
            memory_bytes=one.usedGpuMemory,
            gpu_instance=_id(one.gpuInstanceId),
            compute_instance=_id(one.computeInstanceId),
        )
        for one in processes
    ]


def _id(given: int) -> int | None:
    return None if given == _NO_INSTANCE else given


def _samples(asker: Asker, kind: int, last_seen_us: int) -> tuple[Sample, ...] | None:
    def take() -> tuple[Sample, ...]:
        call = ("nvmlDeviceGetSamples", kind)
        value_type, samples = asker.insist(call, last_seen_us, empty=(None, ()))
        name = value_name(value_type)
        return tuple(
            Sample(
                timestamp_us=peek(one, "timeStamp"),
                percent=getattr(peek(one, "sampleValue"), name),
            )
            for one in samples
        )

    return none_where_absent(take)


def _process_samples(asker: Asker, last_seen_us: int) -> tuple[ProcessSample, ...] | None:
    def take() -> tuple[ProcessSample, ...]:
        call = ("nvmlDeviceGetProcessUtilization",)
        return tuple(
            ProcessSample(
                pid=peek(one, "pid"),
                timestamp_us=peek(one, "timeStamp"),
                sm_percent=peek(one, "smUtil"),
                memory_percent=peek(one, "memUtil"),
            )
            for one in asker.insist(call, last_seen_us, empty=())
        )

    return none_where_absent(take)
