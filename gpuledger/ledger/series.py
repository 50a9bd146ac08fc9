"""The series that are made of events: names, help, labels. Remote-write and OTLP share them.

Here lives the one table of them. A name is in one family, and a family's series are of different
things: a sum over a name counts nothing twice. So a GPU, the MIG instances into which it is cut and
the accounts on which it is booked have names of their own, and none is a name of the nodes' pages
(`gpuledger_node_gpu_…`), which one Prometheus may well scrape. Containers and accounts have a
series of each quantity of the books, averaged over the tick. How an event fills the table is
`gpuledger.ledger.event_series`' business.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuledger.ledger.quantities import APPORTIONED, BOOKED
from gpuledger.ledger.rows import ATTRIBUTES, Attribute


@dataclass(frozen=True, kw_only=True)
class FamilyMetric:
    """One metric of a family."""

    name: str
    """Its name, with the base unit at the end."""
    help: str
    """What it says, as a sentence."""
    kind: str = "gauge"
    """Its Prometheus type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Metrics with the same labels."""

    labels: tuple[str, ...]
    """Names of the labels beside `node`, in the order in which values are given."""
    metrics: tuple[FamilyMetric, ...]
    """The metrics, in the order in which values are given."""


_GPU_LABELS: Final = ("gpu_uuid", "gpu_index")
_HOLDER_LABELS: Final = ("holder_namespace", "holder_pod", "holder_container", "holder_state")

DEVICE: Final = Family(
    labels=(*_GPU_LABELS, "model"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_utilization_ratio",
            help="Share of the tick in which at least one kernel ran.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_utilization_ratio",
            help="Share of the tick in which the memory controller was busy.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_used_bytes",
            help="Device memory in use, without what the driver reserved.",
        ),
        FamilyMetric(name="gpuledger_gpu_memory_total_bytes", help="Size of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_memory_reserved_bytes",
            help="Device memory that the driver and the firmware keep for themselves.",
        ),
        FamilyMetric(name="gpuledger_gpu_power_watts", help="Power draw."),
        FamilyMetric(
            name="gpuledger_gpu_energy_joules_total",
            help="The driver's energy counter; it starts again when the driver is loaded.",
            kind="counter",
        ),
        FamilyMetric(name="gpuledger_gpu_temperature_celsius", help="Temperature of the die."),
        FamilyMetric(
            name="gpuledger_gpu_sm_clock_hertz", help="Clock of the streaming multiprocessors."
        ),
        FamilyMetric(name="gpuledger_gpu_memory_clock_hertz", help="Clock of the device memory."),
    ),
)
INSTANCE: Final = Family(
    labels=(
        *_GPU_LABELS,
        "model",
        "parent_uuid",
        "gpu_instance",
        "compute_instance",
        "mig_profile",
    ),
    metrics=(
        FamilyMetric(
            name="gpuledger_mig_instance_utilization_ratio",
            help="Share of the tick in which the MIG instance's engine was busy, by the chip's own "
            "counters.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_used_bytes",
            help="The instance's memory in use, without what the driver reserved; compute "
            "instances that share one memory tell of it once.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_total_bytes",
            help="Size of the instance's memory, which is a part of the GPU's.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_reserved_bytes",
            help="The instance's memory that the driver and the firmware keep for themselves.",
        ),
    ),
)
NODE: Final = Family(
    labels=(),
    metrics=(
        FamilyMetric(
            name="gpuledger_node_gap_seconds",
            help="Time right before the tick that no tick of the node covers; there is a sample "
            "at the first tick after such a gap alone.",
        ),
    ),
)
POD: Final = Family(
    labels=(
        *_GPU_LABELS,
        "namespace",
        "pod",
        "pod_uid",
        "container",
        "owner_kind",
        "owner_name",
        "method",
    ),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_pod_gpu_{quantity.average}", help=quantity.pod_help)
        for quantity in (*BOOKED, *APPORTIONED)
    ),
)
ACCOUNT: Final = Family(
    labels=(*_GPU_LABELS, "account", "method", *_HOLDER_LABELS),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_account_gpu_{quantity.average}", help=quantity.account_help)
        for quantity in (*BOOKED, *APPORTIONED)
    ),
)
FAMILIES: Final = (DEVICE, INSTANCE, NODE, POD, ACCOUNT)
LABEL_ATTRIBUTES: Final = ATTRIBUTES | {
    "parent_uuid": ("hw.parent", Attribute.POINT),
    "gpu_instance": ("gpuledger.mig.gpu_instance", Attribute.POINT),
    "compute_instance": ("gpuledger.mig.compute_instance", Attribute.POINT),
    "mig_profile": ("gpuledger.mig.profile", Attribute.POINT),
}
"""What OpenTelemetry calls each label, and of what it is an attribute: most are columns of the flat
row, these four are of devices alone."""


class SeriesGroup(NamedTuple):
    """The series of one thing: a family and the values of its labels."""

    family: Family
    label_values: tuple[str, ...]


SeriesValues = tuple[float | None, ...]
"""The values of a group in a tick, in the order of its family's metrics; `None` where unknown."""
