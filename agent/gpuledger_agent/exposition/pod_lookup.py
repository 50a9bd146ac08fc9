"""Finds the containers and jobs that use a node's devices or have devices allocated to them.

This module does not read files or query the kubelet: it takes a tick's record and functions that
look pods up, and returns containers and their use. `ledger.allocated_parts` finds the device that
belongs to an allocation.

The kubelet returns the name of the pod to which a device is allocated, but not the pod's UID. The
UID comes from the cgroup of the container's processes on that device, or is looked up by name in
the node's directories. If two pods have the same name, for example while a pod of a StatefulSet is
recreated, the UID stays empty.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from gpuledger.ledger.allocated_parts import exclusive_container, is_share
from gpuledger.records import ContainerRef, DeviceAllocation, GpuProcess, GpuReading, NodeSample
from gpuledger_agent.exposition.families import Label


class NamedContainer(Protocol):
    """The names of a container and of its pod."""

    @property
    def namespace(self) -> str:
        """The pod's namespace."""

    @property
    def pod(self) -> str:
        """The pod's name."""

    @property
    def container(self) -> str:
        """The container's name in the pod."""


FindUids = Callable[[str, str], Sequence[str]]
"""Takes a pod's namespace and name, and returns the UIDs of all pods with this name."""
LabelsOf = Callable[[str], Sequence[Label]]
"""Takes a pod's UID, and returns the pod's Kubernetes labels to add to its series."""


def _find_no_name(_container_id: str) -> None:
    return None


def _find_no_uid(_namespace: str, _pod: str) -> Sequence[str]:
    return ()


def _find_no_label(_pod_uid: str) -> Sequence[Label]:
    return ()


@dataclass(frozen=True, kw_only=True)
class PodLookup:
    """Functions that look up the names, UIDs and labels of the node's pods."""

    name_of: Callable[[str], NamedContainer | None] = _find_no_name
    """Takes a container's id, and returns the names of the container and its pod; `None` if they
    are unknown."""
    find_uids: FindUids = _find_no_uid
    labels_of: LabelsOf = _find_no_label
    dcgm_labels_of: LabelsOf = _find_no_label
    """Takes a pod's UID, and returns other labels of the pod, only for series of DCGM's metrics."""


NO_PODS: Final = PodLookup()
# Names of labels that DCGM's metrics have by themselves. Labels of pods with these names are left
# out, because a pod could otherwise invalidate the page: no series may have a label twice.
_DCGM_LABEL: Final = re.compile(
    "DCGM_.*|GPU_._ID|GPU_I_PROFILE|gpu|uuid|UUID|pci_bus_id|device|modelName|[hH]ostname"
    "|container|container_name|namespace|pod_namespace|pod|pod_name|pod_uid|hpc_job"
    "|gpuledger_share|err_code|err_msg|window_size_in_ms|xid|clock_event|peer_gpu|link_status"
    "|health_watch|health_error_code"
)


class NodeContainer(NamedTuple):
    """A container or a job; unknown values are empty."""

    namespace: str = ""
    """The pod's namespace."""
    pod: str = ""
    """The pod's name."""
    container: str = ""
    """The container's name in the pod."""
    pod_uid: str = ""
    """The pod's UID."""
    container_id: str = ""
    """The runtime's id of the container."""
    job_id: str = ""
    """The scheduler's job id, for processes outside of pods."""
    pod_labels: Sequence[Label] = ()
    """The pod's Kubernetes labels that are added to all its series."""
    dcgm_pod_labels: Sequence[Label] = ()
    """Other Kubernetes labels of the pod, added only to its series of DCGM's metrics."""

    @property
    def labels(self) -> list[Label]:
        """The labels of the container or job in `gpuledger_…` metrics."""
        return [
            ("namespace", self.namespace),
            ("pod", self.pod),
            ("container", self.container),
            ("pod_uid", self.pod_uid),
            ("container_id", self.container_id),
            ("job_id", self.job_id),
            *self.pod_labels,
        ]

    @property
    def dcgm_labels(self) -> list[Label]:
        """The labels of the container in DCGM's metrics, as dcgm-exporter writes them."""
        return [
            ("container", self.container),
            ("namespace", self.namespace),
            ("pod", self.pod),
            *self.pod_labels,
            *self.dcgm_pod_labels,
        ]


class PodShare(NamedTuple):
    """The use of one device by one container's or job's processes."""

    user: NodeContainer
    """The container or the job."""
    busy_ratio: float | None
    """Fraction of the sampling interval in which the user's kernels ran; `None` if the driver does
    not report it. If the driver does not report it for processes, as under MIG, it is known only
    for the only user of a device."""
    memory_bytes: int | None
    """Device memory in use; `None` if the driver does not report it."""
    engine_busy_ratios: Mapping[str, float] = MappingProxyType({})
    """Fraction of the sampling interval in which each video engine worked for the user, by engine;
    without idle engines."""


# A GPU's UUID and, for a MIG instance, its GPU instance id.
_Device = tuple[str, int | None]
_Container = tuple[str, str, str]


class TickContainers:
    """The containers and jobs that use a tick's devices or to which devices are allocated."""

    def __init__(self, sample: NodeSample, pods: PodLookup) -> None:
        self._sample = sample
        self._pods = pods
        self.containers = [self._container(ref) for ref in sample.containers]
        """The containers and jobs with processes on GPUs, in the order of `sample.containers`;
        their names may be unknown."""
        self._used: dict[tuple[int, int], list[GpuProcess]] = {}
        self._users: dict[int, set[int | None]] = {}
        """The containers and jobs of each device's processes; `None` for the host."""
        self._uids: dict[tuple[_Device, _Container], set[str]] = {}
        for process in sample.processes:
            self._users.setdefault(process.gpu, set()).add(process.container)
            if process.container is not None:
                self._used.setdefault((process.gpu, process.container), []).append(process)
        for gpu, container in self._used:
            user, reading = self.containers[container], sample.gpus[gpu]
            if user.pod_uid:
                key = _device_of(reading), user[:3]
                self._uids.setdefault(key, set()).add(user.pod_uid)

    def shares(self) -> Mapping[str, list[PodShare]]:
        """Return each container's and job's use of each device, by the device's UUID.

        Processes of the host are left out.
        """
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
            # Kernels of several processes may run at once, so the sum may exceed 1.
            busy_ratio = min(1.0, sum(ratios)) if ratios else None
            reading = self._sample.gpus[gpu]
            if busy_ratio is None and len(self._users[gpu]) == 1:
                busy_ratio = reading.utilization_ratio
            share = PodShare(
                user=self.containers[container],
                busy_ratio=busy_ratio,
                memory_bytes=sum(allocation) if allocation else None,
                engine_busy_ratios=_engine_busy_ratios(processes),
            )
            shares.setdefault(reading.uuid, []).append(share)
        return shares

    def exclusive(self, reading: GpuReading) -> NodeContainer | None:
        """Return the container to which the whole device is allocated; `None` if there is none."""
        found = exclusive_container(reading, self._sample.allocations)
        if found is None:
            return None
        pod_uid = self._uid_of(_device_of(reading), found, is_share=False)
        return self._described(*found, pod_uid=pod_uid)

    def allocatee_of(self, allocation: DeviceAllocation) -> NodeContainer:
        """Return the container to which the kubelet has allocated the device of `allocation`."""
        name = allocation.namespace, allocation.pod, allocation.container
        device = allocation.gpu_uuid, allocation.gpu_instance
        pod_uid = self._uid_of(device, name, is_share=is_share(allocation))
        return self._described(*name, pod_uid=pod_uid)

    def _uid_of(self, device: _Device, name: _Container, *, is_share: bool) -> str:
        """Return the UID of the pod to which a device is allocated.

        `name` are the namespace, pod and container from the kubelet. `is_share` is whether only a
        share of the device is allocated. If several pods have this name or the UID is unknown,
        return an empty string.
        """
        running = self._uids.get((device, name), set())
        known = set(self._pods.find_uids(name[0], name[1]))
        # On a wholly allocated device, processes of a pod with this name belong to the allocatee.
        # On a shared device, they may belong to another pod of the same name. A process may also
        # outlive its pod, and a new pod may get the name. So only a UID in both sources is certain.
        certain = set() if is_share else running & known
        return _only(certain or running | known)

    def _container(self, ref: ContainerRef) -> NodeContainer:
        container_id, pod_uid = ref.container_id or "", ref.pod_uid or ""
        name = self._pods.name_of(container_id) if container_id else None
        if name is None:
            found = self._described("", "", "", pod_uid=pod_uid, container_id=container_id)
            # A process in a pod belongs to the pod, not to a job.
            return found if pod_uid else found._replace(job_id=ref.job_id or "")
        if not pod_uid:
            # Some runtimes create a container's cgroup outside of its pod's cgroup.
            pod_uid = _only(self._pods.find_uids(name.namespace, name.pod))
        return self._described(
            name.namespace, name.pod, name.container, pod_uid=pod_uid, container_id=container_id
        )

    def _described(
        self, namespace: str, pod: str, container: str, *, pod_uid: str, container_id: str = ""
    ) -> NodeContainer:
        found = NodeContainer(namespace, pod, container, pod_uid, container_id)
        if not pod_uid:
            return found
        pod_labels = tuple(self._pods.labels_of(pod_uid))
        taken = {name for name, _ in pod_labels}
        of_dcgm = [
            (name, value)
            for name, value in self._pods.dcgm_labels_of(pod_uid)
            if name not in taken and not _DCGM_LABEL.fullmatch(name)
        ]
        return found._replace(pod_labels=pod_labels, dcgm_pod_labels=tuple(of_dcgm))


def _engine_busy_ratios(processes: Sequence[GpuProcess]) -> Mapping[str, float]:
    used = {
        "encoder": sum(process.encoder_utilization_ratio or 0.0 for process in processes),
        "decoder": sum(process.decoder_utilization_ratio or 0.0 for process in processes),
    }
    # As with kernels, the sum may exceed 1.
    return {engine: min(1.0, ratio) for engine, ratio in used.items() if ratio}


def _device_of(reading: GpuReading) -> _Device:
    return reading.parent_uuid or reading.uuid, reading.gpu_instance


def _only(uids: Collection[str]) -> str:
    """Return the UID if there is exactly one, otherwise an empty string."""
    return next(iter(uids)) if len(uids) == 1 else ""
