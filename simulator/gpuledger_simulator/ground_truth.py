"""Exact usage by pod: the reference with which an attribution is compared.

This module sums the busy intervals of kernels by pod, without NVML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.plan import PlannedPod, PlannedProcess


@dataclass(frozen=True, kw_only=True)
class PodUsage:
    """The usage of one pod within an interval, on all its GPUs."""

    uid: str
    """Pod UID."""
    namespace: str
    """Namespace."""
    pod: str
    """Pod name."""
    owner_kind: str | None
    """Kind of the workload."""
    owner_name: str | None
    """Name of the workload."""
    busy_seconds: float
    """Time during which the pod's kernels ran, summed over GPUs."""
    memory_byte_seconds: float
    """Device memory of the pod multiplied by the time for which it was allocated."""
    joules: float
    """Energy of the pod's kernels, beyond the draw of idle GPUs and of contexts."""
    context_joules: float
    """The pod's part of the energy that the GPUs drew because processes had them open. At each
    instant, the processes on a GPU share this draw equally. Idle energy plus this field and
    `joules`, summed over all pods and the host, equal the energy that the GPUs drew."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The usage of some processes within an interval."""

    busy_seconds: float
    """Time during which the processes' kernels ran, summed over GPUs."""
    memory_byte_seconds: float
    """Device memory of the processes multiplied by the time for which it was allocated."""
    joules: float
    """Energy of the processes' kernels, beyond the draw of idle GPUs and of contexts."""
    context_joules: float
    """The processes' part of the energy that the GPUs drew because processes had them open; see
    `PodUsage`."""


@dataclass(frozen=True, kw_only=True)
class InstanceUsage:
    """The usage of one MIG instance within an interval."""

    uuid: str
    """UUID of the instance."""
    gpu_uuid: str
    """UUID of the GPU."""
    profile: str
    """Profile of the instance."""
    usage: Usage
    """Usage of the instance's processes. A second in which a kernel ran counts as a whole busy
    second, even if the instance is only a part of the GPU."""


def instance_usages(
    gpus: Iterable[SimulatedGpu], start_ns: int, end_ns: int
) -> list[InstanceUsage]:
    """Return the usage of every instance that existed within [start, end), in driver order."""
    return [
        InstanceUsage(
            uuid=instance.uuid,
            gpu_uuid=gpu.facts.uuid,
            profile=instance.profile,
            usage=_sum(
                [
                    (gpu, process)
                    for process in gpu.processes
                    if gpu.instance_of(process) == instance
                ],
                start_ns,
                end_ns,
            ),
        )
        for gpu in gpus
        for cut in gpu.cuts_within(start_ns, end_ns)
        for instance in cut.instances
    ]


def sum_usage(
    gpus: Iterable[SimulatedGpu],
    start_ns: int,
    end_ns: int,
    *,
    of: PlannedPod | None,
) -> Usage:
    """Return the usage of a pod's processes within [start, end).

    If `of` is `None`, returns the usage of processes outside pods.
    """
    pairs = [(gpu, process) for gpu in gpus for process in gpu.processes if process.pod is of]
    return _sum(pairs, start_ns, end_ns)


def _sum(pairs: Sequence[tuple[SimulatedGpu, PlannedProcess]], start_ns: int, end_ns: int) -> Usage:
    busy = [gpu.busy_ns(process, start_ns, end_ns) for gpu, process in pairs]
    return Usage(
        busy_seconds=sum(busy) / NS_PER_SECOND,
        memory_byte_seconds=sum(
            process.spec.memory_bytes * process.on_gpu_ns(start_ns, end_ns) / NS_PER_SECOND
            for _, process in pairs
        ),
        joules=sum(gpu.kernel_joules(process, start_ns, end_ns) for gpu, process in pairs),
        context_joules=sum(
            gpu.context_joules_of(process, start_ns, end_ns) for gpu, process in pairs
        ),
    )


def pod_usage(pod: PlannedPod, usage: Usage, *, uid: str) -> PodUsage:
    """Return the usage of a pod's processes with the pod's names and UID."""
    owner = pod.spec.owner
    return PodUsage(
        uid=uid,
        namespace=pod.spec.namespace,
        pod=pod.spec.name,
        owner_kind=owner.kind if owner else None,
        owner_name=owner.name if owner else None,
        busy_seconds=usage.busy_seconds,
        memory_byte_seconds=usage.memory_byte_seconds,
        joules=usage.joules,
        context_joules=usage.context_joules,
    )
