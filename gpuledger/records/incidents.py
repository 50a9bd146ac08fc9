"""Incidents: events of a GPU at an instant, such as an XID, an ECC error or the loss of the GPU.

This module holds the records of `gpuledger.incidents.v1` (from the node) and
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
    """How severe an incident is."""

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
"""The kinds that this version's agent reports; other versions may report others."""


class IncidentProcess(BaseRecord, frozen=True, kw_only=True):
    """A process that was on the GPU at the time of the incident."""

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
    """The job of a scheduler such as Slurm; only outside pods."""


class Incident(BaseRecord, frozen=True, kw_only=True):
    """An incident that a node detected on one of its GPUs."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot."""
    gpu_uuid: Id
    """The affected GPU."""
    time_ns: Natural
    """When it happened, nanoseconds since the epoch."""
    # A word instead of an enumeration, because agents of several versions write to one topic.
    kind: Word
    """Kind of the incident: `xid`, `ecc_uncorrected`, `gpu_lost`, `gpu_recovered`,
    `driver_reloaded`, `driver_unbound`, `mig_changed`, …"""
    source: Word
    """Where it was detected: `nvml` (driver events), `kmsg` (kernel log) or `agent`."""
    gpu_index: SmallNatural | None = None
    """The driver's index of the GPU when the library was last opened with it; absent if the agent
    never had the GPU, as for a bus address at which no GPU answers."""
    gpu_instance: SmallNatural | None = None
    """The affected MIG GPU instance, if the driver reports it."""
    compute_instance: SmallNatural | None = None
    """The affected MIG compute instance, if the driver reports it."""
    severity: Severity
    """How severe it is."""
    xid: Natural | None = None
    """The driver's XID, for incidents of kind `xid`."""
    mnemonic: Word | None = None
    """NVIDIA's name of the XID, such as `GSP_RPC_TIMEOUT`."""
    category: Word | None = None
    """The class of the XID: `app`, `reset`, `hardware`, `node`, `nvlink`, `info`, …"""
    action: Word | None = None
    """NVIDIA's immediate action, such as `RESET_GPU`."""
    message: Sentence
    """Human-readable message of one sentence."""
    processes: Annotated[list[IncidentProcess], at_most(MAX_INCIDENT_PROCESSES)]
    """The processes on the GPU at that time."""
    allocations: Annotated[list[DeviceAllocation], at_most(MAX_ALLOCATIONS)] | None = None
    """The kubelet's allocations of that GPU or instance; absent if there were none, or if the
    kubelet did not answer."""
    present_at_start: bool | None = None
    """True if the state already existed at the agent's first reading. Each start of the agent
    reports it again, but it is one incident per GPU and boot, whatever its time."""
    ended_kinds: Annotated[list[Word], at_most(MAX_ENDED_KINDS)] | None = None
    """For incidents of kind `state_ended`: the kinds whose state has ended or, if
    `present_at_start` is set, does not exist."""


class AttributedIncident(BaseRecord, frozen=True, kw_only=True):
    """An incident together with the pods that were on the GPU."""

    incident: Incident
    """The incident itself."""
    pods: Annotated[list[PodDescription], at_most(MAX_INCIDENT_PODS)]
    """Pods of the incident's processes, then other pods with the GPU allocated; each once."""
    process_pods: Annotated[list[Natural | None], at_most(MAX_INCIDENT_PROCESSES)] | None = None
    """For each of the incident's processes, the position of its pod in `pods`, or `null` if it is
    not in a pod; absent if there are no processes."""
    allocation_pods: Annotated[list[Natural], at_most(MAX_ALLOCATIONS)] | None = None
    """For each of the incident's allocations, the position of its pod in `pods`; may be absent."""
