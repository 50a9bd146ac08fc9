"""Reads autoscalers from manifests, with the line of each value.

Manifests are read as YAML nodes, because only nodes have their lines.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import yaml

from gpuledger.errors import UserError
from gpuledger.settings.yaml_errors import yaml_errors
from gpuledger.small_files import read_small_file
from gpuledger_cli.autoscale.promql import Query

STANDARD_INPUT: Final = "-"
_MAX_BYTES: Final = 16 * 1024 * 1024
_KINDS: Final = ("ScaledObject", "ScaledJob", "HorizontalPodAutoscaler")
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(m?)")
_PART_OF_A_GPU: Final = re.compile(
    r"nvidia\.com/(mig-.*|.*\.shared|gpumem.*|gpucores)|(aliyun|koordinator)\..*gpu.*"
    r"|volcano\.sh/vgpu.*|gpu-(fraction|memory)"
)
"""Resources and annotations by which a pod gets a part of a GPU."""


@dataclass(frozen=True)
class Field:
    """A value in a manifest, or the place where it is missing."""

    node: yaml.Node | None
    line: int

    def at(self, *path: str) -> "Field":
        """Return a value below this one; if it is missing, with the line of its parent."""
        field = self
        for key in path:
            found = dict(field.pairs()).get(key)
            field = found or Field(None, field.line)
        return field

    def pairs(self) -> Iterator[tuple[str, "Field"]]:
        """Yield the keys and values of a mapping, merged ones first."""
        if not isinstance(self.node, yaml.MappingNode):
            return
        values = [
            (str(key.value), Field(value, key.start_mark.line + 1))
            for key, value in self.node.value
        ]
        for key, value in values:
            if key == "<<":
                # If several mappings have a key, the first one counts.
                for merged in reversed(value.items or [value]):
                    yield from merged.pairs()
        yield from values

    @property
    def items(self) -> "list[Field]":
        """The items of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            return []
        return [Field(one, one.start_mark.line + 1) for one in self.node.value]

    @property
    def text(self) -> str:
        """A scalar as it is written; empty if it is missing."""
        return str(self.node.value) if isinstance(self.node, yaml.ScalarNode) else ""

    @property
    def number(self) -> float | None:
        """A number or a quantity such as 700m; None if it is missing or another text."""
        found = _QUANTITY.fullmatch(self.text)
        return float(found[1]) / (1000 if found[2] else 1) if found else None


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A trigger of KEDA, or a metric of a HorizontalPodAutoscaler."""

    place: Field
    type: str
    query: Query | None
    """The PromQL query, or the metric's name as a query; None if there is neither."""
    query_field: Field
    target: Field
    """The threshold of one replica, or of all."""

    @property
    def metric_type(self) -> str:
        """The metric type of a trigger."""
        return self.place.at("metricType").text or "AverageValue"

    def setting(self, name: str) -> Field:
        """Return a value of a trigger's metadata."""
        return self.place.at("metadata", name)


@dataclass(frozen=True, kw_only=True)
class Autoscaler:
    """A ScaledObject, a ScaledJob or a HorizontalPodAutoscaler."""

    file: str
    kind: str
    namespace: str
    name: str
    spec: Field
    has_part_of_gpu: bool
    """Whether a manifest shows that its pods get a part of a GPU."""

    @property
    def is_of_keda(self) -> bool:
        """Whether KEDA scales it."""
        return self.kind != "HorizontalPodAutoscaler"

    @property
    def minimum(self) -> Field:
        """The field with the minimum number of replicas."""
        return self.spec.at("minReplicaCount" if self.is_of_keda else "minReplicas")

    @property
    def scales_to_zero(self) -> bool:
        """Whether it may run without replicas, which is KEDA's default."""
        default = "0" if self.is_of_keda else "1"
        return "0" in {self.minimum.text or default, self.spec.at("idleReplicaCount").text}

    @cached_property
    def signals(self) -> Sequence[Signal]:
        """Its triggers or metrics."""
        if self.is_of_keda:
            return [_trigger(one) for one in self.spec.at("triggers").items]
        return [_metric(one) for one in self.spec.at("metrics").items]


def _trigger(place: Field) -> Signal:
    query = place.at("metadata", "query")
    kind = place.at("type").text
    return Signal(
        place=place,
        type=kind,
        query=Query(query.text) if kind == "prometheus" and query.text else None,
        query_field=query,
        target=place.at("metadata", "threshold"),
    )


def _metric(place: Field) -> Signal:
    kind = place.at("type").text
    source = place.at(kind[:1].lower() + kind[1:])
    name, target = source.at("metric", "name"), source.at("target")
    values = [field for key, field in target.pairs() if key in {"averageValue", "value"}]
    return Signal(
        place=place,
        type=kind,
        query=Query(name.text) if name.text else None,
        query_field=name,
        target=values[0] if values else target,
    )


def read_autoscalers(names: Sequence[str]) -> list[Autoscaler]:
    """Return the autoscalers of files; raises UserError for a file that cannot be read."""
    found = [(name, one) for name in names for one in _objects(name)]
    objects = [one for _, one in found]
    autoscalers = [
        Autoscaler(
            file=file,
            kind=kind,
            namespace=one.at("metadata", "namespace").text or "default",
            name=one.at("metadata", "name").text,
            spec=one.at("spec"),
            has_part_of_gpu=_has_part_of_gpu(one, objects),
        )
        for file, one in found
        if (kind := one.at("kind").text) in _KINDS and not _is_made_by_keda(one)
    ]
    for one in autoscalers:
        if one.is_of_keda and not one.signals:
            raise UserError(
                f"{one.file}:{one.spec.line}: {one.kind} without spec.triggers; if the file is a"
                " template, check its output"
            )
    return autoscalers


def _objects(name: str) -> Iterator[Field]:
    """Yield the objects of a file, and those in its lists."""
    waiting = [Field(node, node.start_mark.line + 1) for node in _documents(name)]
    while waiting:
        one = waiting.pop(0)
        kind = one.at("kind").text
        if kind.endswith("List"):
            waiting = [*(_with_kind(item, kind) for item in one.at("items").items), *waiting]
        else:
            yield one


def _with_kind(item: Field, kind_of_list: str) -> Field:
    """Return an object of a list with its kind, which the API server omits."""
    if isinstance(item.node, yaml.MappingNode) and not item.at("kind").text:
        mark = item.node.start_mark
        pair = [
            yaml.ScalarNode("tag:yaml.org,2002:str", text, mark)
            for text in ("kind", kind_of_list.removesuffix("List"))
        ]
        item.node.value.append(tuple(pair))
    return item


def _documents(name: str) -> list[yaml.Node]:
    with yaml_errors(name):
        if name == STANDARD_INPUT:
            content = sys.stdin.buffer.read(_MAX_BYTES + 1)[:_MAX_BYTES]
        else:
            content = read_small_file(Path(name), max_bytes=_MAX_BYTES)
        return list(yaml.compose_all(content.decode(), yaml.SafeLoader))


def _is_made_by_keda(one: Field) -> bool:
    """Return whether this is the HorizontalPodAutoscaler that KEDA makes for a ScaledObject."""
    owners = one.at("metadata", "ownerReferences").items
    return any(owner.at("kind").text == "ScaledObject" for owner in owners)


def _find_target(one: Field, objects: Sequence[Field]) -> Field | None:
    """Return the workload of an autoscaler; without a namespace, a manifest fits any namespace."""
    target = one.at("spec", "scaleTargetRef")
    wanted = target.at("kind").text or "Deployment", target.at("name").text
    own, found = one.at("metadata", "namespace").text, None
    for other in objects:
        if (other.at("kind").text, other.at("metadata", "name").text) == wanted:
            namespace = other.at("metadata", "namespace").text
            if namespace == own:
                return other
            if not (namespace and own):
                found = other
    return found


def _has_part_of_gpu(one: Field, objects: Sequence[Field]) -> bool:
    template = one.at("spec", "jobTargetRef", "template")
    if target := _find_target(one, objects):
        template = target.at("spec", "template")
    containers = template.at("spec", "containers").items
    named = [key for key, _ in template.at("metadata", "annotations").pairs()]
    for container in containers:
        for amounts in ("limits", "requests"):
            named += [key for key, _ in container.at("resources", amounts).pairs()]
    return any(_PART_OF_A_GPU.fullmatch(key) for key in named)
