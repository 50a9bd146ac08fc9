"""The faults of one node, in time: which are there now, and whether they fit the node.

What NVML answers under a fault is `simulator.nvml.faults`' business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.errors import UserError
from simulator.device import gpu_groups
from simulator.scenario.fault_schema import Fault, GpuIncident
from simulator.scenario.schema import Node, Scenario

_NS: Final = 1_000_000_000
OF_THE_DRIVER: Final = frozenset({"driver_reload", "version_mismatch", "unbind"})


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A fault with its times in nanoseconds since the scenario's start."""

    spec: Fault
    """What the scenario says."""
    start_ns: int
    """When it begins."""
    end_ns: int | None
    """When it ends; `None` is never."""

    def is_there(self, now_ns: int) -> bool:
        """Return whether it is there."""
        return self.start_ns <= now_ns and (self.end_ns is None or now_ns < self.end_ns)

    def is_over(self, now_ns: int) -> bool:
        """Return whether it has been there."""
        return self.end_ns is not None and self.end_ns <= now_ns

    def is_of(self, gpu: int | None, call: str) -> bool:
        """Return whether a call is meant; `gpu` is `None` for one that takes no GPU."""
        if gpu is None:
            return call in self.spec.calls
        return gpu in (self.spec.gpus or (gpu,)) and call in (self.spec.calls or (call,))


def plan_faults(faults: Sequence[Fault], node: str) -> list[PlannedFault]:
    """Return the faults of a node in the scenario's order."""
    return [
        PlannedFault(
            spec=fault,
            start_ns=round(fault.start_seconds * _NS),
            end_ns=None if fault.end_seconds is None else round(fault.end_seconds * _NS),
        )
        for fault in faults
        if fault.node == node
    ]


def check_faults(faults: Sequence[Fault], gpus: dict[str, int]) -> None:
    """Check them against the number of GPUs by node; raises UserError."""
    for number, fault in enumerate(faults):
        where = f"faults[{number}]"
        if fault.node not in gpus:
            raise UserError(f"{where}.node: no node {fault.node!r}; there is {', '.join(gpus)}")
        missing = [index for index in fault.gpus if index >= gpus[fault.node]]
        if missing:
            raise UserError(
                f"{where}.gpus: {fault.node} has no GPU {missing[0]}; "
                f"it has 0 to {gpus[fault.node] - 1}"
            )
        if fault.end_seconds is not None and fault.end_seconds <= fault.start_seconds:
            raise UserError(
                f"{where}.end_seconds: {fault.end_seconds} is not after "
                f"start_seconds {fault.start_seconds}"
            )
        if fault.kind in OF_THE_DRIVER and (fault.gpus or fault.calls):
            raise UserError(
                f"{where}.kind: {fault.kind} happens to the whole driver; leave out gpus and calls"
            )


# What goes wrong with the GPUs of a run, one thing after the other, in nanoseconds.
#
# Here the scenario's incidents are laid out. How NVML and the kernel's log tell of them is theirs.

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PlannedIncident:
    """One thing that happens once."""

    time_ns: int
    """When, since the scenario's start."""
    spec: GpuIncident
    """What the scenario says of it."""


def plan_incidents(scenario: Scenario, node: Node) -> list[PlannedIncident]:
    """Return what happens on a node, in the order of time; a new cut into instances is an event."""
    specs = [spec for spec in scenario.incidents if spec.node == node.name]
    planned = [
        PlannedIncident(time_ns=round(spec.at_seconds * _NS) + number * _NS_PER_MS, spec=spec)
        for spec in [*specs, *_cuts(node)]
        for number in range(spec.times)
    ]
    return sorted(planned, key=lambda one: one.time_ns)


def _cuts(node: Node) -> list[GpuIncident]:
    return [
        GpuIncident(
            node=node.name,
            gpu=index,
            at_seconds=cut.start_seconds,
            event="mig_change",
            told_by="nvml",
        )
        for index, group in enumerate(gpu_groups(node))
        for cut in group.mig
        if cut.start_seconds
    ]
