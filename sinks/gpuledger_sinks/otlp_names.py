"""What the series of events are called in OpenTelemetry: metrics, units, attributes.

Here live these names; those of labels stand beside the columns of the flat row. A metric's name is
the series' own in dots, without the unit, which OTLP keeps apart; a collector that writes to
Prometheus puts it behind again, and so comes to the name that the remote-write sink uses. What
identifies things has the name that OpenTelemetry's semantic conventions give it; what they have no
name for stands under `gpuledger.`.
"""

from dataclasses import dataclass
from typing import Final

from gpuledger.ledger.families import LABEL_ATTRIBUTES, NODE_INFO, FamilyMetric
from gpuledger.ledger.hardware import GPU_TYPE, HARDWARE_ATTRIBUTES
from gpuledger.ledger.rows import Attribute

CLUSTER: Final = "k8s.cluster.name"
NODE: Final = "k8s.node.name"
SERVICE: Final = "service.name"
INSTANCE: Final = "service.instance.id"
"""Of a resource Prometheus keeps these two alone unless told to keep more: they tell pods apart."""
RESOURCE_ATTRIBUTES: Final = {
    label: name
    for label, (name, attribute_of) in LABEL_ATTRIBUTES.items()
    if attribute_of is Attribute.RESOURCE
}
"""Labels that say whose a point is: its resource's."""
POINT_ATTRIBUTES: Final = {
    label: name
    for label, (name, attribute_of) in LABEL_ATTRIBUTES.items()
    if attribute_of is Attribute.POINT
}
"""Labels that tell the points of one resource apart."""
NAMES_ON_POINTS: Final = POINT_ATTRIBUTES | HARDWARE_ATTRIBUTES
"""The same, with those of the series that are the conventions' own."""
HARDWARE: Final = ("hw.type", GPU_TYPE)
"""Stands beside `hw.id`: the conventions ask for it."""
OWNER_KIND: Final = RESOURCE_ATTRIBUTES["owner_kind"]
OWNER_NAME: Final = RESOURCE_ATTRIBUTES["owner_name"]
OWNERS: Final = {
    kind: f"k8s.{kind.lower()}.name"
    for kind in ("CronJob", "DaemonSet", "Deployment", "Job", "ReplicaSet", "StatefulSet")
}
"""Kinds of workload whose names have an attribute of their own in the conventions."""
NODE_ATTRIBUTES: Final = {
    LABEL_ATTRIBUTES[label][0]: label.removeprefix("node_") for label in NODE_INFO.labels
}
"""What is said of the node, by the fields of the event's `node_description`."""
OF_RESOURCES: Final = frozenset(
    {
        *(CLUSTER, NODE, SERVICE, INSTANCE),
        *RESOURCE_ATTRIBUTES.values(),
        *OWNERS.values(),
        *NODE_ATTRIBUTES,
    }
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
    # What counts nothing has no unit, and keeps all of its name.
    "_info": "",
    "_requested": "",
    "_up": "",
}


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """A metric as OTLP describes it."""

    name: str
    unit: str
    """In UCUM; empty where it has none."""
    description: str
    is_counter: bool
    is_sum: bool
    """Whether its values are those of a sum: of a counter, or of what rises and falls."""


def instrument_of(metric: FamilyMetric) -> Instrument:
    """Return a series' instrument; raises ValueError where its name ends in no unit."""
    name = metric.name.removesuffix("_total")
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return Instrument(
                name=(name.removesuffix(ending) if unit else name).replace("_", "."),
                unit=unit,
                description=metric.help,
                is_counter=metric.kind == "counter",
                is_sum=metric.is_additive or metric.kind == "counter",
            )
    raise ValueError(f"{metric.name} ends in no unit that OpenTelemetry has a name for")
