"""A node to show: GPUs, containers, processes, with what a test does not care about filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from agent.exposition.holders import ContainerName
from agent.exposition.page import NodePage
from agent.exposition.settings import ExpositionSettings
from agent.exposition.view import NodeView, make_view
from agent.kubelet import names
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuFacts,
    GpuProcess,
    GpuReading,
    Incident,
    Inventory,
    NodeSample,
    ProcessKind,
    Severity,
)
from simulator.clock import HandClock

MODEL = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30
START_NS = 10**15


@dataclass
class FakeNames:
    """Names by container id: `ns/pod/container`."""

    known: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, container_id: str) -> ContainerName | None:
        known = self.known.get(container_id)
        if known is None:
            return None
        namespace, pod, container = known.split("/")
        return names.ContainerName(namespace=namespace, pod=pod, container=container)


def gpu(index: int = 0, **values: Any) -> GpuReading:  # noqa: ANN401  # a record's fields
    return GpuReading(uuid=f"GPU-{index}", index=index, model=MODEL, **values)


def instance(gi: int, *, of: int = 0, ci: int = 0, **values: Any) -> GpuReading:  # noqa: ANN401  # as above
    return GpuReading(
        uuid=f"MIG-{of}-{gi}-{ci}",
        index=of,
        model=MODEL,
        parent_uuid=f"GPU-{of}",
        gpu_instance=gi,
        compute_instance=ci,
        mig_profile="1g.10gb",
        **values,
    )


def process(gpu: int, container: int | None, **values: Any) -> GpuProcess:  # noqa: ANN401  # as above
    return GpuProcess(
        gpu=gpu,
        container=container,
        kind=ProcessKind.COMPUTE,
        **{"pid": 100, "memory_used_bytes": GIB, "sm_utilization_ratio": 0.25, **values},
    )


def allocation(gpu: int, owner: str, **values: Any) -> DeviceAllocation:  # noqa: ANN401  # as above
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
    *gpus: GpuReading,
    containers: Sequence[str] = (),
    processes: Sequence[GpuProcess] = (),
    allocations: Sequence[DeviceAllocation] = (),
    time_ns: int = 1_700_000_000_000_000_000,
) -> NodeSample:
    return NodeSample(
        node="node-1",
        boot_id="boot",
        seq=1,
        time_ns=time_ns,
        interval_ns=1_000_000_000,
        gpus=list(gpus),
        containers=[ContainerRef(container_id=one, pod_uid=f"uid-{one}") for one in containers],
        processes=list(processes),
        allocations=list(allocations),
    )


def inventory(*indices: int) -> Inventory:
    return Inventory(
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
    """A view with its page."""

    clock: HandClock
    view: NodeView
    page: NodePage

    def lines(self, name: str) -> list[str]:
        """Give the page's series of one name."""
        text = self.page().decode()
        return [line for line in text.splitlines() if line.startswith(f"{name}{{")]

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Give values by some of their labels, read by Prometheus' client for Python.

        That one gives each counter the end `_total`, which DCGM's do not have.
        """
        return {
            tuple(one.labels.get(label, "") for label in labels): one.value
            for family in text_string_to_metric_families(self.page().decode())
            for one in family.samples
            if one.name in (name, f"{name}_total")
        }


def node(settings: ExpositionSettings | None = None, **known: str) -> Node:
    clock, settings = HandClock(start_ns=START_NS), settings or ExpositionSettings()
    view = make_view(settings, clock=clock, tick_seconds=1.0, names=FakeNames(known))
    return Node(clock=clock, view=view, page=NodePage(view, settings=settings, clock=clock))
