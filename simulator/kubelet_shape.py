"""What a scenario says of devices that the kubelet gave away. The shape alone."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.\-]*[a-z0-9])?$")
]


class PluginDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, or a part of one, that a container was given."""

    gpu: Annotated[int, Meta(ge=0)]
    """The driver's index of the GPU."""
    instance: Annotated[int, Meta(ge=0)] | None = None
    """On a GPU that is cut: the position of the instance in the cut."""
    replica: Annotated[int, Meta(ge=0)] | None = None
    """Where several containers share the device: which of the shares."""
    resource: Annotated[str, Meta(min_length=1)] | None = None
    """The resource; absent: `nvidia.com/gpu`, or `nvidia.com/mig-` and the profile."""
    ids: Literal["uuid", "old-mig", "gke", "hami", "gpu-mem"] = "uuid"
    """Whose form the device's id has."""
    claim: Name | None = None
    """A resource claim of the pod's namespace that gave it, in place of a device plugin."""
