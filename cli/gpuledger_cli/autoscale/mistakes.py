"""The known mistakes of scaling by GPU use: one row for each, with a function that finds it.

A row reports only what the manifests show. Each function yields the fields to change.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from gpuledger_cli.autoscale.autoscalers import Autoscaler, Field, Signal
from gpuledger_cli.autoscale.promql import SAME_SERIES, Query

_MAX_GPUS_OF_A_POD: Final = 16
"""More GPUs than a node has, so a higher threshold of a sum of ratios is in per cent."""
_EXPORTERS: Final = tuple(
    re.compile(names)
    for names in (
        # Not the components' own series, such as their lag.
        r"(\w+:)?gpuledger_(allocation|category|container|gpu|mig|node|pod|process|team)_\w+(:\w+)?",
        r"DCGM_FI_\w+",
        r"nvidia_smi_\w+",
        r"hami_\w+|vGPU\w*|Device_\w+_desc_of_container|Host(GPU|Core)\w+",
        r"accelerator_\w+",
        r"(amd_)?gpu_gfx_activity|amd_gpu_\w+",
    )
)
_RATIO: Final = re.compile(r"\w+_ratio|DCGM_FI_PROF_\w+_(ACTIVE|OCCUPANCY)")
_PER_CENT: Final = re.compile(r"DCGM_FI_DEV_\w+_UTIL|(amd_)?gpu_gfx_activity", re.IGNORECASE)
_KEEPS_UNIT: Final = SAME_SERIES | {"sum", "avg", "min", "max", "quantile", "scalar", "vector"}
_OF_ONE_POD: Final = frozenset(
    {"pod", "pod_uid", "container", "gpu_uuid", "gpu", "uuid", "instance"}
)
_HAVE_NAMESPACE: Final = frozenset({"namespace", "workload", "pod", "container"})
"""Words in the names of recorded series that have the label namespace."""
_POD_LABELS: Final = frozenset({"pod", "pod_name", "container", "container_name", "pod_uid"})
_OWNER_LABELS: Final = frozenset({"owner_name", "created_by_name", "workload"})
_DEVICE_LABELS: Final = frozenset({"gpu_uuid", "uuid", "hostname", "instance", "node", "gpu"})
_NEEDS_PODS: Final = re.compile(r"gpuledger_(pod|allocation)_\w+|workload:\w+:\w+|kube_pod_\w+")
_OF_DEVICES: Final = re.compile(
    r"DCGM_FI_(DEV_\w*UTIL|PROF_\w+_(ACTIVE|OCCUPANCY))|gpuledger_gpu_utilization_ratio"
    r"|nvidia_smi_utilization_gpu_ratio",
    re.IGNORECASE,
)
Find = Callable[[Autoscaler], Iterator[Field]]


class Mistake(NamedTuple):
    """A known mistake."""

    name: str
    problem: str
    """The consequence, as one sentence."""
    fix: str
    find: Find


class Finding(NamedTuple):
    """A mistake in a manifest."""

    autoscaler: Autoscaler
    line: int
    mistake: Mistake


def find_mistakes(autoscaler: Autoscaler, *, gpus_are_shared: bool = False) -> list[Finding]:
    """Return the mistakes of an autoscaler in the order of their lines."""
    found = [
        Finding(autoscaler, field.line, mistake)
        for mistake in MISTAKES
        if gpus_are_shared or autoscaler.has_part_of_gpu or mistake is not SHARED_GPU
        for field in mistake.find(autoscaler)
    ]
    return sorted(found, key=lambda one: one.line)


def _gpu_signals(autoscaler: Autoscaler) -> Iterator[tuple[Signal, Query]]:
    """Yield the signals from series of GPUs, with their queries."""
    for signal in autoscaler.signals:
        # The names of an adapter's metrics are free, so `gpu` in one is enough.
        for_adapter = not autoscaler.is_of_keda
        if (query := signal.query) and any(
            _is_of_gpu(name) or (for_adapter and "gpu" in name.lower().replace("gpuledger", ""))
            for name in query.series
        ):
            yield signal, query


def _triggers(autoscaler: Autoscaler) -> Iterator[tuple[Signal, Query]]:
    """Yield the triggers of KEDA with a query of GPU use."""
    if autoscaler.is_of_keda:
        yield from _gpu_signals(autoscaler)


def _sized_triggers(autoscaler: Autoscaler) -> Iterator[tuple[Signal, Query]]:
    """Yield the triggers that size a workload by the rules of KEDA's HPA: no jobs, no formulas."""
    has_formula = autoscaler.spec.at("advanced", "scalingModifiers", "formula").text
    if autoscaler.kind == "ScaledObject" and not has_formula:
        yield from _triggers(autoscaler)


def _is_of_gpu(name: str) -> bool:
    return _exporter(name) >= 0


def _exporter(name: str) -> int:
    """Return the number of the exporter that makes a series; -1 if it is unknown."""
    return next((i for i, names in enumerate(_EXPORTERS) if names.fullmatch(name)), -1)


def _label(name: str) -> str:
    """Return a label's name without Prometheus's prefix for a scraped label."""
    return name.lower().removeprefix("exported_").removeprefix("allocated_")


def _level(name: str) -> Collection[str]:
    """Return the labels of a series: those before the colon of a recorded series, or a pod's."""
    level, colon, _ = name.partition(":")
    return level.split("_") if colon else _HAVE_NAMESPACE


def _selected(query: Query) -> set[str]:
    return {_label(one.label) for one in query.matchers if one.selects}


def average_divided_again(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find averages that KEDA divides by the number of replicas."""
    for signal, query in _sized_triggers(autoscaler):
        is_average = query.outer and query.outer.name in {"avg", "max", "min", "quantile"}
        if is_average and signal.metric_type == "AverageValue":
            yield (
                signal.place.at("metricType")
                if signal.place.at("metricType").text
                else signal.query_field
            )


def sum_as_value(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find sums that are compared with the threshold of one replica."""
    for signal, query in _sized_triggers(autoscaler):
        if query.outer and query.outer.name == "sum" and signal.metric_type == "Value":
            yield signal.place.at("metricType")


def several_series(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find queries with a result for each pod or GPU."""
    for signal, query in _triggers(autoscaler):
        labels = {_label(name) for name in query.outer.by} if query.outer else set()
        # Only a bare selector, or its product with info series, certainly keeps its labels.
        main = query.main
        names = [name for name in main.series if not name.endswith("_info")]
        is_bare = (
            not main.functions - SAME_SERIES
            and len(names) == 1
            and (len(main.series) == 1 or main.factor is not None)
            and not _OF_ONE_POD.isdisjoint(_level(names[0]))
            and not {"pod", "gpu_uuid", "uuid"} & _selected(main)
        )
        if labels & _OF_ONE_POD or is_bare:
            yield signal.query_field


def needs_pods_at_zero(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find autoscalers without a signal that exists without pods."""
    by_gpu = any(True for _ in _gpu_signals(autoscaler))
    if by_gpu and autoscaler.scales_to_zero and all(map(_needs_pods, autoscaler.signals)):
        yield autoscaler.minimum if autoscaler.minimum.text else autoscaler.spec.at("triggers")


def _needs_pods(signal: Signal) -> bool:
    if signal.type in {"cpu", "memory", "Resource", "ContainerResource", "Pods"}:
        return True
    query = signal.query
    if signal.type != "prometheus" or query is None:
        return False
    others = [
        name for name in query.series if not (_NEEDS_PODS.fullmatch(name) or _is_of_gpu(name))
    ]
    if (
        others
        or query.functions & {"absent", "absent_over_time"}
        or re.search(r"vector\(\s*(?!0\b)", query.text)
    ):
        return False
    labels = _POD_LABELS | _OWNER_LABELS | {"namespace"}
    return any(map(_NEEDS_PODS.fullmatch, query.series)) or bool(labels & _selected(query))


def device_series_on_shared_gpu(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find series that are the same for all pods on a GPU."""
    for signal, query in _gpu_signals(autoscaler):
        if any(map(_OF_DEVICES.fullmatch, query.series)):
            yield signal.query_field


def _in_units(signal: Signal, query: Query) -> tuple[float, float] | None:
    """Return the highest value of one GPU, and the threshold; None if one is unknown."""
    query = query.main
    names = [name for name in query.series if not name.endswith("_info")]
    units = {
        1 if _RATIO.fullmatch(name) else 100 if _PER_CENT.fullmatch(name) else 0 for name in names
    }
    threshold, factor = signal.target.number, query.factor
    if len(units) != 1 or 0 in units or query.functions - _KEEPS_UNIT or not (threshold and factor):
        return None
    return units.pop() * factor, threshold


def per_cent_of_ratio(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find thresholds in per cent for a ratio."""
    for signal, query in _gpu_signals(autoscaler):
        busy, threshold = _in_units(signal, query) or (0, 0)
        if busy == 1 and threshold > _MAX_GPUS_OF_A_POD:
            yield signal.target


def ratio_of_per_cent(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find thresholds as a ratio for series in per cent."""
    for signal, query in _gpu_signals(autoscaler):
        busy, threshold = _in_units(signal, query) or (0, 0)
        if busy == 100 and threshold <= 1:  # noqa: PLR2004  # per cent
            yield signal.target


def pod_name_pattern(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find patterns of pod names that also match longer names."""
    for signal, query in _triggers(autoscaler):
        patterns = [
            one.value
            for one in query.matchers
            if _label(one.label) in {"pod", "pod_name"} and one.sign == "=~" and one.selects
        ]
        has_open = any(".*" in pattern or ".+" in pattern for pattern in patterns)
        if has_open and not _selected(query) & _OWNER_LABELS:
            yield signal.query_field


def no_namespace(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find queries that count workloads of all namespaces."""
    for signal, query in _triggers(autoscaler):
        labels = _selected(query)
        names_it = any(label.endswith("namespace") for label in labels)
        levels = [_level(name) for name in query.series if _is_of_gpu(name)]
        if all(map(_HAVE_NAMESPACE.isdisjoint, levels)):
            continue
        if not (names_it or labels & _DEVICE_LABELS or signal.setting("namespace").text):
            yield signal.query_field


def null_values(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find triggers for which an empty answer silently counts as 0, also while pods run."""
    if not autoscaler.scales_to_zero:
        yield from _silent_zeros(autoscaler)


def null_values_at_zero(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find the same triggers of autoscalers that must accept the empty answer without pods."""
    if autoscaler.scales_to_zero:
        yield from _silent_zeros(autoscaler)


def _silent_zeros(autoscaler: Autoscaler) -> Iterator[Field]:
    if autoscaler.kind != "ScaledObject":
        return
    for signal, query in _triggers(autoscaler):
        if not signal.setting("ignoreNullValues").text and "vector" not in query.functions:
            yield signal.place.at("metadata")


def fallback_at_zero(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find triggers without data at zero replicas or in an outage, which activate the fallback."""
    if autoscaler.scales_to_zero and autoscaler.spec.at("fallback").node:
        for signal, _ in _triggers(autoscaler):
            field = signal.setting("ignoreNullValues")
            if field.text.lower() in {"false", "f", "0"} and _needs_pods(signal):
                yield field


def no_activation(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find triggers that any use of a GPU keeps active."""
    if autoscaler.kind == "ScaledObject" and autoscaler.scales_to_zero:
        for signal, _ in _triggers(autoscaler):
            if not signal.setting("activationThreshold").text:
                yield signal.place.at("metadata")


def high_activation(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find activation thresholds that one busy replica does not reach."""
    if not autoscaler.scales_to_zero:
        return
    for signal, _ in _triggers(autoscaler):
        field = signal.setting("activationThreshold")
        activation, threshold = field.number, signal.target.number
        if activation and threshold and activation >= threshold:
            yield field


def counted_twice(autoscaler: Autoscaler) -> Iterator[Field]:
    """Find queries that add the series of several exporters."""
    for signal, query in _gpu_signals(autoscaler):
        places = [(index, _exporter(name)) for index, name in query.places if _exporter(name) >= 0]
        if any(
            one != other and _are_added(query, start, end)
            for (start, one), (end, other) in pairwise(places)
        ):
            yield signal.query_field


def _are_added(query: Query, start: int, end: int) -> bool:
    """Return whether the series of two tokens are added: by name, by `+`, or by `or` in a sum."""
    if start == end:
        return True
    between = [
        token
        for token in query.tokens[start:end]
        if token.text == "+" or (token.text == "or" and token.depth > 0)
    ]
    return bool(between) and "sum" in query.functions


SHARED_GPU: Final = Mistake(
    "shared-gpu",
    "The series is the utilization of the whole GPU, so pods that share it scale by the load of"
    " others.",
    "Use gpuledger_pod_gpu_busy_ratio, which has the use of each pod.",
    device_series_on_shared_gpu,
)
MISTAKES: Final[Sequence[Mistake]] = (
    Mistake(
        "average-divided-again",
        "The metricType AverageValue divides an average or maximum by the number of replicas once"
        " more, so the workload scales down under load.",
        "Use sum(…), or set metricType: Value.",
        average_divided_again,
    ),
    Mistake(
        "sum-as-value",
        "With metricType: Value, the use of all replicas is compared with the threshold of one, so"
        " the number of replicas runs to its maximum or minimum.",
        "Set metricType: AverageValue, or use avg(…).",
        sum_as_value,
    ),
    Mistake(
        "several-series",
        "The query has a result for each pod or GPU, and KEDA rejects more than one result.",
        "Put sum(…) around the query, without these labels.",
        several_series,
    ),
    Mistake(
        "no-signal-at-zero",
        "All signals need a running pod, so the workload never returns from zero replicas.",
        "Add a trigger that has data without pods, such as waiting requests, or set the minimum"
        " to 1.",
        needs_pods_at_zero,
    ),
    SHARED_GPU,
    Mistake(
        "percent-of-ratio",
        "The threshold is in per cent, but a busy GPU counts as 1, so the load never reaches it.",
        "Write the threshold as a ratio, such as 0.7.",
        per_cent_of_ratio,
    ),
    Mistake(
        "ratio-of-percent",
        "The threshold is a ratio, but a busy GPU counts as 100, so any use scales the workload to"
        " its maximum.",
        "Write the threshold in per cent, such as 70.",
        ratio_of_per_cent,
    ),
    Mistake(
        "pod-name-pattern",
        "The pattern of pod names also matches other workloads whose names begin alike.",
        "Join gpuledger_pod_info and select owner_kind and owner_name.",
        pod_name_pattern,
    ),
    Mistake(
        "no-namespace",
        "The query does not select a namespace, so pods of other namespaces count.",
        'Add namespace="…" to the selector.',
        no_namespace,
    ),
    Mistake(
        "null-values",
        "An answer without data counts as 0, so an outage of monitoring scales the workload down"
        " under load.",
        'Set ignoreNullValues: "false" and a fallback, or "true" to accept this.',
        null_values,
    ),
    Mistake(
        "null-values-at-zero",
        "An answer without data counts as 0, so an outage of monitoring scales the workload to zero"
        " under load.",
        "Add `or 0 * count(gpuledger_gpu_up)` to the query, and set ignoreNullValues:"
        ' "false" without a fallback.',
        null_values_at_zero,
    ),
    Mistake(
        "fallback-at-zero",
        "While the query has no data, the fallback starts replicas without load.",
        "Remove the fallback: without it, KEDA keeps the replicas while a query fails.",
        fallback_at_zero,
    ),
    Mistake(
        "no-activation",
        "The activationThreshold is 0, so the shortest use of a GPU, such as a health check, keeps"
        " a replica.",
        "Set activationThreshold, for example to 0.05.",
        no_activation,
    ),
    Mistake(
        "high-activation",
        "The activationThreshold is not below the threshold, so KEDA removes a replica that works.",
        "Set an activationThreshold far below the threshold.",
        high_activation,
    ),
    Mistake(
        "counted-twice",
        "The query adds series of several exporters, so the same GPU counts more than once.",
        "Use the series of one exporter.",
        counted_twice,
    ),
)
