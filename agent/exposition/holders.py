"""Whose processes are on a device, by container; who has all of it is `gpuledger.ledger.holders`'.

Pure: the tick's records in, holders and their shares out.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpuledger.records import GpuProcess, NodeSample


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

    @property
    def pod_labels(self) -> list[tuple[str, str]]:
        """The labels by which dcgm-exporter names the pod that has a device."""
        return [
            ("container", self.container),
            ("namespace", self.namespace),
            ("pod", self.pod),
        ]


class PodShare(NamedTuple):
    """What the processes of one container use of one device."""

    holder: NodeHolder
    """The container."""
    busy_ratio: float | None
    """Share of the tick in which their kernels ran; absent where the driver does not say."""
    memory_bytes: int | None
    """Device memory that they hold; absent where the driver does not say."""
    engine_busy_ratios: Mapping[str, float] = MappingProxyType({})
    """Share of the tick in which video engines worked for them, by engine; only those that did."""


def find_shares(sample: NodeSample, names: ContainerLookup) -> Mapping[str, list[PodShare]]:
    """Return, by a device's UUID, what each container uses; the host's processes are left out.

    A container of which only the UID or the id is known is a holder without a name.
    """
    holders = holders_of(sample, names)
    used: dict[tuple[int, int], list[GpuProcess]] = {}
    for process in sample.processes:
        if process.container is not None:
            used.setdefault((process.gpu, process.container), []).append(process)
    shares: dict[str, list[PodShare]] = {}
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
        share = PodShare(
            holder=holders[container],
            # Kernels of several processes may run at once: together they are no more than all.
            busy_ratio=min(1.0, sum(ratios)) if ratios else None,
            memory_bytes=sum(held) if held else None,
            engine_busy_ratios=_engine_busy_ratios(processes),
        )
        shares.setdefault(sample.gpus[gpu].uuid, []).append(share)
    return shares


def _engine_busy_ratios(processes: Sequence[GpuProcess]) -> Mapping[str, float]:
    used = {
        "encoder": sum(process.encoder_utilization_ratio or 0.0 for process in processes),
        "decoder": sum(process.decoder_utilization_ratio or 0.0 for process in processes),
    }
    # As with kernels: together they are no more than all.
    return {engine: min(1.0, ratio) for engine, ratio in used.items() if ratio}


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
