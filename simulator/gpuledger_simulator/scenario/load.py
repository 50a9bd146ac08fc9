"""Reads a scenario from a YAML file and says in one line what is wrong with it.

Here live the file and the checks of one part against another, so that nothing that plays a scenario
has to ask whether it can be. Its shape is `gpuledger_simulator.schema`'s.
"""

import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file
from gpuledger.texts import find_near, shorten_middle
from gpuledger_simulator.device import describe_gpu
from gpuledger_simulator.gpu_models import Cut, cut_at
from gpuledger_simulator.plan import (
    PlannedProcess,
    check_faults,
    gpu_groups,
    plan_pods,
    plan_processes,
)
from gpuledger_simulator.schema import Scenario

__all__ = ["Scenario", "load_scenario", "parse_scenario"]

_MAX_BYTES: Final = 16 * 2**20  # thousands of pods, each written out
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `(?P<field>[^`]*)`")
_PATTERN_REMEDY: Final = (
    "names are of lower-case letters, digits, '-' and '.', a cgroup path starts with '/'"
)
_VERSION_REMEDY: Final = "a driver's version is numbers with dots between them, such as '580.95.05'"
_CHOICE: Final = re.compile(r"invalid enum value (?P<value>.*)", re.IGNORECASE)
# Of 535.43 to 535.86, as NVML's reports have it.
_PROTECTED_ROW_BYTES: Final = 32
_PROTECTED_VERSION: Final = re.compile(r"535\.(\d+)(\..*)?")
_PROTECTED_MINORS: Final = range(43, 87)


def load_scenario(path: str | Path) -> Scenario:
    """Read and check a scenario; raises UserError that names file, field and remedy."""
    try:
        content = yaml.safe_load(read_small_file(Path(path), max_bytes=_MAX_BYTES))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the path of a scenario file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(f"{path}: expected a scenario, got YAML nested too deep") from error
    except ValueError as error:  # of a date that is none
        raise UserError(f"{path}: a date or number in it is not valid") from error
    try:
        return parse_scenario(content)
    except UserError as error:
        raise UserError(f"{path}: {shorten_middle(str(error))}") from error


def parse_scenario(content: object) -> Scenario:
    """Make a scenario from a YAML document's content and check it."""
    try:
        scenario = msgspec.convert(content, Scenario)
    except msgspec.ValidationError as error:
        raise UserError(_explain(str(error))) from error
    # In this order: later checks lay the scenario out, and count on nodes that are there.
    _check_names(scenario)
    _check_drivers(scenario)
    _check_pods(scenario)
    _check_gpus(scenario)
    _check_devices(scenario)
    _check_incidents(scenario)
    check_faults(scenario.faults, {one.name: len(gpu_groups(one)) for one in scenario.nodes})
    return scenario


def _explain(message: str) -> str:
    """Turn msgspec's words into ours, with the nearest right field."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    where = path.lstrip(".") or "the file"
    if "matching regex" in what:
        is_version = path.endswith(".driver.version")
        return f"{where}: {_VERSION_REMEDY if is_version else _PATTERN_REMEDY}"
    if (wrong := _CHOICE.match(what)) and (choices := _choices_at(path)):
        return f"{where}: {wrong['value']} is none of {', '.join(map(str, choices))}"
    unknown = _UNKNOWN.search(what)
    if not unknown:
        return f"{where}: {what[:1].lower()}{what[1:]}"
    known = _fields_at(path)
    return f"{where}: unknown field {unknown['field']!r}; {_nearest(unknown['field'], known)}"


def _fields_at(path: str) -> list[str]:
    """Return the fields that the scenario's shape has at msgspec's path."""
    return [field.name for field in msgspec.structs.fields(_shape_at(path))]


def _choices_at(path: str) -> list[object]:
    """Return the values of which one may stand at msgspec's path; none where it may be others."""
    return _literals_in(_shape_at(path))


def _shape_at(path: str) -> Any:  # noqa: ANN401  # any type annotation
    at: Any = Scenario
    # The path is msgspec's own, `.pods[...].labels`: it was walked once, and can be walked again.
    for name in re.findall(r"\.(\w+)|(\[)", path):
        if name[1]:
            at = (_structs_in(at) or [at])[0]
        else:
            at = get_type_hints(at)[name[0]]
            at = (_structs_in(at) or [at])[0]
    return at


def _literals_in(hint: Any) -> list[object]:  # noqa: ANN401  # any type annotation
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [found for part in get_args(hint) for found in _literals_in(part)]


def _structs_in(hint: Any) -> list[Any]:  # noqa: ANN401  # any type annotation
    if get_origin(hint) in (Union, types.UnionType, list) or hasattr(hint, "__metadata__"):
        return [found for part in get_args(hint) for found in _structs_in(part)]
    return [hint] if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else []


def _nearest(wrong: str, known: Iterable[str]) -> str:
    """Return what was probably meant, else what there is."""
    names = list(known)
    near = find_near(wrong, names)
    return f"did you mean {near!r}?" if near else f"there is {', '.join(names) or 'none'}"


def _check_names(scenario: Scenario) -> None:
    nodes = [node.name for node in scenario.nodes]
    for number, name in enumerate(nodes):
        if name in nodes[:number]:
            raise UserError(f"nodes[{number}].name: {name!r} comes twice; give each node its own")
    places = [(f"pods[{i}].node", pod.node) for i, pod in enumerate(scenario.pods)]
    places += [(f"host_processes[{i}].node", p.node) for i, p in enumerate(scenario.host_processes)]
    places += [(f"jobs[{i}].node", job.node) for i, job in enumerate(scenario.jobs)]
    places += [(f"incidents[{i}].node", one.node) for i, one in enumerate(scenario.incidents)]
    for where, name in places:
        if name not in nodes:
            raise UserError(f"{where}: no node {name!r}; {_nearest(name, nodes)}")


def _check_drivers(scenario: Scenario) -> None:
    """Check that rows are as long as those of a driver of this version."""
    for number, node in enumerate(scenario.nodes):
        version = _PROTECTED_VERSION.fullmatch(node.driver.version)
        is_protected = version is not None and int(version[1]) in _PROTECTED_MINORS
        if node.driver.process_row_bytes == _PROTECTED_ROW_BYTES and not is_protected:
            raise UserError(
                f"nodes[{number}].driver.process_row_bytes: {_PROTECTED_ROW_BYTES} is of the"
                f" drivers 535.43 to 535.86, and its version is {node.driver.version}; set"
                " driver.version to one of these, or take it out"
            )


def _check_pods(scenario: Scenario) -> None:
    free_from: dict[tuple[str, str], float | None] = {}
    for number, pod in enumerate(scenario.pods):
        where, name = f"pods[{number}]", (pod.namespace, pod.name)
        if pod.end_seconds is not None and pod.end_seconds <= pod.start_seconds:
            raise UserError(
                f"{where}.end_seconds: {pod.end_seconds} is not after "
                f"start_seconds {pod.start_seconds}"
            )
        # None: the earlier pod of that name never ends.
        free = free_from.get(name, 0.0)
        if free is None or (name in free_from and pod.start_seconds < free):
            raise UserError(
                f"{where}.name: {pod.namespace}/{pod.name} still runs at {pod.start_seconds} s; "
                "end the earlier pod of that name first"
            )
        free_from[name] = pod.end_seconds
        containers = [container.name for container in pod.containers]
        if len(set(containers)) < len(containers):
            raise UserError(f"{where}.containers: {', '.join(containers)}: names come twice")


def _check_gpus(scenario: Scenario) -> None:
    """Check that each process's GPUs are there and have room for it when it starts."""
    processes = plan_processes(scenario, plan_pods(scenario, epoch_ns=0))
    for node in scenario.nodes:
        groups = gpu_groups(node)
        on_node = [process for process in processes if process.node == node.name]
        for process in on_node:
            missing = [index for index in process.spec.gpus if not 0 <= index < len(groups)]
            if missing:
                raise UserError(
                    f"{_who(process)}: gpus: {node.name} has no GPU {missing[0]}; "
                    f"it has 0 to {len(groups) - 1}"
                )
        for index, group in enumerate(groups):
            facts = describe_gpu(group, uuid="", index=index)
            room = facts.memory_bytes - facts.model.reserved_bytes
            here = [process for process in on_node if index in process.spec.gpus]
            for process in here:
                # Memory is held from start to end, so it is fullest when somebody starts.
                held = sum(p.spec.memory_bytes for p in here if p.alive(process.start_ns))
                if held > room:
                    raise UserError(
                        f"{_who(process)}: memory_bytes: GPU {index} of {node.name} would hold"
                        f" {held} bytes when it starts, and has room for {room}; lower"
                        " memory_bytes or move a process"
                    )
            for process in here:
                _check_visits(process)
                _check_instance(process, f"GPU {index} of {node.name}", facts.cuts)


def _check_devices(scenario: Scenario) -> None:
    """Check that the GPUs and instances which the kubelet gives away are there."""
    groups = {node.name: gpu_groups(node) for node in scenario.nodes}
    for pod in plan_pods(scenario, epoch_ns=0):
        for container in pod.spec.containers:
            for device in container.devices or ():
                where, on_node = f"{pod.key} {container.name}: devices", groups[pod.spec.node]
                if device.gpu >= len(on_node):
                    raise UserError(
                        f"{where}: no GPU {device.gpu}; the node has 0 to {len(on_node) - 1}"
                    )
                facts = describe_gpu(on_node[device.gpu], uuid="", index=device.gpu)
                cut = cut_at(facts.cuts, pod.start_ns)
                size = len(cut.instances) if cut else 0
                if device.instance is not None and device.instance >= size:
                    raise UserError(
                        f"{where}: GPU {device.gpu} has no instance {device.instance} when the pod"
                        " starts"
                    )


def _check_incidents(scenario: Scenario) -> None:
    sizes = {node.name: len(gpu_groups(node)) for node in scenario.nodes}
    for number, incident in enumerate(scenario.incidents):
        if incident.gpu >= sizes[incident.node]:
            raise UserError(
                f"incidents[{number}].gpu: {incident.node} has no GPU {incident.gpu}; "
                f"it has 0 to {sizes[incident.node] - 1}"
            )
        if (incident.xid is None) == (incident.event == "xid"):
            raise UserError(
                f"incidents[{number}].xid: an incident has either an xid or another event, "
                f"got xid {incident.xid} and event {incident.event!r}"
            )


def _check_visits(process: PlannedProcess) -> None:
    """Check that one visit ends before the next one begins, and that there is one."""
    plan = process.spec.visits
    if plan and plan.count > 1 and plan.every_seconds <= plan.length_seconds:
        raise UserError(
            f"{_who(process)}: visits.every_seconds: {plan.every_seconds} is not more than"
            f" length_seconds {plan.length_seconds}"
        )
    if not process.visits:
        raise UserError(f"{_who(process)}: visits.first_seconds: the process ends before; lower it")


def _check_instance(process: PlannedProcess, gpu: str, cuts: list[Cut]) -> None:
    """Check that a process runs in one instance of a cut GPU, or on a whole one, all its life."""
    place, cut = process.spec.instance, cut_at(cuts, process.start_ns)
    size = len(cut.instances) if cut else 0
    if (place is not None) != (cut is not None) or (place or 0) >= max(size, 1):
        what = f"is cut into {size} instances" if cut else "is whole"
        raise UserError(
            f"{_who(process)}: instance: {place}: {gpu} {what} when it starts; give the position"
            " of one of its instances, and none on a whole GPU"
        )
    if any(process.start_ns < other.start_ns < process.end_ns for other in cuts):
        raise UserError(
            f"{_who(process)}: end_seconds: {gpu} is cut anew while it runs; end it before that"
        )
    if cut and place is not None and process.spec.memory_bytes > cut.instances[place].memory_bytes:
        raise UserError(
            f"{_who(process)}: memory_bytes: its instance of {gpu} has"
            f" {cut.instances[place].memory_bytes} bytes"
        )


def _who(process: PlannedProcess) -> str:
    return f"{process.pod.key if process.pod else 'host process'} {process.spec.command!r}"
