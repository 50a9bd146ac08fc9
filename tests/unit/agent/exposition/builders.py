"""A node to show: GPUs, containers, processes, with defaults for fields that a test ignores."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import fields
from prometheus_client.parser import text_string_to_metric_families

from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuDetails,
    GpuFacts,
    GpuProcess,
    GpuReading,
    Incident,
    Inventory,
    NodeReadings,
    NodeSample,
    ProcessKind,
    ProcessRecord,
    Severity,
)
from gpuledger_agent.exposition import PageRenderer
from gpuledger_agent.exposition.families import Label
from gpuledger_agent.exposition.node_state import NodeState, make_node_state
from gpuledger_agent.exposition.pod_lookup import NamedContainer, PodLookup
from gpuledger_agent.host import node_pods
from gpuledger_agent.settings import ExpositionSettings
from gpuledger_simulator.clock import ManualClock

MODEL = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30
START_NS = 10**15
IN_DETAILS = frozenset(one.name for one in fields(GpuDetails))


class Row(NamedTuple):
    """A device's values in a tick, and its detailed readings."""

    reading: GpuReading
    details: GpuDetails


class Reported(NamedTuple):
    """A tick and its detailed readings."""

    sample: NodeSample
    readings: NodeReadings


@dataclass
class FakeNames:
    """Names by container id: `ns/pod/container`."""

    known: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, container_id: str) -> NamedContainer | None:
        known = self.known.get(container_id)
        if known is None:
            return None
        namespace, pod, container = known.split("/")
        return node_pods.ContainerName(namespace=namespace, pod=pod, container=container)


def row(*, uuid: str, **values: Any) -> Row:  # noqa: ANN401  # fields of both records
    """Make a row; each value goes into the record that has a field of its name."""
    details = {name: value for name, value in values.items() if name in IN_DETAILS}
    booked = {name: value for name, value in values.items() if name not in IN_DETAILS}
    return Row(
        GpuReading(uuid=uuid, model=MODEL, **booked),
        GpuDetails(uuid=uuid, **details),
    )


def gpu(index: int = 0, **values: Any) -> Row:  # noqa: ANN401  # as in `row`
    return row(uuid=f"GPU-{index}", index=index, **values)


def instance(gi: int, *, of: int = 0, ci: int = 0, **values: Any) -> Row:  # noqa: ANN401  # as in `row`
    return row(
        uuid=f"MIG-{of}-{gi}-{ci}",
        index=of,
        parent_uuid=f"GPU-{of}",
        gpu_instance=gi,
        compute_instance=ci,
        mig_profile="1g.10gb",
        **values,
    )


def process(gpu: int, container: int | None, **values: Any) -> GpuProcess:  # noqa: ANN401  # as in `row`
    return GpuProcess(
        gpu=gpu,
        container=container,
        kind=ProcessKind.COMPUTE,
        **{"pid": 100, "memory_used_bytes": GIB, "sm_utilization_ratio": 0.25, **values},
    )


def allocation(gpu: int, owner: str, **values: Any) -> DeviceAllocation:  # noqa: ANN401  # as in `row`
    namespace, pod, container = owner.split("/")
    return DeviceAllocation(
        gpu_uuid=f"GPU-{gpu}",
        device_id=f"GPU-{gpu}",
        resource_name="nvidia.com/gpu",
        namespace=namespace,
        pod=pod,
        container=container,
        **values,
    )


def sample(
    *rows: Row,
    containers: Sequence[str] = (),
    processes: Sequence[GpuProcess] = (),
    allocations: Sequence[DeviceAllocation] = (),
    time_ns: int = 1_700_000_000_000_000_000,
) -> Reported:
    tick: dict[str, Any] = {
        "cluster": "default",
        "node": "node-1",
        "boot_id": "boot",
        "seq": 1,
        "time_ns": time_ns,
        "interval_ns": 1_000_000_000,
    }
    reported = NodeSample(
        **tick,
        gpus=[one.reading for one in rows],
        containers=[ContainerRef(container_id=one, pod_uid=f"uid-{one}") for one in containers],
        processes=list(processes),
        allocations=list(allocations),
    )
    return Reported(reported, NodeReadings(**tick, gpus=[one.details for one in rows]))


def inventory(*indices: int) -> Inventory:
    return Inventory(
        cluster="default",
        node="node-1",
        boot_id="boot",
        time_ns=1,
        driver_version="570.86.15",
        nvml_version="12.570",
        gpus=[
            GpuFacts(
                uuid=f"GPU-{index}",
                index=index,
                model=MODEL,
                serial=f"165{index}",
                pci_bus_id=f"00000000:1{index}:00.0",
                instances=[],
                capabilities=[],
            )
            for index in indices
        ],
    )


def incident(gpu: int, xid: int | None = None, kind: str = "xid") -> Incident:
    return Incident(
        cluster="default",
        node="node-1",
        boot_id="boot",
        gpu_uuid=f"GPU-{gpu}",
        time_ns=1,
        kind=kind,
        source="nvml",
        severity=Severity.WARNING,
        xid=xid,
        message="",
        processes=[],
    )


@dataclass
class Node:
    """A node's state with its page."""

    clock: ManualClock
    view: NodeState
    page: PageRenderer

    def show(
        self,
        reported: Reported,
        *,
        inventory: Inventory | None = None,
        incidents: Iterable[Incident] = (),
        processes: Iterable[ProcessRecord] = (),
    ) -> None:
        """Show a tick and its details; the inventory stays until the next one."""
        if inventory:
            self.view.set_inventory(inventory)
        self.view.update(reported.sample, reported.readings, processes=processes)
        for each in incidents:
            self.view.record_incident(each)

    def lines(self, name: str) -> list[str]:
        """Return the page's series of one name."""
        text = self.page().decode()
        return [line for line in text.splitlines() if line.startswith(f"{name}{{")]

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return values by some of their labels, parsed by Prometheus' client for Python.

        The parser adds `_total` to the names of counters, which DCGM's do not have.
        """
        return {
            tuple(one.labels.get(label, "") for label in labels): one.value
            for family in text_string_to_metric_families(self.page().decode())
            for one in family.samples
            if one.name in (name, f"{name}_total")
        }


def node(
    settings: ExpositionSettings | None = None,
    *,
    uids: Mapping[str, Sequence[str]] = MappingProxyType({}),
    pod_labels: Mapping[str, Sequence[Label]] = MappingProxyType({}),
    dcgm_pod_labels: Mapping[str, Sequence[Label]] = MappingProxyType({}),
    **known: str,
) -> Node:
    """Make a node with pod UIDs in its directories, by `ns/pod`, and with pod labels, by UID."""
    clock, settings = ManualClock(start_ns=START_NS), settings or ExpositionSettings()
    pods = PodLookup(
        name_of=FakeNames(known).name_of,
        find_uids=lambda namespace, pod: uids.get(f"{namespace}/{pod}", ()),
        labels_of=lambda uid: pod_labels.get(uid, ()),
        dcgm_labels_of=lambda uid: dcgm_pod_labels.get(uid, ()),
    )
    view = make_node_state(settings, clock=clock, sampling_interval_seconds=1.0, pods=pods)
    return Node(clock=clock, view=view, page=PageRenderer(view, settings=settings, clock=clock))
