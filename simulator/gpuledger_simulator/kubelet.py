"""A node's kubelet: its current pods, their devices, and the names of their logs.

Like a real kubelet, it lists a pod until the pod is removed, long after the pod's containers have
ended. The scenario may omit the device allocation. Then a container gets the GPUs that its
processes use, and if several containers use one GPU, each gets a replica, as with time-slicing.

Other processes connect to it as to a real kubelet: through a gRPC server on a Unix socket
(`serve_kubelet`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.grpc_codec import BytesCodec
from gpuledger.protobuf import write_field
from gpuledger.runtime.tasks import end_tasks
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.gpu_models import SimulatedInstance
from gpuledger_simulator.plan import PlannedPod
from gpuledger_simulator.schema import PluginDevice, ScenarioContainer

CLAIM_DRIVER: Final = "gpu.nvidia.com"


class SimulatedKubelet:
    """The kubelet of one node."""

    def __init__(
        self,
        pods: Sequence[PlannedPod],
        gpus: Sequence[SimulatedGpu],
        *,
        node: str,
        clock: Clock,
        epoch_ns: int,
        uid_of: Callable[[PlannedPod], str | None],
        ended_seconds: float,
    ) -> None:
        """Create a node's kubelet, which lists a pod until `ended_seconds` after the pod's end."""
        self._ended_ns = round(ended_seconds * NS_PER_SECOND)
        self._pods = [pod for pod in pods if pod.spec.node == node]
        self._devices = assign_devices(self._pods, gpus)
        # The kubelet has only devices that some pod gets during the scenario. Replicas that no
        # container uses do not exist.
        self._allocatable = sorted(
            {
                (device.resource, device.device_id)
                for held in self._devices.values()
                for device in held
                if device.claim is None
            }
        )
        self._node = node
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._uid_of = uid_of

    def listed_pods(self) -> list[PlannedPod]:
        """Return the pods that the kubelet lists now, at most one of each name.

        The API server deletes a pod before it creates the next one of the name, and the kubelet
        removes it from its list before it adds the next one.
        """
        kept = sorted(self._kept_pods(), key=lambda pod: pod.start_ns)
        return list({(pod.spec.namespace, pod.spec.name): pod for pod in kept}.values())

    def _kept_pods(self) -> list[PlannedPod]:
        """Return the pods whose logs exist now."""
        now_ns = self._clock.time_ns() - self._epoch_ns
        return [
            pod
            for pod in self._pods
            if pod.start_ns <= now_ns < pod.end_ns + self._ended_ns
            # A kubelet does not list a pod before the API server has assigned the pod's UID.
            and self._uid_of(pod) is not None
        ]

    async def list_pods(self) -> bytes:
        """Return the current response of `v1.PodResourcesLister/List`, encoded."""
        return b"".join(
            write_field(1, write_pod(pod, self._devices, node=self._node))
            for pod in self.listed_pods()
        )

    async def list_allocatable(self) -> bytes:
        """Return the response of `v1.PodResourcesLister/GetAllocatableResources`, encoded."""
        return b"".join(
            write_field(1, write_field(1, resource) + write_field(2, device_id))
            for resource, device_id in self._allocatable
        )

    def pod_folders(self) -> list[str]:
        """Return the current directory names in `/var/log/pods`."""
        return [
            f"{pod.spec.namespace}_{pod.spec.name}_{self._uid_of(pod)}" for pod in self._kept_pods()
        ]

    def has_cgroup(self, uid: str) -> bool:
        """Return whether a pod has a cgroup now; the cgroup exists until the pod's end."""
        return f"pod{uid}" in self.pod_cgroups()

    def pod_cgroups(self) -> list[str]:
        """Return the names of the pods' current cgroups."""
        now_ns = self._clock.time_ns() - self._epoch_ns
        return [f"pod{self._uid_of(pod)}" for pod in self._kept_pods() if now_ns < pod.end_ns]

    def log_names(self) -> list[str]:
        """Return the current link names in `/var/log/containers`."""
        return [
            f"{pod.spec.name}_{pod.spec.namespace}_{name}-{container_id}.log"
            for pod in self._kept_pods()
            for name, container_id in pod.container_ids.items()
        ]


@dataclass(frozen=True, kw_only=True)
class AssignedDevice:
    """A container's device, with the names that the kubelet uses."""

    resource: str
    """Resource name; for a claim, the driver's name."""
    device_id: str
    """Device id."""
    claim: str | None
    """Name of the claim; `None` if a device plugin allocated the device."""


Container = tuple[str, str]
"""A pod's key and a container's name."""
Device = tuple[int, int | None]
"""A GPU's index and an instance's position in its MIG layout."""


def assign_devices(
    pods: Sequence[PlannedPod], gpus: Sequence[SimulatedGpu]
) -> dict[Container, list[AssignedDevice]]:
    """Return the devices of each container on a node, by pod key and container name."""
    users: dict[Device, list[tuple[PlannedPod, str]]] = {}
    for pod in pods:
        for container in pod.spec.containers:
            for device in used_devices(container):
                users.setdefault(device, []).append((pod, container.name))
    return {
        (pod.key, container.name): [
            name_device(device, gpus[device.gpu], start_ns=pod.start_ns)
            for device in _devices_of(container, pod, users)
        ]
        for pod in pods
        for container in pod.spec.containers
    }


def used_devices(container: ScenarioContainer) -> list[Device]:
    """Return the GPUs and instances that a container's processes use, in order."""
    return sorted(
        {(gpu, process.instance) for process in container.processes for gpu in process.gpus},
        key=lambda device: (device[0], device[1] or 0),
    )


def _devices_of(
    container: ScenarioContainer,
    pod: PlannedPod,
    users: Mapping[Device, Sequence[tuple[PlannedPod, str]]],
) -> list[PluginDevice]:
    if container.devices is not None:
        return container.devices
    devices = []
    for gpu, instance in used_devices(container):
        sharers = users[gpu, instance]
        # Pods that run one after another do not share a GPU. Device plugins have replicas only for
        # time-slicing.
        is_shared = (
            sum(other.start_ns < pod.end_ns and pod.start_ns < other.end_ns for other, _ in sharers)
            > 1
        )
        replica = sharers.index((pod, container.name)) if is_shared else None
        devices.append(PluginDevice(gpu=gpu, instance=instance, replica=replica))
    return devices


def name_device(device: PluginDevice, gpu: SimulatedGpu, *, start_ns: int) -> AssignedDevice:
    """Return a device with the names that the device plugin or the DRA driver gives it.

    `start_ns` is the start of the pod, which selects the MIG layout.
    """
    layout = gpu.cut(start_ns)
    # In the scenario, devices of an unpartitioned GPU have no instance.
    number = device.instance
    instance = layout.instances[number] if layout and number is not None else None
    if device.claim:
        name = f"gpu-{gpu.facts.index}"
        if instance:
            # NVIDIA's number of the profile is not simulated, so it is always 0.
            name += f"-mig-{instance.profile.replace('.', '')}-0-{instance.start}"
        return AssignedDevice(resource=CLAIM_DRIVER, device_id=name, claim=device.claim)
    default = f"nvidia.com/mig-{instance.profile}" if instance else "nvidia.com/gpu"
    device_id = plugin_id(device, gpu, instance)
    return AssignedDevice(resource=device.resource or default, device_id=device_id, claim=None)


def plugin_id(device: PluginDevice, gpu: SimulatedGpu, instance: SimulatedInstance | None) -> str:
    """Return a device's id in the format of the device plugin that the scenario selects."""
    uuid, replica = gpu.facts.uuid, device.replica
    if device.ids == "gke":
        part = f"/gi{instance.gpu_instance}" if instance else ""
        return f"nvidia{gpu.facts.index}{part}" + ("" if replica is None else f"/vgpu{replica}")
    if device.ids in ("hami", "gpu-mem"):
        return f"{uuid}{'-_' if device.ids == 'gpu-mem' else ''}-{replica or 0}"
    if instance and device.ids == "old-mig":
        # The format of drivers before 470.
        uuid = f"MIG-{uuid}/{instance.gpu_instance}/{instance.compute_instance}"
    elif instance:
        uuid = instance.uuid
    return uuid if replica is None else f"{uuid}::{replica}"


def write_pod(
    pod: PlannedPod, devices: Mapping[Container, Sequence[AssignedDevice]], *, node: str
) -> bytes:
    """Return a pod's `PodResources` message in the Protocol Buffers wire format.

    The message is encoded by hand, with only the necessary fields of Kubernetes'
    `podresources/v1/api.proto`. A message is a sequence of fields, each with its number, its length
    and its bytes.
    """
    name, namespace = pod.spec.name, pod.spec.namespace
    parts = [write_field(1, name), write_field(2, namespace)]
    for container in pod.spec.containers:
        assigned = devices[pod.key, container.name]
        plugged = [
            write_field(2, write_field(1, device.resource) + write_field(2, device.device_id))
            for device in assigned
            if device.claim is None
        ]
        claimed = [
            write_field(5, write_claim(device, device.claim, namespace=namespace, node=node))
            for device in assigned
            if device.claim
        ]
        parts.append(write_field(3, b"".join((write_field(1, container.name), *plugged, *claimed))))
    return b"".join(parts)


def write_claim(device: AssignedDevice, claim: str, *, namespace: str, node: str) -> bytes:
    """Return an encoded `DynamicResource` message with one device, its CDI name and its driver."""
    cdi = write_field(1, f"k8s.{device.resource}/claim={claim}-{device.device_id}")
    names = (
        write_field(2, device.resource) + write_field(3, node) + write_field(4, device.device_id)
    )
    return (
        write_field(2, claim)
        + write_field(3, namespace)
        + write_field(4, write_field(1, cdi) + names)
    )


_METHOD = "/v1.PodResourcesLister/List"
_ALLOCATABLE_METHOD = "/v1.PodResourcesLister/GetAllocatableResources"
_LINK_SECONDS = 1.0


class _Lister:
    def __init__(self, kubelet: SimulatedKubelet) -> None:
        self._kubelet = kubelet

    def __mapping__(self) -> Mapping[str, Handler]:
        async def list_pods(stream: Stream[Any, Any]) -> None:
            # The request has no fields, but the protocol requires reading it.
            await stream.recv_message()
            await stream.send_message(await self._kubelet.list_pods())

        async def list_allocatable(stream: Stream[Any, Any]) -> None:
            await stream.recv_message()
            await stream.send_message(await self._kubelet.list_allocatable())

        return {
            _METHOD: Handler(list_pods, Cardinality.UNARY_UNARY, bytes, bytes),
            _ALLOCATABLE_METHOD: Handler(list_allocatable, Cardinality.UNARY_UNARY, bytes, bytes),
        }


@asynccontextmanager
async def serve_kubelet(
    kubelet: SimulatedKubelet, socket: Path, *, logs: Path | None = None
) -> AsyncIterator[None]:
    """Serve on `socket` and keep the files in `logs` up to date while the context is open.

    The socket file remains after the context ends, as after a kubelet that was killed.
    """

    async def keep_links(logs: Path) -> None:
        while True:
            link_logs(kubelet, logs)
            await asyncio.sleep(_LINK_SECONDS)

    server = Server([_Lister(kubelet)], codec=BytesCodec())
    await server.start(path=str(socket))
    linking = asyncio.create_task(keep_links(logs)) if logs else None
    try:
        yield
    finally:
        await end_tasks(linking)
        server.close()
        await server.wait_closed()


def link_logs(kubelet: SimulatedKubelet, logs: Path) -> None:
    """Create or remove files, so that the directory has one empty file per container log."""
    logs.mkdir(parents=True, exist_ok=True)
    wanted = set(kubelet.log_names())
    existing = {path.name for path in logs.glob("*.log")}
    for name in wanted - existing:
        # Files instead of links to logs, because agents use only the names in this directory.
        (logs / name).touch()
    for name in existing - wanted:
        (logs / name).unlink()
