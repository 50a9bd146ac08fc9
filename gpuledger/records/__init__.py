"""The records that travel between the stages: one module a subject, all gathered here.

Times are nanoseconds since the epoch, lengths of time that are measured are nanoseconds or
seconds as the name says. An optional field that is not known is absent, never zero and never -1.
"""

from gpuledger.records.bookkeeping import (
    BootProgress,
    DeadLetter,
    NodeProgress,
    SilentNode,
    Watermark,
)
from gpuledger.records.cluster import (
    ContainerRequest,
    NamespaceRecord,
    NodeRecord,
    PodContainer,
    PodRecord,
)
from gpuledger.records.conditions import HeldCondition, NodeConditions
from gpuledger.records.counters import (
    CountedBoot,
    CountedPod,
    CountedSeries,
    NodeCounters,
    WaitingUse,
)
from gpuledger.records.events import (
    Account,
    BusyMethod,
    Entry,
    EventContainer,
    EventHolder,
    GpuBooks,
    GpuEvent,
    IdleDrawSource,
    MemoryMethod,
    NamespaceDescription,
    NodeDescription,
    PodDescription,
    PodState,
    Settlement,
)
from gpuledger.records.incidents import AttributedIncident, Incident, IncidentProcess, Severity
from gpuledger.records.inventory import Capability, GpuFacts, Inventory, MigInstance
from gpuledger.records.processes import GpuTotals, ProcessChange, ProcessExit, ProcessRecord
from gpuledger.records.readings import (
    EnergyMethod,
    GpuDetails,
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
)
from gpuledger.records.samples import (
    ContainerRef,
    DeviceAllocation,
    GpuProcess,
    NodeReadings,
    NodeSample,
    ProcessKind,
)

__all__ = [
    "Account",
    "AttributedIncident",
    "BootProgress",
    "BusyMethod",
    "Capability",
    "ContainerRef",
    "ContainerRequest",
    "CountedBoot",
    "CountedPod",
    "CountedSeries",
    "DeadLetter",
    "DeviceAllocation",
    "EnergyMethod",
    "Entry",
    "EventContainer",
    "EventHolder",
    "GpuBooks",
    "GpuDetails",
    "GpuEvent",
    "GpuFacts",
    "GpuHealth",
    "GpuLimits",
    "GpuProcess",
    "GpuProfiling",
    "GpuReading",
    "GpuThrottling",
    "GpuTotals",
    "GpuTraffic",
    "HeldCondition",
    "IdleDrawSource",
    "Incident",
    "IncidentProcess",
    "Inventory",
    "MemoryMethod",
    "MigInstance",
    "NamespaceDescription",
    "NamespaceRecord",
    "NodeConditions",
    "NodeCounters",
    "NodeDescription",
    "NodeProgress",
    "NodeReadings",
    "NodeRecord",
    "NodeSample",
    "PodContainer",
    "PodDescription",
    "PodRecord",
    "PodState",
    "ProcessChange",
    "ProcessExit",
    "ProcessKind",
    "ProcessRecord",
    "Settlement",
    "Severity",
    "SilentNode",
    "WaitingUse",
    "Watermark",
]
