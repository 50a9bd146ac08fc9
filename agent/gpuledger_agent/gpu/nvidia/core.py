"""Queries of call group USAGE and of fast polls: samples, memory, power, energy and processes.

This module must not call slow functions. `gpuledger_agent.core` decides which values are plausible.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pynvml

from gpuledger.records import ProcessKind
from gpuledger_agent.core.raw import (
    AnswerTime,
    ListedProcess,
    ProcessUtilizationSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.core.readings import PID
from gpuledger_agent.gpu.nvidia.device_client import (
    NOT_SUPPORTED,
    DeviceClient,
    instance_id,
    raw_getattr,
)
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary, ProcessInfo
from gpuledger_agent.gpu.nvidia.query import value_name
from gpuledger_agent.metrics import NVML_ERRORS

_MEMORY: Final = "nvmlDeviceGetMemoryInfo"
_LISTS: Final = {
    ProcessKind.COMPUTE: NvmlLibrary.nvmlDeviceGetComputeRunningProcesses_v3,
    ProcessKind.GRAPHICS: NvmlLibrary.nvmlDeviceGetGraphicsRunningProcesses_v3,
    ProcessKind.MPS: NvmlLibrary.nvmlDeviceGetMPSComputeRunningProcesses_v3,
}
_RARE: Final = frozenset({ProcessKind.GRAPHICS, ProcessKind.MPS})


class Memory(NamedTuple):
    """A device's memory in bytes; `None` for a value that the driver did not return."""

    total: int | None = None
    """Total memory, in bytes."""
    used: int | None = None
    """Memory in use; includes reserved memory if `reserved` is unknown."""
    reserved: int | None = None
    """Memory reserved by the driver and the firmware."""
    is_unified: bool = False
    """Whether the GPU has no memory of its own and uses the CPU's memory."""


def query_memory(client: DeviceClient) -> Memory:
    """Return the memory of a device; raises SourceLostError."""
    newer = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    if newer is not None:
        return _checked(Memory(newer.total, newer.used, newer.reserved))
    # After a mere failure, do not fall back to the older call: its `used` includes `reserved`.
    if not client.is_unsupported((_MEMORY, pynvml.nvmlMemory_v2)):
        return Memory()
    older = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo)
    if older is not None:
        return _checked(Memory(older.total, older.used))
    # If memory is only hidden or the driver lacks the function, the driver returns another error.
    return Memory(is_unified=client.outcomes.get((_MEMORY,)) == NOT_SUPPORTED)


def _checked(memory: Memory) -> Memory:
    """Return the memory, or unified memory if the total is 0, as some drivers report it."""
    return memory if memory.total else Memory(is_unified=True)


def query_core(
    client: DeviceClient,
    last_seen: SampleCursor,
    lists: "ProcessLists",
    *,
    monotonic_ns: Callable[[], int],
) -> dict[str, Any]:
    """Return a GPU's answers to call group USAGE, keyed by field of `RawGpuSample`.

    Raises `SourceLostError`.
    """
    samples = query_samples(client, last_seen, monotonic_ns=monotonic_ns)
    memory = query_memory(client)
    answers = {
        "model": client.query(NvmlLibrary.nvmlDeviceGetName),
        **samples,
        "memory_total_bytes": memory.total,
        "memory_used_bytes": memory.used,
        "memory_reserved_bytes": memory.reserved,
        "memory_unified": memory.is_unified,
        **query_energy(client),
    }
    # List processes after the samples were read, so that no process with samples is missed.
    requested_ns = monotonic_ns()
    processes = lists.query(client, memory_used_bytes=memory.used)
    return {
        **answers,
        "processes": processes,
        "listed": AnswerTime(requested_ns, monotonic_ns()),
    }


def query_fast_poll(
    client: DeviceClient,
    last_seen: SampleCursor,
    lists: "ProcessLists",
    *,
    monotonic_ns: Callable[[], int],
) -> dict[str, Any]:
    """Return a GPU's answers to a fast poll, keyed by field of `FastPoll`.

    Raises `SourceLostError`.
    """
    samples = query_samples(client, last_seen, monotonic_ns=monotonic_ns)
    del samples["memory_percent"]
    answers = {"since_us": last_seen.process_us, **samples, **query_energy(client)}
    # List processes after the samples were read, so that no process with samples is missed.
    requested_ns = monotonic_ns()
    processes = list_processes(client, skipped=lists.empty)
    return {
        **answers,
        "processes": processes,
        "listed": AnswerTime(requested_ns, monotonic_ns()),
    }


def query_samples(
    client: DeviceClient, last_seen: SampleCursor, *, monotonic_ns: Callable[[], int]
) -> dict[str, Any]:
    """Return the driver's samples since `last_seen`, and its present utilization rates.

    Raises `SourceLostError`.
    """
    requested_ns = monotonic_ns()
    # The rates always cover the last sample period, so they show whether the ring buffers lack
    # samples. They are queried first: if a period ends in between, it has a sample as well.
    rates = client.query(NvmlLibrary.nvmlDeviceGetUtilizationRates)
    samples = _samples(client, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
    return {
        "percent": rates and rates.gpu,
        "memory_percent": rates and rates.memory,
        "samples": samples,
        # Used to track the driver's clock. Each GPU has its own time, because queries take time.
        "sampled": AnswerTime(requested_ns, monotonic_ns()),
        "memory_samples": _samples(
            client, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us
        ),
        "process_samples": _process_samples(client, last_seen.process_us),
    }


def query_energy(client: DeviceClient) -> dict[str, Any]:
    """Return the GPU's energy counter in millijoules and its power draw in milliwatts.

    Raises `SourceLostError`.
    """
    return {
        "energy_millijoules": client.query(NvmlLibrary.nvmlDeviceGetTotalEnergyConsumption),
        "power_milliwatts": client.query(NvmlLibrary.nvmlDeviceGetPowerUsage),
    }


@dataclass(kw_only=True)
class ProcessLists:
    """Queries one GPU's process lists, and skips lists that were empty at the last query.

    Most GPUs never have graphics or MPS processes. A skipped list is queried again if the compute
    processes or the used memory have changed, and if `is_due` is set.
    """

    is_due: bool = True
    """Whether the next query must query all lists."""
    empty: frozenset[ProcessKind] = frozenset()
    """The graphics and MPS lists that were empty at the last query; also read by other threads."""
    _compute_pids: frozenset[int] = frozenset()
    _memory_used_bytes: int | None = None

    def query(
        self, client: DeviceClient, *, memory_used_bytes: int | None
    ) -> tuple[ListedProcess, ...] | None:
        """Return the processes in all lists; `None` if a list failed.

        `memory_used_bytes` is the GPU's memory in use. Raises `SourceLostError`.
        """
        # If memory usage is unknown, as with unified memory, only the lists show new processes.
        is_as_before = not self.is_due and memory_used_bytes is not None
        is_as_before &= memory_used_bytes == self._memory_used_bytes
        skipped = self.empty if is_as_before else frozenset[ProcessKind]()
        listed = list_processes(client, skipped=skipped)
        # If no list was returned, a skipped list may be the only list that the driver supports.
        if skipped and (listed is None or _compute_pids(listed) != self._compute_pids):
            skipped = frozenset()
            listed = list_processes(client)
        self._memory_used_bytes = memory_used_bytes
        if listed is None:
            # The state of the other lists is unknown.
            self.is_due = True
            return None
        self._compute_pids = _compute_pids(listed)
        if not skipped:
            self.is_due = False
            self.empty = _RARE - {process.kind for process in listed}
        return listed


def _compute_pids(listed: Iterable[ListedProcess]) -> frozenset[int]:
    return frozenset(process.pid for process in listed if process.kind is ProcessKind.COMPUTE)


def list_processes(
    client: DeviceClient, *, skipped: Collection[ProcessKind] = ()
) -> tuple[ListedProcess, ...] | None:
    """Return the driver's three process lists as one; `None` if a list failed.

    Lists in `skipped` are not queried. A list with an impossible pid also counts as failed: the
    driver's rows have another layout than expected, so even plausible pids would be wrong. Raises
    `SourceLostError`.
    """
    listed: list[ListedProcess] | None = None
    for kind, function in _LISTS.items():
        if kind in skipped:
            continue
        processes = client.query_list((), function)
        if processes and not _are_processes(processes):
            NVML_ERRORS.labels(call=function.__name__, error="ImpossiblePid").inc()
            return None
        if processes is None:
            if client.is_unsupported((function.__name__,)):
                continue
            # Without this list, its processes would appear to have ended.
            return None
        listed = [
            *(listed or ()),
            *(
                ListedProcess(
                    pid=process.pid,
                    kind=kind,
                    # `None` if unknown: the binding converts the driver's 2^64-1 to `None`.
                    memory_bytes=process.usedGpuMemory,
                    gpu_instance=instance_id(process.gpuInstanceId),
                    compute_instance=instance_id(process.computeInstanceId),
                )
                for process in processes
            ),
        ]
    return None if listed is None else tuple(listed)


def _are_processes(processes: Sequence[ProcessInfo]) -> bool:
    lowest, highest = PID
    return all(lowest <= process.pid <= highest for process in processes)


def _samples(
    client: DeviceClient, kind: int, last_seen_us: int
) -> tuple[UtilizationSample, ...] | None:
    answer = client.query_samples(kind, last_seen_us)
    if answer is None:
        return None
    value_type, samples = answer
    name = value_name(value_type)
    return tuple(
        UtilizationSample(
            timestamp_us=raw_getattr(sample, "timeStamp"),
            percent=getattr(raw_getattr(sample, "sampleValue"), name),
        )
        for sample in samples
    )


def _process_samples(
    client: DeviceClient, last_seen_us: int
) -> tuple[ProcessUtilizationSample, ...] | None:
    # If `last_seen_us` is 0, the driver returns its whole buffer, including processes long gone.
    function = NvmlLibrary.nvmlDeviceGetProcessUtilization
    samples = client.query_list((), function, last_seen_us)
    if samples is None:
        return None
    return tuple(
        ProcessUtilizationSample(
            pid=raw_getattr(sample, "pid"),
            timestamp_us=raw_getattr(sample, "timeStamp"),
            sm_percent=raw_getattr(sample, "smUtil"),
            memory_percent=raw_getattr(sample, "memUtil"),
            encoder_percent=raw_getattr(sample, "encUtil"),
            decoder_percent=raw_getattr(sample, "decUtil"),
        )
        for sample in samples
    )
