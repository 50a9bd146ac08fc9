"""What goes wrong with the GPUs of a run, one thing after the other, in nanoseconds.

Here the scenario's incidents are laid out. How NVML and the kernel's log tell of them is theirs.
"""

from dataclasses import dataclass

from simulator.device import gpu_groups
from simulator.incident_shape import GpuIncident
from simulator.scenario_shape import Node, Scenario

_NS = 1_000_000_000
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
