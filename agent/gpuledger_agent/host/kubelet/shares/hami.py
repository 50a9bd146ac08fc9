"""Shares of HAMi and of Volcano's vGPU, which have one encoding.

The annotation lists the containers, each followed by `;`, with their devices, each followed by `:`.
A device is `UUID,type,MiB,percent of the cores`; 0 % means no limit, so the memory counts. HAMi
lists init containers before the others, but only in versions that support them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from gpuledger.records import AllocationSource
from gpuledger_agent.host.kubelet.pod_list import ListedPod
from gpuledger_agent.host.kubelet.shares.stated import (
    MAX_SHARES_OF_POD,
    MIB,
    BadAnnotationError,
    GpuName,
    ShareSource,
    StatedShare,
    annotation_of,
    containers_of,
    of_percent,
    read_whole,
)

_FIELDS: Final = 4


def find_encoded(pod: ListedPod, annotations: Sequence[str]) -> list[StatedShare]:
    """Return the shares in the first of these annotations that the pod has."""
    annotation = next((name for name in annotations if annotation_of(pod, name)), None)
    if annotation is None:
        return []
    text = annotation_of(pod, annotation)
    if text.count(":") > MAX_SHARES_OF_POD:
        raise BadAnnotationError(f"{annotation}: over {MAX_SHARES_OF_POD} shares")
    containers = containers_of(pod)
    with_init = [*(pod.spec.init_containers or ()), *containers]
    # One part more than the pod has containers, so that too many are detected.
    listed = text.split(";", len(with_init) + 1)
    # The last container is followed by a separator too.
    if not listed[-1]:
        listed.pop()
    if len(listed) > len(containers):
        containers = with_init
    if len(listed) > len(containers):
        raise BadAnnotationError(f"{annotation}: more containers than the pod has")
    return [
        share
        for container, devices in zip(containers, listed, strict=False)
        for device in devices.split(":")
        if (share := _read(container.name, device, annotation))
    ]


def _read(container: str, device: str, annotation: str) -> StatedShare | None:
    """Return the share of a device; `None` if the container has no device here."""
    fields = device.split(",", _FIELDS)
    if not fields[0]:
        return None
    if len(fields) < _FIELDS:
        raise BadAnnotationError(f"{annotation}: expected UUID,type,memory,cores")
    memory, cores = (read_whole(field, annotation) for field in fields[2:_FIELDS])
    if not memory and not cores:
        raise BadAnnotationError(f"{annotation}: neither memory nor cores")
    return StatedShare(
        container,
        GpuName("uuid", fields[0]),
        share_ppm=of_percent(cores),
        memory_bytes=memory * MIB,
    )


HAMI: Final = ShareSource(
    AllocationSource.HAMI,
    resource_name="nvidia.com/gpu",
    has_devices=True,
    find=partial(find_encoded, annotations=("hami.io/vgpu-devices-allocated",)),
)
VOLCANO: Final = ShareSource(
    AllocationSource.VOLCANO,
    resource_name="volcano.sh/vgpu-number",
    has_devices=True,
    find=partial(find_encoded, annotations=("volcano.sh/vgpu-ids-new", "4pd.io/vgpu-ids-new")),
)
