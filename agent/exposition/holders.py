"""Whose processes are on a device, by container; who has all of it is `gpuledger.ledger.holders`'.

Pure: the tick's records in, holders and their shares out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from gpuledger.records import ContainerRef, GpuProcess, NodeSample


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
        share = Share(holders[container], _busy_ratio(processes), _memory_bytes(processes))
        shares.setdefault(sample.gpus[gpu].uuid, []).append(share)
    return shares


def holders_of(sample: NodeSample, names: ContainerLookup) -> list[NodeHolder]:
    """Return the containers of a tick in its order."""
    return [_holder_of(ref, names) for ref in sample.containers]


def _holder_of(ref: ContainerRef, names: ContainerLookup) -> NodeHolder:
    container_id = ref.container_id or ""
    name = names.name_of(container_id) if container_id else None
    if name is None:
        return NodeHolder(pod_uid=ref.pod_uid or "", container_id=container_id)
    return NodeHolder(name.namespace, name.pod, name.container, ref.pod_uid or "", container_id)


def _busy_ratio(processes: Sequence[GpuProcess]) -> float | None:
    ratios = [one.sm_utilization_ratio for one in processes if one.sm_utilization_ratio is not None]
    return min(1.0, sum(ratios)) if ratios else None


def _memory_bytes(processes: Sequence[GpuProcess]) -> int | None:
    held = [one.memory_used_bytes for one in processes if one.memory_used_bytes is not None]
    return sum(held) if held else None
