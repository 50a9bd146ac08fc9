"""Shares of KAI Scheduler and Run:ai.

A reservation pod has the GPU. The pods behind it have an annotation with a fraction, or with memory
in MiB, for their first container or a named one. A label has the group of the pods that share one
GPU; the reservation pod has the same label. A pod with several GPUs has a label for each.
"""

from typing import Final

from gpuledger.records import AllocationSource
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.stated import (
    MIB,
    BadAnnotationError,
    GpuName,
    ShareSource,
    StatedShare,
    annotation_of,
    container_at,
    containers_of,
    read_fraction,
    read_whole,
    take_shares,
)

_FRACTION: Final = "gpu-fraction"
_MEMORY: Final = "gpu-memory"
_NUMBER: Final = "gpu-fraction-num-devices"
_CONTAINER: Final = "gpu-fraction-container-name"
_GROUP: Final = "runai-gpu-group"


def groups_of(pod: ListedPod) -> list[str]:
    """Return the groups in a pod's labels: one for each of its GPUs."""
    labels = pod.metadata.labels or {}
    found = {
        group for name, group in labels.items() if name == _GROUP or name.startswith(f"{_GROUP}/")
    }
    return sorted(found - {""})


def find_shares(pod: ListedPod) -> list[StatedShare]:
    """Return the shares that a pod states."""
    if fraction := annotation_of(pod, _FRACTION):
        annotation, share_ppm, memory_bytes = _FRACTION, read_fraction(fraction, _FRACTION), 0
    elif memory := annotation_of(pod, _MEMORY):
        annotation, share_ppm, memory_bytes = _MEMORY, 0, read_whole(memory, _MEMORY) * MIB
        if not memory_bytes:
            raise BadAnnotationError(f"{_MEMORY}: no memory")
    else:
        return []
    container = annotation_of(pod, _CONTAINER) or container_at(pod, 0, annotation)
    if container not in {
        each.name for each in (*containers_of(pod), *(pod.spec.init_containers or ()))
    }:
        raise BadAnnotationError(f"{_CONTAINER}: the pod has no such container")
    groups = groups_of(pod)
    if not groups and annotation_of(pod, _NUMBER) not in ("", "1"):
        raise BadAnnotationError(f"{_NUMBER}: several GPUs, but no label {_GROUP}/…")
    return [
        StatedShare(container, GpuName("group", group), share_ppm, memory_bytes)
        for group in take_shares(groups or [""], annotation)
    ]


KAI: Final = ShareSource(
    AllocationSource.KAI, resource_name="nvidia.com/gpu", has_devices=False, find=find_shares
)
