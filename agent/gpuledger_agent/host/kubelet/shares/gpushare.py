"""Shares of Alibaba's cGPU and gpushare.

Newer schedulers write JSON, with the memory in GiB and optionally the percentage of the cores, by
the container's position and the number in the device file's name: `{"0":{"1":8}}`. Older ones write
the number of the pod's GPU and the size of this GPU, in the unit of the containers' requests.
"""

from typing import Final

from gpuledger.records import AllocationSource
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.stated import (
    GIB,
    BadAnnotationError,
    GpuName,
    ShareSource,
    StatedShare,
    annotation_of,
    container_at,
    containers_of,
    of_parts,
    of_percent,
    read_json,
    read_quantity,
    read_whole,
    take_shares,
)

_MEMORY: Final = "scheduler.framework.gpushare.allocation"
_CORES: Final = "gpushare.alibabacloud.com/core-percentage"
_INDEX: Final = "ALIYUN_COM_GPU_MEM_IDX"
_POD_UNITS: Final = "ALIYUN_COM_GPU_MEM_POD"
_GPU_UNITS: Final = "ALIYUN_COM_GPU_MEM_DEV"
_RESOURCE: Final = "aliyun.com/gpu-mem"
_MAX_AMOUNT: Final = 2**30

_Amounts = dict[tuple[str, int], int]


def find_shares(pod: ListedPod) -> list[StatedShare]:
    """Return the shares that a pod states."""
    if annotation_of(pod, _MEMORY):
        memory, cores = _read_amounts(pod, _MEMORY), _read_amounts(pod, _CORES)
        return [
            StatedShare(
                container,
                GpuName("minor", minor),
                share_ppm=of_percent(cores.get((container, minor), 0)),
                memory_bytes=memory.get((container, minor), 0) * GIB,
            )
            for container, minor in dict.fromkeys((*memory, *cores))
        ]
    return _find_older(pod) if annotation_of(pod, _INDEX) else []


def _read_amounts(pod: ListedPod, annotation: str) -> _Amounts:
    """Return the amounts in a JSON annotation, by container and GPU, without zeros."""
    text = annotation_of(pod, annotation)
    found = read_json(text, dict[int, dict[int, int]], annotation) if text else {}
    stated = (
        (position, minor, amount)
        for position, by_gpu in found.items()
        for minor, amount in by_gpu.items()
        if amount
    )
    amounts: _Amounts = {}
    for position, minor, amount in take_shares(stated, annotation):
        if not 0 < amount < _MAX_AMOUNT:
            raise BadAnnotationError(f"{annotation}: invalid amount")
        amounts[container_at(pod, position, annotation), minor] = amount
    return amounts


def _find_older(pod: ListedPod) -> list[StatedShare]:
    gpu = GpuName("minor", read_whole(annotation_of(pod, _INDEX), _INDEX))
    whole = read_whole(annotation_of(pod, _GPU_UNITS) or "0", _GPU_UNITS)
    units = {
        container.name: read_quantity(limit, _RESOURCE)
        for container in containers_of(pod)
        if (limit := (container.resources.limits or {}).get(_RESOURCE))
    } or {
        container_at(pod, 0, _INDEX): read_whole(annotation_of(pod, _POD_UNITS) or "0", _POD_UNITS)
    }
    if not all(units.values()):
        raise BadAnnotationError(f"{_POD_UNITS}: no memory")
    return [
        StatedShare(container, gpu, share_ppm=of_parts(number, whole))
        if whole
        else StatedShare(container, gpu, memory_bytes=number * GIB)
        for container, number in units.items()
    ]


GPUSHARE: Final = ShareSource(
    AllocationSource.GPUSHARE, resource_name=_RESOURCE, has_devices=True, find=find_shares
)
