"""The records that travel between the stages: one module a subject, all gathered here.

Times are nanoseconds since the epoch, lengths of time that are measured are nanoseconds or
seconds as the name says. An optional field that is not known is absent, never zero and never -1.
"""

from gpuledger.records.dead_letters import DeadLetter
from gpuledger.records.events import (
    Account,
    Entry,
    GpuBooks,
    GpuEvent,
    Method,
    PodDescription,
    PodState,
)
from gpuledger.records.incidents import AttributedIncident, Incident, IncidentProcess, Severity
from gpuledger.records.pods import PodContainer, PodRecord
from gpuledger.records.processes import ProcessChange, ProcessRecord
from gpuledger.records.samples import (
    ContainerRef,
    DeviceAllocation,
    GpuProcess,
    GpuReading,
    NodeSample,
    ProcessKind,
)

__all__ = [
    "Account",
    "AttributedIncident",
    "ContainerRef",
    "DeadLetter",
    "DeviceAllocation",
    "Entry",
    "GpuBooks",
    "GpuEvent",
    "GpuProcess",
    "GpuReading",
    "Incident",
    "IncidentProcess",
    "Method",
    "NodeSample",
    "PodContainer",
    "PodDescription",
    "PodRecord",
    "PodState",
    "ProcessChange",
    "ProcessKind",
    "ProcessRecord",
    "Severity",
]
