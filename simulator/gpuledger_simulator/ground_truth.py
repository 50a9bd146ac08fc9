"""Who used what, exactly: the answer against which an attribution is measured.

Here the kernels' busy intervals are summed by pod. Nothing here passes through NVML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.plan import PlannedPod, PlannedProcess


@dataclass(frozen=True, kw_only=True)
class PodUsage:
    """What one pod used within an interval, on all its GPUs."""

    uid: str
    """The pod's UID."""
    namespace: str
    """Its namespace."""
    pod: str
    """Its name."""
    owner_kind: str | None
    """Kind of its workload."""
    owner_name: str | None
    """Name of its workload."""
    busy_seconds: float
    """Time in which its kernels ran, summed over GPUs."""
    memory_byte_seconds: float
    """Device memory that it held times the time it was held."""
    joules: float
    """Energy of its kernels beyond the GPUs' idle draw, and beyond what contexts draw."""
    context_joules: float
    """Its part of what the GPUs drew beyond idle because processes were on them, whatever ran: at
    each instant each process that is on a GPU has an equal part of its draw. So idle draw, this and
    `joules` of all pods and of the host sum to what the boards drew."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What some processes used within an interval."""

    busy_seconds: float
    """Time in which their kernels ran, summed over GPUs."""
    memory_byte_seconds: float
    """Device memory held times the time it was held."""
    joules: float
    """Energy of their kernels beyond the GPUs' idle draw, and beyond what contexts draw."""
    context_joules: float
    """Their part of what the GPUs drew because processes were on them, as `PodUsage` has it."""


@dataclass(frozen=True, kw_only=True)
class InstanceUsage:
    """What ran in one MIG instance within an interval."""

    uuid: str
    """The instance's UUID."""
    gpu_uuid: str
    """The GPU's."""
    profile: str
    """Its profile."""
    usage: Usage
    """What its processes used; its seconds are of the instance, its energy of the board."""


def instance_usages(
    gpus: Iterable[SimulatedGpu], start_ns: int, end_ns: int
) -> list[InstanceUsage]:
    """Return each instance of any cut that there was within [start, end), in the driver's order."""
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
    """Sum what a pod's processes, or those of no pod, used of the GPUs within [start, end)."""
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
    """Put the pod's name to what its processes used."""
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
