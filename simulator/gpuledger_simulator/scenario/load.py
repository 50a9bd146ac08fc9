"""Loads a scenario from a YAML file and reports invalid input in one line.

This module reads the file and checks its parts against each other, so that other code can rely on a
valid scenario. `gpuledger_simulator.schema` defines the fields.
"""

import re
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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

ShapeT = TypeVar("ShapeT")
_MAX_BYTES: Final = 16 * 2**20  # enough for thousands of pods
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"unknown field `(?P<field>[^`]*)`")
_PATTERN_REMEDY: Final = (
    "invalid value; names consist of lower-case letters, digits, '-' and '.', and a cgroup path"
    " starts with '/'"
)
_VERSION_REMEDY: Final = (
    "invalid driver version; use numbers separated by dots, such as '580.95.05'"
)
_CHOICE: Final = re.compile(r"invalid enum value (?P<value>.*)", re.IGNORECASE)
# Drivers 535.43 to 535.86 write longer rows, according to bug reports about NVML.
_PROTECTED_ROW_BYTES: Final = 32
_PROTECTED_VERSION: Final = re.compile(r"535\.(\d+)(\..*)?")
_PROTECTED_MINORS: Final = range(43, 87)


def load_scenario(path: str | Path) -> Scenario:
    """Return the scenario in a file; raise `UserError` with the file, the field and the remedy."""
    return load_as(path, parse_scenario)


def load_as(path: str | Path, parse: Callable[[object], ShapeT]) -> ShapeT:
    """Return the content of a YAML file as `parse` returns it; its errors then name the file."""
    try:
        content = yaml.safe_load(read_small_file(Path(path), max_bytes=_MAX_BYTES))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the path of a scenario file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UserError(
            f"{path}: expected a scenario, got YAML that is nested too deeply"
        ) from error
    except ValueError as error:  # for example, an invalid date
        raise UserError(f"{path}: invalid date or number") from error
    try:
        return parse(content)
    except UserError as error:
        raise UserError(f"{path}: {shorten_middle(str(error))}") from error


def parse_scenario(content: object) -> Scenario:
    """Return the scenario in the content of a YAML document; raise `UserError` if it is invalid."""
    scenario = convert(content, Scenario)
    # The order matters: later checks plan the scenario and assume that all nodes exist.
    _check_names(scenario)
    _check_drivers(scenario)
    _check_pods(scenario)
    _check_gpus(scenario)
    _check_devices(scenario)
    _check_incidents(scenario)
    check_faults(scenario.faults, {one.name: len(gpu_groups(one)) for one in scenario.nodes})
    return scenario


def convert(content: object, shape: type[ShapeT]) -> ShapeT:
    """Return the content of a file as a Struct; raise `UserError` with the field and the remedy."""
    try:
        return msgspec.convert(content, shape)
    except msgspec.ValidationError as error:
        raise UserError(_explain(str(error), shape)) from error


def _explain(message: str, shape: type) -> str:
    """Return an error message in the file's terms, from msgspec's error message."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    where = path.lstrip(".") or "the file"
    if "matching regex" in what:
        is_version = path.endswith(".driver.version")
        return f"{where}: {_VERSION_REMEDY if is_version else _PATTERN_REMEDY}"
    if (wrong := _CHOICE.match(what)) and (choices := _choices_at(path, shape)):
        return f"{where}: unknown value {wrong['value']}; available: {', '.join(map(str, choices))}"
    unknown = _UNKNOWN.search(what)
    if not unknown:
        return f"{where}: {what[:1].lower()}{what[1:]}"
    known = _fields_at(path, shape)
    return f"{where}: unknown field {unknown['field']!r}; {_nearest(unknown['field'], known)}"


def _fields_at(path: str, shape: type) -> list[str]:
    """Return the names of the fields at a msgspec path."""
    return [field.name for field in msgspec.structs.fields(_shape_at(path, shape))]


def _choices_at(path: str, shape: type) -> list[object]:
    """Return the allowed values at a msgspec path; an empty list if any value is allowed."""
    return _literals_in(_shape_at(path, shape))


def _shape_at(path: str, shape: type) -> Any:  # noqa: ANN401  # any type annotation
    at: Any = shape
    # The path exists, because it is part of an error message of msgspec.
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
    """Return a suggestion: the most similar name, or all known names."""
    names = list(known)
    near = find_near(wrong, names)
    return f"did you mean {near!r}?" if near else f"available: {', '.join(names) or 'none'}"


def _check_names(scenario: Scenario) -> None:
    nodes = [node.name for node in scenario.nodes]
    for number, name in enumerate(nodes):
        if name in nodes[:number]:
            raise UserError(
                f"nodes[{number}].name: duplicate name {name!r}; give each node its own"
            )
    places = [(f"pods[{i}].node", pod.node) for i, pod in enumerate(scenario.pods)]
    places += [(f"host_processes[{i}].node", p.node) for i, p in enumerate(scenario.host_processes)]
    places += [(f"jobs[{i}].node", job.node) for i, job in enumerate(scenario.jobs)]
    places += [(f"incidents[{i}].node", one.node) for i, one in enumerate(scenario.incidents)]
    for where, name in places:
        if name not in nodes:
            raise UserError(f"{where}: unknown node {name!r}; {_nearest(name, nodes)}")


def _check_drivers(scenario: Scenario) -> None:
    """Raise `UserError` if a driver's version does not fit the length of rows in process lists."""
    for number, node in enumerate(scenario.nodes):
        version = _PROTECTED_VERSION.fullmatch(node.driver.version)
        is_protected = version is not None and int(version[1]) in _PROTECTED_MINORS
        if node.driver.process_row_bytes == _PROTECTED_ROW_BYTES and not is_protected:
            raise UserError(
                f"nodes[{number}].driver.process_row_bytes: {_PROTECTED_ROW_BYTES} requires"
                f" a driver from 535.43 to 535.86, but driver.version is {node.driver.version};"
                " change driver.version or remove process_row_bytes"
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
        # `None` means that the earlier pod of that name never ends.
        free = free_from.get(name, 0.0)
        if free is None or (name in free_from and pod.start_seconds < free):
            raise UserError(
                f"{where}.name: {pod.namespace}/{pod.name} is still running at "
                f"{pod.start_seconds} s; end the earlier pod of that name first"
            )
        free_from[name] = pod.end_seconds
        containers = [container.name for container in pod.containers]
        if len(set(containers)) < len(containers):
            raise UserError(f"{where}.containers: duplicate name in {', '.join(containers)}")


def _check_gpus(scenario: Scenario) -> None:
    """Raise `UserError` if a process's GPUs do not exist or have too little memory at its start."""
    processes = plan_processes(scenario, plan_pods(scenario, epoch_ns=0))
    for node in scenario.nodes:
        groups = gpu_groups(node)
        on_node = [process for process in processes if process.node == node.name]
        for process in on_node:
            missing = [index for index in process.spec.gpus if not 0 <= index < len(groups)]
            if missing:
                raise UserError(
                    f"{_who(process)}: gpus: {node.name} has no GPU {missing[0]}; "
                    f"available: 0 to {len(groups) - 1}"
                )
        for index, group in enumerate(groups):
            facts = describe_gpu(group, uuid="", index=index)
            here = [process for process in on_node if index in process.spec.gpus]
            for process in here:
                # A process uses the same memory from start to end, so the total can only be highest
                # when a process starts.
                held = sum(p.spec.memory_bytes for p in here if p.alive(process.start_ns))
                if held > facts.room_bytes:
                    raise UserError(
                        f"{_who(process)}: memory_bytes: GPU {index} of {node.name} has room for"
                        f" {facts.room_bytes} bytes, but its processes would use {held} at this"
                        " start; lower memory_bytes or move a process"
                    )
            for process in here:
                _check_visits(process)
                _check_instance(process, f"GPU {index} of {node.name}", facts.cuts)


def _check_devices(scenario: Scenario) -> None:
    """Raise `UserError` if the kubelet allocates a GPU or an instance that does not exist."""
    groups = {node.name: gpu_groups(node) for node in scenario.nodes}
    for pod in plan_pods(scenario, epoch_ns=0):
        for container in pod.spec.containers:
            for device in container.devices or ():
                where, on_node = f"{pod.key} {container.name}: devices", groups[pod.spec.node]
                if device.gpu >= len(on_node):
                    raise UserError(
                        f"{where}: no GPU {device.gpu}; available: 0 to {len(on_node) - 1}"
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
                f"available: 0 to {sizes[incident.node] - 1}"
            )
        if (incident.xid is None) == (incident.event == "xid"):
            raise UserError(
                f"incidents[{number}].xid: set either xid or an event other than 'xid'; "
                f"got xid {incident.xid} and event {incident.event!r}"
            )


def _check_visits(process: PlannedProcess) -> None:
    """Raise `UserError` if a process has no visit, or if its visits overlap."""
    plan = process.spec.visits
    if plan and plan.count > 1 and plan.every_seconds <= plan.length_seconds:
        raise UserError(
            f"{_who(process)}: visits.every_seconds: {plan.every_seconds} must be greater"
            f" than length_seconds {plan.length_seconds}"
        )
    if not process.visits:
        raise UserError(
            f"{_who(process)}: visits.first_seconds: the process ends before; lower first_seconds"
        )


def _check_instance(process: PlannedProcess, gpu: str, cuts: list[Cut]) -> None:
    """Raise `UserError` if the MIG instance of a process is invalid.

    The instance must exist from the process's start to its end, and have enough memory. A process
    on an unpartitioned GPU must have no instance.
    """
    place, cut = process.spec.instance, cut_at(cuts, process.start_ns)
    size = len(cut.instances) if cut else 0
    if (place is not None) != (cut is not None) or (place or 0) >= max(size, 1):
        what = f"has {size} MIG instances" if cut else "is not partitioned"
        raise UserError(
            f"{_who(process)}: instance: {place}: {gpu} {what} when the process starts; set the"
            " position of an instance, or leave it out if the GPU is not partitioned"
        )
    if any(process.start_ns < other.start_ns < process.end_ns for other in cuts):
        raise UserError(
            f"{_who(process)}: end_seconds: the MIG layout of {gpu} changes while the process"
            " runs; end the process before"
        )
    if cut and place is not None and process.spec.memory_bytes > cut.instances[place].memory_bytes:
        raise UserError(
            f"{_who(process)}: memory_bytes: its instance of {gpu} has only"
            f" {cut.instances[place].memory_bytes} bytes; lower memory_bytes"
        )


def _who(process: PlannedProcess) -> str:
    return f"{process.pod.key if process.pod else 'host process'} {process.spec.command!r}"
