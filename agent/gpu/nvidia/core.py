"""The questions whose answers are booked: samples, memory, power, energy, processes.

Nothing slow may be asked here. Whether a value can be true is judged elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pynvml

from agent.core.raw import ListedProcess, ProcessUtilizationSample, SampleCursor, UtilizationSample
from agent.gpu.nvidia.client import DeviceClient, none_where_absent, raw_getattr
from agent.gpu.nvidia.library import NvmlLibrary, ProcessInfo
from agent.gpu.nvidia.query import value_name
from agent.gpu.source import FailedError, UnsupportedError
from gpuledger.records import ProcessKind

_CALL: Final = "nvmlDeviceGetMemoryInfo"


class Memory(NamedTuple):
    """What was answered, in bytes; `None` where it was not."""

    total: int | None = None
    """All of it."""
    used: int | None = None
    """What is in use; the driver's own is in it where `reserved` is not known."""
    reserved: int | None = None
    """What the driver and the firmware keep for themselves."""


def query_memory(client: DeviceClient) -> Memory:
    """Ask for the memory; raises SourceLostError."""
    newer = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    if newer is not None:
        return Memory(newer.total, newer.used, newer.reserved)
    # What only failed is not asked in the older way: its `used` means something else.
    if not client.is_unsupported((_CALL, pynvml.nvmlMemory_v2)):
        return Memory()
    older = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo)
    return Memory() if older is None else Memory(older.total, older.used)


_NO_INSTANCE: Final = 0xFFFFFFFF
_LISTS: Final = {
    ProcessKind.COMPUTE: NvmlLibrary.nvmlDeviceGetComputeRunningProcesses_v3,
    ProcessKind.GRAPHICS: NvmlLibrary.nvmlDeviceGetGraphicsRunningProcesses_v3,
    ProcessKind.MPS: NvmlLibrary.nvmlDeviceGetMPSComputeRunningProcesses_v3,
}


def query_core(client: DeviceClient, last_seen: SampleCursor) -> dict[str, Any]:
    """Ask one GPU, by the fields of `GpuAnswers`; raises SourceLostError."""
    samples = _samples(client, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
    memory_samples = _samples(client, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us)
    rates = (
        None
        if samples and memory_samples
        else client.query(NvmlLibrary.nvmlDeviceGetUtilizationRates)
    )
    memory = query_memory(client)
    return {
        "model": client.query(NvmlLibrary.nvmlDeviceGetName),
        "samples": samples,
        "memory_samples": memory_samples,
        "percent": rates and rates.gpu,
        "memory_percent": rates and rates.memory,
        "memory_total_bytes": memory.total,
        "memory_used_bytes": memory.used,
        "memory_reserved_bytes": memory.reserved,
        "power_milliwatts": client.query(NvmlLibrary.nvmlDeviceGetPowerUsage),
        "energy_millijoules": client.query(NvmlLibrary.nvmlDeviceGetTotalEnergyConsumption),
        "process_samples": _process_samples(client, last_seen.process_us),
        # Last, so that a process with samples is still looked for after they were taken.
        "processes": list_processes(client),
    }


def list_processes(client: DeviceClient) -> tuple[ListedProcess, ...] | None:
    """Return the three lists, one after the other; `None` where one of them failed."""
    listed: list[ListedProcess] | None = None
    for kind, function in _LISTS.items():
        try:
            processes = client.list_or_raise((), function)
        except UnsupportedError:
            continue
        except FailedError:
            return None
        listed = [*(listed or ()), *_listed(processes, kind)]
    return None if listed is None else tuple(listed)


def _listed(processes: Sequence[ProcessInfo], kind: ProcessKind) -> list[ListedProcess]:
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


def _samples(
    client: DeviceClient, kind: int, last_seen_us: int
) -> tuple[UtilizationSample, ...] | None:
    def take() -> tuple[UtilizationSample, ...]:
        value_type, samples = client.samples_or_raise(kind, last_seen_us)
        name = value_name(value_type)
        return tuple(
            UtilizationSample(
                timestamp_us=raw_getattr(one, "timeStamp"),
                percent=getattr(raw_getattr(one, "sampleValue"), name),
            )
            for one in samples
        )

    return none_where_absent(take)


def _process_samples(
    client: DeviceClient, last_seen_us: int
) -> tuple[ProcessUtilizationSample, ...] | None:
    def take() -> tuple[ProcessUtilizationSample, ...]:
        function = NvmlLibrary.nvmlDeviceGetProcessUtilization
        return tuple(
            ProcessUtilizationSample(
                pid=raw_getattr(one, "pid"),
                timestamp_us=raw_getattr(one, "timeStamp"),
                sm_percent=raw_getattr(one, "smUtil"),
                memory_percent=raw_getattr(one, "memUtil"),
            )
            for one in client.list_or_raise((), function, last_seen_us)
        )

    return none_where_absent(take)
