"""Find the containers and jobs that use a node's devices, and those they are allocated to.

Pure: the records of a tick in, containers and their shares out. `ledger.allocated_parts` finds
which device an allocation means.

The kubelet returns the name of the pod that has a device, without its UID. The UID comes from the
cgroup of the container's processes on that device, or from the name in the node's directories. If
two pods have the name, as when a pod of a StatefulSet is recreated, the UID stays empty.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from gpuledger.ledger.allocated_parts import exclusive_container
from gpuledger.records import ContainerRef, DeviceAllocation, GpuProcess, GpuReading, NodeSample
from gpuledger_agent.exposition.families import Label


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


FindUids = Callable[[str, str], Sequence[str]]
"""Takes namespace and name of a pod, and gives the UIDs that may be meant."""
LabelsOf = Callable[[str], Sequence[Label]]
"""Takes a pod's UID, and gives the labels that its series have beside their own."""


def _find_no_name(_container_id: str) -> None:
    return None


def _find_no_uid(_namespace: str, _pod: str) -> Sequence[str]:
    return ()


def _find_no_label(_pod_uid: str) -> Sequence[Label]:
    return ()


@dataclass(frozen=True, kw_only=True)
class PodLookup:
    """Who knows the node's pods."""

    name_of: Callable[[str], NamedContainer | None] = _find_no_name
    """Takes a container's id, and gives its name; `None` where it is not known."""
    find_uids: FindUids = _find_no_uid
    labels_of: LabelsOf = _find_no_label


NO_PODS: Final = PodLookup()


class NodeContainer(NamedTuple):
    """A container or a job as far as the node knows it; what is not known is empty."""

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
    job_id: str = ""
    """The scheduler's job, outside of pods."""
    further: Sequence[Label] = ()
    """Those of the pod's labels in Kubernetes that its series have."""

    @property
    def labels(self) -> list[Label]:
        """The labels by which our own series name a container or a job."""
        return [
            ("namespace", self.namespace),
            ("pod", self.pod),
            ("container", self.container),
            ("pod_uid", self.pod_uid),
            ("container_id", self.container_id),
            ("job_id", self.job_id),
            *self.further,
        ]

    @property
    def dcgm_labels(self) -> list[Label]:
        """The labels by which dcgm-exporter names the pod that has a device."""
        return [
            ("container", self.container),
            ("namespace", self.namespace),
            ("pod", self.pod),
            *self.further,
        ]


class PodShare(NamedTuple):
    """What the processes of one container or job use of one device."""

    user: NodeContainer
    """The container or the job."""
    busy_ratio: float | None
    """Share of the tick in which their kernels ran; absent where the driver does not say."""
    memory_bytes: int | None
    """Device memory that they hold; absent where the driver does not say."""
    engine_busy_ratios: Mapping[str, float] = MappingProxyType({})
    """Share of the tick in which video engines worked for them, by engine; only those that did."""


# A GPU by its UUID alone; an instance by that of its GPU, and its number there.
_Device = tuple[str, int | None]
_Container = tuple[str, str, str]


class TickContainers:
    """The containers and jobs of a tick, and those to which its devices are given."""

    def __init__(self, sample: NodeSample, pods: PodLookup) -> None:
        self._sample = sample
        self._pods = pods
        self.containers = [self._container(ref) for ref in sample.containers]
        """The containers and jobs that have processes, in the tick's order; without a name where
        only UID or id is known."""
        self._used: dict[tuple[int, int], list[GpuProcess]] = {}
        self._uids: dict[tuple[_Device, _Container], set[str]] = {}
        for process in sample.processes:
            if process.container is not None:
                self._used.setdefault((process.gpu, process.container), []).append(process)
        for gpu, container in self._used:
            user, reading = self.containers[container], sample.gpus[gpu]
            if user.pod_uid:
                key = _device_of(reading), user[:3]
                self._uids.setdefault(key, set()).add(user.pod_uid)

    def shares(self) -> Mapping[str, list[PodShare]]:
        """Return what each container or job uses by a device's UUID; the host's is left out."""
        shares: dict[str, list[PodShare]] = {}
        for (gpu, container), processes in self._used.items():
            ratios = [
                process.sm_utilization_ratio
                for process in processes
                if process.sm_utilization_ratio is not None
            ]
            allocation = [
                process.memory_used_bytes
                for process in processes
                if process.memory_used_bytes is not None
            ]
            share = PodShare(
                user=self.containers[container],
                # Kernels of several processes may run at once: together they are no more than all.
                busy_ratio=min(1.0, sum(ratios)) if ratios else None,
                memory_bytes=sum(allocation) if allocation else None,
                engine_busy_ratios=_engine_busy_ratios(processes),
            )
            shares.setdefault(self._sample.gpus[gpu].uuid, []).append(share)
        return shares

    def exclusive(self, reading: GpuReading) -> NodeContainer | None:
        """Return the container that has all of a device; `None` where none or several have it."""
        found = exclusive_container(reading, self._sample.allocations)
        if found is None:
            return None
        pod_uid = self._uid_of(_device_of(reading), found, is_share=False)
        return self._described(*found, pod_uid=pod_uid)

    def allocatee_of(self, allocation: DeviceAllocation) -> NodeContainer:
        """Return the container that a device is given to."""
        name = allocation.namespace, allocation.pod, allocation.container
        device = allocation.gpu_uuid, allocation.gpu_instance
        pod_uid = self._uid_of(device, name, is_share=allocation.replica is not None)
        return self._described(*name, pod_uid=pod_uid)

    def _uid_of(self, device: _Device, name: _Container, *, is_share: bool) -> str:
        """Return the UID of a pod that holds a device; empty where it may be one of two."""
        running = self._uids.get((device, name), set())
        known = set(self._pods.find_uids(name[0], name[1]))
        # Who has all of a device is the one that runs there; of shares another pod of that name
        # may have the next one. A process may also outlive its pod, whose name is another's then.
        certain = set() if is_share else running & known
        return _only(certain or running | known)

    def _container(self, ref: ContainerRef) -> NodeContainer:
        container_id, pod_uid = ref.container_id or "", ref.pod_uid or ""
        name = self._pods.name_of(container_id) if container_id else None
        if name is None:
            found = self._described("", "", "", pod_uid=pod_uid, container_id=container_id)
            # Where there is a pod, what runs in it is the pod's.
            return found if pod_uid else found._replace(job_id=ref.job_id or "")
        if not pod_uid:
            # Some runtimes put a container's cgroup beside its pod's.
            pod_uid = _only(self._pods.find_uids(name.namespace, name.pod))
        return self._described(
            name.namespace, name.pod, name.container, pod_uid=pod_uid, container_id=container_id
        )

    def _described(
        self, namespace: str, pod: str, container: str, *, pod_uid: str, container_id: str = ""
    ) -> NodeContainer:
        further = self._pods.labels_of(pod_uid) if pod_uid else ()
        return NodeContainer(
            namespace, pod, container, pod_uid, container_id, further=tuple(further)
        )


def _engine_busy_ratios(processes: Sequence[GpuProcess]) -> Mapping[str, float]:
    used = {
        "encoder": sum(process.encoder_utilization_ratio or 0.0 for process in processes),
        "decoder": sum(process.decoder_utilization_ratio or 0.0 for process in processes),
    }
    # As with kernels: together they are no more than all.
    return {engine: min(1.0, ratio) for engine, ratio in used.items() if ratio}


def _device_of(reading: GpuReading) -> _Device:
    return reading.parent_uuid or reading.uuid, reading.gpu_instance


def _only(uids: Collection[str]) -> str:
    """Return the one UID there is; empty where there is none or more."""
    return next(iter(uids)) if len(uids) == 1 else ""
