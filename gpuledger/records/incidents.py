"""Something that happened to a GPU at an instant: an XID, an ECC error, a GPU that was lost.

Here live the records of `gpuledger.incidents.v1` (by the node) and
`gpuledger.attributed-incidents.v1` (with the pods that were on the GPU).
"""

from typing import Annotated

from gpuledger.records.base import (
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    OpenEnum,
    SmallNatural,
)
from gpuledger.records.bounds import (
    MAX_ALLOCATIONS,
    MAX_ENDED_KINDS,
    MAX_INCIDENT_PODS,
    MAX_INCIDENT_PROCESSES,
    BoottimeNs,
    Id,
    JobId,
    Sentence,
    Word,
    at_most,
)
from gpuledger.records.events import PodDescription
from gpuledger.records.samples import DeviceAllocation


class Severity(OpenEnum):
    """How loud an incident is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


INCIDENT_KINDS = (
    "xid",
    "ecc_uncorrected",
    "ecc_corrected_storm",
    "page_retirement_pending",
    "page_retirement_failed",
    "row_remap_pending",
    "row_remap_done",
    "row_remap_failed",
    "poison_nonfatal",
    "poison_fatal",
    "sram_threshold_exceeded",
    "fabric_bandwidth_degraded",
    "fabric_route_recovery",
    "fabric_route_unhealthy",
    "fabric_access_timeout",
    "nvlink_recovery_failed",
    "pcie_link_degraded",
    "hardware_thermal_slowdown",
    "power_brake_slowdown",
    "state_ended",
    "gpu_unavailable",
    "recovery_action",
    "mig_changed",
    "gpu_lost",
    "gpu_recovered",
    "driver_reloaded",
    "agent_ended",
    "driver_unbound",
)
"""The kinds that this version's agent tells of; another version's may tell of others."""


class IncidentProcess(BaseRecord, frozen=True, kw_only=True):
    """A process that was on the GPU when it happened."""

    pid: Natural
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since the node's boot."""
    command: Word | None = None
    """The kernel's name of the program."""
    container_id: Id | None = None
    """Its container's id."""
    pod_uid: Id | None = None
    """Its pod's UID."""
    job_id: JobId | None = None
    """The job of a scheduler such as Slurm, outside of pods."""


class Incident(BaseRecord, frozen=True, kw_only=True):
    """What a node saw happen to one of its GPUs."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot."""
    gpu_uuid: Id
    """The GPU to which it happened."""
    time_ns: Natural
    """When it happened, nanoseconds since the epoch."""
    # A word and no enumeration: agents of several versions write to one topic.
    kind: Word
    """What happened: `xid`, `ecc_uncorrected`, `gpu_lost`, `gpu_recovered`, `driver_reloaded`,
    `driver_unbound`, `mig_changed`, …"""
    source: Word
    """Who said so: `nvml` (the driver's events), `kmsg` (the kernel's log) or `agent`."""
    gpu_index: SmallNatural | None = None
    """The driver's index of the GPU when the library was opened last with it; absent where the
    agent never had it, as of an address on the bus at which no GPU answers."""
    gpu_instance: SmallNatural | None = None
    """The MIG GPU instance to which it happened, where the driver says."""
    compute_instance: SmallNatural | None = None
    """The MIG compute instance to which it happened, where the driver says."""
    severity: Severity
    """How loud it is."""
    xid: Natural | None = None
    """The driver's XID, on incidents of kind `xid`."""
    mnemonic: Word | None = None
    """NVIDIA's name of the XID, such as `GSP_RPC_TIMEOUT`."""
    category: Word | None = None
    """The class of the XID: `app`, `reset`, `hardware`, `node`, `nvlink`, `info`, …"""
    action: Word | None = None
    """NVIDIA's immediate action, such as `RESET_GPU`."""
    message: Sentence
    """One sentence for people."""
    processes: Annotated[list[IncidentProcess], at_most(MAX_INCIDENT_PROCESSES)]
    """The processes on the GPU at that time."""
    allocations: Annotated[list[DeviceAllocation], at_most(MAX_ALLOCATIONS)] | None = None
    """The kubelet's allocations of that GPU, or of that instance; absent if it was not allocated,
    or if the kubelet did not answer."""
    present_at_start: bool | None = None
    """True of what was so at the agent's first reading of it: each start of the agent tells it, and
    it is one incident of the GPU and its boot, whatever its time."""
    ended_kinds: Annotated[list[Word], at_most(MAX_ENDED_KINDS)] | None = None
    """On incidents of kind `state_ended`: the kinds of which that is so no longer, or, where it was
    present at the start, not so."""


class AttributedIncident(BaseRecord, frozen=True, kw_only=True):
    """An incident together with the pods that were on the GPU."""

    incident: Incident
    """What happened."""
    pods: Annotated[list[PodDescription], at_most(MAX_INCIDENT_PODS)]
    """The pods of the incident's processes, then those with an allocation of the GPU; each once."""
    process_pods: Annotated[list[Natural | None], at_most(MAX_INCIDENT_PROCESSES)] | None = None
    """Of each of the incident's processes the position of its pod in `pods`, `null` where it runs
    in none; absent without processes."""
    allocation_pods: Annotated[list[Natural], at_most(MAX_ALLOCATIONS)] | None = None
    """Of each of the incident's allocations the position of the pod in `pods`; absent without."""
