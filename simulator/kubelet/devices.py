"""Which container was given which device, under which id.

What the scenario leaves open follows from what runs: a container has the GPUs that its processes
use, and where several containers use one, each has a share of it, as by time-slicing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.device import SimulatedGpu
from simulator.gpu_models import SimulatedInstance
from simulator.plan import PlannedPod
from simulator.scenario.schema import PluginDevice, ScenarioContainer

CLAIM_DRIVER = "gpu.nvidia.com"


@dataclass(frozen=True, kw_only=True)
class GivenDevice:
    """A device of a container, as the kubelet names it."""

    resource: str
    """The resource; of a claim, the driver."""
    device_id: str
    """The id."""
    claim: str | None
    """The claim's name, where one gave it."""


User = tuple[PlannedPod, str]
"""A pod, and the name of a container of it."""
Place = tuple[int, int | None]
"""A GPU's index, and an instance's position in its cut."""


def hand_out(
    pods: Sequence[PlannedPod], gpus: Sequence[SimulatedGpu]
) -> dict[tuple[str, str], list[GivenDevice]]:
    """Return the devices of a node's containers, by the pod's key and the container's name."""
    users = _users(pods)
    return {
        (pod.key, container.name): [
            _name(device, gpus[device.gpu], pod) for device in _devices(container, pod, users)
        ]
        for pod in pods
        for container in pod.spec.containers
    }


def _users(pods: Iterable[PlannedPod]) -> Mapping[Place, list[User]]:
    users: dict[Place, list[User]] = {}
    for pod in pods:
        for container in pod.spec.containers:
            for place in _places(container):
                users.setdefault(place, []).append((pod, container.name))
    return users


def _places(container: ScenarioContainer) -> list[Place]:
    return sorted(
        {(gpu, process.instance) for process in container.processes for gpu in process.gpus},
        key=lambda place: (place[0], place[1] or 0),
    )


def _devices(
    container: ScenarioContainer, pod: PlannedPod, users: Mapping[Place, list[User]]
) -> list[PluginDevice]:
    if container.devices is not None:
        return container.devices
    return [
        PluginDevice(
            gpu=gpu,
            instance=instance,
            replica=_replica((pod, container.name), users[gpu, instance]),
        )
        for gpu, instance in _places(container)
    ]


def _replica(who: User, users: Sequence[User]) -> int | None:
    """Return which share of a device a container has; `None` where nobody else ever shares it."""
    pod, _ = who
    at_once = [
        other for other, _ in users if other.start_ns < pod.end_ns and pod.start_ns < other.end_ns
    ]
    return users.index(who) if len(at_once) > 1 else None


def _name(device: PluginDevice, gpu: SimulatedGpu, pod: PlannedPod) -> GivenDevice:
    cut = gpu.cut(pod.start_ns)
    instance = cut.instances[device.instance] if cut and device.instance is not None else None
    if device.claim:
        name = _claimed_name(gpu, instance)
        return GivenDevice(resource=CLAIM_DRIVER, device_id=name, claim=device.claim)
    default = f"nvidia.com/mig-{instance.profile}" if instance else "nvidia.com/gpu"
    return GivenDevice(
        resource=device.resource or default, device_id=_id(device, gpu, instance), claim=None
    )


def _id(device: PluginDevice, gpu: SimulatedGpu, instance: SimulatedInstance | None) -> str:
    uuid, replica = gpu.facts.uuid, device.replica
    if device.ids == "gke":
        part = f"/gi{instance.gpu_instance}" if instance else ""
        return f"nvidia{gpu.facts.index}{part}" + ("" if replica is None else f"/vgpu{replica}")
    if device.ids in ("hami", "gpu-mem"):
        return f"{uuid}{'-_' if device.ids == 'gpu-mem' else ''}-{replica or 0}"
    if instance and device.ids == "old-mig":
        uuid = f"MIG-{uuid}/{instance.gpu_instance}/{instance.compute_instance}"
    elif instance:
        uuid = instance.uuid
    return uuid if replica is None else f"{uuid}::{replica}"


def _claimed_name(gpu: SimulatedGpu, instance: SimulatedInstance | None) -> str:
    name = f"gpu-{gpu.facts.index}"
    if instance is None:
        return name
    # NVIDIA's number of the profile is not played.
    return f"{name}-mig-{instance.profile.replace('.', '')}-0-{instance.start}"
