"""The series that the remote-write sink sends: names, help, labels.

Here lives the one table of them. A name is in one family, and a family's series are of different
things: a sum over a name counts nothing twice. So a GPU, the MIG instances into which it is cut and
the accounts on which it is booked have names of their own, and none is a name of the nodes' pages
(`gpuledger_node_gpu_…`), which one Prometheus may well scrape. How an event fills the table is
`sinks.remote_write.values`' business.
"""

from dataclasses import dataclass
from typing import Final


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


def _activity(of: str, whom: str) -> tuple[FamilyMetric, ...]:
    parts = (("sm", "multiprocessors"), ("tensor", "tensor pipes"), ("dram", "memory interface"))
    return tuple(
        FamilyMetric(
            name=f"gpuledger_{of}_gpu_{part}_active_ratio",
            help=f"Share of the tick in which the GPU's {name} worked, as far as it is booked on "
            f"{whom}: apportioned by busy time, where the chip has counters.",
        )
        for part, name in parts
    )


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
            name="gpuledger_node_uncovered_seconds",
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
    metrics=(
        FamilyMetric(
            name="gpuledger_pod_gpu_busy_ratio",
            help="Share of the tick in which the container's kernels ran on the GPU.",
        ),
        FamilyMetric(
            name="gpuledger_pod_gpu_memory_bytes",
            help="Device memory that the container's processes held at the tick.",
        ),
        FamilyMetric(
            name="gpuledger_pod_gpu_power_watts",
            help="Power booked on the container, averaged over the tick.",
        ),
        *_activity("pod", "the container"),
    ),
)
ACCOUNT: Final = Family(
    labels=(*_GPU_LABELS, "account", "method", *_HOLDER_LABELS),
    metrics=(
        FamilyMetric(
            name="gpuledger_account_gpu_busy_ratio",
            help="Share of the tick booked on no pod: on the host, on nobody that could be seen "
            "(unattributed), or on idle, where it is the share in which no kernel ran.",
        ),
        FamilyMetric(
            name="gpuledger_account_gpu_memory_bytes",
            help="Device memory booked on no pod, as it was at the tick; on idle, free memory.",
        ),
        FamilyMetric(
            name="gpuledger_account_gpu_power_watts",
            help="Power booked on no pod, averaged over the tick.",
        ),
        *_activity("account", "the account"),
    ),
)
FAMILIES: Final = (DEVICE, INSTANCE, NODE, POD, ACCOUNT)
