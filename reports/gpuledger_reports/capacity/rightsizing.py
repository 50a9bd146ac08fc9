"""The report `rightsizing`: workloads that need fewer or smaller devices than they have.

A row is a workload on one kind of device, in the whole days of the window. A workload needs fewer
devices if each of its pods leaves devices unused. Smaller devices are other models in the same
cluster and, if a pod needs only one device, MIG profiles of the present model. `fitting` decides
which devices fit the load. The report recommends the device that saves the most; one with a high
risk only if no other device fits and saves more than 10 %. Another capacity type is a high risk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import duckdb
from typing_extensions import override

from gpuledger.errors import ArgumentError
from gpuledger.mig_profiles import mig_gpu_of
from gpuledger.texts import find_near, shorten
from gpuledger_reports.capacity.allocations import DIMENSIONS, Terms
from gpuledger_reports.capacity.fitting import (
    BUSY_ROOM,
    MEMORY_ROOM,
    RISKS,
    Device,
    Load,
    Percentiles,
    misfit,
    move_risks,
)
from gpuledger_reports.capacity.loads import BY, QUANTITIES, Workload, Workloads, read_workloads
from gpuledger_reports.capacity.report import Answer, Option, Question, Report, Row, whole
from gpuledger_reports.pricing.money import minor_digits
from gpuledger_reports.reading.times import DAY_US, Window, time_text

_UNKNOWN: Final = 0.01
"""The maximum share of minutes with use by unknown processes."""
_KNOWN_TIME: Final = 0.5
"""The minimum share of the allocated time with known use."""
_WORTH: Final = 0.1
"""The minimum share of the present cost whose saving is worth a change."""
_NO_DEVICE_FITS: Final = f"no smaller device fits and saves more than {_WORTH * 100:.0f} %"
_FEW_MINUTES: Final = 1440
_SOME_GIB: Final = 0.5
_MIG_COLUMNS: Final = ("compute_slices", "memory_slices", "gpu_compute_slices", "gpu_memory_slices")
_UNITS: Final = (" %", " GiB", " %")
_COLUMNS: Final[Mapping[str, str]] = {
    "model": "GPU",
    "mig_profile": "MIG",
    "gpus": "GPUs",
    "used_gpus": "Used",
    "allocated_gpu_hours": "Allocated GPU-h",
    **{
        f"{name}_{at}_{'gib' if name == 'memory' else 'ratio'}": {
            "utilization_p95": "Util p95",
            "memory_p99": "GiB p99",
        }.get(f"{name}_{at}", "")
        for name in QUANTITIES
        for at in Percentiles._fields
    },
    "history_days": "",
    "recommendation": "Recommended",
    "recommended_gpus": "",
    "recommended_model": "",
    "recommended_mig_profile": "",
    "risk": "Risk",
    "risk_reasons": "",
    "saved_gpu_hours": "Saved GPU-h",
    "saved_cost": "Saved cost",
    "saved_by_fewer_cost": "",
    "currency": "",
    "note": "Note",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device that a workload could have instead."""

    device: Device
    terms: Mapping[str, Any]
    """Values that replace columns `PRICED` of the workload's device."""
    risks: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a workload's devices that its load allows."""

    device: Device
    gpus: int
    """Number of devices of a pod."""
    saved_hours: float
    """GPU-hours of the present model that would no longer be allocated."""
    saved_cost: float | None
    """`None` if a price is missing."""
    risks: Sequence[tuple[str, str]]

    @property
    def risk(self) -> str:
        """The highest risk."""
        return max((level for level, _ in self.risks), key=RISKS.index, default=RISKS[0])

    @property
    def rank(self) -> tuple[Any, ...]:
        """The sort key of changes, the best first."""
        saved = (-(self.saved_cost or 0.0), -self.saved_hours)
        return (self.risk == RISKS[-1], *saved, RISKS.index(self.risk))

    @override
    def __str__(self) -> str:
        return f"{self.gpus} x {self.device}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for a workload, with its evidence."""

    workload: Workload
    load: Load | None
    change: Change | None = None
    fewer: Change | None = None
    """The change to fewer devices of the same kind."""
    note: str | None = None
    """The reason, if there is no change."""
    tried: Sequence[str] = ()
    """A sentence for each device that was considered."""


class Advisor:
    """Finds the best change for each workload of a fleet."""

    def __init__(self, found: Workloads, terms: Terms, *, minimum_days: int) -> None:
        self._all, self._terms, self._minimum_days = found, terms, minimum_days

    def find(self, workload: Workload) -> Finding:
        """Return the best change for a workload, or the reason for keeping its devices."""
        for part in workload.parts:
            self._terms.note_unpriced(part, part["hours"])
        load = workload.load()
        note = _obstacle(workload, load, self._minimum_days)
        if note or load is None:
            return Finding(workload=workload, load=load, note=note)
        changes, tried = [], []
        for target in self._targets(workload):
            problem = misfit(load, workload.device, target.device)
            change = None if problem else self._change(workload, load, target)
            if change:
                changes.append(change)
            tried.append(_tried(target.device, problem, change, self._terms.currency))
        best = min(changes, key=lambda change: change.rank, default=None)
        return Finding(
            workload=workload,
            load=load,
            change=best,
            fewer=next((each for each in changes if each.device == workload.device), None),
            note=None if best else _NO_DEVICE_FITS,
            tried=tried,
        )

    def _targets(self, workload: Workload) -> Iterator[Target]:
        device = workload.device
        if workload.needed_gpus:
            yield Target(device=device, terms={})
        yield from self._other_models(workload)
        memory_bytes = self._all.memory.get(device.model or "", 0)
        mig_gpu = mig_gpu_of(device.model or "", memory_bytes=memory_bytes)
        # MIG instances cannot use NVLink, so they suit only pods with one device.
        if mig_gpu and memory_bytes and (workload.needed_gpus or workload.gpus) == 1:
            for profile, slices in mig_gpu.profiles.items():
                counts = dict(zip(_MIG_COLUMNS, (*slices, *mig_gpu.whole), strict=True))
                instance = self._all.device(
                    {"model": device.model, "mig_profile": profile, **counts}
                )
                if instance.compute_part < device.compute_part:
                    yield Target(device=instance, terms={"mig_profile": profile, **counts})

    def _other_models(self, workload: Workload) -> Iterator[Target]:
        """Yield GPUs of other models, of the workload's capacity type if a model has it.

        Another capacity type may be cheap only because its nodes can be taken away.
        """
        cluster, model = workload.parts[0]["cluster"], workload.device.model
        types = {part["capacity_type"] for part in workload.parts}
        others = [r for r in self._all.gpus if r["cluster"] == cluster and r["model"] != model]
        of_type = {row["model"] for row in others if {row["capacity_type"]} == types}
        present = ", ".join(sorted(name or "unknown" for name in types))
        for row in others:
            gpu = self._all.device({**row, **dict.fromkeys(_MIG_COLUMNS)})
            if gpu.memory_gib and row["model"] not in of_type:
                name = row["capacity_type"] or "unknown"
                risk = ("high", f"its capacity type is {name} instead of {present}")
                yield Target(device=gpu, terms=row, risks=[risk])
            elif gpu.memory_gib and {row["capacity_type"]} == types:
                yield Target(device=gpu, terms=row)

    def _change(self, workload: Workload, load: Load, target: Target) -> Change | None:
        """Return the change to a device that fits; `None` if it saves too little."""
        saved_hours, cost, saved_cost = 0.0, 0.0, 0.0
        has_prices = True
        for part in workload.parts:
            # GPU-hours on the new devices, if pods have only as many devices as they need.
            needed = (workload.needed_gpus or part["gpus"]) / part["gpus"]
            hours = part["hours"] / workload.device.compute_part * needed
            hours *= target.device.compute_part
            saved_hours += part["hours"]
            if target.device.model == workload.device.model:
                saved_hours -= hours
            before, after = self._terms.price(part), self._terms.price({**part, **target.terms})
            if before is None or after is None:
                has_prices = False
                continue
            cost += part["hours"] * float(before)
            saved_cost += part["hours"] * float(before) - hours * float(after)
        change = Change(
            device=target.device,
            gpus=workload.needed_gpus or workload.gpus,
            saved_hours=saved_hours,
            saved_cost=saved_cost if has_prices else None,
            risks=[
                *_risks(workload),
                *target.risks,
                *move_risks(load, workload.device, target.device),
            ],
        )
        return change if _is_worth(change, workload, cost) else None


def _is_worth(change: Change, workload: Workload, cost: float) -> bool:
    """Return whether a change saves enough of the present cost, or of the GPUs without prices."""
    if change.saved_cost is not None:
        return change.saved_cost > _WORTH * cost
    # Hours of different models cannot be compared.
    is_same = change.device.model == workload.device.model
    return is_same and change.saved_hours > _WORTH * workload.hours


def _risks(workload: Workload) -> Iterator[tuple[str, str]]:
    if workload.needed_gpus and workload.unused_gib > _SOME_GIB:
        yield "medium", f"an unused GPU held {workload.unused_gib:.4g} GiB"
    if workload.minutes < _FEW_MINUTES:
        yield "medium", f"only {workload.minutes} minutes are known"


def _obstacle(workload: Workload, load: Load | None, minimum_days: int) -> str | None:
    """Return the reason why a workload gets no recommendation, regardless of its load."""
    if load is None:
        return "its use is unknown"
    if workload.history_days < minimum_days:
        return f"history of {workload.history_days} days; {minimum_days} are needed"
    if workload.known_ratio < _KNOWN_TIME:
        return f"its use is known for only {workload.known_ratio * 100:.0f} % of its time"
    if workload.is_shared:
        return "shares its GPUs"
    if workload.unknown_ratio > _UNKNOWN:
        return f"unknown processes used its GPUs in {workload.unknown_ratio * 100:.0f} % of minutes"
    return None if workload.used_gpus else "never used; see the report `waste`"


def _tried(device: Device, problem: str | None, change: Change | None, currency: str) -> str:
    if problem:
        return f"{device} does not fit: {problem}."
    if change is None:
        return f"{device} fits, but its saving is unknown or less than {_WORTH * 100:.0f} %."
    saved = f"{change.saved_hours:,.1f} GPU-hours"
    if change.saved_cost is not None:
        saved += f" and {change.saved_cost:,.2f} {currency}"
    reasons = "; ".join(reason for _, reason in change.risks)
    return f"{change} saves {saved}; risk {change.risk}{': ' if reasons else ''}{reasons}."


def _row(finding: Finding, by: Sequence[str], currency: str) -> Row:
    workload = finding.workload
    found: Row = dict(zip(by, workload.key, strict=True)) | dict.fromkeys(_COLUMNS)
    found |= {
        "model": workload.device.model,
        "mig_profile": workload.device.mig_profile,
        "gpus": workload.gpus,
        "used_gpus": workload.used_gpus,
        "allocated_gpu_hours": round(workload.hours, 2),
        "history_days": workload.history_days,
        "note": finding.note,
    }
    for name, values in zip(QUANTITIES, finding.load or (), strict=False):
        unit, scale = ("gib", 1) if name == "memory" else ("ratio", 100)
        for at, value in values._asdict().items() if values else ():
            found[f"{name}_{at}_{unit}"] = round(value / scale, 2)
    if change := finding.change:
        found |= {
            "recommendation": str(change),
            "recommended_gpus": change.gpus,
            "recommended_model": change.device.model,
            "recommended_mig_profile": change.device.mig_profile,
            "risk": change.risk,
            "risk_reasons": [reason for _, reason in change.risks],
            "saved_gpu_hours": round(change.saved_hours, 2),
        }
        if change.saved_cost is not None:
            cost = round(change.saved_cost, minor_digits(currency))
            found |= {"saved_cost": cost, "currency": currency}
        if finding.fewer and finding.fewer.saved_cost is not None:
            found["saved_by_fewer_cost"] = round(finding.fewer.saved_cost, minor_digits(currency))
    return found


def _explanation(finding: Finding, minimum_days: int) -> Iterator[str]:
    """Yield the data, the rule and each device that was considered, with its risks."""
    workload, load = finding.workload, finding.load
    yield (
        f"Data: {workload.hours:,.1f} GPU-hours of {workload.device} in {workload.history_days}"
        f" days; a pod usually had up to {workload.gpus} and used at most {workload.used_gpus}."
    )
    if load:
        yield f"Load in {workload.minutes:,} minutes of used devices, as p50, p95, p99 and max:"
        for name, unit, values in zip(QUANTITIES, _UNITS, load, strict=True):
            shown = ", ".join(f"{value:.4g}" for value in values or ())
            yield f"- {name}: {shown + unit if values else 'not measured'}"
    yield (
        f"Rule: p99 of memory is at most {MEMORY_ROOM * 100:.0f} % of the device's, p95 of"
        f" utilization and bandwidth at most {BUSY_ROOM:.0f} %, the saving more than"
        f" {_WORTH * 100:.0f} %, and the history at least {minimum_days} days."
    )
    yield from finding.tried
    yield f"Result: {finding.change or finding.note}."


def _named(found: Workloads, text: str) -> list[Workload]:
    """Return the workloads with a name; raise `ArgumentError` if the name is unknown."""
    names = ["/".join(filter(None, workload.key[1 : len(BY)])) for workload in found.workloads]
    if text in names:
        return [each for each, name in zip(found.workloads, names, strict=True) if name == text]
    near = find_near(text, names)
    hint = f"did you mean {near}?" if near else "give NAMESPACE/KIND/NAME"
    raise ArgumentError("explain", f"unknown workload {shorten(text, 80)!r}; {hint}")


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    begin_us, end_us = question.window
    days = Window(-(-begin_us // DAY_US) * DAY_US, end_us // DAY_US * DAY_US)
    if days.begin_us >= days.end_us:
        return Answer(rows=[], notes=["The window has no whole day in UTC."])
    minimum_days, explained = question.options["minimum_history"], question.options["explain"]
    terms = Terms(question.policy, days)
    found = read_workloads(connection, days, terms, question.by)
    question.advance(90)
    workloads = found.workloads if explained is None else _named(found, explained)
    workloads = [
        each
        for each in workloads
        if question.selects(dict(zip(question.by, each.key, strict=True)))
    ]
    advisor = Advisor(found, terms, minimum_days=minimum_days)
    findings = sorted(map(advisor.find, workloads), key=_rank)
    question.advance(10)
    notes = [f"Whole days from {time_text(days.begin_us)} to {time_text(days.end_us)}."]
    count = (days.end_us - days.begin_us) // DAY_US
    if missing := count - found.days:
        notes.append(
            f"{missing} of {count} days have no daily sums, which `gpuledger store maintain` adds."
        )
    if explained is not None:
        notes += [text for each in findings for text in _explanation(each, minimum_days)]
    currency = question.policy.currency
    return Answer(
        rows=[_row(each, question.by, currency) for each in findings],
        notes=[*notes, *terms.notes()],
        is_found=any(each.change for each in findings),
    )


def _rank(finding: Finding) -> tuple[Any, ...]:
    change, workload = finding.change, finding.workload
    saved = (-(change.saved_cost or 0.0), -change.saved_hours) if change else (0.0, 0.0)
    return (change is None, *saved, -workload.hours, str(workload.key))


REPORT: Final = Report(
    name="rightsizing",
    summary="Find workloads that need fewer GPUs, smaller GPUs or MIG instances.",
    about=(
        "Each row is a workload on one kind of device, with percentiles of its load by minute,"
        " rounded up to the bound of a bucket. A minute without a process counts as 0 %. A GPU that"
        " a pod never used does not count toward the load. A recommended device has headroom: in"
        " 99 % of minutes, the workload needs at most 90 % of the device's memory, and in 95 %"
        " of minutes, its utilization and bandwidth are at most 80 %. The speeds of other models"
        " are from data sheets. `Risk` rates the change; `--explain` lists the risks and every"
        " device that was considered. `Saved GPU-h` counts only GPUs of the present model. In"
        " files, `saved_by_fewer_cost` is the part of the saving that fewer GPUs of the present"
        " model bring. A MIG instance saves the rest only if other pods use the other instances."
        " New labels of a node or namespace count from the next day on, in UTC. A workload has no"
        " recommendation if no smaller device fits, if it shares GPUs or never used them, or if its"
        " history is too short."
    ),
    examples={
        "The 20 changes that save the most": "--prices prices.yaml --top 20",
        "Why a workload should change": "--explain serving/Deployment/rerank",
    },
    columns=_COLUMNS,
    droppable=(
        "allocated_gpu_hours",
        "saved_gpu_hours",
        "used_gpus",
        "utilization_p95_ratio",
        "memory_p99_gib",
        "gpus",
        "mig_profile",
        "note",
    ),
    texts=frozenset(
        {
            *("namespace", "workload", "model", "mig_profile"),
            *("recommendation", "recommended_model"),
            *("recommended_mig_profile", "risk", "risk_reasons", "currency", "note"),
        }
    ),
    counts=frozenset({"gpus", "used_gpus", "recommended_gpus", "history_days"}),
    dimensions=DIMENSIONS,
    default_by=",".join(BY),
    has_by=False,
    has_money=True,
    options={
        "minimum_history": Option(
            help="The minimum history for a recommendation. Duration: 7d or 2w.",
            default="7d",
            parse=whole(),
        ),
        "explain": Option(
            help="NAMESPACE/KIND/NAME of a workload, to list its data, the rule, and the devices"
            " that were considered."
        ),
    },
    codes=("at least one change is recommended", "no change is recommended"),
    read=_read,
)
