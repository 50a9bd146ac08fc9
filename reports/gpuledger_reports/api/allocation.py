"""Converts a bill into OpenCost's allocations: GPU time and cost by name. Pure.

The bill has more dimensions than the client requests, so several lines may have the same allocation
name. First, idle is distributed among the tenants of the same cluster or node. Then lines with the
same name are summed, and the costs of shared tenants are distributed among all others. Costs are
fractions until all allocations are complete. They are then rounded together, so that they sum to
the rounded total. Costs of CPU, memory, volumes and network are 0.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

from gpuledger_reports.api.fields import (
    CONTROLLER_KINDS,
    NO_OWNER,
    WITHOUT_VALUE,
    Values,
    dimensions_of,
    value_of,
)
from gpuledger_reports.api.filters import passes
from gpuledger_reports.api.questions import AllocationQuestion, Split
from gpuledger_reports.pricing.billing import Bill, BillLine
from gpuledger_reports.pricing.money import quantize_together, rounded
from gpuledger_reports.pricing.policy import is_of_device
from gpuledger_reports.pricing.tenants import ABSENT, IDLE, UNALLOCATED
from gpuledger_reports.reading.charging_sql import HOUR_UNITS
from gpuledger_reports.reading.times import Window, time_text

COST_DIGITS: Final = 5
"""The number of decimals in OpenCost's costs."""
_MINUTE_US: Final = 60_000_000
_COSTLESS: Final = (
    "cpuCores", "cpuCoreRequestAverage", "cpuCoreLimitAverage", "cpuCoreUsageAverage",
    "cpuCoreHours", "cpuCost", "cpuCostAdjustment", "cpuCostIdle", "cpuEfficiency",
    "networkTransferBytes", "networkReceiveBytes", "networkCost", "networkCrossZoneCost",
    "networkCrossRegionCost", "networkInternetCost", "networkCostAdjustment",
    "loadBalancerCost", "loadBalancerCostAdjustment", "pvBytes", "pvByteHours", "pvCost",
    "pvCostAdjustment", "ramBytes", "ramByteRequestAverage", "ramByteLimitAverage",
    "ramByteUsageAverage", "ramByteHours", "ramCost", "ramCostAdjustment", "ramCostIdle",
    "ramEfficiency", "externalCost",
)  # fmt: skip
"""Fields of an OpenCost allocation that do not apply to GPUs."""


@dataclass(kw_only=True)
class _Sums:
    """The sums of GPU time and cost of some lines; times are in the units of bills.

    First, an allocation has sums for each cluster or node. Later, these are added up.
    """

    billed: int = 0
    allocated: int = 0
    used: int = 0
    gpu_cost: Fraction = Fraction(0)
    idle_cost: Fraction = Fraction(0)
    """The distributed idle cost that the lines' tenant pays."""
    shared_cost: Fraction = Fraction(0)
    models: set[str] = field(default_factory=set)
    properties: dict[str, Any] | None = None
    """OpenCost's properties, such as the namespace; `None` until other sums are added."""

    @property
    def cost(self) -> Fraction:
        return self.gpu_cost + self.idle_cost + self.shared_cost

    def add(self, other: "_Sums") -> None:
        # The sum keeps only the properties that are equal in all its parts.
        theirs = other.properties or {}
        mine = theirs if self.properties is None else self.properties
        self.properties = {k: v for k, v in mine.items() if theirs.get(k) == v}
        self.billed += other.billed
        self.allocated += other.allocated
        self.used += other.used
        self.gpu_cost += other.gpu_cost
        self.idle_cost += other.idle_cost
        self.shared_cost += other.shared_cost
        self.models |= other.models


class _Name(NamedTuple):
    """An allocation's name, and whether the filters select it.

    Allocations that are not selected are left out of the answer, but still pay shared costs.
    """

    is_selected: bool
    text: str


_Scope = tuple[str, ...]
_Key = tuple[_Scope, _Name]


def dimensions_for(
    question: AllocationQuestion, *, find: Callable[[str], tuple[str, ...]] = dimensions_of
) -> tuple[str, ...]:
    """Return the dimensions that a bill must have to answer a question."""
    known = [field for field in question.fields if field not in WITHOUT_VALUE]
    fields = [name for field in known for name in find(field)]
    # Every line has the model, because allocations show it.
    requested = ["cluster", "model", *(["node"] if question.idle_by_node else []), *fields]
    shared = ["namespace"] if question.share_namespaces else []
    labels = [f"label:{key}" for key, _ in question.share_labels]
    return tuple(dict.fromkeys([*requested, *shared, *labels]))


def allocation_set(bill: Bill, question: AllocationQuestion) -> dict[str, dict[str, Any]]:
    """Return a bill's allocations as OpenCost formats them, by name; empty without usage."""
    tenants: dict[_Key, _Sums] = defaultdict(_Sums)
    idle: dict[tuple[_Scope, bool], _Sums] = defaultdict(_Sums)
    shared: dict[_Name, _Sums] = defaultdict(_Sums)
    for line in bill.lines:
        values = dict(zip(bill.by, line.values, strict=True))
        scope = (values["cluster"], *([values["node"]] if question.idle_by_node else []))
        if _is_nobodys(line, values, is_of_device=bill.policy.policy.is_of_device):
            # Idle lines have special values in tenant dimensions, which filters must not match.
            is_selected = passes(values, question.filters, is_absent=lambda n: not is_of_device(n))
            idle[scope, is_selected].add(_sums_of(line, _scope_properties(scope)))
        elif _is_shared(values, question):
            shared[_name(question, values)].add(_sums_of(line, _properties(question, values)))
        else:
            sums = _sums_of(line, _properties(question, values), model=values["model"])
            tenants[scope, _name(question, values)].add(sums)
    if question.share_idle:
        _share_idle(tenants, idle, question.share_idle)
    named = _fold((name, sums) for (_, name), sums in tenants.items())
    _share_among(named, shared, question.share_split)
    if question.has_idle or question.share_idle:
        for (scope, is_selected), sums in idle.items():
            # Sums whose cost was distributed are empty now. If no tenant could pay it, it remains.
            if sums.cost or sums.billed:
                named[_Name(is_selected, _idle_name(scope, question))].add(sums)
    return _written({name.text: sums for name, sums in named.items() if name.is_selected}, bill)


def _is_nobodys(line: BillLine, values: Values, *, is_of_device: Callable[[str], bool]) -> bool:
    """Return whether a line contains idle that no tenant pays for.

    A policy with `share: table` can name tenants that pay for idle; such lines are not included.
    """
    return line.idle_kind is not None and all(
        value in NO_OWNER for name, value in values.items() if not is_of_device(name)
    )


def _sums_of(line: BillLine, properties: dict[str, Any], *, model: str | None = None) -> _Sums:
    return _Sums(
        billed=line.billed,
        allocated=line.allocated,
        used=line.used,
        gpu_cost=line.gpu_cost + line.energy_cost,
        shared_cost=line.shared_cost,
        models={model} if model else set(),
        properties=properties,
    )


def _scope_properties(scope: _Scope) -> dict[str, Any]:
    return dict(zip(("cluster", "node"), scope, strict=False))


def _is_shared(values: Values, question: AllocationQuestion) -> bool:
    if values.get("namespace") in question.share_namespaces:
        return True
    return any(values[f"label:{key}"] == value for key, value in question.share_labels)


def _name(question: AllocationQuestion, values: Values) -> _Name:
    """Return the name of the allocation that a tenant's line belongs to."""
    text = "/".join(_name_part(requested, values) for requested in question.aggregate)
    return _Name(passes(values, question.filters, is_absent=lambda _: False), text)


def _name_part(field: str, values: Values) -> str:
    """Return the part of an allocation's name for one requested field, as OpenCost writes it."""
    value = value_of(field, values)
    prefix, _, key = field.partition(":")
    return f"{key}={value}" if prefix == "label" and value != UNALLOCATED else value


def _properties(question: AllocationQuestion, values: Values) -> dict[str, Any]:
    """Return an allocation's properties, by OpenCost's names."""
    found: dict[str, Any] = {"cluster": values["cluster"]}
    labels = {}
    for requested in question.aggregate:
        if requested in ("controller", *CONTROLLER_KINDS):
            found |= {"controllerKind": values["owner_kind"].lower()}
            found |= {"controller": values["owner_name"]}
        elif requested.startswith("label:"):
            labels[requested.removeprefix("label:")] = values[requested]
        elif requested in ("cluster", "node", "namespace", "pod"):
            found[requested] = values[requested]
    kept = {name: value for name, value in found.items() if value not in (*ABSENT, None)}
    known = {name: value for name, value in labels.items() if value not in ABSENT}
    return {**kept, "labels": known} if known else kept


def _idle_name(scope: _Scope, question: AllocationQuestion) -> str:
    return "/".join((*scope, IDLE)) if question.splits_idle else IDLE


def _share_idle(
    tenants: dict[_Key, _Sums], idle: dict[tuple[_Scope, bool], _Sums], split: Split
) -> None:
    """Distribute the idle of each cluster or node among the tenants that had GPUs in it."""
    # Find all weights first, because distributing the first pool changes the costs.
    by_scope = {
        scope: [sums for (of, _), sums in tenants.items() if of == scope] for scope, _ in idle
    }
    weights_of = {scope: _weights(takers, split) for scope, takers in by_scope.items()}
    for (scope, is_selected), unused in idle.items():
        weights = weights_of[scope]
        for taker, weight in zip(by_scope[scope], weights, strict=True):
            taker.idle_cost += unused.cost * weight
        if any(weights):
            idle[scope, is_selected] = _Sums(properties=unused.properties)


def _share_among(named: dict[_Name, _Sums], shared: Mapping[_Name, _Sums], split: Split) -> None:
    takers = list(named.values())
    weights = _weights(takers, split)
    if not any(weights):
        # No other tenant has a cost, so the shared tenants pay for themselves.
        for name, sums in shared.items():
            named[name].add(sums)
        return
    total = sum((sums.cost for sums in shared.values()), Fraction(0))
    for taker, weight in zip(takers, weights, strict=True):
        taker.shared_cost += total * weight


def _weights(takers: Sequence[_Sums], split: Split) -> list[Fraction]:
    """Return the part of a cost that each taker pays; the parts sum to 1.

    With a split by cost, all parts are 0 if the takers' costs sum to 0.
    """
    if split == "even":
        return [Fraction(1, len(takers)) for _ in takers]
    costs = [taker.cost for taker in takers]
    total = sum(costs, Fraction(0))
    return [cost / total for cost in costs] if total else [Fraction(0) for _ in takers]


def _fold(pairs: Iterable[tuple[_Name, _Sums]]) -> dict[_Name, _Sums]:
    found: dict[_Name, _Sums] = defaultdict(_Sums)
    for name, sums in pairs:
        found[name].add(sums)
    return found


def _written(named: Mapping[str, _Sums], bill: Bill) -> dict[str, dict[str, Any]]:
    ordered = sorted(named.items())
    parts = [
        part for _, sums in ordered for part in (sums.gpu_cost, sums.idle_cost, sums.shared_cost)
    ]
    costs = quantize_together(parts, digits=COST_DIGITS)
    return {
        name: _allocation(name, sums, costs[3 * at : 3 * at + 3], bill)
        for at, (name, sums) in enumerate(ordered)
    }


def _allocation(name: str, sums: _Sums, costs: Sequence[Decimal], bill: Bill) -> dict[str, Any]:
    gpu_cost, idle_cost, shared_cost = costs
    window = Window(bill.window.begin_us, max(bill.window.begin_us, bill.end_us))
    minutes = Fraction(window.end_us - window.begin_us, _MINUTE_US)
    hours = Fraction(sums.billed, HOUR_UNITS)
    efficiency = _efficiency(sums)
    return {
        "name": name,
        "properties": sums.properties or {},
        "window": {"start": time_text(bill.window.begin_us), "end": time_text(bill.window.end_us)},
        "start": time_text(window.begin_us),
        "end": time_text(window.end_us),
        "minutes": _number(minutes),
        **dict.fromkeys(_COSTLESS, 0),
        "gpuCount": _number(hours * 60 / minutes if minutes else Fraction(0)),
        "gpuHours": _number(hours),
        "gpuCost": gpu_cost + idle_cost,
        "gpuCostAdjustment": 0,
        "gpuCostIdle": idle_cost,
        "gpuEfficiency": _number(efficiency),
        "pvs": None,
        "lbAllocations": None,
        "sharedCost": shared_cost,
        "totalCost": gpu_cost + idle_cost + shared_cost,
        "totalEfficiency": _number(efficiency),
        "gpuAllocation": _gpu_allocation(sums, minutes),
    }


def _efficiency(sums: _Sums) -> Fraction:
    """Return used over allocated time.

    Without allocated time, return 1 if GPU time was used and has a cost, else 0, as OpenCost does.
    """
    if sums.allocated:
        return Fraction(sums.used, sums.allocated)
    return Fraction(1 if sums.used and sums.cost else 0)


def _gpu_allocation(sums: _Sums, minutes: Fraction) -> dict[str, Any] | None:
    if not sums.models or not minutes:
        return None
    allocated, used = (
        Fraction(units * 60, HOUR_UNITS) / minutes for units in (sums.allocated, sums.used)
    )
    known = sums.models - {UNALLOCATED}
    model = {"gpuModel": next(iter(known))} if len(sums.models) == len(known) == 1 else {}
    averages = {"gpuUsageAverage": _number(used), "gpuRequestAverage": _number(allocated)}
    # A bill does not show whether others had the same GPU at the time.
    return {**model, "isGPUShared": None, **averages}


def _number(amount: Fraction) -> Decimal:
    return rounded(amount, digits=COST_DIGITS)
