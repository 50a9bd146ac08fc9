"""What is booked: samples, memory, power, energy, processes; the same between ticks.

Nothing slow may be called here. Whether a value can be true is decided in `gpuledger_agent.core`.
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
    """What was answered, in bytes; `None` where it was not."""

    total: int | None = None
    """All of it."""
    used: int | None = None
    """What is in use; the driver's own is in it where `reserved` is not known."""
    reserved: int | None = None
    """What the driver and the firmware keep for themselves."""
    is_unified: bool = False
    """Whether there is none of its own, as on a GPU that is built with its CPU."""


def query_memory(client: DeviceClient) -> Memory:
    """Return the memory of a device; raises SourceLostError."""
    newer = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    if newer is not None:
        return Memory(newer.total, newer.used, newer.reserved)
    # What only failed is not queried in the older way: its `used` means something else.
    if not client.is_unsupported((_MEMORY, pynvml.nvmlMemory_v2)):
        return Memory()
    older = client.query(NvmlLibrary.nvmlDeviceGetMemoryInfo)
    if older is not None:
        return Memory(older.total, older.used)
    # Where it is hidden, or the driver lacks the function, another reason is given.
    return Memory(is_unified=client.outcomes.get((_MEMORY,)) == NOT_SUPPORTED)


def query_core(
    client: DeviceClient,
    last_seen: SampleCursor,
    lists: "ProcessLists",
    *,
    monotonic_ns: Callable[[], int],
) -> dict[str, Any]:
    """Return a GPU's answers, by the fields of `RawGpuSample`; raises SourceLostError."""
    samples = query_samples(client, last_seen, monotonic_ns=monotonic_ns)
    memory = query_memory(client)
    return {
        "model": client.query(NvmlLibrary.nvmlDeviceGetName),
        **samples,
        "memory_total_bytes": memory.total,
        "memory_used_bytes": memory.used,
        "memory_reserved_bytes": memory.reserved,
        "memory_unified": memory.is_unified,
        **query_energy(client),
        # Last, so that a process with samples is still looked for after they were taken.
        "processes": lists.query(client, memory_used_bytes=memory.used),
    }


def query_fast_poll(
    client: DeviceClient,
    last_seen: SampleCursor,
    lists: "ProcessLists",
    *,
    monotonic_ns: Callable[[], int],
) -> dict[str, Any]:
    """Return a GPU's answers between two ticks, by the fields of `FastPoll`.

    Raises SourceLostError.
    """
    samples = query_samples(client, last_seen, monotonic_ns=monotonic_ns)
    del samples["memory_percent"]
    return {
        "since_us": last_seen.process_us,
        **samples,
        **query_energy(client),
        # Last, so that a process with samples is still looked for after they were taken.
        "processes": list_processes(client, skipped=lists.empty),
    }


def query_samples(
    client: DeviceClient, last_seen: SampleCursor, *, monotonic_ns: Callable[[], int]
) -> dict[str, Any]:
    """Return what the driver has sampled; raises SourceLostError."""
    requested_ns = monotonic_ns()
    # The rates are always of the last sample period, so they show whether the ring buffers leave
    # something out. Before the samples: of a window that closes in between there is a sample.
    rates = client.query(NvmlLibrary.nvmlDeviceGetUtilizationRates)
    samples = _samples(client, pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
    return {
        "percent": rates and rates.gpu,
        "memory_percent": rates and rates.memory,
        "samples": samples,
        # By these the driver's clock is followed: of the GPU behind others it is later.
        "sampled": AnswerTime(requested_ns, monotonic_ns()),
        "memory_samples": _samples(
            client, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us
        ),
        "process_samples": _process_samples(client, last_seen.process_us),
    }


def query_energy(client: DeviceClient) -> dict[str, Any]:
    """Return a board's counter of energy and its draw; raises SourceLostError."""
    return {
        "energy_millijoules": client.query(NvmlLibrary.nvmlDeviceGetTotalEnergyConsumption),
        "power_milliwatts": client.query(NvmlLibrary.nvmlDeviceGetPowerUsage),
    }


@dataclass(kw_only=True)
class ProcessLists:
    """The lists of processes of one GPU, of which those that are empty are asked rarely.

    Most GPUs never have a process of graphics or of MPS. A list that was empty is asked again when
    something has come that may be in it, by the compute list or by the memory in use, and whenever
    it is `due`.
    """

    is_due: bool = True
    """Whether all lists are to be asked next."""
    empty: frozenset[ProcessKind] = frozenset()
    """Those that were empty when they were asked last; read by other threads, too."""
    _compute_pids: frozenset[int] = frozenset()
    _memory_used_bytes: int | None = None

    def query(
        self, client: DeviceClient, *, memory_used_bytes: int | None
    ) -> tuple[ListedProcess, ...] | None:
        """Return the processes of all lists; raises SourceLostError."""
        # Where memory is not told, as where it is the machine's, only the lists say who has come.
        is_as_before = not self.is_due and memory_used_bytes is not None
        is_as_before &= memory_used_bytes == self._memory_used_bytes
        skipped = self.empty if is_as_before else frozenset[ProcessKind]()
        listed = list_processes(client, skipped=skipped)
        # Where no list has answered, one that was skipped may be all that there is.
        if skipped and (listed is None or _compute_pids(listed) != self._compute_pids):
            skipped = frozenset()
            listed = list_processes(client)
        self._memory_used_bytes = memory_used_bytes
        if listed is None:
            # Nobody knows what the others would have said.
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
    """Return the driver's three lists of processes in one; `None` where one of them failed.

    Those that are `skipped` are not asked. A list with a pid that no process can have is none: its
    rows are not what they are read as, and the pids that could be true would be those of others.
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
            # Two lists of three would show the processes of the third one as ended.
            return None
        listed = [
            *(listed or ()),
            *(
                ListedProcess(
                    pid=process.pid,
                    kind=kind,
                    # `None` where the driver answers 2^64-1: the binding makes it that.
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
    # With 0 the driver answers from its whole buffer, so also processes that are long gone.
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
