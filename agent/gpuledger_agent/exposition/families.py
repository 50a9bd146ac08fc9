"""The page's families: the text format in which all are written, and our own with their labels.

`native_metrics.csv` beside this module is the table of the readings of devices, under our own names
and in base units; what is no reading of a device is an `InfoFamily`. What the values are is decided
in `native` and `dcgm`.
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
    """One series with its value now."""

    labels: str
    """Its labels, written."""
    value: float
    """Its value."""


def write_labels(labels: Labels) -> str:
    """Write labels without their braces; one without a value is left out, as it says the same."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels if value)


def write_family(
    name: str, kind: str, help_text: str, samples: Iterable[SampleLine]
) -> Iterator[str]:
    """Write a family line by line; nothing at all where it has no series."""
    head = f"# HELP {name} {help_text.translate(_HELP_ESCAPES)}\n# TYPE {name} {kind}\n"
    # The head goes out with the first series: a family without any must not stand on the page.
    for labels, value in samples:
        yield f"{head}{name}{{{labels}}} {value!r}\n"
        head = ""


class NativeFamily(NamedTuple):
    """A family of readings of devices."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
    """Its help text."""
    members: Sequence[tuple[str, Read]]
    """Further labels, written, with what reads the value."""
    label_names: tuple[str, ...]
    """Names of the further labels."""
    profile: Profile
    """The least profile that shows it."""

    def is_in(self, profile: Profile) -> bool:
        """Return whether a profile shows the family."""
        return profile in ("full", self.profile)


@cache
def native_families() -> tuple[NativeFamily, ...]:
    """Return the families of devices in their order."""
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
    """A family that is not a reading of a device."""

    name: str
    """Its name."""
    kind: str
    """`gauge` or `counter`."""
    help: str
    """Its help text."""
    label_names: tuple[str, ...]
    """Names of its labels beside `node`."""
    profile: Profile = "lean"
    """The least profile that shows it."""

    def write(self, rows: Iterable[tuple[Labels, float]]) -> Iterator[str]:
        """Write the series of these labels and values line by line."""
        samples = (SampleLine(write_labels(labels), value) for labels, value in rows)
        return write_family(self.name, self.kind, self.help, samples)


_GPU: Final = ("gpu_uuid", "gpu_index")
_ALLOCATION: Final = ("namespace", "pod", "container", "pod_uid", "container_id", "job_id")
CONTAINER_LABELS: Final = (*_GPU, *_ALLOCATION)
NODE_INFO: Final = InfoFamily(
    "gpuledger_node_info",
    "gauge",
    "What the node's GPUs are driven by.",
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
    "End of the interval that the newest tick covers, since the epoch.",
    (),
)
GPU_INFO: Final = InfoFamily(
    "gpuledger_node_gpu_info",
    "gauge",
    "What a GPU or a MIG instance is.",
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
    "1 while the GPU answers; 0 where it is known and does not, or is lost.",
    _GPU,
)
RECOVERY: Final = InfoFamily(
    "gpuledger_node_gpu_recovery_action_info",
    "gauge",
    "What the driver asks for so that the GPU works again.",
    (*_GPU, "action"),
)
FABRIC: Final = InfoFamily(
    "gpuledger_node_gpu_fabric_info",
    "gauge",
    "How far the GPU's registration with the NVLink fabric is.",
    (*_GPU, "state"),
    profile="full",
)
FABRIC_CLUSTER: Final = InfoFamily(
    "gpuledger_node_gpu_fabric_cluster_info",
    "gauge",
    "Which NVLink fabric the GPU has joined, and the part of it in which GPUs reach each other.",
    (*_GPU, "cluster_uuid", "clique_id"),
    profile="full",
)
RACK: Final = InfoFamily(
    "gpuledger_node_gpu_rack_info",
    "gauge",
    "Where the GPU is in a rack: told of racks whose GPUs are one fabric.",
    (*_GPU, "chassis_serial_number", "slot", "tray", "host", "module"),
    profile="full",
)
THROTTLE_REASON: Final = InfoFamily(
    "gpuledger_node_gpu_throttle_reason",
    "gauge",
    "1 where the clocks are held down for the reason when it was asked last, else 0; `other` is all"
    " that this version does not know.",
    (*_GPU, "reason"),
    profile="full",
)
NVLINK_RATE: Final = InfoFamily(
    "gpuledger_node_gpu_nvlink_bytes_per_second",
    "gauge",
    "Rate of bytes over one NVLink, headers included, mean of some seconds (Hopper and newer).",
    (*_GPU, "nvlink", "direction"),
    profile="full",
)
NVLINK_BYTES: Final = InfoFamily(
    "gpuledger_node_gpu_nvlink_bytes_total",
    "counter",
    "Bytes over one NVLink, both ways, data alone; read every few seconds.",
    (*_GPU, "nvlink"),
    profile="full",
)
ALLOCATION: Final = InfoFamily(
    "gpuledger_node_gpu_allocation_info",
    "gauge",
    "A device, or a share of one, that the kubelet has given to a container.",
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
    ),
)
JOB_ALLOCATION: Final = InfoFamily(
    "gpuledger_node_gpu_job_allocation_info",
    "gauge",
    "A GPU, or an instance of one, that a scheduler such as Slurm has given to a job.",
    (*_GPU[:1], "gpu_instance", "job_id"),
)
CONTAINER_BUSY: Final = InfoFamily(
    "gpuledger_container_gpu_busy_ratio",
    "gauge",
    "Share of the tick in which the kernels of the container, or of the job, ran on the GPU.",
    CONTAINER_LABELS,
)
CONTAINER_MEMORY: Final = InfoFamily(
    "gpuledger_container_gpu_memory_bytes",
    "gauge",
    "Device memory that the processes of the container, or of the job, hold.",
    CONTAINER_LABELS,
)
CONTAINER_ENGINES: Final = InfoFamily(
    "gpuledger_container_gpu_engine_busy_ratio",
    "gauge",
    "Share of the tick in which video engines worked for the container; there where they did.",
    (*CONTAINER_LABELS, "engine"),
)
XIDS: Final = InfoFamily(
    "gpuledger_node_gpu_xids_total", "counter", "XIDs since the agent's start.", (*_GPU, "xid")
)
INCIDENTS: Final = InfoFamily(
    "gpuledger_node_gpu_incidents_total",
    "counter",
    "Incidents since the agent's start. That a GPU is well at the start is none.",
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
    "Share of the tick in which the process's kernels ran on the GPU.",
    PROCESS_LABELS,
)
PROCESS_MEMORY: Final = InfoFamily(
    "gpuledger_process_gpu_memory_bytes",
    "gauge",
    "Device memory that the process holds.",
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
"""Those of single processes, off unless asked for."""
