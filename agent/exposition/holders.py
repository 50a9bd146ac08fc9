"""Who has a device: the container that the kubelet gave it to, and those whose processes are on it.

Pure: the tick's records in, holders and their shares out.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from gpuledger.records import DeviceAllocation, GpuProcess, GpuReading, NodeSample

_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class NamedContainer(Protocol):
    """A container's name and its pod's."""

    @property
    def namespace(self) -> str:
        """Namespace of the pod."""

    @property
    def pod(self) -> str:
        """Name of the pod."""

    @property
    def container(self) -> str:
        """Name of the container in the pod."""


class ContainerLookup(Protocol):
    """Who knows how a container is called."""

    def name_of(self, container_id: str) -> NamedContainer | None:
        """Return the name of a container, `None` where it is not known."""


class NodeHolder(NamedTuple):
    """A container as far as the node knows it; what is not known is empty."""

    namespace: str = ""
    """Namespace of the pod."""
    pod: str = ""
    """Name of the pod."""
    container: str = ""
    """Name of the container in the pod."""
    pod_uid: str = ""
    """UID of the pod."""
    container_id: str = ""
    """The runtime's id of the container."""


class Share(NamedTuple):
    """What the processes of one container use of one device."""

    holder: NodeHolder
    """The container."""
    busy_ratio: float | None
    """Share of the tick in which their kernels ran; absent where the driver does not say."""
    memory_bytes: int | None
    """Device memory that they hold; absent where the driver does not say."""


def exclusive_holder(
    reading: GpuReading, allocations: Iterable[DeviceAllocation]
) -> NodeHolder | None:
    """Return the one container that has all of a device; `None` where none or several have it.

    A share of a device is not all of it, even while nobody has the others.
    """
    holders = set()
    for allocation in allocations:
        if not _is_of(allocation, reading):
            continue
        if allocation.replica is not None:
            return None
        holders.add(NodeHolder(allocation.namespace, allocation.pod, allocation.container))
    return holders.pop() if len(holders) == 1 else None


def _is_of(allocation: DeviceAllocation, reading: GpuReading) -> bool:
    if reading.parent_uuid is None:
        return allocation.gpu_uuid == reading.uuid and allocation.gpu_instance is None
    instance = allocation.device_id.partition("::")[0]
    if _INSTANCE_UUID.fullmatch(instance):
        # Of the compute instances of one GPU instance, it names the one that is meant.
        return instance == reading.uuid
    return (
        allocation.gpu_uuid in (reading.parent_uuid, reading.uuid)
        and allocation.gpu_instance == reading.gpu_instance
    )


def find_shares(sample: NodeSample, names: ContainerLookup) -> Mapping[str, list[Share]]:
    """Return, by a device's UUID, what each container uses; the host's processes are left out.

    A container of which only the UID or the id is known is a holder without a name.
    """
    holders = holders_of(sample, names)
    used: dict[tuple[int, int], list[GpuProcess]] = {}
    for process in sample.processes:
        if process.container is not None:
            used.setdefault((process.gpu, process.container), []).append(process)
    shares: dict[str, list[Share]] = {}
    for (gpu, container), processes in used.items():
        ratios = [
            process.sm_utilization_ratio
            for process in processes
            if process.sm_utilization_ratio is not None
        ]
        held = [
            process.memory_used_bytes
            for process in processes
            if process.memory_used_bytes is not None
        ]
        share = Share(
            holder=holders[container],
            # Kernels of several processes may run at once: together they are no more than all.
            busy_ratio=min(1.0, sum(ratios)) if ratios else None,
            memory_bytes=sum(held) if held else None,
        )
        shares.setdefault(sample.gpus[gpu].uuid, []).append(share)
    return shares


def holders_of(sample: NodeSample, names: ContainerLookup) -> list[NodeHolder]:
    """Return the containers of a tick in its order."""
    holders = []
    for ref in sample.containers:
        container_id = ref.container_id or ""
        name = names.name_of(container_id) if container_id else None
        holders.append(
            NodeHolder(
                namespace=name.namespace if name else "",
                pod=name.pod if name else "",
                container=name.container if name else "",
                pod_uid=ref.pod_uid or "",
                container_id=container_id,
            )
        )
    return holders
