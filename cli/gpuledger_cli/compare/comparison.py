"""Compares the series of two pages over several scrapes. Does no I/O.

Two series have the same values if the ranges of their values overlap, with a small tolerance,
because the two exporters query the driver at different times.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from gpuledger_agent.dcgm_differences import find_reason
from gpuledger_cli.compare.dcgm_page import DcgmPage, SeriesKey, ShownSeries, old_names

_RELATIVE_TOLERANCE: Final = 0.05
_TOLERANCE: Final = 2.0
"""Absolute tolerance of values, such as degrees or per cent."""
_RATIO_TOLERANCE: Final = 0.02
"""Absolute tolerance of values from 0 to 1."""
_NOT_LISTED: Final = "The agent has the field; add it to `exposition.counters_file`."
_UNSUPPORTED: Final = "The agent does not have this field."
_INSTANCES_INSTEAD: Final = (
    "The agent leaves out a GPU whose MIG instances have values, so that sums count it once."
)
_PROFILING: Final = "DCGM_FI_PROF_"
_NOT_IN_DCGM_EXPORTER: Final = (
    "Either dcgm-exporter's list lacks the field, or DCGM has no value of it."
)
_OTHERS_IN_DCGM_EXPORTER: Final = (
    "dcgm-exporter has the field, but no value of this GPU, instance or event."
)


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

    def add(self, theirs: DcgmPage, ours: DcgmPage) -> None:
        """Add one scrape of dcgm-exporter's page and of the agent's."""
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
                yield _compare_values(key, theirs, ours)
                yield from _compare_labels(key, theirs[-1], ours[-1])
            elif theirs:
                reason = self._explain_missing(key)
                yield _row(key, Result.NOT_IN_GPULEDGER, theirs=_range(theirs), reason=reason)
            else:
                has_metric = any(shown.metric == key.metric for shown in self._theirs)
                reason = _OTHERS_IN_DCGM_EXPORTER if has_metric else _NOT_IN_DCGM_EXPORTER
                yield _row(key, Result.NOT_IN_DCGM_EXPORTER, ours=_range(ours), reason=reason)

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
    key: SeriesKey, theirs: Sequence[ShownSeries], ours: Sequence[ShownSeries]
) -> Row:
    their_values, our_values = ([shown.value for shown in side] for side in (theirs, ours))
    is_same = are_close(their_values, our_values)
    has_changed = len({*their_values}) > 1 or len({*our_values}) > 1
    return _row(
        key,
        Result.SAME if is_same else Result.VALUE,
        theirs=_range(theirs),
        ours=_range(ours),
        reason="" if is_same else find_reason("value", key.metric, has_changed=has_changed),
    )


def are_close(theirs: Sequence[float], ours: Sequence[float]) -> bool:
    """Return whether the ranges of the values overlap, or are at most the tolerance apart.

    The tolerance is 5 % of the larger value, but at least 2. If all values are at most 1, it is at
    least 0.02.
    """
    lower, higher = sorted((theirs, ours), key=min)
    # The gap between the two ranges is from `below` to `above`; it is negative if they overlap.
    below, above = max(lower), min(higher)
    absolute = _RATIO_TOLERANCE if max(map(abs, (*theirs, *ours))) <= 1 else _TOLERANCE
    tolerance = max(absolute, _RELATIVE_TOLERANCE * max(abs(below), abs(above)))
    return above - below <= tolerance


def _compare_labels(key: SeriesKey, theirs: ShownSeries, ours: ShownSeries) -> Iterator[Row]:
    for name in sorted(theirs.labels.keys() | ours.labels.keys()):
        if theirs.labels.get(name) != ours.labels.get(name):
            yield _row(
                key,
                Result.LABEL,
                theirs=_label(name, theirs.labels),
                ours=_label(name, ours.labels),
                label=name,
                reason=find_reason("label", name),
            )


def _label(name: str, labels: Mapping[str, str]) -> str:
    return f'{name}="{labels[name]}"' if name in labels else f"no {name}"


def _range(seen: Sequence[ShownSeries]) -> str:
    """Return the smallest and the largest value as text."""
    values = [shown.value for shown in seen]
    lowest, highest = f"{min(values):.7g}", f"{max(values):.7g}"
    return lowest if lowest == highest else f"{lowest} to {highest}"
