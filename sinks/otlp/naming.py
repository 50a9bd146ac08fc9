"""What the remote-write sink's series are called in OpenTelemetry: metrics, units, attributes.

Here live these names and nothing else. A metric's name is the series' own in dots, without the
unit, which OTLP keeps apart; a collector that writes to Prometheus puts it behind again, and so
comes to the name that the remote-write sink uses. What identifies things has the name that
OpenTelemetry's semantic conventions give it; what they have no name for stands under `gpuledger.`.
"""

from dataclasses import dataclass
from typing import Final

from sinks.remote_write.families import FamilyMetric

NODE: Final = "k8s.node.name"
SERVICE: Final = "service.name"
INSTANCE: Final = "service.instance.id"
"""Of a resource Prometheus keeps these two alone unless told to keep more: they tell pods apart."""
RESOURCE_ATTRIBUTES: Final = {
    "namespace": "k8s.namespace.name",
    "pod": "k8s.pod.name",
    "pod_uid": "k8s.pod.uid",
    "container": "k8s.container.name",
    "owner_kind": "gpuledger.owner.kind",
    "owner_name": "gpuledger.owner.name",
}
"""Labels that say whose a point is: its resource's."""
POINT_ATTRIBUTES: Final = {
    "gpu_uuid": "hw.id",
    "gpu_index": "gpuledger.gpu.index",
    "model": "hw.model",
    "parent_uuid": "hw.parent",
    "gpu_instance": "gpuledger.mig.gpu_instance",
    "compute_instance": "gpuledger.mig.compute_instance",
    "mig_profile": "gpuledger.mig.profile",
    "account": "gpuledger.account",
    "method": "gpuledger.method",
    "holder_namespace": "gpuledger.holder.namespace",
    "holder_pod": "gpuledger.holder.pod",
    "holder_container": "gpuledger.holder.container",
    "holder_state": "gpuledger.holder.state",
}
"""Labels that tell the points of one resource apart."""
HARDWARE: Final = ("hw.type", "gpu")
"""Stands beside `hw.id`: the conventions ask for it."""
OWNERS: Final = {
    kind: f"k8s.{kind.lower()}.name"
    for kind in ("CronJob", "DaemonSet", "Deployment", "Job", "ReplicaSet", "StatefulSet")
}
"""Kinds of workload whose names have an attribute of their own in the conventions."""
OF_RESOURCES: Final = frozenset(
    {NODE, SERVICE, INSTANCE, *RESOURCE_ATTRIBUTES.values(), *OWNERS.values()}
)
"""All that a resource may have of its own."""
_UNITS: Final = {
    "_ratio": "1",
    "_bytes": "By",
    "_watts": "W",
    "_joules": "J",
    "_celsius": "Cel",
    "_hertz": "Hz",
    "_seconds": "s",
}


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """A metric as OTLP describes it."""

    name: str
    unit: str
    """In UCUM."""
    description: str
    is_counter: bool


def instrument_of(metric: FamilyMetric) -> Instrument:
    """Return a series' instrument; raises ValueError where its name ends in no unit."""
    name = metric.name.removesuffix("_total")
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return Instrument(
                name=name.removesuffix(ending).replace("_", "."),
                unit=unit,
                description=metric.help,
                is_counter=metric.kind == "counter",
            )
    raise ValueError(f"{metric.name} ends in no unit that OpenTelemetry has a name for")
