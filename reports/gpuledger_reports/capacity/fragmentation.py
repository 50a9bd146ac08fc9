"""The report `fragmentation`: free GPUs that typical pods cannot use, but could after packing.

`unusable` defines the measure, `packing` the comparison, and `node_states` reads the store.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb

from gpuledger_reports.capacity.demand import read_waiting
from gpuledger_reports.capacity.node_states import Kind, NodeStates, find_instants, read_states
from gpuledger_reports.capacity.packing import Measured, measure
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Question,
    Report,
    Row,
    rounded_cell,
)
from gpuledger_reports.capacity.unusable import CPU, MEMORY, WHOLE, Shape
from gpuledger_reports.capacity.waits import notes_on_too_large
from gpuledger_reports.reading.times import HOUR_US

_ADVISED_GPUS: Final = 1
"""Minimum mean number of stranded GPUs for advice to pack."""
COLUMNS: Final[Mapping[str, str]] = {
    "instants": "",
    "gpus": "GPUs",
    "free_gpus": "Free",
    "unusable_gpus": "Unusable",
    "by_cpu_gpus": "by CPU",
    "by_memory_gpus": "by RAM",
    "packed_gpus": "If packed",
    "stranded_gpus": "Stranded",
    "unmet_gpus": "Unmet GPUs",
    "advice": "Advice",
}


@dataclass(kw_only=True)
class _Group:
    """The sums of a row over its kinds and instants, in GPUs."""

    instants: set[int] = field(default_factory=set)
    sums: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)
    evidence: list[tuple[float, str]] = field(default_factory=list)

    def add(
        self, kind: Kind, found: Mapping[int, Measured], mix: Mapping[Shape, int], sampled: int
    ) -> None:
        """Add a kind at each of its instants; `sampled` is the number of instants with samples."""
        self.instants |= found.keys()
        for each in found.values():
            amounts = {
                "gpus": each.gpus,
                "free_gpus": each.free,
                "unusable_gpus": each.now.total / WHOLE,
                "by_cpu_gpus": each.now.by_lack.get(CPU, 0) / WHOLE,
                "by_memory_gpus": each.now.by_lack.get(MEMORY, 0) / WHOLE,
                "packed_gpus": each.packed.total / WHOLE,
            }
            self.sums.update({name: value * kind.fraction for name, value in amounts.items()})
            if each.free and not each.knows_cpu:
                self.unknown.add("by_cpu_gpus")
            if each.free and not each.knows_memory:
                self.unknown.add("by_memory_gpus")
        self.evidence += _evidence(kind, found, mix, sampled)

    def row(self, unmet_gpus: float, sampled: int) -> Row:
        """Return the means over the instants with samples, with advice if packing would help."""
        means = {
            name: None if name in self.unknown else round(total / sampled, 6)
            for name, total in self.sums.items()
        }
        stranded = (self.sums["unusable_gpus"] - self.sums["packed_gpus"]) / sampled
        is_much = stranded >= _ADVISED_GPUS
        return {
            "instants": len(self.instants),
            **means,
            "stranded_gpus": round(stranded, 6),
            "unmet_gpus": round(unmet_gpus, 6),
            "advice": f"pack pods onto fewer nodes: {max(self.evidence)[1]}" if is_much else None,
        }


def _evidence(
    kind: Kind, found: Mapping[int, Measured], mix: Mapping[Shape, int], sampled: int
) -> Iterator[tuple[float, str]]:
    """Yield the gain of packing for each size of pod, with a sentence about this size."""
    sizes = Counter[Shape]()
    for shape, number in mix.items():
        sizes[Shape(shape.gpus, shape.share)] += number
    unit = kind.fraction / sampled
    free = sum(each.free for each in found.values()) * unit
    for size, number in sizes.items():
        part = number / sum(sizes.values())
        now, packed = (
            sum(each.by_size.get(size, 0) for each in states) / WHOLE * unit
            for states in zip(*((each.now, each.packed) for each in found.values()), strict=True)
        )
        words = (
            f"pods of {kind.describe(size)} ({100 * part:.0f} % of the pods) could use"
            f" {_amount(free - now / part)} of {_amount(free)} free GPUs on average, and"
            f" {_amount(free - packed / part)} if packed"
        )
        yield now - packed, words


def _amount(gpus: float) -> str:
    return f"{round(abs(gpus), 1):.12g}"


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    states = read_states(connection, question)
    # Every row is a mean over the same instants: those at which any node has samples. A group
    # without GPUs at an instant has 0 GPUs. `unmet_gpus` is a mean over the whole window.
    sampled = len({at for of_kind in states.nodes.values() for at in of_kind})
    groups: dict[tuple[str | None, ...], _Group] = defaultdict(_Group)
    measured: dict[Kind, dict[int, Measured]] = defaultdict(dict)
    instants = [(kind, at) for kind, of_kind in states.nodes.items() for at in of_kind]
    for kind, at in question.each(instants):
        nodes = list(states.nodes[kind][at].values())
        measured[kind][at] = measure(nodes, states.mixes.get(kind, Counter()))
    for kind, found in measured.items():
        groups[kind.key].add(kind, found, states.mixes.get(kind, Counter()), sampled)
    waiting = read_waiting(connection, question.by, window=question.window)
    too_large = notes_on_too_large(connection)
    hours = (question.window.end_us - question.window.begin_us) / HOUR_US
    rows = [
        {
            **dict(zip(question.by, key, strict=True)),
            **group.row(sum(waiting.get(key, {}).values()) / hours, sampled),
        }
        for key, group in groups.items()
    ]
    rows.sort(key=lambda row: (-row["stranded_gpus"], -row["gpus"]))
    requested = len(find_instants(question.window))
    notes = [*_notes(states, rows, requested=requested, sampled=sampled)]
    notes += [f"{note} `Unmet GPUs` does not include them." for note in too_large]
    return Answer(rows=rows, notes=notes)


def _notes(
    states: NodeStates, rows: Sequence[Row], *, requested: int, sampled: int
) -> Iterator[str]:
    yield (
        f"Means over {sampled} instants of the time range. `Unmet GPUs` is the mean over the whole"
        " time range."
    )
    if missing := requested - sampled:
        yield (
            f"{missing} of {requested} instants have no usage with minutes: nodes had no"
            " samples, or an earlier version of gpuledger summed up the hour."
        )
    if states.unknown_gpus:
        yield f"{states.unknown_gpus:.3g} GPUs or instances with unknown allocation are excluded."
    if states.cordoned_gpus:
        yield f"{states.cordoned_gpus:.3g} GPUs or instances on cordoned nodes are excluded."
    if any(row[name] is None for row in rows for name in ("by_cpu_gpus", "by_memory_gpus")):
        yield (
            "CPU or memory of some pods or nodes is unknown. Start the time range after podwatch"
            " and the store sink were upgraded."
        )


REPORT: Final = Report(
    name="fragmentation",
    summary="Show free GPUs that typical pods cannot use, but could if pods were packed.",
    about=(
        "`Unusable` is the free capacity that a pod cannot use, because its nodes lack GPUs, CPU or"
        " memory for the pod. It is a mean over all pods of the time range. `If packed` is the same"
        " after moving each running pod to the fullest node on which it fits. Their difference is"
        " `Stranded`: 0 if packing gains nothing. `Unmet GPUs` is the mean over the whole time"
        " range of the GPUs for which pods waited, as in the report `queue`. Pods of DaemonSets"
        " stay on their nodes. Cordoned nodes, and parts of a partitioned GPU without a MIG"
        " instance, are excluded. Pods stay on GPUs of their pool, model and MIG profile. A pod"
        " without a node counts in each group whose GPUs its namespace used. `by CPU` and `by RAM`"
        " are empty if podwatch has not published the requests of all pods and the sizes of all"
        " nodes."
    ),
    examples={"By pool": "", "By cluster and model": "--by cluster,model"},
    columns=COLUMNS,
    droppable=(
        "packed_gpus",
        "by_memory_gpus",
        "by_cpu_gpus",
        "unusable_gpus",
    ),
    texts=frozenset({"advice"}),
    counts=frozenset({"instants"}),
    dimensions=GPU_DIMENSIONS,
    default_by="pool",
    cell=rounded_cell,
    read=_read,
)
