"""The page's part about single processes, `nvidia_pid_pod` among it: off unless asked for.

Bounded, as every new process is a new series: those that hold most memory are shown.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.exposition.holders import NodeHolder, holders_of
from agent.exposition.native import InfoFamily
from agent.exposition.node_state import Snapshot
from agent.exposition.text import SampleLine, write_family, write_labels
from gpuledger.records import GpuProcess

_MIB: Final = 1 << 20
_LABELS: Final = (
    "gpu_uuid",
    "gpu_index",
    "pid",
    "process_name",
    "namespace",
    "pod",
    "container",
    "pod_uid",
    "container_id",
)
PID_POD: Final = InfoFamily(
    "nvidia_pid_pod",
    "gauge",
    "The GPU memory of each pid in a pod (in MiB).",
    ("pid", "process_name", "pod_name", "namespace", "node_name"),
)
BUSY: Final = InfoFamily(
    "gpuledger_process_gpu_busy_ratio",
    "gauge",
    "Share of the tick in which the process's kernels ran on the GPU.",
    _LABELS,
)
MEMORY: Final = InfoFamily(
    "gpuledger_process_gpu_memory_bytes",
    "gauge",
    "Device memory that the process holds.",
    _LABELS,
)
INFO_FAMILIES: Final = (PID_POD, BUSY, MEMORY)


class _Entry(NamedTuple):
    process: GpuProcess
    name: str
    holder: NodeHolder


def write_processes(now: Snapshot, *, max_processes: int) -> Iterator[str]:
    """Write the families of at most `max_processes` processes line by line."""
    running = [process for process in now.sample.processes if not process.ended]
    if len(running) > max_processes:
        # Those that hold most memory, and the same ones each time among equals.
        running.sort(key=lambda process: (-(process.memory_used_bytes or 0), process.pid))
    holders = holders_of(now.sample, now.names)
    entries = [
        _Entry(
            process,
            now.commands.get(process.pid, ""),
            NodeHolder() if process.container is None else holders[process.container],
        )
        for process in running[:max_processes]
    ]
    yield from write_family(PID_POD.name, PID_POD.kind, PID_POD.help, _pid_pod(entries, now))
    for family, field in ((BUSY, "sm_utilization_ratio"), (MEMORY, "memory_used_bytes")):
        values = {
            _labels(entry, now): value
            for entry in entries
            # What the driver does not say is absent, never 0.
            if (value := getattr(entry.process, field)) is not None
        }
        samples = (SampleLine(labels, value) for labels, value in values.items())
        yield from write_family(family.name, family.kind, family.help, samples)


def _pid_pod(entries: list[_Entry], now: Snapshot) -> Iterator[SampleLine]:
    """Sum what a process holds on all GPUs: the labels name none."""
    held: dict[str, int] = {}
    for process, name, holder in entries:
        if holder.pod and process.memory_used_bytes is not None:
            labels = write_labels(
                [
                    ("pid", str(process.pid)),
                    ("process_name", name),
                    ("pod_name", holder.pod),
                    ("namespace", holder.namespace),
                    ("node_name", now.sample.node),
                ]
            )
            held[labels] = held.get(labels, 0) + process.memory_used_bytes
    for labels, memory_bytes in held.items():
        yield SampleLine(labels, memory_bytes // _MIB)


def _labels(entry: _Entry, now: Snapshot) -> str:
    gpu = now.sample.gpus[entry.process.gpu]
    own = (gpu.uuid, str(gpu.index), str(entry.process.pid), entry.name)
    values = (*own, *entry.holder)
    return write_labels([("node", now.sample.node), *zip(_LABELS, values, strict=True)])
