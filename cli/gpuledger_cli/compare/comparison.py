"""Compares the series of two pages over several scrapes. Does no I/O.

Two series have the same values if the mean of each is in the range of the other, with a tolerance,
because the two exporters query the driver at different times. Codes and counts are the same if both
pages had the same values and end with the same one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

from gpuledger_agent.dcgm_differences import Fact, find_reason
from gpuledger_agent.exposition.dcgm_fields import find_field
from gpuledger_cli.compare.dcgm_page import DcgmPage, SeriesKey, ShownSeries, old_names

_RATIOS: Final = ("_ratio", "_ratios")
_UNITS: Final = (
    *_RATIOS,
    *("_bytes", "_celsius", "_hertz", "_millijoules", "_milliwatts", "_ns_total"),
    *("_per_second", "_rate", "_rates"),
)
"""The ends of the names of measured values."""
_NOT_LISTED: Final = "The agent has the field; add it to `exposition.counters_file`."
_UNSUPPORTED: Final = "The agent does not have this field."
_INSTANCES_INSTEAD: Final = (
    "The agent leaves out a GPU whose MIG instances have values, so that sums count it once."
)
_PROFILING: Final = "DCGM_FI_PROF_"
_NOT_IN_DCGM_EXPORTER: Final = (
    "Either dcgm-exporter's list lacks the field, or DCGM has no value for it."
)
_OTHERS_IN_DCGM_EXPORTER: Final = (
    "dcgm-exporter has the field, but no value for this GPU, instance or event."
)


class Tolerance(NamedTuple):
    """How far two values may be apart: by an amount, or by a fraction of the larger one."""

    amount: float
    fraction: float

    def allows(self, one: float, other: float) -> bool:
        """Return whether two values count as equal."""
        return abs(one - other) <= max(self.amount, self.fraction * max(abs(one), abs(other)))


_EXACT: Final = Tolerance(0.0, 0.0)
_MEASURED: Final = Tolerance(2.0, 0.05)
_RATIO: Final = Tolerance(0.02, 0.05)


class Result(StrEnum):
    """The result of comparing one series or label."""

    SAME = "same"
    VALUE = "value differs"
    LABEL = "label differs"
    NOT_IN_GPULEDGER = "missing in gpuledger"
    NOT_IN_DCGM_EXPORTER = "missing in dcgm-exporter"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the result."""

    metric: str
    """The metric, by its name before DCGM 4.6."""
    gpu: str
    """UUID of the GPU."""
    part: str
    """The MIG instance, XID or the like; empty if there is none."""
    result: Result
    dcgm_exporter: str
    """The values or the label on dcgm-exporter's page."""
    gpuledger: str
    """The values or the label on the agent's page."""
    label: str
    """The label that differs; empty if a value differs or is missing."""
    reason: str
    """The known reason of the difference; empty if it is unknown, or if there is no difference."""

    @property
    def is_unexplained(self) -> bool:
        """Whether this is a difference without a known reason."""
        return self.result is not Result.SAME and not self.reason


class Comparison:
    """Collects the pages of all scrapes."""

    def __init__(self) -> None:
        self._theirs: dict[SeriesKey, list[ShownSeries]] = defaultdict(list)
        self._ours: dict[SeriesKey, list[ShownSeries]] = defaultdict(list)
        self._scrapes = 0

    def add(self, theirs: DcgmPage, ours: DcgmPage) -> None:
        """Add one scrape of dcgm-exporter's page and of the agent's."""
        self._scrapes += 1
        for page, seen in ((theirs, self._theirs), (ours, self._ours)):
            for key, shown in page.series.items():
                seen[key].append(shown)

    @property
    def common_gpus(self) -> set[str]:
        """The UUIDs of the GPUs that are on both pages."""
        return {key.gpu for key in self._theirs} & {key.gpu for key in self._ours} - {""}

    def rows(self) -> Iterator[Row]:
        """Yield a row for each series, and one for each label that differs."""
        for key in sorted(self._theirs.keys() | self._ours.keys()):
            theirs, ours = self._theirs.get(key, ()), self._ours.get(key, ())
            if theirs and ours:
                yield _compare_values(key, theirs, ours, scrapes=self._scrapes)
                yield from _compare_labels(key, theirs, ours)
            elif theirs:
                reason = self._explain_missing(key)
                yield _row(
                    key,
                    Result.NOT_IN_GPULEDGER,
                    theirs=_range(theirs, scrapes=self._scrapes),
                    reason=reason,
                )
            else:
                has_metric = any(shown.metric == key.metric for shown in self._theirs)
                reason = _OTHERS_IN_DCGM_EXPORTER if has_metric else _NOT_IN_DCGM_EXPORTER
                yield _row(
                    key,
                    Result.NOT_IN_DCGM_EXPORTER,
                    ours=_range(ours, scrapes=self._scrapes),
                    reason=reason,
                )

    def _explain_missing(self, missing: SeriesKey) -> str:
        """Return the reason why the agent's page lacks a series; empty without a reason."""
        of_metric = [key for key in self._ours if key.metric == missing.metric]
        if any(key.gpu == missing.gpu and key.part and not missing.part for key in of_metric):
            return _INSTANCES_INSTEAD
        if of_metric:
            return ""  # the agent supports the metric, but not for this GPU or part
        fallback = _NOT_LISTED if missing.metric in old_names() else _UNSUPPORTED
        has_profiling = any(key.metric.startswith(_PROFILING) for key in self._ours)
        if has_profiling and missing.metric.startswith(_PROFILING):
            # The known reason is that the GPU has no profiling metrics.
            return fallback
        return find_reason("missing", missing.metric) or fallback


def _row(
    key: SeriesKey,
    result: Result,
    *,
    theirs: str = "",
    ours: str = "",
    label: str = "",
    reason: str = "",
) -> Row:
    return Row(
        metric=key.metric,
        gpu=key.gpu,
        part=key.part,
        result=result,
        dcgm_exporter=theirs,
        gpuledger=ours,
        label=label,
        reason=reason,
    )


def _compare_values(
    key: SeriesKey, theirs: Sequence[ShownSeries], ours: Sequence[ShownSeries], *, scrapes: int
) -> Row:
    tolerance = tolerance_of(key.metric)
    their_values, our_values = ([shown.value for shown in side] for side in (theirs, ours))
    is_rare = 2 * min(len(theirs), len(ours)) < max(len(theirs), len(ours))
    is_same = are_close(their_values, our_values, tolerance) and not is_rare
    facts = [*find_facts(their_values, our_values, tolerance)]
    return _row(
        key,
        Result.SAME if is_same else Result.VALUE,
        theirs=_range(theirs, scrapes=scrapes),
        ours=_range(ours, scrapes=scrapes),
        reason="" if is_same or is_rare else find_reason("value", key.metric, facts),
    )


def tolerance_of(metric: str) -> Tolerance:
    """Return the tolerance of a metric: values without a unit are codes or counts, and exact."""
    field = find_field(metric)
    if field is None:
        return _MEASURED
    if field.path.endswith(_RATIOS) and field.unit != "%":
        return _RATIO
    return _MEASURED if field.path.endswith(_UNITS) else _EXACT


def are_close(theirs: Sequence[float], ours: Sequence[float], tolerance: Tolerance) -> bool:
    """Return whether two series of values count as the same."""
    if tolerance is _EXACT:
        return set(theirs) == set(ours) and theirs[-1] == ours[-1]
    return _is_in_range(fmean(theirs), ours, tolerance) and _is_in_range(
        fmean(ours), theirs, tolerance
    )


def _is_in_range(mean: float, others: Sequence[float], tolerance: Tolerance) -> bool:
    nearest = min(max(mean, min(others)), max(others))
    return tolerance.allows(nearest, mean)


def find_facts(
    theirs: Sequence[float], ours: Sequence[float], tolerance: Tolerance
) -> Iterator[Fact]:
    """Yield the conditions of reasons that two series of values meet."""
    if not any(ours):
        yield "absent"
    if max(ours) < min(theirs):
        yield "fewer"
    gap = max(min(theirs) - max(ours), min(ours) - max(theirs))
    change = max(max(values) - min(values) for values in (theirs, ours))
    if change and change >= gap:
        yield "changed"
        # dcgm-exporter's first values may be older than the comparison.
        is_ours = [tolerance.allows(value, ours[-1]) for value in theirs]
        has_ended_there = is_ours[-1] and is_ours == sorted(is_ours)
        if has_ended_there or not tolerance.allows(min(ours), max(ours)):
            yield "followed"


def _compare_labels(
    key: SeriesKey, theirs: Sequence[ShownSeries], ours: Sequence[ShownSeries]
) -> Iterator[Row]:
    their_last, our_last = theirs[-1].labels, ours[-1].labels
    for name in sorted(their_last.keys() | our_last.keys()):
        if their_last.get(name) != our_last.get(name):
            facts: list[Fact] = []
            if not (their_last.get(name) and our_last.get(name)):
                facts.append("absent")
            if len({shown.labels.get(name) for shown in ours}) > 1:
                facts.append("followed")
            yield _row(
                key,
                Result.LABEL,
                theirs=_label(name, their_last),
                ours=_label(name, our_last),
                label=name,
                reason=find_reason("label", name, facts),
            )


def _label(name: str, labels: Mapping[str, str]) -> str:
    return f'{name}="{labels[name]}"' if name in labels else f"no {name}"


def _range(seen: Sequence[ShownSeries], *, scrapes: int) -> str:
    """Return the smallest and the largest value as text, and the number of scrapes if not all."""
    values = [shown.value for shown in seen]
    lowest, highest = f"{min(values):.7g}", f"{max(values):.7g}"
    shown = lowest if lowest == highest else f"{lowest} to {highest}"
    return shown if len(seen) == scrapes else f"{shown}, in {len(seen)} of {scrapes} scrapes"
