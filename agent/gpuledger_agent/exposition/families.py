"""Metric families: the text format, and the definitions of the `gpuledger_…` families.

`native_metrics.csv` in this directory lists the families whose values are readings of devices, in
base units. All other families are `InfoFamily`s. `native` and `dcgm` provide the values.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from gpuledger_agent.exposition.device import Read, read_at
from gpuledger_agent.settings import Profile

FILE: Final = Path(__file__).with_name("native_metrics.csv")
LABELS: Final = ("gpu_uuid", "gpu_index", "model")
Label = tuple[str, str]
Labels = Sequence[Label]
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


class SampleLine(NamedTuple):
    """One series of a family with its value."""

    labels: str
    """The labels in the text format, without braces."""
    value: float
    """The series' value."""


def write_labels(labels: Labels) -> str:
    """Return labels in the text format, without braces and without empty labels.

    In Prometheus, an empty label means the same as a missing label.
    """
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels if value)


def write_family(
    name: str, kind: str, help_text: str, samples: Iterable[SampleLine]
) -> Iterator[str]:
    """Yield a family's lines; yield nothing if the family has no series."""
    head = f"# HELP {name} {help_text.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"
    # Write the head with the first series, so that a family without series is left out.
    for labels, value in samples:
        yield f"{head}{name}{{{labels}}} {value!r}\n"
        head = ""


class NativeFamily(NamedTuple):
    """A metric family whose values are readings of devices."""

    name: str
    """The family's name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
    """The help text."""
    members: Sequence[tuple[str, Read]]
    """The series of a device: for each, the additional labels in the text format, and a function
    that takes the device and returns the value."""
    label_names: tuple[str, ...]
    """Names of the additional labels."""
    profile: Profile
    """The smallest profile that includes the family."""

    def is_in(self, profile: Profile) -> bool:
        """Return whether the page includes the family if this profile is set."""
        return profile in ("full", self.profile)


@cache
def native_families() -> tuple[NativeFamily, ...]:
    """Return the families of devices' readings, in the table's order."""
    found: dict[str, NativeFamily] = {}
    with FILE.open(newline="") as lines:
        for name, kind, help_text, path, further, profile, unit in csv.reader(
            line for line in lines if not line.startswith("#")
        ):
            labels = [tuple(pair.split("=", 1)) for pair in further.split(",") if pair]
            family = found.setdefault(
                name,
                NativeFamily(name, kind, help_text, [], tuple(pair[0] for pair in labels), profile),  # type: ignore[arg-type]  # a test holds the file to the profiles
            )
            written = write_labels([(pair[0], pair[1]) for pair in labels])
            family.members.append(("," + written if written else "", read_at(path, unit)))  # type: ignore[attr-defined]  # a list while it is built
    return tuple(found.values())


class InfoFamily(NamedTuple):
    """A metric family whose values are not readings, such as facts, allocations or events."""

    name: str
    """The family's name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
    """The help text."""
    label_names: tuple[str, ...]
    """Names of the labels, without `node`."""
    profile: Profile = "lean"
    """The smallest profile that includes the family."""

    def write(self, rows: Iterable[tuple[Labels, float]]) -> Iterator[str]:
        """Yield the family's lines; `rows` are the labels and the value of each series."""
        samples = (SampleLine(write_labels(labels), value) for labels, value in rows)
        return write_family(self.name, self.kind, self.help, samples)


_GPU: Final = ("gpu_uuid", "gpu_index")
_ALLOCATION: Final = ("namespace", "pod", "container", "pod_uid", "container_id", "job_id")
CONTAINER_LABELS: Final = (*_GPU, *_ALLOCATION)
NODE_INFO: Final = InfoFamily(
    "gpuledger_node_info",
    "gauge",
    "Versions of the node's driver and libraries, and its confidential computing modes.",
    (
        "boot_id",
        "driver_version",
        "nvml_version",
        "cuda_driver_version",
        "confidential_computing_mode",
        "confidential_link_mode",
    ),
)
TICK_TIME: Final = InfoFamily(
    "gpuledger_node_sample_timestamp_seconds",
    "gauge",
    "End of the newest sample's interval, in seconds since the epoch.",
    (),
)
GPU_INFO: Final = InfoFamily(
    "gpuledger_node_gpu_info",
    "gauge",
    "Hardware and firmware of a GPU, or profile of a MIG instance.",
    (
        *_GPU,
        "model",
        "pci_bus_id",
        "serial",
        "vbios_version",
        "architecture",
        "parent_uuid",
        "gpu_instance",
        "compute_instance",
        "mig_profile",
    ),
)
UP: Final = InfoFamily(
    "gpuledger_node_gpu_up",
    "gauge",
    "Whether the GPU answers (1 = yes, 0 = unresponsive or lost).",
    _GPU,
)
RECOVERY: Final = InfoFamily(
    "gpuledger_node_gpu_recovery_action_info",
    "gauge",
    "Action that the driver recommends to recover the GPU.",
    (*_GPU, "action"),
)
FABRIC: Final = InfoFamily(
    "gpuledger_node_gpu_fabric_info",
    "gauge",
    "State of the GPU's registration with the NVLink fabric.",
    (*_GPU, "state"),
    profile="full",
)
FABRIC_CLUSTER: Final = InfoFamily(
    "gpuledger_node_gpu_fabric_cluster_info",
    "gauge",
    "NVLink fabric that the GPU has joined, and the clique in which GPUs can reach each other.",
    (*_GPU, "cluster_uuid", "clique_id"),
    profile="full",
)
RACK: Final = InfoFamily(
    "gpuledger_node_gpu_rack_info",
    "gauge",
    "GPU's position in a rack whose GPUs form one NVLink fabric.",
    (*_GPU, "chassis_serial_number", "slot", "tray", "host", "module"),
    profile="full",
)
THROTTLE_REASON: Final = InfoFamily(
    "gpuledger_node_gpu_throttle_reason",
    "gauge",
    "Whether the clocks were throttled for the reason at the last reading (1 = yes, 0 = no);"
    " `other` covers unknown reasons.",
    (*_GPU, "reason"),
    profile="full",
)
NVLINK_RATE: Final = InfoFamily(
    "gpuledger_node_gpu_nvlink_bytes_per_second",
    "gauge",
    "Bytes per second over one NVLink, including headers, averaged over a few seconds (Hopper and"
    " newer).",
    (*_GPU, "nvlink", "direction"),
    profile="full",
)
NVLINK_BYTES: Final = InfoFamily(
    "gpuledger_node_gpu_nvlink_bytes_total",
    "counter",
    "Total number of data bytes over one NVLink in both directions; read every few seconds.",
    (*_GPU, "nvlink"),
    profile="full",
)
ALLOCATION: Final = InfoFamily(
    "gpuledger_node_gpu_allocation_info",
    "gauge",
    "Device, or `count` of its shares, allocated to a container; `source` is empty if the"
    " kubelet reported it.",
    (
        *_GPU[:1],
        "device_id",
        "resource",
        "namespace",
        "pod",
        "container",
        "pod_uid",
        "replica",
        "claim",
        "source",
        "share_ppm",
        "count",
    ),
)
JOB_ALLOCATION: Final = InfoFamily(
    "gpuledger_node_gpu_job_allocation_info",
    "gauge",
    "GPU or MIG instance that a scheduler such as Slurm has allocated to a job.",
    (*_GPU[:1], "gpu_instance", "job_id"),
)
CONTAINER_BUSY: Final = InfoFamily(
    "gpuledger_container_gpu_busy_ratio",
    "gauge",
    "Fraction of the sampling interval in which the container's or job's kernels ran on the GPU.",
    CONTAINER_LABELS,
)
CONTAINER_MEMORY: Final = InfoFamily(
    "gpuledger_container_gpu_memory_bytes",
    "gauge",
    "Device memory in use by the container's or job's processes.",
    CONTAINER_LABELS,
)
CONTAINER_ENGINES: Final = InfoFamily(
    "gpuledger_container_gpu_engine_busy_ratio",
    "gauge",
    "Fraction of the sampling interval in which a video engine worked for the container; absent if"
    " it did not.",
    (*CONTAINER_LABELS, "engine"),
)
XIDS: Final = InfoFamily(
    "gpuledger_node_gpu_xids_total",
    "counter",
    "Total number of XIDs since the agent started.",
    (*_GPU, "xid"),
)
INCIDENTS: Final = InfoFamily(
    "gpuledger_node_gpu_incidents_total",
    "counter",
    "Total number of incidents since the agent started, except recoveries present at the start.",
    (*_GPU, "kind", "severity"),
)
PROCESS_LABELS: Final = (
    *_GPU,
    "pid",
    "process_name",
    *_ALLOCATION,
)
PID_POD: Final = InfoFamily(
    "nvidia_pid_pod",
    "gauge",
    "The GPU memory of each pid in a pod (in MiB).",
    ("pid", "process_name", "pod_name", "namespace", "node_name"),
)
PROCESS_BUSY: Final = InfoFamily(
    "gpuledger_process_gpu_busy_ratio",
    "gauge",
    "Fraction of the sampling interval in which the process's kernels ran on the GPU.",
    PROCESS_LABELS,
)
PROCESS_MEMORY: Final = InfoFamily(
    "gpuledger_process_gpu_memory_bytes",
    "gauge",
    "Device memory in use by the process.",
    PROCESS_LABELS,
)
INFO_FAMILIES: Final = (
    NODE_INFO,
    TICK_TIME,
    GPU_INFO,
    UP,
    ALLOCATION,
    JOB_ALLOCATION,
    RECOVERY,
    FABRIC,
    FABRIC_CLUSTER,
    RACK,
    THROTTLE_REASON,
    NVLINK_RATE,
    NVLINK_BYTES,
    XIDS,
    INCIDENTS,
    CONTAINER_BUSY,
    CONTAINER_MEMORY,
    CONTAINER_ENGINES,
)
PROCESS_FAMILIES: Final = (PID_POD, PROCESS_BUSY, PROCESS_MEMORY)
"""Families of single processes, off by default."""
