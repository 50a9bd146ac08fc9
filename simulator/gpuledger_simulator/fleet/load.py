"""Loads a fleet from a YAML file and reports invalid input in one line."""

from collections.abc import Sequence
from pathlib import Path

from gpuledger.errors import UserError
from gpuledger.texts import find_near
from gpuledger_simulator.fleet.plan import FleetNode, plan_nodes
from gpuledger_simulator.fleet.schema import Fleet
from gpuledger_simulator.scenario.load import convert, load_as


def load_fleet(path: str | Path) -> Fleet:
    """Return the fleet in a file; raise `UserError` with the file, the field and the remedy."""
    return load_as(path, parse_fleet)


def parse_fleet(content: object) -> Fleet:
    """Return the fleet in the content of a YAML document; raise `UserError` if it is invalid."""
    fleet = convert(content, Fleet)
    _check_pools(fleet)
    nodes: dict[str, list[FleetNode]] = {pool.name: [] for pool in fleet.pools}
    for node in plan_nodes(fleet, minutes=1):
        nodes[node.pool.name].append(node)
    _check_workloads(fleet, nodes)
    _check_failures(fleet, nodes)
    return fleet


def _check_pools(fleet: Fleet) -> None:
    names = [pool.name for pool in fleet.pools]
    for number, pool in enumerate(fleet.pools):
        if pool.name in names[:number]:
            raise UserError(
                f"pools[{number}].name: duplicate name {pool.name!r}; give each pool its own"
            )
        if pool.mig and pool.sharing != "none":
            raise UserError(
                f"pools[{number}].sharing: {pool.sharing} is invalid with mig; remove one of them"
            )


def _check_workloads(fleet: Fleet, nodes: dict[str, list[FleetNode]]) -> None:
    teams: dict[str, str] = {}
    for number, workload in enumerate(fleet.workloads):
        where = f"workloads[{number}]"
        _check_known(f"{where}.pool", workload.pool, list(nodes))
        for name in ("busy", "run_hours", "pause_hours"):
            low, high = getattr(workload, name) or (0, 0)
            if low > high:
                raise UserError(f"{where}.{name}: {low} is above {high}; write the lower one first")
        if workload.grows_to and workload.grows_to <= workload.pods:
            raise UserError(
                f"{where}.grows_to: {workload.grows_to} is not more than pods: {workload.pods}"
            )
        if teams.setdefault(workload.namespace, workload.team) != workload.team:
            raise UserError(
                f"{where}.team: {workload.team!r} differs from team"
                f" {teams[workload.namespace]!r} of namespace {workload.namespace}; use one team"
                " per namespace"
            )
        node = nodes[workload.pool][0]
        fitting = [device for device in node.devices if device.profile == workload.profile]
        if not fitting:
            profiles = sorted({each.profile for each in node.devices if each.profile})
            raise UserError(
                f"{where}.profile: {workload.profile} is not a profile of pool {workload.pool};"
                f" available: {', '.join(profiles) or 'none, because it is not partitioned'}"
            )
        # A pod gets several devices of its own, or several slots of one device.
        maximum = fitting[0].slots if node.is_shared else len(fitting)
        if workload.units > maximum:
            raise UserError(
                f"{where}.units: {workload.units} is more than a node of pool {workload.pool} has;"
                f" at most {maximum}"
            )


def _check_failures(fleet: Fleet, nodes: dict[str, list[FleetNode]]) -> None:
    for name in ("lost_gpus", "flaky_nodes", "cordoned_nodes"):
        for number, failure in enumerate(getattr(fleet, name)):
            where = f"{name}[{number}]"
            _check_known(f"{where}.pool", failure.pool, list(nodes))
            found = nodes[failure.pool]
            if failure.node >= len(found):
                raise UserError(
                    f"{where}.node: pool {failure.pool} has no node {failure.node};"
                    f" available: 0 to {len(found) - 1}"
                )
            if name == "lost_gpus" and failure.gpu >= len(found[0].gpus):
                raise UserError(
                    f"{where}.gpu: pool {failure.pool} has no GPU {failure.gpu};"
                    f" available: 0 to {len(found[0].gpus) - 1}"
                )


def _check_known(where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = find_near(name, known)
        hint = f"did you mean {near!r}?" if near else f"available: {', '.join(known)}"
        raise UserError(f"{where}: unknown pool {name!r}; {hint}")
