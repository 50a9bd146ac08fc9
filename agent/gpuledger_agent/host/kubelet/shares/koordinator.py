"""Shares of Koordinator.

The annotation is JSON with the pod's devices by type. A GPU has the number in its device file's
name, a percentage of the cores, and the memory in bytes and in percent. The annotation is the
pod's, so the shares belong to the first container that requests a GPU.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from gpuledger.records import AllocationSource
from gpuledger_agent.host.kubelet.pod_list import ListedContainer, ListedPod
from gpuledger_agent.host.kubelet.shares.stated import (
    BadAnnotationError,
    GpuName,
    ShareSource,
    StatedShare,
    annotation_of,
    container_at,
    containers_of,
    of_percent,
    read_json,
    read_quantity,
    take_shares,
)

_ANNOTATION: Final = "scheduling.koordinator.sh/device-allocated"


class _Device(msgspec.Struct):
    minor: int
    resources: Mapping[str, str | int] = {}


class _Devices(msgspec.Struct):
    gpu: list[_Device] = []


def find_shares(pod: ListedPod) -> list[StatedShare]:
    """Return the shares that a pod states."""
    text = annotation_of(pod, _ANNOTATION)
    devices = take_shares(read_json(text, _Devices, _ANNOTATION).gpu, _ANNOTATION) if text else []
    if not devices:
        return []
    container = next(
        (each.name for each in containers_of(pod) if _requests_gpu(each)),
        container_at(pod, 0, _ANNOTATION),
    )
    return [_read(container, device) for device in devices]


def _read(container: str, device: _Device) -> StatedShare:
    # Earlier versions wrote `kubernetes.io/gpu-core` instead of `koordinator.sh/gpu-core`.
    amounts = {
        name.rpartition("/")[2]: read_quantity(quantity, _ANNOTATION)
        for name, quantity in device.resources.items()
        if name.rpartition("/")[2] in ("gpu-core", "gpu-memory", "gpu-memory-ratio")
    }
    if not any(amounts.values()):
        raise BadAnnotationError(f"{_ANNOTATION}: neither memory nor cores")
    # The percentage is exact; Koordinator rounds the bytes that it computes from it.
    ratio = amounts.get("gpu-memory-ratio", 0)
    return StatedShare(
        container,
        GpuName("minor", device.minor),
        share_ppm=of_percent(max(ratio, amounts.get("gpu-core", 0))),
        memory_bytes=0 if ratio else amounts.get("gpu-memory", 0),
    )


def _requests_gpu(container: ListedContainer) -> bool:
    limits = container.resources.limits or {}
    return any(name.rpartition("/")[2].startswith("gpu") for name in limits)


KOORDINATOR: Final = ShareSource(
    AllocationSource.KOORDINATOR,
    resource_name="koordinator.sh/gpu",
    has_devices=False,
    find=find_shares,
)
